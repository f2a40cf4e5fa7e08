"""One shard as a file: an Arrow stream under a temporary name, its hash taken while it is written, synced."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from workbench.core.errors import UserError
from workbench.datasets.plan import even_batches

if TYPE_CHECKING:
    import pyarrow as pa

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def temporary_name(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(path.name + ".tmp")


def write_shard_file(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], *, batch_rows: int
) -> dict[str, Any]:
    """Write a shard under its temporary name and sync it; at most a record batch of it is held in memory.

    Args:
        path: Its final name, which it does not take yet.
        schema: Columns.
        batches: Its rows, in order; they are cut anew to equal batches.
        batch_rows: Rows of a batch.

    Returns:
        Its file, sha256, bytes and rows, for the manifest.

    Raises:
        OSError: The file could not be written; nothing of it is left.
    """
    import pyarrow as pa

    temporary, rows = temporary_name(path), 0
    try:
        with open(temporary, "wb") as handle:
            sink = HashingFile(handle)
            with pa.ipc.new_stream(sink, schema) as stream:
                for batch in even_batches(batches, batch_rows):
                    stream.write_batch(batch)
                    rows += batch.num_rows
            handle.flush()
            os.fsync(handle.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return {"file": path.name, "sha256": sink.digest.hexdigest(), "bytes": sink.size, "rows": rows}


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn what the disk says into a sentence that tells how to go on.

    Args:
        path: What is being written.

    Raises:
        UserError: In place of OSError.
    """
    try:
        yield
    except OSError as error:
        why, remedy = f"{error}", "make room there"
        if error.errno in FULL:
            why = f"the disk is full: {error.strerror}"
        elif error.errno in CLOSED:
            remedy = "make the directory writable"
        raise UserError(
            f"{path} could not be written ({why}): finished shards are kept; {remedy} and run again to go on"
        ) from error


class HashingFile:
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
