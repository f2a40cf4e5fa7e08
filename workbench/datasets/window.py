"""Records of one tape, filled as its chunks pass: rows are kept only while a record still needs them.

Legend: N records, R rows, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.datasets.topk import SparseRows


@dataclass(frozen=True, eq=False)
class Filled:
    """Records whose every slot has passed.

    Args:
        positions: Anchors [N].
        hidden_NH: Trunk row h_{p-1} of every anchor, as it is stored.
        slots: Rows p..p+gamma-1 of every anchor, in order; N * gamma rows.
    """

    positions: np.ndarray
    hidden_NH: np.ndarray
    slots: SparseRows


class Window:
    """The rows that records need, and those that are held.

    Args:
        positions: Anchors of the tape, strictly increasing.
        gamma: Slots per record.
    """

    def __init__(self, positions: np.ndarray, gamma: int) -> None:
        self.positions, self.gamma = positions, gamma
        self.scored = np.unique(positions[:, None] + np.arange(gamma))
        self.done = 0
        self.refused = False  # a row of the tape is not sound, and no record of it is wanted any more
        self._rows: SparseRows | None = None
        self._rows_at = np.zeros(0, dtype=np.int64)
        self._hidden: np.ndarray | None = None

    @property
    def end(self) -> int:
        """Rows to run: everything up to the last one a record needs."""
        return int(self.positions[-1]) + self.gamma

    @property
    def held(self) -> int:
        """Scored rows in memory."""
        return len(self._rows_at)

    def scored_in(self, start: int, end: int) -> np.ndarray:
        """Positions in [start, end) whose logits a record needs."""
        low, high = np.searchsorted(self.scored, (start, end))
        return self.scored[low:high]

    def carriers_in(self, start: int, end: int) -> np.ndarray:
        """Positions p - 1 in [start, end) of anchors p."""
        low, high = np.searchsorted(self.positions - 1, (start, end))
        return self.positions[low:high] - 1

    def add(self, end: int, rows_at: np.ndarray, rows: SparseRows | None, hidden_NH: np.ndarray) -> Filled | None:
        """Take what a chunk gave and hand out the records it completed.

        Args:
            end: Position after the chunk.
            rows_at: What ``scored_in`` named for the chunk.
            rows: Those rows; None when there are none.
            hidden_NH: Trunk rows at what ``carriers_in`` named.

        Returns:
            Completed records in order; None when there are none.
        """
        if rows is not None:
            self._rows = rows if self._rows is None else SparseRows.concat([self._rows, rows])
            self._rows_at = np.concatenate([self._rows_at, rows_at])
        self._hidden = hidden_NH if self._hidden is None else np.concatenate([self._hidden, hidden_NH])
        upto = int(np.searchsorted(self.positions + self.gamma, end, side="right"))
        if upto == self.done:
            return None
        assert self._rows is not None
        anchors, n = self.positions[self.done : upto], upto - self.done
        wanted = (anchors[:, None] + np.arange(self.gamma)).reshape(-1)
        index = np.searchsorted(self._rows_at, wanted)
        assert np.array_equal(self._rows_at[index], wanted), "every row of a finished record has passed"
        filled = Filled(anchors, self._hidden[:n], self._rows.take(index))
        self._hidden = self._hidden[n:].copy()
        self.done = upto
        first = self.positions[upto] if upto < len(self.positions) else end
        keep = int(np.searchsorted(self._rows_at, first))
        self._rows, self._rows_at = self._rows.take(slice(keep, None)), self._rows_at[keep:]
        return filled
