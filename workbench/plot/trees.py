"""Figures of draft trees: their shapes, and what they gain over chains of the same verify width.

A shape is written as nodes per depth, such as "1,2,2": one spine node (the drafter's favourite) and, beside it, hedges
(its next choices). Hedges have no children. Verify width is the pending token and all nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

YIELDS = {"yield": "yield (tokens per round, with bonus)"}


def tree_shapes(frame: Any, *, ax: Axes | None = None, most: int = 6, value: str = "yield") -> Axes:
    """Draw tree shapes side by side: the root, the spine downwards, hedges to its right.

    Args:
        frame: A frame with a column ``shape``, a sequence of shapes, or one shape such as "1,2,2".
        ax: Axes to draw on; None for a new figure.
        most: Shapes drawn, those of the first rows; default 6.
        value: Column of a frame written under its shapes, where it is there; default "yield".

    Returns:
        The axes.

    Raises:
        UserError: The frame has no column of shapes, or a shape is malformed.
    """
    check_int("most", most, low=1)
    values: dict[str, float | None] = {}
    if hasattr(frame, "columns"):
        require(frame, ("shape",), "a figure of tree shapes")
        rows = style.of_source(frame, "all") if "source" in frame.columns and "all" in frame["source"] else frame
        texts = rows["shape"].unique(maintain_order=True).to_list()[:most]
        if value in rows.columns and not rows["shape"].is_duplicated().any():
            values = dict(rows.select("shape", value).iter_rows())
    else:
        texts = [str(one) for one in ([frame] if isinstance(frame, str) else frame)][:most]
    shapes = [(text, counts_of(text)) for text in texts]
    ax = style.axes(ax, width=0.9 + sum(1.0 + 0.5 * max(counts) for _, counts in shapes), height=3.6)
    if not shapes:
        return style.empty(ax, "shapes")
    ax.axis("off")
    left, ticks = 0.0, style.tone(ax)
    for text, counts in shapes:
        _draw(ax, left, counts)
        known = values.get(text)
        note = f"{text}\nverify width {1 + sum(counts)}" + (f"\n{value} {known:.2f}" if known is not None else "")
        ax.text(left, -len(counts) - 0.5, note, ha="left", va="top", fontsize=style.SMALL, color=ticks)
        left += 1.6 + max(max(counts) - 1, 1) * 0.8
    deepest = max(len(counts) for _, counts in shapes)
    ax.set_xlim(-0.5, left - 0.6)
    ax.set_ylim(-deepest - 1.6, 0.5)
    style.panel_title(ax, "Tree shapes")
    style.caption(ax, "grey: pending token; filled: spine; open: hedges, whose acceptance ends the round", below=4)
    return ax


def tree_gain(frame: pl.DataFrame, *, ax: Axes | None = None, value: str = "yield", source: str | None = "all") -> Axes:
    """Yield against verify width: every shape, the best chain and the best tree of each width, and the tree's gain.

    Args:
        frame: One row per shape: shape, the value, and ``<value>_low`` and ``<value>_high`` where it has intervals.
        ax: Axes to draw on; None for a new figure.
        value: Column to compare; default "yield".
        source: Rows of this source; default "all".

    Returns:
        The axes. A width's gain stands over its tree, and only at widths that have both.

    Raises:
        UserError: A column is missing, a shape is malformed, or occurs twice.
    """
    require(frame, ("shape", value), "a figure of tree gains")
    rows = style.of_source(frame, source).drop_nulls(value)
    ax = style.axes(ax)
    if not len(rows):
        return style.empty(ax, "shapes")
    if rows["shape"].is_duplicated().any():
        raise UserError(f"two rows give one shape{style.differing(rows, ('shape',), (value,))}")
    counts = [counts_of(text) for text in rows["shape"]]
    width = np.array([1 + sum(one) for one in counts])
    chain = np.array([max(one) == 1 for one in counts])
    at = rows[value].to_numpy()
    ax.plot(width, at, "o", color=style.tone(ax, style.MUTED), markersize=3, alpha=0.4, label="all shapes")
    names, ends = ("best chain", "best tree"), []
    best: dict[str, dict[int, int]] = {}
    for i, (name, mine) in enumerate(zip(names, (chain, ~chain))):
        found = {
            int(w): int(max(np.flatnonzero(mine & (width == w)), key=at.__getitem__)) for w in np.unique(width[mine])
        }
        best[name] = found
        lows, highs = (
            [rows[f"{value}_{end}"][row] if f"{value}_{end}" in rows.columns else None for row in found.values()]
            for end in ("low", "high")
        )
        x = np.array([*found], float) + 0.08 * (i - 0.5)
        ends += style.line(ax, x, [float(at[row]) for row in found.values()], lows, highs, index=i, name=name)
    for w in sorted({*best["best chain"]} & {*best["best tree"]}):
        row = best["best tree"][w]
        gain = 100 * (at[row] / at[best["best chain"][w]] - 1)
        ax.annotate(
            f"{rows['shape'][row]}\n{gain:+.1f} %", (w, max(at[width == w])), (0, 9), textcoords="offset points",
            ha="center", va="bottom", fontsize=style.SMALL, color=style.tone(ax),
        )  # fmt: skip
    ax.set_xticks(np.unique(width))
    ax.margins(x=0.08, y=0.22)
    style.end_labels(ax, ends)
    style.titles(
        ax, "Trees against chains", x="verify width (rows per target pass)",
        y=YIELDS.get(value, style.MEASURE_NAMES.get(value, value)),
    )  # fmt: skip
    bars = "; bars: 95 % bootstrap by document" if f"{value}_low" in rows.columns else ""
    where = f"; source: {source}" if "source" in rows.columns and source is not None else ""
    style.caption(
        ax, f"n = {style.counted(len(rows), 'shape')}{where}; %: best tree over best chain of that width{bars}"
    )
    return ax


def counts_of(shape: str) -> tuple[int, ...]:
    """Nodes per depth of a shape such as "1,2,2".

    Raises:
        UserError: It is malformed.
    """
    parts = str(shape).split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"shape {shape!r} is not valid: give the nodes per depth, each at least 1, such as '1,2,2'")
    return tuple(int(part) for part in parts)


def _draw(ax: Axes, left: float, counts: tuple[int, ...]) -> None:
    """One tree, its root at (left, 0)."""
    ink, grey = style.colour(0), style.tone(ax, style.MUTED)
    hedge = style.colour(1)
    behind = ax.figure.get_facecolor()  # type: ignore[union-attr]
    for depth, count in enumerate(counts, start=1):
        for rank in range(count):
            colour = ink if rank == 0 else hedge
            ax.plot([left, left + 0.8 * rank], [1 - depth, -depth], color=colour, linewidth=1.3, zorder=1)
    for depth, count in enumerate(counts, start=1):
        hedges = [left + 0.8 * rank for rank in range(1, count)]
        ax.plot(hedges, [-depth] * len(hedges), "o", color=hedge, markerfacecolor=behind, markersize=10, label="hedges")
    ax.plot([left] * len(counts), [-d for d in range(1, len(counts) + 1)], "o", color=ink, markersize=11, label="spine")
    ax.plot([left], [0], "o", color=grey, markersize=11, label="root")
