"""Phase anatomy: where a round, a draft step and a whole generation spend their time.

Drawn from a phases frame (``core.frames.phases_frame``): group, part, ms, count, synchronised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core.bench_rows import UNPARTED
from workbench.core.errors import check_choice
from workbench.core.frames import GROUPS, PHASES, phase_schema, require
from workbench.plot import frames, style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

UNITS = {"round": "round", "predicted round": "round", "draft step": "step", "setup": "generation"}
NAMES = {
    "round": "one round",
    "predicted round": "one round,\npredicted",
    "draft step": "one draft step",
    "setup": "whole generation",
}
# A phase of a round has one colour everywhere; a model that does not part the verify has that of its larger part.
ROUND_COLOURS = {name.replace("_", " "): i for i, name in enumerate(PHASES)} | {"verify": 1, UNPARTED: len(PHASES)}
SCALES = ("share", "ms")
STATISTICS = ("mean", "median")
LETTER = 0.62 * style.SMALL  # width of a letter, points, with some air


def phase_anatomy(
    frame: pl.DataFrame, *, ax: Axes | None = None, scale: str = "share", statistic: str = "mean"
) -> Axes:
    """Stacked horizontal bars of time: round phases, measured or predicted, draft-step anatomy and the setup split.

    The groups differ by orders of magnitude, so each bar is 100 % of its own group; parts carry milliseconds.
    Groups measured with the device synchronised are hatched and marked: their total is no throughput number. Predicted
    groups (``core.frames.predicted_phases``) are pale, with dotted edges.

    Args:
        frame: A phases frame, ms being the mean per round, per draft step or per generation; frames concatenate.
        ax: Axes to draw on; None for a new figure.
        scale: "share" (default), or "ms" for one scale in milliseconds, which suits groups of one kind, such as rounds
            measured and predicted, or rounds of several policies.
        statistic: What ms is over the count, for the caption: "mean" (default) or "median"; a bar of medians is their
            sum.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing, or the scale or the statistic is unknown.
    """
    import polars as pl

    check_choice("scale", scale, SCALES)
    check_choice("statistic", statistic, STATISTICS)
    require(frame, tuple(phase_schema()), "a phases frame")
    known = [*GROUPS, *(name for name in frame["group"].unique(maintain_order=True) if name not in GROUPS)]
    rows = [(name, part) for name in known if len(part := frame.filter(pl.col("group") == name))]
    ax = style.axes(ax, width=8.4, height=0.9 + 1.05 * max(len(rows), 1))
    if not rows:
        return style.empty(ax, "phases")
    longest = max(float(part["ms"].sum()) for _, part in rows)
    for y, (name, part) in enumerate(rows):
        _bar(ax, y, name, part, longest if scale == "ms" else float(part["ms"].sum()))
    ax.set_yticks(range(len(rows)), [_name(name, part) for name, part in rows])
    ax.set_ylim(len(rows) - 0.35, -0.5)
    ax.set_xlim(0, 100)
    ax.grid(False)
    if scale == "ms" and longest > 0:
        from matplotlib.ticker import MaxNLocator

        at = [tick for tick in MaxNLocator(5).tick_values(0, longest) if tick <= longest]
        ax.set_xticks([100 * tick / longest for tick in at], [f"{tick:g}" for tick in at])
    along = f"{statistic} time (ms)" if scale == "ms" else "share of the group's time (%)"
    style.titles(ax, "Where the time goes", x=along)
    n = "; ".join(
        f"{_plain(name)}: {statistic} of {frames.counted(int(part['count'][0]), _unit(name, part))}"
        for name, part in rows
    )
    marked = any(part["synchronised"].any() for _, part in rows)
    style.caption(ax, f"n: {n}" + ("; hatched: device synchronised, no throughput number" if marked else ""))
    return ax


def _bar(ax: Axes, y: int, name: str, part: pl.DataFrame, whole: float) -> None:
    """One stacked bar with its labels: inside where they fit, else below with a leader; the axis spans ``whole``."""
    total = float(part["ms"].sum())
    predicted, known = "predicted" in name, {*part["part"]} <= {*ROUND_COLOURS}
    left, narrow = 0.0, []
    percent = 100 / (0.82 * style.size(ax)[0])  # of the bar, per point; the layout will still narrow the axes a little
    for i, (label, ms, marked) in enumerate(part.select("part", "ms", "synchronised").iter_rows()):
        share = 100 * ms / whole if whole > 0 else 0.0
        ink = style.colour(ROUND_COLOURS[label] if known else i)
        ax.barh(
            y,
            share,
            left=left,
            height=0.46,
            facecolor=(ink, 0.45) if predicted else ink,
            edgecolor=ink if predicted else "white",
            linestyle=":" if predicted else "-",
            linewidth=0.8,
            hatch="///" if marked else None,
        )
        centre, lines = left + share / 2, (label, _ms(ms))
        left += share
        if share >= percent * LETTER * max(map(len, lines)):
            text = ax.text(centre, y, "\n".join(lines), ha="center", va="center", fontsize=style.SMALL, color=style.INK)
            # A pale box keeps the label legible on every colour and over the hatching.
            text.set_bbox({"facecolor": "white", "alpha": 0.82, "edgecolor": "none", "pad": 1.2})
        elif ms > 0:
            narrow.append((centre, " ".join(lines), ink))
    _below(ax, y, narrow, percent)
    note = f"{_ms(total)}\nper {_unit(name, part)}"
    ax.text(101, y, note, va="center", fontsize=style.BODY, color=style.tone(ax))


def _below(ax: Axes, y: int, labels: list[tuple[float, str, str]], percent: float) -> None:
    """Labels of narrow parts under their bar, on one level, or in turn on two where one is too short."""
    wide = [percent * LETTER * len(text) for _, text, _ in labels]
    levels = 2 if sum(wide) > 100 else 1
    for level in range(levels):
        mine = labels[level::levels]
        places = style.spread([at for at, _, _ in mine], wide[level::levels], low=0.0, high=100.0)
        for x, (at, text, ink) in zip(places, mine):
            under = y + 0.40 + 0.15 * level
            ax.plot([at, x], [y + 0.23, under - 0.07], color=ink, linewidth=0.8, zorder=1, clip_on=False)
            label = ax.text(x, under, text, ha="center", va="center", fontsize=style.SMALL, color=style.INK, zorder=3)
            label.set_bbox({"facecolor": "white", "alpha": 0.82, "edgecolor": "none", "pad": 0.6})


def _unit(name: str, part: pl.DataFrame) -> str:
    """What one sample of a group is: a round, where all its parts are phases of one."""
    return UNITS.get(name, "round" if {*part["part"]} <= {*ROUND_COLOURS} else "sample")


def _name(name: str, part: pl.DataFrame) -> str:
    """The bar's name, marked when the device was synchronised."""
    return NAMES.get(name, name) + ("\n(synchronised)" if part["synchronised"].any() else "")


def _plain(name: str) -> str:
    """The bar's name on one line."""
    return NAMES.get(name, name).replace("\n", " ")


def _ms(value: float) -> str:
    """Milliseconds to three significant figures, seconds from ten of them on, microseconds below a tenth."""
    if value >= 1e4:
        return f"{value / 1e3:,.3g} s" if value < 1e6 else f"{value / 1e3:,.0f} s"
    if 0 < value < 0.1:
        return f"{1e3 * value:.3g} µs"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
