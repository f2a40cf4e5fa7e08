"""One number per set of rounds, with its interval: the differences of two runs, and rates along another quantity;
and which of many points no other one beats.

Built on ``bootstrap``: documents are resampled, never rounds. Frames in, frames out, ready for ``plot``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import DRAWS, Interval, bootstrap_by, bootstrap_difference
from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.frames import require

if TYPE_CHECKING:
    import polars as pl

MEASURES = {
    "tau": "accepted per round (without bonus)",
    "efficiency": "accepted / drafted",
    "slot1": "joint acceptance of slot 1",
}


def parts(rounds: pl.DataFrame, measure: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a measure is a ratio of, per round.

    Args:
        rounds: A rounds frame.
        measure: "tau" (accepted / rounds, without bonus), "efficiency" (accepted / drafted) or "slot1" (share of all
            rounds that accepted their first draft).

    Returns:
        Document ids, numerators and denominators, [N] each, as ``bootstrap_by`` takes them.

    Raises:
        UserError: Another measure, or a column is missing.
    """
    check_choice("measure", measure, MEASURES)
    require(rounds, ("doc_id", "drafted", "accepted"), "a rounds frame")
    drafted, accepted = (rounds[name].to_numpy().astype(np.float64) for name in ("drafted", "accepted"))
    one = np.ones(len(rounds))
    top, bottom = {"tau": (accepted, one), "efficiency": (accepted, drafted), "slot1": (accepted > 0, one)}[measure]
    return rounds["doc_id"].to_numpy(), np.asarray(top, np.float64), bottom


def interval(rounds: pl.DataFrame, measure: str = "slot1", *, draws: int = DRAWS, seed: int = 0) -> Interval:
    """A measure, pooled over rounds, with its 95 % interval by document.

    Args:
        rounds: A rounds frame.
        measure: "tau", "efficiency" or "slot1".
        draws: Resamples; default 2000.
        seed: Seed of the resampling.

    Returns:
        The interval.

    Raises:
        UserError: As for ``parts``.
    """
    return bootstrap_by(*parts(rounds, measure), draws=draws, seed=seed)[0]


def differences(
    baseline: pl.DataFrame,
    runs: Mapping[str, pl.DataFrame],
    measure: str = "slot1",
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> pl.DataFrame:
    """How much each run differs from a baseline over the same documents.

    Args:
        baseline: Rounds of the baseline.
        runs: Rounds of the other runs by name.
        measure: "tau", "efficiency" or "slot1".
        draws: Resamples; default 2000.
        seed: Seed of the resampling.

    Returns:
        One row per run: name, measure, value, baseline, difference (value − baseline), low, high (95 %, paired by
        document), documents.

    Raises:
        UserError: The runs cover different documents, or as for ``parts``.
    """
    import polars as pl

    base = parts(baseline, measure)
    mine = interval(baseline, measure, draws=1, seed=seed).value
    rows = []
    for name, rounds in runs.items():
        other = parts(rounds, measure)
        found = bootstrap_difference(other, base, draws=draws, seed=seed)[0]
        value = bootstrap_by(*other, draws=1, seed=seed)[0].value
        rows.append((name, measure, value, mine, found.value, found.low, found.high, found.groups))
    numbers = dict.fromkeys("value baseline difference low high".split(), pl.Float64)
    schema = {"name": pl.String, "measure": pl.String, **numbers, "documents": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def rate_by(
    frame: pl.DataFrame,
    x: str,
    hit: str,
    *,
    bins: int | Sequence[float] = 6,
    draws: int = DRAWS,
    seed: int = 0,
) -> pl.DataFrame:
    """The mean of one column in bins of another, with intervals by document.

    Args:
        frame: Rows with doc_id and both columns; rows where either is null are left out.
        x: Column to bin.
        hit: Column to average: a boolean for a rate, or a number.
        bins: A number of bins that hold equally many rows (default 6), or ascending inner edges.
        draws: Resamples; default 2000.
        seed: Seed of the resampling.

    Returns:
        One row per bin that is not empty: x, hit (the columns' names), low, high (smallest and largest value in the
        bin), centre (median), rows, value, value_low, value_high (95 %; null with one document).

    Raises:
        UserError: A column is missing, the edges do not ascend, or no row is left.
    """
    import polars as pl

    require(frame, ("doc_id", x, hit), "rate_by")
    known = frame.select("doc_id", x=pl.col(x).cast(pl.Float64), hit=pl.col(hit).cast(pl.Float64)).drop_nulls()
    if not len(known):
        raise UserError(f"rate_by was given no row with both {x!r} and {hit!r}: give a frame that has some")
    at, hits = known["x"].to_numpy(), known["hit"].to_numpy()
    inner = _edges(at, bins)
    index = np.searchsorted(inner, at, side="right")
    inside = index[:, None] == np.arange(len(inner) + 1)
    found = bootstrap_by(known["doc_id"].to_numpy(), hits[:, None] * inside, inside, draws=draws, seed=seed)
    rows: list[tuple[Any, ...]] = []
    for b, one in enumerate(found):
        here = at[index == b]
        if len(here):
            ends = (float(here.min()), float(here.max()), float(np.median(here)), len(here))
            rows.append((x, hit, *ends, one.value, one.low, one.high))
    names = dict.fromkeys(("x", "hit"), pl.String)
    ends_types = {**dict.fromkeys("low high centre".split(), pl.Float64), "rows": pl.Int64}
    values = dict.fromkeys("value value_low value_high".split(), pl.Float64)
    return pl.DataFrame(rows, schema={**names, **ends_types, **values}, orient="row")


def non_dominated(cost: Any, gain: Any) -> np.ndarray:
    """Which points no other point beats: none costs at most as much and gains at least as much, one of them strictly.

    Args:
        cost: What to keep small, [N].
        gain: What to make large, [N].

    Returns:
        bool [N]; equal points stay together, points with NaN are dominated.
    """
    at, up = np.asarray(cost, np.float64), np.asarray(gain, np.float64)
    out = np.zeros(len(at), bool)
    known = np.flatnonzero(~(np.isnan(at) | np.isnan(up)))
    order = known[np.lexsort((-up[known], at[known]))]
    best, where = -np.inf, np.nan
    for i in order:
        # In the order of cost, a point stands when it gains more than everything cheaper.
        if up[i] > best or (up[i] == best and at[i] == where):
            out[i], best, where = True, up[i], at[i]
    return out


def _edges(at: np.ndarray, bins: int | Sequence[float]) -> np.ndarray:
    """Inner edges; equal ones, which a value that fills several bins makes, are joined."""
    if isinstance(bins, int):
        count = check_int("bins", bins, low=1)
        return np.unique(np.quantile(at, np.arange(1, count) / count))
    given = list(bins)
    if given != sorted(set(given)):
        raise UserError(f"bins={given!r} is not valid: give a number of bins, or edges that ascend")
    return np.asarray(given, np.float64)
