"""Record batches whose bytes are a function of their values alone.

Arrow packs booleans and validity as bits and leaves the bits past the last row as they were in memory. They reach the
file, where two equal tables then differ, so they are set to zero before writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


def settled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows with every bit past the last one zero.

    Args:
        batch: Flat columns, texts, and lists of these.

    Returns:
        A batch that begins at its buffers' first row.
    """
    import pyarrow as pa

    whole = batch.take(pa.array(np.arange(batch.num_rows)))
    return pa.RecordBatch.from_arrays([_settled(column) for column in whole.columns], schema=batch.schema)


def _settled(array: pa.Array) -> pa.Array:
    import pyarrow as pa

    kind, length = array.type, len(array)
    valid, *rest = array.buffers()[: kind.num_buffers]
    children = []
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        children = [_settled(array.values)]
    elif pa.types.is_boolean(kind):
        rest = [_zero_tail(rest[0], length)]
    buffers = [_zero_tail(valid, length) if valid is not None and array.null_count else None, *rest]
    return pa.Array.from_buffers(kind, length, buffers, children=children)


def _zero_tail(bits: pa.Buffer, length: int) -> pa.Buffer:
    """The first ``length`` bits, and zeros up to the byte's end."""
    import pyarrow as pa

    packed = np.frombuffer(bits, np.uint8, (length + 7) // 8).copy()
    if length % 8:
        packed[-1] &= (1 << length % 8) - 1
    return pa.py_buffer(packed)
