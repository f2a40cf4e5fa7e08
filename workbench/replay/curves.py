"""Curves of cost: seconds against rows and context, and the phases of a round that they make up.

A curve is a table over a number of rows; between its entries it goes straight, beyond them it refuses. Every entry is a
line over the context, the tokens known when the round starts.
Legend: S drafter steps, D drafts verified, A drafts accepted, each from 0 to K; the last axis holds base and slope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.core.errors import UserError

PHASES = ("draft", "verify", "accept", "commit", "other")


@dataclass(frozen=True)
class Curve:
    """Seconds over rows and context.

    Args:
        knots: Numbers of rows that were measured, increasing; none for a cost that does not depend on rows.
        base: Seconds of each at context 0; one value for a curve without knots.
        slope: Seconds added to each per token of context.
    """

    knots: tuple[int, ...]
    base: tuple[float, ...]
    slope: tuple[float, ...]

    def __post_init__(self) -> None:
        wanted = max(len(self.knots), 1)
        rows = [int(n) for n in self.knots]
        finite = all(isinstance(x, int | float) and np.isfinite(x) for x in (*self.base, *self.slope))
        if len(self.base) != wanted or len(self.slope) != wanted or not finite:
            raise UserError(
                f"a curve over rows {rows} has base {list(self.base)} and slope {list(self.slope)}: give one finite "
                "number of each per number of rows, or one of each without rows"
            )
        if any(a >= b for a, b in zip(rows, rows[1:])) or any(n < 1 for n in rows):
            raise UserError(f"a curve over rows {rows} is not valid: give increasing numbers of rows, from 1")

    @classmethod
    def constant(cls, seconds: float, slope: float = 0.0) -> Curve:
        """A cost that does not depend on rows."""
        return cls((), (float(seconds),), (float(slope),))

    @classmethod
    def of(cls, entries: Mapping[int, tuple[float, float]]) -> Curve:
        """A curve of rows to (base, slope)."""
        rows = sorted(entries)
        return cls(tuple(rows), tuple(entries[n][0] for n in rows), tuple(entries[n][1] for n in rows))

    def lines(self, rows: ArrayLike, what: str) -> np.ndarray:
        """Base and slope at numbers of rows.

        Args:
            rows: Numbers of rows, any shape.
            what: What is run, for the sentence.

        Returns:
            The same shape with one more axis of 2.

        Raises:
            UserError: A number of rows is outside of what was measured.
        """
        n = np.asarray(rows)
        if not self.knots:
            return np.broadcast_to(np.array([self.base[0], self.slope[0]]), (*n.shape, 2))
        if n.size and (n.min() < self.knots[0] or n.max() > self.knots[-1]):
            bad = int(n.max() if n.max() > self.knots[-1] else n.min())
            raise UserError(
                f"this cost model knows {what} of {self.knots[0]} to {self.knots[-1]} rows, and {bad} were asked for: "
                "use shorter drafts, or a model measured that far"
            )
        return np.stack([np.interp(n, self.knots, self.base), np.interp(n, self.knots, self.slope)], -1)

    def to_json(self) -> dict[str, Any]:
        """Lists by name."""
        return {"knots": list(self.knots), "base": list(self.base), "slope": list(self.slope)}

    @classmethod
    def from_json(cls, data: Any) -> Curve:
        """The inverse of ``to_json``; ValueError when the mapping is another."""
        if not isinstance(data, dict) or set(data) != {"knots", "base", "slope"}:
            raise ValueError("a curve holds knots, base and slope")
        if any(not isinstance(n, int) or isinstance(n, bool) for n in data["knots"]):
            raise ValueError("knots are whole numbers")
        return cls(*(tuple(data[name]) for name in ("knots", "base", "slope")))


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What the parts of a round cost at one batch width.

    Args:
        plain: One step of plain decode, all of it.
        first: The first drafter step of a chain, by rows: the pending token, and the tokens before it that the drafter
            has not seen.
        step: Each further drafter step.
        verify: The target's forward, by rows: the pending token and the drafts.
        accept: Deciding which drafts stand, by rows.
        partial: Committing a part of a verify, by rows kept.
        whole: Committing all of it.
        other: What each round costs besides.
    """

    plain: Curve
    first: Curve
    step: Curve
    verify: Curve
    accept: Curve
    partial: Curve
    whole: Curve
    other: Curve

    @property
    def k_max(self) -> int | None:
        """Longest draft whose verify is known; None without a bound."""
        return self.verify.knots[-1] - 1 if self.verify.knots else None

    def plain_line(self) -> np.ndarray:
        """Base and slope of a plain step, [2]."""
        return self.plain.lines(1, "a plain step")

    def work(self, steps: int, drafted: int) -> dict[str, np.ndarray]:
        """Parts of a round that steps and drafts determine.

        Args:
            steps: Largest S.
            drafted: Largest D.

        Returns:
            Phase to [S+1, D+1, 2].
        """
        s, rows = np.arange(steps + 1), 1 + np.arange(drafted + 1)
        first, step = self.first.lines(1, "a first drafter step"), self.step.lines(1, "a drafter step")
        draft_S = first + np.maximum(s - 1, 0)[:, None] * step
        draft_S[0] = self._unseen(np.array([1]))[0]
        full = (steps + 1, drafted + 1, 2)
        return {
            "draft": np.broadcast_to(draft_S[:, None], full),
            "verify": np.broadcast_to(self.verify.lines(rows, "a verify"), full),
            "accept": np.broadcast_to(self.accept.lines(rows, "the acceptance"), full),
            "other": np.broadcast_to(self.other.lines(1, "a round"), full),
        }

    def outcome(self, drafted: int) -> dict[str, np.ndarray]:
        """Parts of a round that drafts and acceptances determine; 0 where A > D.

        Args:
            drafted: Largest D.

        Returns:
            Phase to [D+1, D+1, 2]: the commit, and under "draft" what tokens accepted here cost the drafter later,
            which sees their true rows in its next first step.
        """
        n = drafted + 1
        commit, seen = np.zeros((n, n, 2)), np.zeros((n, n, 2))
        unseen_A = self._unseen(np.arange(n))
        for d in range(n):
            commit[d, :d] = self.partial.lines(1 + np.arange(d), "a partial commit")
            commit[d, d] = self.whole.lines(1, "a commit")
            seen[d, : d + 1] = unseen_A[: d + 1]
        return {"commit": commit, "draft": seen}

    def _unseen(self, tokens: np.ndarray) -> np.ndarray:
        """What tokens that the drafter has not seen add to its next first step, [N, 2]."""
        what = "a first drafter step"
        return self.first.lines(1 + tokens, what) - self.first.lines(1, what)

    def to_json(self) -> dict[str, Any]:
        """Curves by name."""
        return {item.name: getattr(self, item.name).to_json() for item in fields(self)}

    @classmethod
    def from_json(cls, data: Any) -> RoundCost:
        """The inverse of ``to_json``; ValueError when the mapping is another."""
        names = [item.name for item in fields(cls)]
        if not isinstance(data, dict) or set(data) != set(names):
            raise ValueError(f"a width holds {', '.join(names)}")
        return cls(**{name: Curve.from_json(data[name]) for name in names})


def between(costs: Mapping[int, RoundCost], width: int, part: Callable[[RoundCost], Any]) -> Any:
    """A part of the cost at a batch width, straight between the widths that were measured.

    Args:
        costs: Costs by width.
        width: Sequences that run together.
        part: Gives an array, or a mapping of arrays.

    Returns:
        What ``part`` gives, at this width.

    Raises:
        UserError: The width is outside of what was measured.
    """
    known: Sequence[int] = sorted(costs)
    if not known[0] <= width <= known[-1]:
        said = f"width {known[0]}" if len(known) == 1 else f"widths {known[0]} to {known[-1]}"
        raise UserError(
            f"width={width} is not valid: this cost model knows {said}; use one of those, or measure more widths"
        )
    if width in costs:
        return part(costs[width])
    high = next(w for w in known if w > width)
    low = known[known.index(high) - 1]
    share = (width - low) / (high - low)
    a, b = part(costs[low]), part(costs[high])
    if isinstance(a, dict):
        return {name: a[name] * (1 - share) + b[name] * share for name in a}
    return a * (1 - share) + b * share
