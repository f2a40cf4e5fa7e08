"""Colours, sizes, captions and direct labels shared by the figures; changes no global matplotlib setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.bootstrap import DRAWS, LEVEL
from workbench.core.errors import UserError, check_choice
from workbench.core.frames import require

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from matplotlib.axes import Axes

# Okabe and Ito (2008), told apart under every common colour-vision deficiency; the yellow, faint on white, is left out.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX"
INK, MUTED, GRID = "#222222", "#666666", "#DDDDDD"
DARK = {INK: "#EEEEEE", MUTED: "#A6A6A6", GRID: "#3A3A3A"}  # the same three on a dark background
SMALL, BODY, TITLE = 8.0, 9.0, 10.5
WIDTH, HEIGHT = 7.2, 4.0
MEASURE_NAMES = {
    "speedup": "predicted speed-up (× plain decode)",
    "tau": "tau (accepted per round, without bonus)",
    "accepted_length": "accepted length (tokens per whole round, with bonus)",
    "emitted_per_round": "tokens per round (accepted and bonus)",
    "efficiency": "draft efficiency (accepted / drafted)",
    "tokens_per_second": "predicted speed (tokens/s)",
    "drafted_per_token": "drafted tokens per token of text",
}
# Columns that tell the policies of a sweep apart, beside the one a figure is drawn along.
SETTINGS = (
    "table source temperature estimator family k p_min pmin0 floor cap floor_context statistic policy shape"
).split()
DEPTHS = (0, 512, 1024, 2048, 4096, 8192)  # lower edges of buckets of context depth, tokens


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
    """Split a frame into the series to draw, ordered by name, or by depth.

    Args:
        frame: The frame.
        by: "source" for one series per source, "depth" for one per bucket of the start's position, None for one of
            everything.

    Returns:
        (name, part) pairs; the name is "all" for everything, "no source" for an empty source.

    Raises:
        UserError: Another ``by``.
    """
    import polars as pl

    if by is None:
        return [("all", frame)] if len(frame) else []
    column = check_choice("by", by, ("source", "depth"), hint="or None for one series")
    if column == "depth":
        require(frame, ("start",), "by='depth'")
        ends = zip(DEPTHS, [*DEPTHS[1:], None])
        upper = {low: pl.lit(True) if high is None else pl.col("start") < high for low, high in ends}
        found = [(low, frame.filter((pl.col("start") >= low) & below)) for low, below in upper.items()]
        names = dict(zip(DEPTHS, buckets(DEPTHS)))
        return [(names[low], part) for low, part in found if len(part)]
    require(frame, (column,), "by='source'")
    names = frame[column].unique().sort().to_list()
    return [(name or "no source", frame.filter(pl.col(column).eq_missing(name))) for name in names]


def buckets(edges: Sequence[int]) -> list[str]:
    """Names of buckets by their ascending lower edges, such as "512–1k"; the last holds everything above."""

    def short(n: int) -> str:
        return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)

    ends = zip(edges, [*edges[1:], None])
    return [f"{short(low)}+" if high is None else f"{short(low)}–{short(high)}" for low, high in ends]


def of_source(frame: pl.DataFrame, source: str | None) -> pl.DataFrame:
    """The rows of one source, of a frame that has a source column; all rows otherwise, or for None.

    Raises:
        UserError: No row has that source.
    """
    if source is None or "source" not in frame.columns or not len(frame):
        return frame
    rows = frame.filter(frame["source"] == source)
    if not len(rows):
        known = ", ".join(map(repr, frame["source"].unique().sort().drop_nulls().to_list()))
        raise UserError(f"source={source!r} is not in the frame: choose one of {known}, or None for all rows")
    return rows


def differing(rows: pl.DataFrame, keys: Sequence[str], values: Sequence[str]) -> str:
    """What the first rows with equal keys differ in, for the end of a refusal.

    Args:
        rows: The frame, in which some keys occur twice.
        keys: Columns that should tell rows apart.
        values: Columns that do not count.
    """
    twice = rows.filter(rows.select(keys).is_duplicated())
    first = twice.row(0, named=True)
    same = twice.filter(twice[key].eq_missing(first[key]) for key in keys).head(2)
    skip = ("_low", "_high")
    settings = [
        one for one in rows.columns if one in SETTINGS and one not in (*keys, *values) and not one.endswith(skip)
    ]
    found = [name for name in settings if same[name].n_unique() > 1]
    if not found:
        return ": aggregate or filter the frame first"
    return f"; they differ in {', '.join(found)}: filter the frame to one setting of it first"


def setting(value: Any) -> str:
    """A setting of a policy as text: "none" for None, numbers without idle digits."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def legend(ax: Axes, **options: Any) -> None:
    """A legend without a frame, in small type, readable on the axes' background."""
    ax.legend(frameon=False, fontsize=SMALL, labelcolor=tone(ax), **options)


def panel_title(ax: Axes, title: str, *, pad: float = 6.0) -> None:
    """A title over axes that only hold panels."""
    ax.set_title(title, loc="left", fontsize=TITLE, fontweight="bold", color=tone(ax), pad=pad)


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
