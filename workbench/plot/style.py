"""Colours, sizes, captions and direct labels shared by the figures; changes no global matplotlib setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.bootstrap import DRAWS, LEVEL
from workbench.core.errors import UserError, check_choice
from workbench.core.frames import require

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

# Okabe and Ito (2008), told apart under every common colour-vision deficiency; the yellow, faint on white, is left out.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
MARKERS = "osD^vPX"
INK, MUTED, GRID = "#222222", "#666666", "#DDDDDD"
SMALL, BODY, TITLE = 8.0, 9.0, 10.5
WIDTH, HEIGHT = 7.2, 4.0


def colour(index: int) -> str:
    """The colour of the index-th series, repeating after the palette's end."""
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """The marker of the index-th series, so that series differ without colour too."""
    return MARKERS[index % len(MARKERS)]


def axes(ax: Axes | None, *, width: float = WIDTH, height: float = HEIGHT) -> Axes:
    """The axes given, or those of a new figure; pyplot is touched in the second case only.

    Args:
        ax: Axes to draw on, or None.
        width: Width of a new figure, inches.
        height: Height of a new figure, inches.

    Returns:
        Axes with light spines, small ticks and a grid behind the data.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    dress(ax)
    return ax


def dress(ax: Axes) -> None:
    """Give axes the house style: two spines, small ticks, a quiet grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(MUTED)
    ax.tick_params(labelsize=BODY, color=MUTED, labelcolor=INK)
    ax.grid(True, color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)


def titles(ax: Axes, title: str, *, x: str = "", y: str = "") -> None:
    """Set a left-aligned title and axis labels; units belong into the labels."""
    ax.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=INK)
    ax.set_xlabel(x, fontsize=BODY, color=INK)
    ax.set_ylabel(y, fontsize=BODY, color=INK)


def size(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes as they are laid out now, points."""
    scale = 72 / ax.figure.dpi
    return ax.bbox.width * scale, ax.bbox.height * scale


def caption(ax: Axes, text: str, *, below: float = 38.0) -> None:
    """Write what the figure was drawn from under the axes, wrapped to their width.

    Args:
        ax: The axes.
        text: Counts, aggregation and what the intervals are.
        below: Distance from the axes' lower edge, points.
    """
    wrapped = textwrap.fill(text, max(30, int(0.9 * size(ax)[0] / (0.5 * SMALL))))
    ax.annotate(
        wrapped,
        xy=(0, 0),
        xycoords="axes fraction",
        xytext=(0, -below),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=SMALL,
        color=MUTED,
        annotation_clip=False,
    )


def spread(values: Sequence[float], sizes: Sequence[float], *, low: float, high: float) -> list[float]:
    """Move labels apart until they touch at most, staying inside [low, high]; overlap is shared evenly if they must.

    Args:
        values: Wanted centres.
        sizes: Extent of each label, in the unit of the values.
        low: Lower end of the room.
        high: Upper end of the room.

    Returns:
        The centres, in the order given.
    """
    shrink = min(1.0, (high - low) / max(sum(sizes), 1e-12))
    half = [shrink * size / 2 for size in sizes]
    order = sorted(range(len(values)), key=lambda i: values[i])
    out, edge = [0.0] * len(values), low
    for i in order:
        out[i] = max(values[i], edge + half[i])
        edge = out[i] + half[i]
    edge = high
    for i in reversed(order):
        out[i] = min(out[i], edge - half[i])
        edge = out[i] - half[i]
    return out


def end_labels(ax: Axes, labels: Sequence[tuple[float, float, str, str]], *, offset: float = 8.0) -> None:
    """Name lines at their right end, outside the axes, without overlaps.

    Args:
        ax: The axes; their limits must be final.
        labels: (x, y, text, colour) per line, in data coordinates.
        offset: Distance from the axes' right edge, points.
    """
    if not labels:
        return
    width, height = size(ax)
    low, high = ax.get_ylim()
    places = [(y - low) / (high - low) for _, y, _, _ in labels]
    tall = [1.3 * BODY / height] * len(labels)
    for place, (x, y, text, ink) in zip(spread(places, tall, low=0.0, high=1.0), labels):
        ax.annotate(
            text,
            xy=(x, y),
            xytext=(1 + offset / width, place),
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=BODY,
            color=ink,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": ink, "linewidth": 0.5, "alpha": 0.5, "shrinkA": 0, "shrinkB": 3},
        )


def empty(ax: Axes, what: str) -> Axes:
    """Say on the axes that there is nothing to draw."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.text(0.5, 0.5, f"no {what}", transform=ax.transAxes, ha="center", va="center", color=MUTED, fontsize=BODY)
    return ax


def as_rounds(frame: Any, columns: Sequence[str]) -> pl.DataFrame:
    """A rounds frame from a frame, or from anything that has one as ``rounds`` or gives one by ``rounds()``.

    Args:
        frame: The frame, a draft table or a generation.
        columns: Columns the figure needs.

    Returns:
        The frame.

    Raises:
        UserError: Neither, or a column is missing.
    """
    if not hasattr(frame, "columns"):
        inner = getattr(frame, "rounds", None)
        frame = inner() if callable(inner) else inner
    if not hasattr(frame, "columns"):
        raise UserError("this figure is drawn from a rounds frame: give a polars DataFrame or a table with .rounds()")
    require(frame, columns, "a rounds frame")
    return frame


def series(frame: pl.DataFrame, by: str | None) -> list[tuple[str, pl.DataFrame]]:
    """Split a frame into the series to draw, ordered by name.

    Args:
        frame: The frame.
        by: "source" for one series per source, None for one of everything.

    Returns:
        (name, part) pairs; the name is "all" for everything, "no source" for an empty source.

    Raises:
        UserError: Another ``by``.
    """
    import polars as pl

    if by is None:
        return [("all", frame)] if len(frame) else []
    column = check_choice("by", by, ("source",), hint="or None for one series")
    require(frame, (column,), "by='source'")
    names = frame[column].unique().sort().to_list()
    return [(name or "no source", frame.filter(pl.col(column).eq_missing(name))) for name in names]


def counted(number: int, noun: str) -> str:
    """A count with its noun, such as "1,204 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def intervals(frame: pl.DataFrame, drawn: bool, mark: str) -> str:
    """What the intervals are, for the end of a caption; one document has none.

    Args:
        frame: The frame, with doc_id.
        drawn: Whether the figure draws intervals.
        mark: What shows them, such as "bars".
    """
    if not drawn:
        return ""
    if frame["doc_id"].n_unique() < 2:
        return "; no interval: it takes two documents"
    return f"; {mark}: {100 * LEVEL:.0f} % bootstrap by document ({DRAWS:,} draws)"
