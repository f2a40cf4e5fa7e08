"""The frame of a sweep, made from cells: every metric named with its aggregation, every interval by document.

Shapes: G documents of one source, M cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import Interval, bootstrap_by
from workbench.core.metrics import ratio
from workbench.spec.policies.naming import canonical
from workbench.sweep.cells import ALL, COUNTS, RATIOS, Cell, Walked
from workbench.sweep.grid import PARAMETERS

if TYPE_CHECKING:
    import polars as pl

INTERVALS = ("tau", "accepted_length", "efficiency", "speedup", "tokens_per_second")
VALUES = ("emitted_per_round", "drafted_per_token")  # without interval
KINDS = ("joint", "reach", "cond")
TOTALS = ("rounds", "cut", "emitted", "drafted", "accepted")
AT_ONCE = 512  # cells whose resamples are held together


def frame_of(
    cells: Sequence[Cell],
    walked: Sequence[Walked],
    *,
    setting: Mapping[str, Any],
    draws: int,
    seed: int,
    level: float,
) -> pl.DataFrame:
    """One row per cell and source, "all" first.

    Args:
        cells: The cells, in the order of the frame.
        walked: Their tables.
        setting: Of the sweep: cost, width.
        draws: Resamples of documents.
        seed: Of the resampling.
        level: Coverage of the intervals.

    Returns:
        The frame; see ``sweep`` for its columns.
    """
    import polars as pl

    tables = {one.name: one for one in walked}
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    order: dict[str, list[str]] = {}
    for name, table in tables.items():
        mine = [cell for cell in cells if cell.table == name]
        if not mine:
            continue
        groups = groups_of(table, mine[0])
        order[name] = list(groups)
        for source, index_G in groups.items():
            for cell, found in _metrics(mine, index_G, table, draws, seed, level):
                metrics[cell.key, source] = found
    cost = setting["cost"]
    rows = []
    for cell in cells:
        table = tables[cell.table]
        about = {"cell": cell.key, "table": cell.table, "temperature": table.temperature, "estimator": table.estimator}
        about |= {"policy": cell.label, "family": cell.family, "k_max": cell.k_max}
        about |= {"spec": None if cell.spec is None else canonical(cell.spec)} | parameters(cell.spec)
        about |= {"width": setting["width"], "cost": None if cost is None else cost["name"]}
        about |= {"extrapolated": cell.extrapolated}
        rows += [about | {"source": source} | metrics[cell.key, source] for source in order[cell.table]]
    names = schema()
    extra = {name: pl.Series([row.get(name) for row in rows], strict=False).dtype
             for name in dict.fromkeys(name for row in rows for name in row) if name not in names}  # fmt: skip
    at = list(names).index("width")
    items = list(names.items())
    return pl.DataFrame(rows, schema=dict([*items[:at], *extra.items(), *items[at:]]), orient="row", strict=False)


def schema() -> dict[str, Any]:
    """Columns and types that every frame has; parameters of further families stand before ``width``."""
    import polars as pl

    out: dict[str, Any] = {"cell": pl.String, "table": pl.String, "source": pl.String, "temperature": pl.Float64}
    out |= dict.fromkeys(("estimator", "policy", "family", "spec"), pl.String) | {"k_max": pl.Int64}
    out |= {"k": pl.Int64, "p_min": pl.Float64, "pmin0": pl.Boolean, "statistic": pl.String}
    out |= {"floor": pl.Int64, "cap": pl.Int64, "floor_context": pl.Int64}
    out |= {"width": pl.Int64, "cost": pl.String, "extrapolated": pl.Float64, "documents": pl.Int64}
    out |= dict.fromkeys(TOTALS, pl.Int64) | {"aggregation": pl.String}
    for name in INTERVALS:
        out |= dict.fromkeys((name, f"{name}_low", f"{name}_high"), pl.Float64)
    out |= dict.fromkeys(VALUES, pl.Float64) | dict.fromkeys(KINDS, pl.List(pl.Float64))
    return out | dict.fromkeys(("tau_request_mean", "accepted_length_request_mean"), pl.Float64)


def parameters(spec: Mapping[str, Any] | None) -> dict[str, Any]:
    """The plain parameters of a policy as columns; "policy_" before a name that a metric has too.

    Args:
        spec: The policy's description; None for none.

    Returns:
        Numbers, flags and texts by column; lists and mappings stand in the column ``spec`` alone.
    """
    metrics = {*RATIOS, *COUNTS, *KINDS, "cell", "table", "source", "policy", "width", "cost", "documents", "spec"}
    out = dict.fromkeys(PARAMETERS)
    for name, value in (spec or {}).items():
        if name != "family" and (value is None or isinstance(value, (bool, int, float, str))):
            out[f"policy_{name}" if name in metrics else name] = value
    return out


def groups_of(table: Walked, cell: Cell) -> dict[str, np.ndarray]:
    """The documents of every source, "all" first, without those that hold no round.

    Args:
        table: The table.
        cell: One of its cells; which documents hold a round is the same for all.

    Returns:
        Indices [G] by source.
    """
    has_G = cell.sums["rounds"] > 0
    sources = np.array(table.sources, dtype=object)
    named = {source: np.flatnonzero(has_G & (sources == source)) for source in dict.fromkeys(table.sources)}
    return {ALL: np.flatnonzero(has_G), **named}


def stacked(cells: Sequence[Cell], quantity: str, index_G: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Numerators and denominators of one quantity for several cells of one table.

    Args:
        cells: The cells.
        quantity: A name of ``RATIOS``.
        index_G: Documents.

    Returns:
        Two arrays [G, M]; None where no cost was given.
    """
    pairs = [cell.parts(quantity) for cell in cells]
    if any(pair is None for pair in pairs):
        return None
    top, bottom = zip(*(pair for pair in pairs if pair is not None))
    return np.stack(top, 1)[index_G], np.stack(bottom, 1)[index_G]


