"""What a run is going to write, from its columns and its rows, and whether the disk has room for it.

Fixed columns are counted to the bit and texts to the byte; what is guessed is a few hundred bytes of framing per batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.errors import UserError
from workbench.datasets.plan import BATCH_ROWS

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.core.tape import Tape

OFFSET = 4  # bytes per row of a text or list column beside its contents
FRAME, NODE, BUFFER = 128, 16, 16  # bytes of a record batch's head, and of its mention of a column and of a buffer
PAD = 4  # bytes by which a buffer is rounded up to 8, on average
LISTING = 400  # bytes of a shard in the manifest
ROOM = 10  # free space is mentioned where it is less than so many times what is needed


def value_bits(kind: pa.DataType) -> int:
    """Bits of one value of a type that are the same for every value; of a text or list, those of its offset."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(kind):
        return kind.list_size * value_bits(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind):
        return 8 * OFFSET
    return int(kind.bit_width)


def batch_bytes(schema: pa.Schema) -> int:
    """Bytes of a record batch besides its values."""
    import pyarrow as pa

    def parts(kind: pa.DataType) -> tuple[int, int]:
        if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind):
            nodes, buffers = parts(kind.value_type)
            return nodes + 1, buffers + (1 if pa.types.is_fixed_size_list(kind) else 2)
        return 1, 3 if pa.types.is_string(kind) or pa.types.is_binary(kind) else 2

    each = [parts(field.type) for field in schema]
    return FRAME + sum(nodes * NODE + buffers * (BUFFER + PAD) for nodes, buffers in each)


def document_bytes(
    schema: pa.Schema,
    rows: Sequence[int],
    *,
    texts: Mapping[str, Sequence[str]] | None = None,
    values: Mapping[str, Sequence[int]] | None = None,
) -> list[int]:
    """Bytes that the rows of every document take in a shard, its share of the framing of full batches included.

    Args:
        schema: Columns.
        rows: Rows of every document.
        texts: Of a text column, every document's text, which all of its rows repeat.
        values: Of a list column of free length, the values of one row of every document.

    Returns:
        Bytes per document.
    """
    fixed = sum(value_bits(field.type) for field in schema) / 8 + batch_bytes(schema) / BATCH_ROWS
    each = [fixed] * len(rows)
    for column in (texts or {}).values():
        each = [a + len(text.encode()) for a, text in zip(each, column, strict=True)]
    for name, counts in (values or {}).items():
        width = value_bits(schema.field(name).type.value_type) / 8
        each = [a + n * width for a, n in zip(each, counts, strict=True)]
    return [round(a * n) for a, n in zip(each, rows, strict=True)]


def tape_bytes(schema: pa.Schema, rows: Sequence[int], tapes: Sequence[Tape]) -> list[int]:
    """``document_bytes`` of tapes, whose id, split and source are columns where the schema has them."""
    names = [name for name in ("doc_id", "split", "source") if name in schema.names]
    return document_bytes(schema, rows, texts={name: [getattr(tape, name) for tape in tapes] for name in names})


def size_text(size: float) -> str:
    """A number of bytes as text, such as "1.3 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def check_room(out: Path, needed: int, *, done: int, shards: int) -> str:
    """Say what a run is going to write, or refuse it.

    Args:
        out: The directory, which is there.
        needed: Bytes still to be written.
        done: Shards that are finished.
        shards: Shards of the finished dataset.

    Returns:
        One line.

    Raises:
        UserError: The disk has less room than that.
    """
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            f"{out} is going to need about {size_text(needed)} more and its disk has {size_text(free)} left: make room "
            "there, choose another out, or record less"
        )
    kept = f"; {done:,} of {shards:,} shards are there already" if done else ""
    room = f"; {size_text(free)} are free" if free < ROOM * needed else ""
    return (
        f"{out}: about {size_text(needed)} to write in {shards - done:,} shard{'s'[: shards - done != 1]}{kept}{room}"
    )
