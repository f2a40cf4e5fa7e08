"""Dataset directories as sources: what ``save_to_disk`` of Hugging Face wrote, and corpora that the workbench wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.manifest import FILE, Manifest, sha256_file

KIND = "corpus"  # of a manifest whose directory holds documents
MARKS = ("state.json", "dataset_dict.json")


def is_dataset(path: Path) -> bool:
    """Whether a directory holds a dataset rather than documents."""
    ours = (path / FILE).is_file() and any(path.glob("data-*.arrow"))
    return ours or any((path / name).is_file() for name in MARKS)


def open_dataset(path: Path) -> Any:
    """The dataset of a directory, memory-mapped; one of the workbench's own is checked against its hashes.

    Args:
        path: The directory.

    Returns:
        A Hugging Face Dataset or DatasetDict.

    Raises:
        CheckpointError: It holds records that are no documents, is incomplete, or its bytes have changed.
    """
    if (path / FILE).is_file():
        manifest = Manifest.read(path)
        if manifest.kind != KIND:
            raise CheckpointError(
                f"{path} holds {manifest.kind!r}, which are no documents: give what generate_corpus wrote, or the "
                "corpus that these records were made of"
            )
        if not manifest.complete:
            raise CheckpointError(
                f"{path} is incomplete ({len(manifest.shards)} shards are done): run generate_corpus again into it to "
                "go on, or delete it"
            )
        listed = {shard["file"]: shard["sha256"] for shard in manifest.shards} | manifest.files
        for name, digest in listed.items():
            file = path / name
            if not file.is_file() or sha256_file(file) != digest:
                raise CheckpointError(
                    f"{file} is missing or does not match the hash in its manifest: restore it, or delete it and run "
                    "generate_corpus again into the directory"
                )
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a dataset that can be read ({error}): restore it, or leave it out"
        ) from None
