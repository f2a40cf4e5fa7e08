"""Calibration of a drafter: does a draft it gives probability p stand in a share p of the cases?

Needs confidences and outcomes and nothing else. Error, score and ranking are three different things: a drafter may
rank its drafts perfectly (AUROC 1) and be far from calibrated.

Shapes: N drafts, G documents, B bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from workbench.core.bootstrap import DRAWS, LEVEL, Interval, bootstrap_by, bootstrap_of
from workbench.core.errors import UserError, check_choice, check_int

if TYPE_CHECKING:
    import polars as pl

BINNINGS = ("mass", "width")


@dataclass(frozen=True, slots=True)
class Bin:
    """Drafts of similar confidence.

    Args:
        low: Lower edge of the bin.
        high: Upper edge; the value itself belongs to the next bin, except 1.
        confidence: Mean confidence of the bin's drafts.
        hits: Share of them that stood, with its interval by document.
        count: Drafts.
    """

    low: float
    high: float
    confidence: float
    hits: Interval
    count: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well confidences predict outcomes.

    Args:
        binning: "mass" (bins of equally many drafts) or "width" (equally wide bins).
        bins: The bins that hold drafts, in the order of confidence.
        ece: Expected calibration error: mean over drafts of |share of hits − mean confidence| of their bin. It is
            biased upwards where bins hold few drafts, and so is its interval.
        brier: Mean squared difference of confidence and outcome; lower is better.
        auroc: Probability that a draft that stood has a higher confidence than one that did not, ties counting half;
            None when all stood or all failed.
        count: Drafts.
    """

    binning: str
    bins: tuple[Bin, ...]
    ece: Interval
    brier: float
    auroc: float | None
    count: int

    def frame(self) -> pl.DataFrame:
        """One row per bin: low, high, confidence, rate, rate_low, rate_high, count."""
        import polars as pl

        rows = [(b.low, b.high, b.confidence, b.hits.value, b.hits.low, b.hits.high, b.count) for b in self.bins]
        names = "low high confidence rate rate_low rate_high".split()
        return pl.DataFrame(rows, schema={**dict.fromkeys(names, pl.Float64), "count": pl.Int64}, orient="row")


def calibration(
    confidences: ArrayLike,
    hits: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    bins: int = 10,
    binning: str = "mass",
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Calibration:
    """Expected calibration error, Brier score and AUROC of confidences, with the bins of a reliability diagram.

    Args:
        confidences: Probabilities in [0, 1], [N].
        hits: Outcomes, bool [N].
        groups: Document of each draft [N], the unit that intervals resample; None for one document, without intervals.
        bins: Number of bins; default 10. Equal values never part, so "mass" may give fewer.
        binning: "mass" (default): bins that hold equally many drafts; "width": bins of width 1/bins.
        draws: Resamples; default 2000.
        seed: Seed of the resampling.
        level: Coverage of the intervals; default 0.95.

    Returns:
        The calibration.

    Raises:
        UserError: Lengths differ, there is no draft, a confidence is no probability, or an option is not valid.

    Source: Naeini et al. 2015 (ECE with equal-width bins), Nguyen and O'Connor 2015 (equal-mass bins), Brier 1950.
    """
    p_N, hit_N = np.asarray(confidences, np.float64), np.asarray(hits, bool)
    names = np.zeros(len(p_N), np.int64) if groups is None else np.asarray(groups)
    if p_N.ndim != 1 or not len(p_N) == len(hit_N) == len(names):
        raise UserError(
            f"calibration was given {p_N.shape} confidences, {hit_N.shape} outcomes and {names.shape} groups: give one "
            "of each per draft"
        )
    if not len(p_N):
        raise UserError("calibration was given no draft: give at least one confidence with its outcome")
    if len(wrong := np.flatnonzero(~((p_N >= 0) & (p_N <= 1)))):
        raise UserError(f"confidence {p_N[wrong[0]]} of draft {wrong[0]} is not valid: it must lie in [0, 1]")
    edges = _edges(p_N, check_int("bins", bins, low=1), check_choice("binning", binning, BINNINGS))
    bin_N = np.searchsorted(edges[1:-1], p_N, side="right")
    ids, group_N = np.unique(names, return_inverse=True)
    b, g = len(edges) - 1, len(ids)

    def sums(weights: np.ndarray) -> np.ndarray:
        return np.bincount(group_N * b + bin_N, weights, g * b).reshape(g, b)

    hit_GB, count_GB, p_GB = sums(hit_N.astype(np.float64)), sums(np.ones(len(p_N))), sums(p_N)
    rates = bootstrap_by(np.arange(g), hit_GB, count_GB, draws=draws, seed=seed, level=level)
    total_B = count_GB.sum(0)
    found = tuple(
        Bin(float(edges[i]), float(edges[i + 1]), float(p_GB[:, i].sum() / total_B[i]), rates[i], int(total_B[i]))
        for i in range(b)
        if total_B[i]
    )
    # A bin's share of the error is |hits − Σ confidence| / N: its own count cancels.
    error = bootstrap_of(
        np.arange(g),
        np.concatenate([hit_GB - p_GB, count_GB.sum(1, keepdims=True)], 1),
        lambda s_DM: np.abs(s_DM[:, :-1]).sum(1) / s_DM[:, -1],
        draws=draws,
        seed=seed,
        level=level,
    )
    return Calibration(binning, found, error, float(np.mean((p_N - hit_N) ** 2)), auroc(p_N, hit_N), len(p_N))


def auroc(confidences: ArrayLike, hits: ArrayLike) -> float | None:
    """Area under the receiver operating characteristic: how well confidences rank hits above misses.

    Args:
        confidences: Scores, [N].
        hits: Outcomes, bool [N].

    Returns:
        P(score of a hit > score of a miss) + P(equal) / 2; None without a hit or without a miss.

    Source: Mann and Whitney 1947 (U over the number of pairs).
    """
    hit_N = np.asarray(hits, bool)
    good, bad = int(hit_N.sum()), int((~hit_N).sum())
    if not good or not bad:
        return None
    _, index_N, count_V = np.unique(np.asarray(confidences, np.float64), return_inverse=True, return_counts=True)
    rank_V = np.cumsum(count_V) - (count_V - 1) / 2  # mean rank of equal scores, from 1
    return float((rank_V[index_N][hit_N].sum() - good * (good + 1) / 2) / (good * bad))


def _edges(p_N: np.ndarray, bins: int, binning: str) -> np.ndarray:
    """Edges from 0 to 1, both included."""
    if binning == "width":
        return np.linspace(0.0, 1.0, bins + 1)
    inner = np.unique(np.quantile(p_N, np.arange(1, bins) / bins)) if bins > 1 else np.empty(0)
    return np.concatenate([[0.0], inner[(inner > 0) & (inner < 1)], [1.0]])
