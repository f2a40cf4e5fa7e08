"""Equal rows give equal bytes, whatever lies in memory past the last one."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pyarrow as pa

from workbench.datasets.bits import settled
from workbench.datasets.shards import even_batches

ROWS = 42


def dirty(fill: int) -> pa.RecordBatch:
    """One batch of each kind of column, the bits past its last row filled with ones or zeros."""
    rng = np.random.default_rng(0)

    def bits(n: int) -> pa.Buffer:
        packed = np.packbits(rng.random(n) < 0.5, bitorder="little")
        packed[-1] |= np.uint8(fill & (0xFF << n % 8) & 0xFF)
        return pa.py_buffer(packed)

    flags = pa.Array.from_buffers(pa.bool_(), ROWS, [None, bits(ROWS)])
    numbers = pa.Array.from_buffers(pa.int32(), ROWS, [bits(ROWS), pa.py_buffer(np.arange(ROWS, dtype=np.int32))])
    inner = pa.Array.from_buffers(pa.float32(), 3 * ROWS, [bits(3 * ROWS), pa.py_buffer(np.ones(3 * ROWS, np.float32))])
    lists = pa.FixedSizeListArray.from_arrays(inner, 3)
    marks = pa.FixedSizeListArray.from_arrays(pa.Array.from_buffers(pa.bool_(), 3 * ROWS, [None, bits(3 * ROWS)]), 3)
    texts = pa.array([None if i % 5 == 0 else "x" * (i % 4) for i in range(ROWS)])
    ends = pa.array(np.arange(0, 2 * ROWS + 1, 2, dtype=np.int32))
    ragged = pa.ListArray.from_arrays(ends, pa.Array.from_buffers(pa.bool_(), 2 * ROWS, [None, bits(2 * ROWS)]))
    return pa.RecordBatch.from_arrays([flags, numbers, lists, marks, texts, ragged], names=list("abcdef"))


def stream(batch: pa.RecordBatch) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def test_bits_past_the_last_row_do_not_reach_the_file() -> None:
    ones, zeros = dirty(0xFF), dirty(0)
    assert ones.equals(zeros) and stream(ones) != stream(zeros)  # arrow itself writes what lies there
    assert settled(ones).equals(ones) and stream(settled(ones)) == stream(settled(zeros))
    for first, n in ((3, 17), (8, 8), (0, 41), (5, 0)):
        a, b = settled(ones.slice(first, n)), settled(zeros.slice(first, n))
        assert a.equals(ones.slice(first, n)) and stream(a) == stream(b)


def test_batches_are_settled_however_they_come() -> None:
    whole, made = dirty(0), []
    for cuts in ((0, ROWS), (0, 5, 9, ROWS), (0, 16, 17, 33, ROWS)):
        parts = [dirty(0xFF).slice(a, b - a) for a, b in itertools.pairwise(cuts)]
        made.append([stream(batch) for batch in even_batches(parts, 20)])
        assert pa.Table.from_batches(list(even_batches(parts, 20))).equals(pa.Table.from_batches([whole]))
    assert made[0] == made[1] == made[2] and len(made[0]) == 3
