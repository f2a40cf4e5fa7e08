"""A dataset directory in the making: Arrow IPC stream shards, a manifest, and what is still to do.

A shard holds a fixed range of documents, is written to a temporary name while its hash is taken, synced and renamed;
then the manifest is written. What is done is read from the directory, so that a killed run goes on where it stopped
and ends with the bytes of an uninterrupted one. ``datasets.load_from_disk`` opens a finished directory as it is.
This module knows nothing of models or of what the columns mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, TypeVar

from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import Manifest, git_state, sha256_file, sync_directory, write_atomic, write_json
from workbench.core.progress import progress
from workbench.datasets.background import Background
from workbench.datasets.bits import settled

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

T = TypeVar("T")

BATCH_ROWS = 256  # rows held before they are written as one record batch


class Part(NamedTuple):
    """Rows of one document.

    Args:
        document: Its index.
        batch: The rows.
        last: No more of its rows come.
    """

    document: int
    batch: pa.RecordBatch
    last: bool


def in_order(parts: Iterable[Part], documents: Sequence[int]) -> Iterator[Part]:
    """The parts of some documents, document by document; others are dropped.

    Args:
        parts: In order within each document; documents may be mixed.
        documents: Whose parts are wanted, in this order.

    Yields:
        Each part as soon as those before it are there; what comes early is held.
    """
    held: dict[int, list[Part]] = {document: [] for document in documents}
    waiting = iter(documents)
    now = next(waiting, None)
    for part in parts:
        if part.document in held:
            held[part.document].append(part)
        while now is not None and held[now]:
            ready, held[now] = held[now], []
            yield from ready
            if not ready[-1].last:
                break
            del held[now]
            now = next(waiting, None)
    assert now is None, f"document {now} did not come to its end"


def plan_shards(rows: Sequence[int], shard_rows: int) -> list[tuple[int, int]]:
    """Cut documents into shards of about ``shard_rows`` rows; a document is never cut.

    Args:
        rows: Rows of every document.
        shard_rows: Rows after which a shard ends.

    Returns:
        Ranges [first, last) of documents.
    """
    plan, first, held = [], 0, 0
    for i, n in enumerate(rows):
        held += n
        if held >= shard_rows:
            plan.append((first, i + 1))
            first, held = i + 1, 0
    return plan + ([(first, len(rows))] if first < len(rows) else [])


def even_batches(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of ``size``, the last one shorter: a file's bytes do not tell how the rows came."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        while sum(b.num_rows for b in held) >= size:
            joined = pa.concat_batches(held)
            yield settled(joined.slice(0, size))
            held = [joined.slice(size)] if joined.num_rows > size else []
    if held:
        yield settled(pa.concat_batches(held))


class ShardDirectory:
    """One run over one directory; use it as a context manager.

    Args:
        out: The directory, made if needed.
        manifest: Describes the run about to start.
        plan: Document range [first, last) of every shard.
        schema: Columns.
        files: Small files beside the shards, by name.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.

    Raises:
        UserError: The directory holds something else, another run's data, or is being written by another process.
    """

    shard_names = re.compile(r"data-\d{5,}-of-\d{5,}\.arrow")
    batch_rows: int | None = None  # rows of a record batch; None for BATCH_ROWS

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        *,
        plan: Sequence[tuple[int, int]],
        schema: pa.Schema,
        files: Mapping[str, bytes] | None = None,
        resume: bool = True,
    ) -> None:
        self.out, self.manifest, self.plan, self.schema = out, manifest, list(plan), schema
        self._files, self._resume = dict(files or {}), resume
        self._made: list[Path] = []
        self._lock = -1

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
            self._leave()
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
        if kind is not None:
            self._sweep()
            if not self.manifest.shards:
                unlisted = [path.name for path in self.out.iterdir() if self.shard_names.fullmatch(path.name)]
                for name in [*unlisted, *self._files, "manifest.json"]:
                    (self.out / name).unlink(missing_ok=True)
        self._leave()

    def _leave(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        for path in reversed(self._made):
            if not any(path.iterdir()):
                path.rmdir()

    def _temporary(self, path: Path) -> bool:
        """True for the temporary name of a file that runs of this kind write."""
        final, dot, end = path.name.rpartition(".")
        named = final in {"manifest.json", "state.json", "dataset_info.json", *self._files}
        return dot + end == ".tmp" and bool(named or self.shard_names.fullmatch(final))

    def _sweep(self) -> None:
        for path in filter(self._temporary, list(self.out.iterdir())):
            path.unlink()

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
            here = {path.name for path in held}
            before.complete &= here.issuperset([*before.files, *(shard["file"] for shard in before.shards)])
            before.shards = [shard for shard in before.shards if shard["file"] in here]
            before.files = {name: digest for name, digest in before.files.items() if name in here}
            verify(self.out, before)
            self.manifest = self.carried(before)
        self._sweep()
        if self.manifest.complete:
            return
        state = git_state()
        if state is not None and state not in self.manifest.git:
            self.manifest.git.append(state)
        self.manifest.files |= {name: hashlib.sha256(data).hexdigest() for name, data in self._files.items()}
        self.manifest.write(self.out)  # first of all files, so that a directory of ours is always known as one
        for name, data in self._files.items():
            write_atomic(self.out / name, data)

    def differences(self, before: Manifest) -> list[str]:
        """What keeps the directory's manifest and this run's from describing one run, as phrases."""
        return before.differences(self.manifest)

    def carried(self, before: Manifest) -> Manifest:
        """The manifest to go on with: the directory's own, its files present and unharmed."""
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

    def write(self, index: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Write one shard, holding at most a record batch of it in memory.

        Args:
            index: Which shard of the plan.
            batches: Its rows, in order; they are cut anew to equal batches.
        """
        import pyarrow as pa

        final = self.out / self.name(index)
        temporary = final.with_name(final.name + ".tmp")
        with open(temporary, "wb") as handle:
            sink = _Hashing(handle)
            rows = 0
            with pa.ipc.new_stream(sink, self.schema) as stream:
                for batch in even_batches(batches, self.batch_rows or BATCH_ROWS):
                    stream.write_batch(batch)
                    rows += batch.num_rows
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, final)
        sync_directory(self.out)
        entry = {"file": final.name, "sha256": sink.digest.hexdigest(), "bytes": sink.size, "rows": rows}
        self.manifest.shards.append(entry | self.holds(index))
        self.manifest.shards.sort(key=lambda shard: shard["file"])
        self.manifest.write(self.out)

    def holds(self, index: int) -> dict[str, Any]:
        """What the manifest says of a shard's contents."""
        return {"documents": list(self.plan[index])}

    def fill(
        self, batches: Callable[[slice, Any], Iterable[pa.RecordBatch]], *, sizes: Sequence[int], desc: str
    ) -> None:
        """Write every pending shard, with one progress bar over all of them.

        Args:
            batches: Called with a shard's slice of the documents and the bar; gives its rows and counts the bar up.
            sizes: Tokens to run per document.
            desc: Name on the bar.
        """
        spans = {index: slice(*self.plan[index]) for index in self.pending}
        todo = sum(sum(sizes[span]) for span in spans.values())
        with progress(todo, desc=desc, unit="tok", enabled=None if todo else False) as bar:
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
        documents = self.documents
        todo = sum(sizes[i] for i in documents)
        with progress(todo, desc=desc, unit="tok", enabled=None if todo else False) as bar:
            if not documents:
                return
            with Background[T](lambda given: self._write_parts(parts(given, documents))) as writer:
                for item in items(documents, bar):
                    writer.put(item)

    def _write_parts(self, parts: Iterable[Part]) -> None:
        given = iter(parts)
        for index in self.pending:
            try:
                self.write(index, _until(self.plan[index][1] - 1, given))
            except OSError as error:
                raise UserError(
                    f"{self.out / self.name(index)} could not be written ({error}): finished shards are kept; make "
                    "room there and run again to go on"
                ) from error
        assert next(given, None) is None, "every part belongs to a pending shard"

    def finish(self, counts: Mapping[str, int]) -> None:
        """Write what ``datasets.load_from_disk`` reads, and mark the directory complete.

        Args:
            counts: Totals for the manifest.
        """
        import datasets

        assert not self.pending, "finish comes after the last shard"
        manifest = self.manifest
        if manifest.complete:
            return
        hashes = "".join(shard["sha256"] for shard in manifest.shards)
        features = datasets.Features.from_arrow_schema(self.schema).to_dict()
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": shard["file"]} for shard in manifest.shards],
            "_fingerprint": hashlib.sha256(hashes.encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        for name, value in (("dataset_info.json", info), ("state.json", state)):
            manifest.files[name] = sha256_file(write_json(self.out / name, value))
        manifest.counts, manifest.complete = dict(counts), True
        manifest.write(self.out)


def _until(document: int, parts: Iterator[Part]) -> Iterator[pa.RecordBatch]:
    """Rows of parts up to the end of a document."""
    for part in parts:
        yield part.batch
        if part.last and part.document == document:
            return
    raise AssertionError(f"document {document} did not come to its end")


class _Hashing:
    """A file that takes the hash and the size of what is written to it."""

    def __init__(self, handle: BinaryIO) -> None:
        self.handle, self.digest, self.size = handle, hashlib.sha256(), 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.digest.update(view)
        self.size += view.nbytes
        return self.handle.write(view)

    def flush(self) -> None:
        self.handle.flush()

    def close(self) -> None:
        self.closed = True


def verify(path: Path, manifest: Manifest) -> None:
    """Check every listed file of a dataset directory against its hash.

    Args:
        path: The directory.
        manifest: Its manifest.

    Raises:
        CheckpointError: A file is missing or its bytes are not those that were written.
    """
    listed = {shard["file"]: shard["sha256"] for shard in manifest.shards} | manifest.files
    for name, expected in listed.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks {name}, which its manifest lists: restore it, or run again into the directory"
            )
        if sha256_file(file) != expected:
            raise CheckpointError(
                f"{file} does not match the hash in its manifest, so it was damaged or changed after it was written: "
                "restore it, or delete the file and run again into the directory"
            )


def load_shards(path: str | Path, *, kind: str, check_hashes: bool = True) -> datasets.Dataset:
    """Open a finished dataset directory, memory-mapped.

    Args:
        path: The directory.
        kind: What it must hold, such as "anchors".
        check_hashes: Read every file and compare its hash with the manifest; default True.

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
    if check_hashes:
        verify(path, manifest)
    import datasets

    return datasets.load_from_disk(str(path))
