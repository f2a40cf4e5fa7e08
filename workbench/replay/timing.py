"""Seconds of a round by a cost model, looked up as walks do: by bucket of committed length, steps and drafts."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.replay.counts import CONTEXTS


@dataclass(frozen=True, eq=False)
class RoundSeconds:
    """A table of round times.

    Args:
        contexts: Lower edges of buckets of committed length, the first 0 [C].
        seconds_CSD: Seconds of a round by bucket, drafter steps and drafts verified, [C, K+1, K+1].
    """

    contexts: tuple[int, ...]
    seconds_CSD: np.ndarray

    @classmethod
    def of(cls, cost: Any, k_max: int, longest: int) -> RoundSeconds:
        """The times of a cost model.

        Args:
            cost: An object with ``grid(k_max, contexts=...)``, such as a CostModel; None makes every round take 0.
            k_max: Longest draft.
            longest: Longest text, tokens; buckets past it are not asked for.

        Returns:
            The table.
        """
        contexts = tuple(edge for edge in CONTEXTS if edge < max(longest, 1))
        if cost is None:
            return cls(contexts[:1], np.zeros((1, k_max + 1, k_max + 1)))
        return cls(contexts, np.ascontiguousarray(cost.grid(k_max, contexts=contexts), dtype=np.float64))

    def __call__(self, committed: int, steps: int, drafted: int) -> float:
        """Seconds of a round that began with ``committed`` tokens known."""
        return float(self.seconds_CSD[bisect_right(self.contexts, committed) - 1, steps, drafted])
