"""Heat maps: one value over two settings, such as p_min × K or floor × context, with the number in every cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

SEQUENTIAL, DIVERGING = "cividis", "RdBu"  # both read the same under colour-vision deficiency
LEAST = 0.05  # half range of a diverging map at the least, so that noise around the centre stays pale
NAMES = {
    "k": "K (draft tokens per round)",
    "K": "K (draft tokens per round)",
    "p_min": "p_min (drafter's probability)",
    "pmin0": "p_min on slot 1 too",
    "floor": "floor (draft tokens; none: fixed K)",
    "cap": "cap (draft tokens)",
    "floor_context": "floor context (tokens)",
    "context": "context (tokens)",
    "temperature": "temperature",
    "width": "sequences at a time",
}


def heatmap(
    frame: pl.DataFrame,
    x: str,
    y: str,
    value: str,
    *,
    ax: Axes | None = None,
    source: str | None = "all",
    centre: float | None = None,
    fmt: str = "{:.2f}",
) -> Axes:
    """A value over two settings, the best cell framed and cells without a value hatched.

    Args:
        frame: One row per cell, such as a sweep's.
        x: Column of the horizontal setting, such as "k".
        y: Column of the vertical setting, such as "p_min".
        value: Column of the value, such as "speedup" or "tau".
        ax: Axes to draw on; None for a new figure.
        source: Rows of this source, where the frame has a source column; None for all rows. Default "all".
        centre: Value at the middle of a diverging colour map; None (default) is 1 for a speed-up, and a sequential map
            for everything else.
        fmt: Format of a number; default two decimals.

    Returns:
        The axes; numbers ascend along both, other settings stand in the order of their first rows. A setting of None
        comes first.

    Raises:
        UserError: A column is missing, two rows give one cell, or no row has that source.
    """
    require(frame, (x, y, value), "a heat map")
    rows = style.of_source(frame, source)
    names = [_ordered(rows[one].unique(maintain_order=True).to_list()) for one in (x, y)]
    ax = style.axes(ax, width=2.2 + 0.72 * max(len(names[0]), 4), height=1.6 + 0.42 * max(len(names[1]), 3))
    ax.grid(False)
    if not len(rows):
        return style.empty(ax, "cells")
    if rows.select(x, y).is_duplicated().any():
        raise UserError(
            f"two rows of the frame give the same cell of {x!r} and {y!r}{style.differing(rows, (x, y), (value,))}"
        )
    values = np.full((len(names[1]), len(names[0])), np.nan)
    for at, up, one in rows.select(x, y, value).iter_rows():
        values[names[1].index(up), names[0].index(at)] = np.nan if one is None else one
    middle = 1.0 if centre is None and value.startswith("speedup") else centre
    _cells(ax, values, middle, fmt)
    for axis, labels in zip((ax.xaxis, ax.yaxis), names):
        axis.set_ticks(range(len(labels)), [style.setting(one) for one in labels])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    what = style.MEASURE_NAMES.get(value, value.replace("_", " "))
    style.titles(ax, what[:1].upper() + what[1:], x=NAMES.get(x, x), y=NAMES.get(y, y))
    said = [] if middle is None else [f"blue above {middle:g}, red below"]
    said += ["framed: highest"] if np.isfinite(values).any() else []
    said += ["hatched: no value"] if np.isnan(values).any() else []
    if "source" in rows.columns and source is not None:
        said.insert(0, f"source: {source}")
    style.caption(ax, "; ".join(said))
    return ax


def _cells(ax: Axes, values: np.ndarray, middle: float | None, fmt: str) -> None:
    """The mesh, its numbers, the frame of the best cell and the hatching of missing ones."""
    from matplotlib.colors import CenteredNorm, Normalize
    from matplotlib.patches import Rectangle

    known = values[np.isfinite(values)]
    norm: Any = Normalize(*((known.min(), known.max()) if len(known) else (0, 1)))
    if middle is not None:
        norm = CenteredNorm(middle, max(float(np.abs(known - middle).max(initial=0.0)), LEAST))
    places = [np.arange(n + 1) - 0.5 for n in (values.shape[1], values.shape[0])]
    mesh = ax.pcolormesh(*places, np.ma.masked_invalid(values), norm=norm, edgecolors="face", linewidth=0)
    mesh.set_cmap(SEQUENTIAL if middle is None else DIVERGING)
    for (row, column), one in np.ndenumerate(values):
        if np.isnan(one):
            ink = style.tone(ax, style.MUTED)
            ax.add_patch(
                Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="///", edgecolor=ink, linewidth=0)
            )
            continue
        ink = "white" if style.luminance(mesh.cmap(norm(one))) < 0.5 else "black"
        ax.text(column, row, fmt.format(one), ha="center", va="center", fontsize=style.SMALL, color=ink)
    if len(known):
        row, column = np.unravel_index(int(np.nanargmax(values)), values.shape)
        ink = style.tone(ax)
        ax.add_patch(Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, fill=False, edgecolor=ink, linewidth=1.8))


def _ordered(settings: list[Any]) -> list[Any]:
    """None first, then numbers ascending; anything else as it comes."""
    rest = [one for one in settings if one is not None]
    if all(isinstance(one, (int, float)) for one in rest):
        rest.sort()
    return [None] * (len(rest) < len(settings)) + rest
