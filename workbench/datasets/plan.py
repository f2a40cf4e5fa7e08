"""Which documents make which shard, and rows brought into that order, in batches of one size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from workbench.datasets.bits import settled

if TYPE_CHECKING:
    import pyarrow as pa


BATCH_ROWS = 256  # rows held before they are written as one record batch


class Part(NamedTuple):
    """Rows of one document, or why it has none.

    Args:
        document: Its index.
        batch: The rows; None for a document that is left out.
        last: No more of its rows come.
        reason: Why it is left out; "" when it is not.
    """

    document: int
    batch: pa.RecordBatch | None
    last: bool
    reason: str = ""


def without_rows(document: int, reason: str) -> Part:
    """The only part of a document that has no rows."""
    assert reason, f"document {document} is left out without a reason"
    return Part(document, None, True, reason)


def in_order(parts: Iterable[Part], documents: Sequence[int], *, whole: bool = False) -> Iterator[Part]:
    """The parts of some documents, document by document; others are dropped.

    Args:
        parts: In order within each document; documents may be mixed.
        documents: Whose parts are wanted, in this order.
        whole: Hold every document until its last part; one that turns out to be left out then has no other part.
            Default False, for parts that leave nothing out.

    Yields:
        Each part as soon as those before it are there; what comes early is held.
    """
    held: dict[int, list[Part]] = {document: [] for document in documents}
    waiting = iter(documents)
    now = next(waiting, None)
    for part in parts:
        if part.document in held:
            if part.batch is None:
                assert whole, f"document {part.document} is left out and rows of it may be written already"
                held[part.document].clear()
            held[part.document].append(part)
        while now is not None and held[now] and (held[now][-1].last or not whole):
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


def rows_until(document: int, parts: Iterator[Part], aside: dict[int, str]) -> Iterator[pa.RecordBatch]:
    """Rows of parts up to the end of a document; ``aside`` takes why documents before it, or it, have none."""
    for part in parts:
        if part.batch is None:
            aside[part.document] = part.reason
        else:
            yield part.batch
        if part.last and part.document == document:
            return
    raise AssertionError(f"document {document} did not come to its end")
