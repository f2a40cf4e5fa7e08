"""Which documents run together: by length inside a bounded window, so that little is padded and order is not far off.

What is grouped depends on the documents, the options and the device's size alone, never on what is free or already
done, so that a run that goes on groups as the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from workbench.model.hybrid import HybridModel

WINDOW = 4  # groups that a window of documents makes
ROWS = 8192  # rows that one forward on a GPU is made to have
MOST = 32  # documents that run together at most
CACHE_SHARE = 8  # the caches of a group take at most the device's memory divided by this


def batch_limit(model: HybridModel, batch: int | None, chunk: int) -> Callable[[int], int]:
    """How many documents of a length may run together.

    Args:
        model: The target.
        batch: What the user asked for; None goes by the device: one on a CPU; on a GPU as many as make a forward of
            8,192 rows, at most 32, with caches in an eighth of its memory.
        chunk: Tokens per forward.

    Returns:
        From the rows of the longest document to a number of documents.
    """
    if batch is not None:
        return lambda rows: batch
    if model.device.type != "cuda":
        return lambda rows: 1
    room = torch.cuda.get_device_properties(model.device).total_memory // CACHE_SHARE

    def limit(rows: int) -> int:
        each = model.cache_bytes(rows, capacity=rows)
        return max(1, min(MOST, ROWS // min(rows, chunk), room // each))

    return limit


def plan_groups(rows: Sequence[int], limit: Callable[[int], int]) -> list[list[int]]:
    """Groups of documents that run together, in an order that ends documents about in theirs.

    Args:
        rows: Rows to run of every document.
        limit: As ``batch_limit`` gives it.

    Returns:
        Indices of documents, each exactly once; within a group by falling length.
    """
    size = limit(min(rows, default=1)) * WINDOW
    if size == WINDOW:
        return [[i] for i in range(len(rows))]
    groups: list[list[int]] = []
    for first in range(0, len(rows), size):
        left = sorted(range(first, min(first + size, len(rows))), key=lambda i: (-rows[i], i))
        window = []
        while left:
            count = limit(rows[left[0]])
            window.append(left[:count])
            left = left[count:]
        groups += sorted(window, key=min)
    assert sorted(chain.from_iterable(groups)) == list(range(len(rows)))
    return groups


def chunk_counts(rows: Sequence[int], start: int, chunk: int) -> list[int]:
    """Rows of every document that lie in [start, start + chunk)."""
    return [min(max(n - start, 0), chunk) for n in rows]
