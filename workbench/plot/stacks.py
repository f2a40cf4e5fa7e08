"""Bars of parts on top of one another: what a whole is made of, case by case.

Drawn from any frame with one row per case and a column per part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes


def stacked(
    frame: pl.DataFrame,
    x: str,
    parts: Sequence[str],
    *,
    ax: Axes | None = None,
    label: str = "",
    title: str = "",
    note: str | None = None,
) -> Axes:
    """A bar per row, made of parts.

    Args:
        frame: One row per bar, in order; parts are numbers of at least 0, null for none.
        x: Column that names the bars.
        parts: Columns of the parts, from the bottom up.
        ax: Axes to draw on; None for a new figure.
        label: Name and unit of the whole, for the axis.
        title: Title; default the label and x.
        note: Column whose text stands above each bar; None for none.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing, there are no parts, or a part is below 0.
    """
    if not parts:
        raise UserError("parts is empty: name at least one column of the frame")
    require(frame, (x, *parts, *(() if note is None else (note,))), "a frame of parts")
    ax = style.axes(ax)
    if not len(frame):
        return style.empty(ax, "bars")
    at, base = np.arange(len(frame)), np.zeros(len(frame))
    for i, part in enumerate(parts):
        heights = frame[part].fill_null(0).to_numpy().astype(np.float64)
        if (heights < 0).any():
            raise UserError(f"part {part!r} holds {heights.min():g}: parts of a bar are at least 0")
        ax.bar(at, heights, 0.7, bottom=base, color=style.colour(i), label=part.replace("_", " "))
        base += heights
    if note is not None:
        for place, top, text in zip(at, base, frame[note].to_list(), strict=True):
            ax.annotate(
                str(text),
                xy=(place, top),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=style.SMALL,
                color=style.INK,
            )
    ax.grid(False, axis="x")
    ax.set_xticks(at, [str(name) for name in frame[x].to_list()])
    ax.set_ylim(0, 1.12 * float(base.max()) or 1)
    ax.legend(frameon=False, fontsize=style.BODY)
    named = label or "whole"
    style.titles(
        ax, title or f"{named[:1].upper()}{named[1:]} by {x.replace('_', ' ')}", x=x.replace("_", " "), y=label
    )
    return ax
