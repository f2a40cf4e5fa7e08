"""A dataset directory in the making: Arrow IPC stream shards, a manifest, and what is still to do.

A shard holds a fixed range of documents, less those that the run leaves out, which its entry in the manifest names with
their reasons. It is written to a temporary name while its hash is taken, synced, listed with its hash, and only then
renamed: at no moment has a shard its name and is not known. What is done is read from the directory, so that a killed
run goes on where it stopped and ends with the bytes of an uninterrupted one; what was left is proven by its hashes
while the rest is made, and made again where it is broken.
``datasets.load_from_disk`` opens a finished directory as it is. This module knows nothing of models or of what the
columns mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import LOG, Manifest, git_state, sha256_file, write_atomic, write_json
from workbench.core.progress import progress, say
from workbench.core.sealed import sync_directory
from workbench.datasets.background import Background
from workbench.datasets.estimate import LISTING, batch_bytes, check_room
from workbench.datasets.left_out import LISTED, QUARANTINE_FILE, about, reasons
from workbench.datasets.plan import BATCH_ROWS, Part, even_batches, in_order, plan_shards, rows_until, without_rows
from workbench.datasets.proof import Proof, unharmed, verify
from workbench.datasets.shardfile import refusing, temporary_name, write_shard_file

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

__all__ = [
    "BATCH_ROWS",
    "Part",
    "ShardDirectory",
    "even_batches",
    "in_order",
    "load_shards",
    "plan_shards",
    "verify",
    "without_rows",
]

T = TypeVar("T")

OWN = ("state.json", "dataset_info.json", QUARANTINE_FILE)  # written at the end of a run, the last one if need be


class ShardDirectory:
    """One run over one directory; use it as a context manager.

    Args:
        out: The directory, made if needed.
        manifest: Describes the run about to start.
        plan: Document range [first, last) of every shard.
        schema: Columns.
        files: Small files beside the shards, by name.
        expected: Bytes that the rows of every document take, from ``estimate.document_bytes``; None checks no room.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.
        leaves_out: Makes ``quarantine.jsonl`` of why documents are left out, by index; None, the default, for runs that
            leave none out, which do not go on where some have been.

    Raises:
        UserError: The directory holds something else, another run's data, is being written by another process, cannot
            be written to, or lies on a disk without room for the run.
    """

    shard_names = re.compile(r"data-\d{5,}-of-\d{5,}\.arrow")
    batch_rows: int | None = None  # rows of a record batch; None for BATCH_ROWS
    proves_later = True  # hashes of what is there are taken beside the run; False takes them before it begins

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        *,
        plan: Sequence[tuple[int, int]],
        schema: pa.Schema,
        files: Mapping[str, bytes] | None = None,
        expected: Sequence[int] | None = None,
        resume: bool = True,
        leaves_out: Callable[[Mapping[int, str]], bytes] | None = None,
    ) -> None:
        self.out, self.manifest, self.plan, self.schema = out, manifest, list(plan), schema
        self._files, self._expected, self._resume = dict(files or {}), expected, resume
        self._leaves_out, self._versions = leaves_out, manifest.versions
        self._aside: dict[int, str] = {}
        self._aside_count = 0
        self._proof: Proof | None = None
        self._made: list[Path] = []
        self._lock, self._claimed = -1, False

    # ---------------------------------------------------------------- begin and end

    def __enter__(self) -> Self:
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"out={str(self.out)!r} is a file: give a directory")
        try:
            for path in [*reversed(self.out.parents), self.out]:
                if not path.exists():
                    path.mkdir()
                    self._made.append(path)
            self._lock = os.open(self.out, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._claim()
        except BaseException as error:
            self._retreat()
            if isinstance(error, BlockingIOError):
                raise UserError(
                    f"{self.out} is being written by another process: wait, or choose another out"
                ) from None
            if isinstance(error, OSError):
                raise UserError(
                    f"out={str(self.out)!r} cannot be written to ({error}): choose another directory"
                ) from None
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self._leave()
            return
        self._retreat()
        if isinstance(error, KeyboardInterrupt):
            done = len(self.manifest.shards)
            kept = f"{done:,} finished shard{'s'[: done != 1]} in {self.out} are kept" if done else "nothing was kept"
            error.add_note(f"{kept}: run the same again to {'go on from there' if done else 'begin anew'}")

    def _retreat(self) -> None:
        """Leave after a failure: finished shards and what goes with them, or nothing."""
        if self._claimed:
            with suppress(OSError):  # a disk that takes no deletion either: the next run sweeps
                self._sweep()
                if not self.manifest.shards:
                    unlisted = [path.name for path in self.out.iterdir() if self.shard_names.fullmatch(path.name)]
                    for name in [*unlisted, *self._files, *OWN, LOG, "manifest.json"]:
                        (self.out / name).unlink(missing_ok=True)
        self._leave()

    def _leave(self) -> None:
        if self._proof is not None:
            self._proof.stop()
        if self._lock >= 0:
            os.close(self._lock)
        for path in reversed(self._made):
            if not any(path.iterdir()):
                path.rmdir()

    def _temporary(self, path: Path) -> bool:
        """True for the temporary name of a file that runs of this kind write."""
        final, dot, end = path.name.rpartition(".")
        named = final in {"manifest.json", *OWN, *self._files}
        return dot + end == ".tmp" and bool(named or self.shard_names.fullmatch(final))

    def _sweep(self) -> None:
        for path in filter(self._temporary, list(self.out.iterdir())):
            path.unlink()

    # ---------------------------------------------------------------- what is there

    def _claim(self) -> None:
        held = [path for path in self.out.iterdir() if not self._temporary(path)]
        if held and not self._resume:
            raise UserError(f"{self.out} is not empty and resume=False was given: choose another out, or delete it")
        if held and not (self.out / "manifest.json").exists():
            raise UserError(
                f"{self.out} holds {held[0].name} and no manifest.json, so the workbench did not write it: choose "
                "another out"
            )
        if held:
            before = Manifest.read(self.out)
            if differences := self.differences(before):
                raise UserError(
                    f"{self.out} belongs to another run: {'; '.join(differences)}. Repeat that run's settings to go on "
                    "with it, choose another out, or delete it"
                )
            shards, files = unharmed(self.out, before)
            self._check_lost({*before.files} - {*files})
            before.complete &= len(shards) == len(before.shards) and len(files) == len(before.files)
            before.shards, before.files = shards, files
            self.manifest = self.carried(before)
            self._aside_count = len(self.aside)
            self._proof = Proof(self.out, {shard["file"]: shard["sha256"] for shard in shards})
            if not self.proves_later:
                self._drop_broken()
        if self._expected is not None and not self.manifest.complete:
            say(check_room(self.out, self._needed(), done=len(self.manifest.shards), shards=len(self.plan)))
        self._claimed = True
        self._sweep()
        if self.manifest.complete:
            if (self.out / LOG).exists():
                (self.out / LOG).unlink()
            return
        self._open()

    def _check_lost(self, names: set[str]) -> None:
        """Refuse a directory that has lost a file which this run cannot make again."""
        if lost := sorted(names - {*self._files, *OWN}):
            raise CheckpointError(
                f"{self.out} has lost {lost[0]}, or it was damaged, and this run cannot make it again: restore it, or "
                "choose another out"
            )

    def _open(self) -> None:
        """Write the manifest of a run that goes on, and the files beside the shards."""
        manifest, state = self.manifest, git_state()
        if state is not None and state not in manifest.git:
            manifest.git.append(state)
        if self._versions not in (manifest.versions, *manifest.later_versions):
            manifest.later_versions.append(self._versions)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in self._files.items()}
        here, manifest.files = manifest.files, manifest.files | digests
        manifest.write(self.out)  # first of all files, so that a directory of ours is always known as one
        listed = {shard["file"] for shard in manifest.shards}
        for path in list(self.out.iterdir()):
            if self.shard_names.fullmatch(path.name) and path.name not in listed:
                path.unlink()  # broken: shards are listed before they take their names
        for name, data in self._files.items():
            if here.get(name) != digests[name]:
                write_atomic(self.out / name, data)

    def _needed(self) -> int:
        """Bytes that are still to be written."""
        assert self._expected is not None
        rows = sum(self._expected[i] for i in self.documents)
        per_shard = self.schema.serialize().size + 8 + LISTING
        return rows + sum(map(len, self._files.values())) + len(self.pending) * (per_shard + batch_bytes(self.schema))

    def _drop_broken(self) -> None:
        """Wait for the proof, and forget shards that are not what was written."""
        broken = set(self._proof.broken()) if self._proof is not None else set()
        if broken:
            names = ", ".join(sorted(broken))
            say(f"{self.out}: made again, since their bytes are not those that were written: {names}")
            self.manifest.shards = [shard for shard in self.manifest.shards if shard["file"] not in broken]
            self.manifest.complete = False
            self._aside_count = len(self.aside)
        self._proof = None

    def recheck(self) -> list[int]:
        """Wait until what earlier runs wrote is proven, and take back what is broken.

        Returns:
            Shards that are to be written; none when the dataset can be finished.
        """
        if self._proof is not None:
            listed = len(self.manifest.shards)
            self._drop_broken()
            if len(self.manifest.shards) < listed:
                with refusing(self.out):
                    self._open()
        return self.pending

    def differences(self, before: Manifest) -> list[str]:
        """What keeps the directory's manifest and this run's from describing one run, as phrases."""
        found = before.differences(self.manifest)
        if self._leaves_out is None and (aside := reasons(before.shards)):
            found.append(f"on_bad is 'quarantine' there, which left out {len(aside):,}, and 'stop' now")
        return found

    def carried(self, before: Manifest) -> Manifest:
        """The manifest to go on with: the directory's own, of files that are there and unharmed."""
        return before

    def name(self, index: int) -> str:
        """File name of a shard."""
        return f"data-{index:05d}-of-{len(self.plan):05d}.arrow"

    @property
    def pending(self) -> list[int]:
        """Shards that are still to be written."""
        done = {shard["file"] for shard in self.manifest.shards}
        return [i for i in range(len(self.plan)) if self.name(i) not in done]

    @property
    def documents(self) -> list[int]:
        """Documents of the shards that are still to be written."""
        return [i for index in self.pending for i in range(*self.plan[index])]

    @property
    def aside(self) -> dict[int, str]:
        """Why a document is left out, by its index, as far as shards are finished."""
        return reasons(self.manifest.shards)

    @property
    def note(self) -> str:
        """What a progress bar says beside its numbers: how many documents are left out so far."""
        return f"{self._aside_count:,} left out" if self._aside_count else ""

    # ---------------------------------------------------------------- writing

    def write(self, index: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write one shard, holding at most a record batch of it in memory.

        Args:
            index: Which shard of the plan.
            batches: Its rows, in order; they are cut anew to equal batches.

        Raises:
            UserError: The disk takes no more; finished shards stay.
        """
        final = self.out / self.name(index)
        with refusing(final):
            entry = write_shard_file(final, self.schema, batches, batch_rows=self.batch_rows or BATCH_ROWS)
            self.place(entry | self.holds(index))

    def place(self, entry: Mapping[str, Any]) -> None:
        """List a shard that lies under its temporary name, whole and synced, and give it its name.

        Args:
            entry: What ``write_shard_file`` returned, with what ``holds`` says.
        """
        final = self.out / entry["file"]
        self.manifest.list_shard(self.out, entry)
        os.replace(temporary_name(final), final)
        sync_directory(self.out)
        self._aside_count += len(entry.get(LISTED, ()))

    def holds(self, index: int) -> dict[str, Any]:
        """What the manifest says of a shard's contents, once its rows are written."""
        aside = [[i, self._aside[i]] for i in range(*self.plan[index]) if i in self._aside]
        return {"documents": list(self.plan[index])} | ({LISTED: aside} if aside else {})

    def fill(
        self, batches: Callable[[slice, Any], Iterable[pa.RecordBatch]], *, sizes: Sequence[int], desc: str
    ) -> None:
        """Write every pending shard, with one progress bar over all of them.

        Args:
            batches: Called with a shard's slice of the documents and the bar; gives its rows and counts the bar up.
            sizes: Tokens to run per document.
            desc: Name on the bar.
        """
        while spans := {index: slice(*self.plan[index]) for index in self.pending or self.recheck()}:
            todo = sum(sum(sizes[span]) for span in spans.values())
            with progress(todo, desc=desc, unit="tok") as bar:
                for index, span in spans.items():
                    self.write(index, batches(span, bar))

    def stream(
        self,
        items: Callable[[list[int], Any], Iterable[T]],
        parts: Callable[[Iterator[T], list[int]], Iterable[Part]],
        *,
        sizes: Sequence[int],
        desc: str,
    ) -> None:
        """Write every pending shard on a thread of its own while the next items are made.

        Args:
            items: Called with the documents that are not written yet and the bar, which it counts up; makes items.
            parts: Called on the writing thread with the items in order and these documents; makes of the items the
                documents' parts, in order.
            sizes: Tokens to run per document.
            desc: Name on the bar.

        Raises:
            UserError: A shard could not be written; finished ones stay.
        """
        while self.pending or self.recheck():
            self._stream(items, parts, self.documents, sizes, desc)

    def _stream(
        self,
        items: Callable[[list[int], Any], Iterable[T]],
        parts: Callable[[Iterator[T], list[int]], Iterable[Part]],
        documents: list[int],
        sizes: Sequence[int],
        desc: str,
    ) -> None:
        with (
            progress(sum(sizes[i] for i in documents), desc=desc, unit="tok") as bar,
            Background[T](lambda given: self._write_parts(parts(given, documents), bar)) as writer,
        ):
            for item in items(documents, bar):
                writer.put(item)

    def _write_parts(self, parts: Iterable[Part], bar: Any) -> None:
        given = iter(parts)
        for index in self.pending:
            self.write(index, rows_until(self.plan[index][1] - 1, given, self._aside))
            if self.note:
                bar.set_postfix_str(self.note)
        assert next(given, None) is None, "every part belongs to a pending shard"

    def finish(self, counts: Mapping[str, int]) -> None:
        """Write what ``datasets.load_from_disk`` reads and the list of what is left out; mark the directory complete.

        Args:
            counts: Totals for the manifest.

        Raises:
            UserError: The disk takes no more; every shard stays.
        """
        import datasets

        assert not self.recheck(), "finish comes after the last shard"
        manifest = self.manifest
        if manifest.complete:
            return
        aside = self.aside
        quarantine = b"" if self._leaves_out is None else self._leaves_out(aside)
        assert quarantine.count(b"\n") == len(aside), "every document that is left out is listed"
        hashes = "".join(shard["sha256"] for shard in manifest.shards)
        features = datasets.Features.from_arrow_schema(self.schema).to_dict()
        described = about(aside, manifest.corpus.get("documents", 0))
        info = {"citation": "", "description": described, "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": shard["file"]} for shard in manifest.shards],
            "_fingerprint": hashlib.sha256(hashes.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        with refusing(self.out):
            for name, value in (("dataset_info.json", info), ("state.json", state)):
                manifest.files[name] = sha256_file(write_json(self.out / name, value))
            if quarantine:
                manifest.files[QUARANTINE_FILE] = sha256_file(write_atomic(self.out / QUARANTINE_FILE, quarantine))
            manifest.counts, manifest.complete = dict(counts), True
            manifest.write(self.out)


def load_shards(path: str | Path, *, kind: str, check_hashes: bool = True) -> datasets.Dataset:
    """Open a finished dataset directory, memory-mapped; say how many documents it leaves out, if any.

    Args:
        path: The directory.
        kind: What it must hold, such as "anchors".
        check_hashes: Read every file and compare its hash with the manifest; default True. Sizes are always compared.

    Returns:
        The dataset.

    Raises:
        CheckpointError: It is no such dataset, is incomplete, or its bytes are not those that were written.
    """
    path = Path(path)
    manifest = Manifest.read(path)
    if manifest.kind != kind:
        raise CheckpointError(f"{path} holds {manifest.kind!r}; {kind!r} is needed here: give another directory")
    if not manifest.complete:
        raise CheckpointError(
            f"{path} is incomplete ({len(manifest.shards)} shards are done): run again into it to go on, or delete it"
        )
    verify(path, manifest, hashes=check_hashes)
    if aside := reasons(manifest.shards):
        say(f"{path}: {about(aside, manifest.corpus['documents'])}")
    import datasets

    return datasets.load_from_disk(str(path))