def _metrics(
    cells: Sequence[Cell], index_G: np.ndarray, table: Walked, draws: int, seed: int, level: float
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The metrics of every cell over some documents of their table, resampled together."""
    names_G = np.array(table.documents, dtype=object)[index_G].astype(str)
    for first in range(0, len(cells), AT_ONCE):
        part = cells[first : first + AT_ONCE]
        found: dict[str, list[Interval]] = {}
        for quantity in INTERVALS:
            if (pair := stacked(part, quantity, index_G)) is not None:
                found[quantity] = bootstrap_by(names_G, *pair, draws=draws, seed=seed, level=level)
        for i, cell in enumerate(part):
            yield (
                cell,
                _values(cell, index_G)
                | {
                    column: value
                    for quantity, listed in found.items()
                    for column, value in (
                        (quantity, listed[i].value),
                        (f"{quantity}_low", listed[i].low),
                        (f"{quantity}_high", listed[i].high),
                    )
                },
            )


def _values(cell: Cell, index_G: np.ndarray) -> dict[str, Any]:
    """Totals, ratios without interval, acceptance per slot and means over requests."""
    out: dict[str, Any] = {"documents": len(index_G), "aggregation": "pooled"}
    out |= {name: int(cell.sums[name][index_G].sum()) for name in TOTALS}
    for name in VALUES:
        pair = cell.parts(name)
        assert pair is not None, "counts need no cost"
        out[name] = ratio(*(float(part[index_G].sum()) for part in pair))
    slots = cell.slot_counts(index_G)
    out |= {kind: list(slots.pooled(kind)) for kind in KINDS}
    for name in ("tau", "accepted_length"):
        pair = cell.parts(name)
        assert pair is not None, "counts need no cost"
        top_G, bottom_G = (part[index_G] for part in pair)
        known_G = bottom_G > 0
        shares = top_G[known_G] / bottom_G[known_G]
        out[f"{name}_request_mean"] = ratio(float(shares.sum()), len(shares))
    return out
