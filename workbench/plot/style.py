"""Colours, sizes, captions and direct labels shared by the figures; changes no global matplotlib setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# Okabe and Ito (2008), told apart under every common colour-vision deficiency; the yellow, faint on white, is left out.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX"
INK, MUTED, GRID = "#222222", "#666666", "#DDDDDD"
DARK = {INK: "#EEEEEE", MUTED: "#A6A6A6", GRID: "#3A3A3A"}  # the same three on a dark background
SMALL, BODY, TITLE = 8.0, 9.0, 10.5
WIDTH, HEIGHT = 7.2, 4.0


def colour(index: int) -> str:
    """The colour of the index-th series, repeating after the palette's end."""
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """The marker of the index-th series, so that series differ without colour too."""
    return MARKERS[index % len(MARKERS)]


def luminance(value: Any) -> float:
    """Brightness of a colour as the eye weighs it, from 0 (black) to 1 (white)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(value)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def tone(ax: Axes, ink: str = INK) -> str:
    """INK, MUTED or GRID as it reads on the axes' background, which is the figure's where the axes have none.

    Args:
        ax: The axes.
        ink: One of the three; default INK.
    """
    from matplotlib.colors import to_rgba

    behind = ax.get_facecolor()
    if to_rgba(behind)[3] < 0.5 or not ax.axison:
        behind = ax.figure.get_facecolor()  # type: ignore[union-attr]
    return ink if to_rgba(behind)[3] < 0.5 or luminance(behind) >= 0.5 else DARK[ink]


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
    ax.spines[["left", "bottom"]].set_color(tone(ax, MUTED))
    ax.tick_params(labelsize=BODY, color=tone(ax, MUTED), labelcolor=tone(ax))
    ax.grid(True, color=tone(ax, GRID), linewidth=0.6)
    ax.set_axisbelow(True)


def titles(ax: Axes, title: str, *, x: str = "", y: str = "") -> None:
    """Set a left-aligned title and axis labels; units belong into the labels."""
    ax.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=tone(ax))
    ax.set_xlabel(x, fontsize=BODY, color=tone(ax))
    ax.set_ylabel(y, fontsize=BODY, color=tone(ax))


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
        color=tone(ax, MUTED),
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
    """Name lines at their right end, outside the axes, without overlaps, whatever the scale of y.

    Args:
        ax: The axes; their limits must be final.
        labels: (x, y, text, colour) per line, in data coordinates.
        offset: Distance from the axes' right edge, points.
    """
    if not labels:
        return
    width, height = size(ax)
    low, high, *ys = ax.yaxis.get_transform().transform([*ax.get_ylim(), *(y for _, y, _, _ in labels)])
    places = [(y - low) / (high - low) for y in ys]
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


def line(
    ax: Axes,
    x: Sequence[float] | np.ndarray,
    values: Sequence[float | None],
    lows: Sequence[float | None],
    highs: Sequence[float | None],
    *,
    index: int,
    name: str,
    ci: bool = True,
) -> list[tuple[float, float, str, str]]:
    """A line with markers and interval bars; unknown values leave a gap.

    Args:
        ax: The axes.
        x: Places, [N].
        values: Values, [N]; None where there is none.
        lows: Lower ends of the intervals, [N]; None where there is none.
        highs: Upper ends, [N].
        index: Which colour and marker.
        name: Name of the series.
        ci: Draw the intervals; default True.

    Returns:
        What ``end_labels`` needs to name the line; nothing when no value is known.
    """
    known = [(float(at), float(one)) for at, one in zip(x, values) if one is not None]
    if not known:
        return []
    ink = colour(index)
    heights = [float("nan") if one is None else one for one in values]
    ax.plot(x, heights, color=ink, marker=marker(index), markersize=4, linewidth=1.4, label=name)
    bars = [(at, low, high) for at, low, high in zip(x, lows, highs) if low is not None and high is not None]
    if ci and bars:
        ax.vlines(*zip(*bars), color=ink, linewidth=1.1, alpha=0.7)
    return [(*known[-1], name, ink)]


def empty(ax: Axes, what: str) -> Axes:
    """Say on the axes that there is nothing to draw."""
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    ax.text(
        0.5, 0.5, f"no {what}", transform=ax.transAxes, ha="center", va="center", color=tone(ax, MUTED), fontsize=BODY
    )
    return ax


def legend(ax: Axes, **options: Any) -> None:
    """A legend without a frame, in small type, readable on the axes' background."""
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=tone(ax), **options)


def panel_title(ax: Axes, title: str, *, pad: float = 6.0) -> None:
    """A title over axes that only hold panels."""
    ax.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=tone(ax), pad=pad)
