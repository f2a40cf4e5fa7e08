"""Figures of one number per run or bin: paired differences, and rates along a quantity.

Drawn from the frames of ``core.measures``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.core.measures import MEASURES
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes


def differences(frame: pl.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Differences of runs from one baseline, in percentage points or tokens, with paired intervals.

    Args:
        frame: What ``core.measures.differences`` returned: name, measure, value, baseline, difference, low, high,
            documents.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes; a run whose bar crosses the line at 0 differs by less than the spread between documents.

    Raises:
        UserError: A column is missing, or the frame mixes measures.
    """
    columns = ("name", "measure", "value", "baseline", "difference", "low", "high", "documents")
    require(frame, columns, "a frame of differences")
    ax = style.axes(ax, height=1.3 + 0.42 * max(len(frame), 2))
    if not len(frame):
        return style.empty(ax, "runs")
    measure = frame["measure"][0]
    if frame["measure"].n_unique() > 1:
        raise UserError(f"the frame mixes measures {frame['measure'].unique().to_list()}: filter it to one")
    share = measure != "tau"
    scale, unit = (100, "points") if share else (1, "tokens")
    ax.axvline(0, color=style.tone(ax), linewidth=0.9)
    for y, row in enumerate(frame.iter_rows(named=True)):
        if row["difference"] is None:
            continue
        if row["low"] is not None:
            ax.hlines(y, scale * row["low"], scale * row["high"], color=style.colour(y), linewidth=2.2, alpha=0.7)
        ax.plot(scale * row["difference"], y, color=style.colour(y), marker=style.marker(y), markersize=7)
        note = f"{scale * row['difference']:+.{1 if share else 3}f} {unit} → {_shown(row['value'], share)}"
        ax.text(
            1.02, y, note, transform=ax.get_yaxis_transform(), va="center", fontsize=style.SMALL, color=style.tone(ax)
        )
    ax.set_yticks(range(len(frame)), frame["name"].to_list())
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.margins(x=0.12)
    base = frame["baseline"][0]
    name = MEASURES.get(measure, measure).partition(" (")[0]
    style.titles(ax, f"{name.capitalize()}: difference from {_shown(base, share)}", x=f"difference ({unit})")
    documents = style.counted(max(frame["documents"].to_list()), "document")
    style.caption(ax, f"{documents}; pooled; bars: 95 % bootstrap, paired by document")
    return ax


def rate_by(frame: pl.DataFrame, *, ax: Axes | None = None, label: str = "", index: int = 0, log: bool = False) -> Axes:
    """A rate in bins of another quantity.

    Args:
        frame: What ``core.measures.rate_by`` returned: x, hit, low, high, centre, rows, value, value_low, value_high.
        ax: Axes to draw on, which may hold other series already; None for a new figure.
        label: Name of the series, for ``ax.legend()``; default "".
        index: Which colour and marker; default 0.
        log: Draw x on a logarithmic scale; default False.

    Returns:
        The axes; a point stands at its bin's median, a thin line spans the bin.

    Raises:
        UserError: A column is missing.
    """
    columns = ("x", "hit", "low", "high", "centre", "rows", "value", "value_low", "value_high")
    require(frame, columns, "a frame of binned rates")
    ax = style.axes(ax)
    if not len(frame):
        return style.empty(ax, "bins")
    ink, at = style.colour(index), frame["centre"].to_numpy()
    if log:
        ax.set_xscale("log")
    ax.plot(at, frame["value"], color=ink, marker=style.marker(index), markersize=4, linewidth=1.4, label=label or None)
    ax.hlines(frame["value"], frame["low"], frame["high"], color=ink, linewidth=0.7, alpha=0.5)
    known = frame.drop_nulls(["value_low", "value_high"])
    if len(known):
        ax.vlines(known["centre"], known["value_low"], known["value_high"], color=ink, linewidth=1.1, alpha=0.7)
    name, hit = frame["x"][0].replace("_", " "), frame["hit"][0].replace("_", " ")
    style.titles(ax, f"{hit.capitalize()} by {name}", x=name, y=f"share: {hit}")
    style.caption(ax, f"n = {int(frame['rows'].sum()):,}; bars: 95 % bootstrap by document")
    return ax


def _shown(value: float, share: bool) -> str:
    """A value in the unit of its measure."""
    return f"{100 * value:.1f} %" if share else f"{value:.2f} tokens"
