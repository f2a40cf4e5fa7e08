"""How long rounds take in a walk, by a cost model: one table that plain and compiled walks read alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class CostGrid(Protocol):
    """What a walk asks of a cost model, such as ``CostModel``."""

    def grid(self, k_max: int, *, contexts: Sequence[float]) -> np.ndarray:
        """Durations of rounds.

        Args:
            k_max: Largest number of steps and drafts.
            contexts: Tokens known when the round starts, C of them.

        Returns:
            Seconds, [C, K+1 steps, K+1 drafted].
        """
        ...


@dataclass(frozen=True, eq=False)
class RoundSeconds:
    """Durations of rounds.

    Args:
        seconds_CSD: Seconds by tokens known when the round starts, drafter steps and drafts verified, float64
            [C, K+1, K+1].
    """

    seconds_CSD: np.ndarray

    @classmethod
    def of(cls, cost: CostGrid, k_max: int, longest: int) -> RoundSeconds:
        """Durations by a cost model.

        Args:
            cost: The cost model.
            k_max: Longest draft.
            longest: Tokens of the longest text.

        Returns:
            The durations at every committed length.
        """
        grid = cost.grid(k_max, contexts=range(longest + 1))
        return cls(np.ascontiguousarray(grid, dtype=np.float64))

    def round_seconds(self, *, steps: int, drafted: int, context: int = 0) -> float:
        """Duration of a round, seconds."""
        return float(self.seconds_CSD[context, steps, drafted])
