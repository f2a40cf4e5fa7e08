"""Documents that an extraction leaves out: each with its reason beside the shards, counted, and never a hole.

A shard's entry in the manifest says which of its documents have no rows and why, so that the list is as safe as the
shards are. ``quarantine.jsonl`` is made of these entries at the end of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Tape
from workbench.datasets.proof import matches

if TYPE_CHECKING:
    import polars as pl

ON_BAD = ("stop", "quarantine")
LISTED = "quarantined"  # member of a shard's entry: [[document, reason], ...]; absent where nothing is left out
QUARANTINE_FILE = "quarantine.jsonl"


def reasons(shards: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Why a document is left out, by its index, as the entries of shards say."""
    return {document: reason for shard in shards for document, reason in shard.get(LISTED, ())}


def quarantine_bytes(tapes: Sequence[Tape], aside: Mapping[int, str]) -> bytes:
    """The file that lists what is left out, one JSON line each; nothing when nothing is.

    Args:
        tapes: All documents, by index.
        aside: Why a document is left out, by its index.

    Returns:
        Lines of document (its index), doc_id, source, split, tokens, reason, in the order of the documents.
    """
    lines = []
    for i in sorted(aside):
        tape = tapes[i]
        facts = {"document": i, "doc_id": tape.doc_id, "source": tape.source, "split": tape.split, "tokens": len(tape)}
        lines.append(json.dumps({**facts, "reason": aside[i]}, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def about(aside: Mapping[int, str], documents: int) -> str:
    """One line that says how many of how many documents are left out, and why the first is; "" when none is."""
    if not aside:
        return ""
    return (
        f"{len(aside):,} of {documents:,} documents {'is' if len(aside) == 1 else 'are'} left out, each with its "
        f"reason in {QUARANTINE_FILE}; the first: {aside[min(aside)]}"
    )


def kept_counts(manifest: Manifest, tapes: Sequence[Tape], rows: Sequence[int]) -> dict[str, int]:
    """Totals of a dataset whose shards are all there; every document is stored whole or left out, which is asserted.

    Args:
        manifest: Lists the shards.
        tapes: All documents, by index.
        rows: Rows of every document, where it is stored.

    Returns:
        documents, records and tokens of what is stored and, if any are left out, how many are "quarantined".

    Raises:
        UserError: Every document is left out; the shards, which hold nothing, are forgotten.
    """
    aside = reasons(manifest.shards)
    spans = [range(*shard["documents"]) for shard in manifest.shards]
    assert sorted(chain.from_iterable(spans)) == list(range(len(tapes))), "every document is in one shard"
    for shard, span in zip(manifest.shards, spans, strict=True):
        there = sum(rows[i] for i in span if i not in aside)
        assert shard["rows"] == there, f"{shard['file']} holds {shard['rows']} rows and its documents make {there}"
    kept = [i for i in range(len(tapes)) if i not in aside]
    assert len(kept) + len(aside) == len(tapes), "documents in = stored + left out"
    if not kept:
        manifest.shards.clear()
        raise UserError(f"all {len(tapes)} documents would be left out and nothing stored; the first: {aside[0]}")
    counts = {
        "documents": len(kept),
        "records": sum(rows[i] for i in kept),
        "tokens": sum(len(tapes[i]) for i in kept),
    }
    return counts | ({"quarantined": len(aside)} if aside else {})


def load_quarantine(path: str | Path) -> pl.DataFrame:
    """What a finished extraction left out, and why.

    Args:
        path: The directory that ``extract`` or ``extract_sequences`` wrote.

    Returns:
        One row per document left out, in the order of the documents: document (its index), doc_id, source, split,
        tokens, reason. No row when every document is stored. A reason names the first position whose row was refused;
        it may lie before the token at fault, as far as the chunk in which both ran.

    Raises:
        CheckpointError: The directory is no finished dataset, or the list's bytes have changed.
    """
    import polars as pl

    path, manifest = Path(path), Manifest.read(path)
    if not manifest.complete:
        raise CheckpointError(f"{path} is incomplete: run again into it to go on, then read what it leaves out")
    lines: list[str] = []
    if (digest := manifest.files.get(QUARANTINE_FILE)) is not None:
        file = path / QUARANTINE_FILE
        if not matches(file, digest):
            raise CheckpointError(
                f"{file} is missing or does not match the hash in its manifest: run again into the directory to make "
                "it anew"
            )
        lines = [line for line in file.read_text("utf-8").split("\n") if line]
    words = dict.fromkeys(("doc_id", "source", "split"), pl.String())
    schema = {"document": pl.Int64(), **words, "tokens": pl.Int64(), "reason": pl.String()}
    return pl.DataFrame([json.loads(line) for line in lines], schema=schema, orient="row")
