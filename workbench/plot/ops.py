"""Figures of single ops: their error beside what is allowed, and their speed beside another way of doing the same.

Drawn from rows of ``workbench_kernels.errors`` and from ``core.bench_rows.op_ratios``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.plot import frames, style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

ROW = 0.19  # height of a named row, inches


def op_errors(frame: pl.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Relative errors of an op's shapes as bars, one per type, each under the line of what its type allows.

    Args:
        frame: One row per shape and type: case, dtype, error and allowed (both relative, in norm). Shapes whose error
            is 0, such as empty ones, have no bar.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes, errors on a logarithmic scale; a bar past its type's line is hatched.

    Raises:
        UserError: A column is missing, two rows give one bar, or a type has two tolerances.
    """
    require(frame, ("case", "dtype", "error", "allowed"), "a frame of errors")
    cases = frame["case"].unique(maintain_order=True).to_list()
    types = frame["dtype"].unique(maintain_order=True).to_list()
    ax = style.axes(ax, width=8.4, height=1.5 + 0.17 * (len(types) + 1) * max(len(cases), 2))
    if not len(frame) or not (frame["error"] > 0).any():
        return style.empty(ax, "errors")
    if frame.select("case", "dtype").is_duplicated().any():
        raise UserError("two rows of the frame give one shape in one type: filter it to one op and one run first")
    height = 0.84 / len(types)
    for i, dtype in enumerate(types):
        part = frame.filter(frame["dtype"] == dtype)
        if part["allowed"].n_unique() > 1:
            raise UserError(f"{dtype} has tolerances {part['allowed'].unique().to_list()}: filter the frame to one op")
        allowed = float(part["allowed"][0])
        by_case = dict(part.select("case", "error").iter_rows())
        for y, case in enumerate(cases):
            error = by_case.get(case) or 0.0
            if error > 0:
                at = y + (i - (len(types) - 1) / 2) * height
                past = "///" if error > allowed else None
                ax.barh(at, error, 0.9 * height, color=style.colour(i), edgecolor="white", hatch=past, label="_bar")
        ax.barh(np.nan, np.nan, color=style.colour(i), label=dtype)
        if allowed > 0:
            ax.axvline(allowed, color=style.colour(i), linestyle="--", linewidth=1.3, label=f"allowed in {dtype}")
    ax.set_xscale("log")
    known = [value for value in (*frame["error"], *frame["allowed"]) if value > 0]
    ax.set_xlim(min(known) / 4, max(known) * 2)
    ax.set_yticks(range(len(cases)), cases)
    ax.set_ylim(len(cases) - 0.4, -0.6)
    ax.grid(False, axis="y")
    style.legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    style.titles(ax, "Error against float64, shape by shape", x="relative error, in norm")
    style.caption(ax, f"n = {frames.counted(len(cases), 'shape')}, {len(types)} types; dashed: what is allowed")
    return ax


def op_speeds(frame: pl.DataFrame, *, ax: Axes | None = None) -> Axes:
    """How many times faster each call is than what stands beside it, on a logarithmic scale around 1.

    Args:
        frame: One row per call (``core.bench_rows.op_ratios``): name, case, against, ratio, and low and high, null
            where unknown.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes, one line per call, ops in the order of their first rows; left of the line at 1 the other way is
        faster.

    Raises:
        UserError: A column is missing, or a ratio is not above 0.
    """
    require(frame, ("name", "case", "against", "ratio", "low", "high"), "a frame of ratios")
    if len(frame) and not (frame["ratio"] > 0).all():
        raise UserError(f"ratio={frame['ratio'].min()!r} is not valid: a ratio of two times is above 0")
    others = frame["against"].unique(maintain_order=True).to_list()
    ax = style.axes(ax, width=8.4, height=1.6 + ROW * max(len(frame), 4))
    if not len(frame):
        return style.empty(ax, "ratios")
    names = frame["name"].unique(maintain_order=True).to_list()
    rows = [row for name in names for row in frame.filter(frame["name"] == name).iter_rows(named=True)]
    ax.set_xscale("log")
    ax.axvline(1, color=style.tone(ax), linewidth=1.0, label="_equal")
    for y, row in enumerate(rows):
        i = others.index(row["against"])
        ink = style.colour(i)
        if row["low"] is not None and row["high"] is not None:
            ax.hlines(y, row["low"], row["high"], color=ink, linewidth=2.4, alpha=0.5)
        ax.plot(row["ratio"], y, color=ink, marker=style.marker(i), markersize=4.5, linestyle="none")
        ax.text(1.01, y, f"{row['ratio']:.2f}×", transform=ax.get_yaxis_transform(), va="center",
                fontsize=style.SMALL, color=style.tone(ax))  # fmt: skip
    for i, other in enumerate(others):
        ax.plot([], [], color=style.colour(i), marker=style.marker(i), linestyle="none", label=f"over {other}")
    for y in (y for y in range(1, len(rows)) if rows[y]["name"] != rows[y - 1]["name"]):
        ax.axhline(y - 0.5, color=style.tone(ax, style.GRID), linewidth=0.9)
    ax.set_yticks(range(len(rows)), [f"{row['name']}  {row['case']}" for row in rows], fontsize=style.SMALL)
    ax.set_ylim(len(rows) - 0.3, -0.7)
    ax.grid(False, axis="y")
    _plain_ticks(ax, [row[one] for row in rows for one in ("ratio", "low", "high") if row[one] is not None])
    style.legend(ax, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(others), borderaxespad=1.9)
    style.titles(ax, "Speed beside another way", x="times faster (logarithmic)")
    slower = sum(row["ratio"] < 1 for row in rows)
    bars = "; bars: p20 to p80 of the op's time" if any(row["low"] is not None for row in rows) else ""
    style.caption(ax, f"n = {frames.counted(len(rows), 'call')}, {slower} slower{bars}")
    return ax


def _plain_ticks(ax: Axes, values: list[float]) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, as plain numbers, over the values and 1."""
    from matplotlib.ticker import NullLocator

    low, high = min(*values, 1.0) / 1.15, max(*values, 1.0) * 1.15
    every = [lead * 10.0**power for power in range(-4, 5) for lead in (1, 2, 5)]
    ticks = [one for one in every if low <= one <= high]
    ax.set_xticks(ticks, [f"{one:g}" for one in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(low, high)
