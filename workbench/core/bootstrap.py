"""Bootstrap intervals by document: resample whole documents, never rounds or tokens.

Rounds of one document share their text, so a resample of rounds would make every interval too narrow.
Works on ratios of sums: a numerator and a denominator per row, summed per document, resampled, divided.

Shapes: N rows, G documents, M quantities, D draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.core.errors import UserError, check_int, check_real

DRAWS = 2000
LEVEL = 0.95
CHUNK = 1 << 22  # weights held at a time


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of sums with its percentile interval.

    Args:
        value: The ratio over all documents; None when its denominator is 0.
        low: Lower end; None when fewer than two documents have a denominator above 0.
        high: Upper end; None when ``low`` is.
        groups: Documents whose denominator is above 0.
        draws: Resamples.
        level: Coverage aimed at, such as 0.95.
    """

    value: float | None
    low: float | None
    high: float | None
    groups: int
    draws: int
    level: float

    def row(self) -> dict[str, Any]:
        """The interval as one flat mapping."""
        return asdict(self)


def bootstrap_by(
    groups: ArrayLike,
    numerator: ArrayLike,
    denominator: ArrayLike | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> list[Interval]:
    """Percentile bootstrap of sum(numerator) / sum(denominator), resampling whole groups.

    Args:
        groups: Document of each row, [N]; any sortable ids.
        numerator: [N] for one quantity or [N, M] for M of them, resampled together.
        denominator: Same shape, or [N] shared by all quantities; None for one per row, which makes the ratio a mean.
        draws: Resamples; default 2000.
        seed: Seed of the resampling; the same seed gives the same interval.
        level: Coverage; default 0.95.

    Returns:
        One interval per quantity. Draws whose denominator is 0 are left out of that quantity's quantiles.

    Raises:
        UserError: Shapes that do not match, or an option out of range.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), §13.3 (percentile interval); the resampled
        unit is the document (cluster bootstrap).
    """
    num_GM, den_GM, _ = group_sums(groups, numerator, denominator)
    value_M, draws_DM = _ratio(num_GM.sum(0), den_GM.sum(0)), _resample(num_GM, den_GM, draws, seed)
    counts = (den_GM > 0).sum(0)
    return [_interval(value_M[m], draws_DM[:, m], int(counts[m]), draws, level) for m in range(len(value_M))]


def ratio_draws(
    groups: ArrayLike,
    numerator: ArrayLike,
    denominator: ArrayLike | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> np.ndarray:
    """The resampled ratios themselves; calls over the same groups with the same seed are paired, draw by draw.

    Args:
        groups: Document of each row, [N]; any sortable ids.
        numerator: [N] or [N, M], as for ``bootstrap_by``.
        denominator: As for ``bootstrap_by``.
        draws: Resamples; default 2000.
        seed: Seed of the resampling.

    Returns:
        Float64 [D, M]; NaN where a draw's denominator is 0.

    Raises:
        UserError: Shapes that do not match, or an option out of range.
    """
    num_GM, den_GM, _ = group_sums(groups, numerator, denominator)
    return _resample(num_GM, den_GM, draws, seed)


def bootstrap_difference(
    a: tuple[ArrayLike, ArrayLike, ArrayLike | None],
    b: tuple[ArrayLike, ArrayLike, ArrayLike | None],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> list[Interval]:
    """Paired bootstrap of ratio(a) − ratio(b): both runs see the same resampled documents.

    Args:
        a: (groups, numerator, denominator or None) of one run, as for ``bootstrap_by``.
        b: The same of the other run, over the same documents; the number of rows may differ.
        draws: Resamples; default 2000.
        seed: Seed of the resampling.
        level: Coverage; default 0.95.

    Returns:
        One interval per quantity; an interval that excludes 0 is a difference beyond the spread between documents.

    Raises:
        UserError: The runs cover different documents or different numbers of quantities.
    """
    num_a, den_a, names_a = group_sums(*a)
    num_b, den_b, names_b = group_sums(*b)
    if not np.array_equal(names_a, names_b):
        lone = sorted({*names_a.tolist()} ^ {*names_b.tolist()})
        raise UserError(
            f"a paired difference needs the same documents on both sides; {len(lone)} are on one side only "
            f"(first: {lone[0]!r}); keep the documents common to both"
        )
    if num_a.shape != num_b.shape:
        raise UserError(f"the two runs hold {num_a.shape[1]} and {num_b.shape[1]} quantities; they must hold the same")
    value_M = _ratio(num_a.sum(0), den_a.sum(0)) - _ratio(num_b.sum(0), den_b.sum(0))
    # The same seed over the same documents draws the same weights: this is what pairs the runs.
    draws_DM = _resample(num_a, den_a, draws, seed) - _resample(num_b, den_b, draws, seed)
    counts = ((den_a > 0) & (den_b > 0)).sum(0)
    return [_interval(value_M[m], draws_DM[:, m], int(counts[m]), draws, level) for m in range(len(value_M))]


def bootstrap_of(
    groups: ArrayLike,
    sums: ArrayLike,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """Percentile bootstrap of any function of sums, resampling whole groups.

    Args:
        groups: Document of each row, [N].
        sums: What is summed over rows, [N, M].
        statistic: From sums [D, M] of D draws to values [D]; NaN leaves a draw out.
        draws: Resamples; default 2000.
        seed: Seed of the resampling; the same documents and seed pair with ``bootstrap_by``.
        level: Coverage; default 0.95.

    Returns:
        The interval of the statistic.

    Raises:
        UserError: Shapes that do not match, or an option out of range.
    """
    sums_GM, _, names = group_sums(groups, sums)
    value = float(statistic(sums_GM.sum(0)[None])[0])
    draws_D = np.concatenate([statistic(w_DG @ sums_GM) for w_DG in _weights(len(names), draws, seed)])
    return _interval(value, draws_D, len(names), draws, level)


def group_sums(
    groups: ArrayLike, numerator: ArrayLike, denominator: ArrayLike | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sum numerators and denominators per group.

    Args:
        groups: Document of each row, [N].
        numerator: [N] or [N, M].
        denominator: [N], [N, M] or None for ones.

    Returns:
        Numerators [G, M], denominators [G, M] (float64) and the sorted group ids [G].

    Raises:
        UserError: Shapes that do not match.
    """
    ids_N, num = np.asarray(groups), np.asarray(numerator, dtype=np.float64)
    den = np.ones(num.shape[:1]) if denominator is None else np.asarray(denominator, dtype=np.float64)
    num_NM = num[:, None] if num.ndim == 1 else num
    den_NM = np.broadcast_to(den[:, None], num_NM.shape) if den.ndim == 1 and len(den) == len(num) else den
    if ids_N.ndim != 1 or num_NM.shape != den_NM.shape or len(ids_N) != len(num_NM):
        raise UserError(
            f"groups {ids_N.shape}, numerator {num.shape} and denominator {den.shape} do not match: give one group "
            "per row, and a denominator of the numerator's shape or one per row"
        )
    names, index_N = np.unique(ids_N, return_inverse=True)
    out = np.zeros((2, len(names), num_NM.shape[1]))
    np.add.at(out[0], index_N, num_NM)
    np.add.at(out[1], index_N, den_NM)
    return out[0], out[1], names


def _weights(groups: int, draws: int, seed: int) -> Iterator[np.ndarray]:
    """How often each group enters each draw, in chunks [d, G] that together hold ``draws`` rows."""
    rng = np.random.default_rng(check_int("seed", seed, low=0))
    left, step = check_int("draws", draws, low=1), max(1, CHUNK // max(groups, 1))
    share = np.full(groups, 1.0 / groups)
    while left > 0:
        yield rng.multinomial(groups, share, size=min(step, left)).astype(np.float64)
        left -= step


def _resample(num_GM: np.ndarray, den_GM: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Ratios of every draw, [D, M]; NaN where a draw's denominator is 0."""
    if not len(num_GM):
        return np.full((draws, num_GM.shape[1]), np.nan)
    return np.concatenate([_ratio(w_DG @ num_GM, w_DG @ den_GM) for w_DG in _weights(len(num_GM), draws, seed)])


def _ratio(num: np.ndarray, den: np.ndarray) -> np.ndarray:
    """num / den, NaN where den is 0."""
    return np.divide(num, den, out=np.full(num.shape, np.nan), where=den > 0)


def _interval(value: float, draws_D: np.ndarray, groups: int, draws: int, level: float) -> Interval:
    """The percentile interval of one quantity; nulls where it is undefined."""
    check_real("level", level, low=0, high=1, open_low=True, open_high=True)
    point = None if np.isnan(value) else float(value)
    defined_D = draws_D[~np.isnan(draws_D)]
    if point is None or groups < 2 or not len(defined_D):
        return Interval(point, None, None, groups, draws, level)
    low, high = np.quantile(defined_D, [(1 - level) / 2, (1 + level) / 2])
    return Interval(point, float(low), float(high), groups, draws, level)
