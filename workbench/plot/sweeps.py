"""Figures of a sweep: a measure along K, survival of drafts, the front of yield against drafts, and predictions.

Drawn from sweep frames (one row per policy, source and temperature) and from frames of predictions beside measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.frames import require
from workbench.core.measures import non_dominated
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

MOST = 8  # lines that one figure still tells apart


def speedup_by_k(
    frame: pl.DataFrame,
    *,
    ax: Axes | None = None,
    by: str | None = None,
    source: str | None = "all",
    value: str = "speedup",
    ci: bool = True,
) -> Axes:
    """Predicted speed-up against the draft length K, with intervals.

    Args:
        frame: A sweep frame: k, the value, and its ends ``<value>_low`` and ``<value>_high`` where it has intervals.
        ax: Axes to draw on; None for a new figure.
        by: Column that tells lines apart, such as "p_min", "floor" or "source"; None for one line.
        source: Rows of this source; default "all". Ignored by ``by="source"``, which draws all but "all".
        value: "speedup" (default), "tau", "accepted_length", "emitted_per_round", "efficiency" or
            "tokens_per_second".
        ci: Draw the intervals; default True.

    Returns:
        The axes; a ring marks the best K of each line, and a dashed line at 1 plain decode.

    Raises:
        UserError: A column is missing, the frame has no speed-up, two rows of one line have the same K, or there are
            more lines than can be told apart.
    """
    check_choice("value", value, style.MEASURE_NAMES)
    require(frame, ("k", value, *([by] if by else [])), "a figure by K")
    rows, found = _lines(frame, by, source)
    ax = style.axes(ax)
    if not len(rows):
        return style.empty(ax, "policies")
    if rows[value].null_count() == len(rows):
        hint = (
            ": sweep with cost=..., which a speed-up is predicted from" if "speed" in value or "second" in value else ""
        )
        raise UserError(f"the frame holds no {value}{hint}")
    ends, bests, drawn = [], [], False
    for i, (name, part) in enumerate(found):
        part = part.sort("k")
        if part["k"].is_duplicated().any():
            more = style.differing(part, ("k",), (value,))
            raise UserError(f"two rows{f' of {name}' if by else ''} have the same K{more}")
        lows, highs = _ends(part, value)
        drawn |= any(low is not None for low in lows)
        x = part["k"].to_numpy() + 0.05 * (i - (len(found) - 1) / 2)
        ends += style.line(ax, x, part[value].to_list(), lows, highs, index=i, name=name, ci=ci)
        if part[value].null_count() < len(part):
            at = int(part[value].arg_max())  # type: ignore[arg-type]
            ax.plot(x[at], part[value][at], "o", markersize=10, fillstyle="none", color=style.colour(i), label="_best")
            bests.append(f"{f'{name}: ' if by else ''}K = {part['k'][at]} ({part[value][at]:.2f})")
    ax.set_xticks(sorted(rows["k"].drop_nulls().unique().to_list()))
    if value == "speedup":
        ax.axhline(1, color=style.tone(ax, style.MUTED), linewidth=1.0, linestyle="--", label="_plain")
        ends.append((float(rows["k"].max()), 1.0, "plain decode", style.tone(ax, style.MUTED)))  # type: ignore[arg-type]
    ax.margins(x=0.06, y=0.1)
    style.end_labels(ax, ends if by else ends[len(found) :])
    what = style.MEASURE_NAMES[value]
    style.titles(ax, f"{_short(what)} by draft length", x="K (draft tokens per round, at most)", y=what)
    style.caption(
        ax,
        f"{_n(rows, source, by)}; ring: best{'; ' + '; '.join(bests) if len(bests) < 4 else ''}{_bars(ci and drawn)}",
    )
    return ax


def survival(frame: pl.DataFrame, *, ax: Axes | None = None, by: str = "policy", source: str | None = "all") -> Axes:
    """The share of rounds that accepted at least j drafts, per policy.

    Args:
        frame: A sweep frame: ``joint`` (a list per row, joint(j) from j = 1) and the column of names.
        ax: Axes to draw on; None for a new figure.
        by: Column that names the lines; default "policy".
        source: Rows of this source; default "all". Ignored by ``by="source"``, which draws all but "all".

    Returns:
        The axes; the values of a line from j = 1 on add up to its tau.

    Raises:
        UserError: A column is missing, two rows give one line, or there are more lines than can be told apart.
    """
    require(frame, ("joint", by), "a figure of survival")
    rows, found = _lines(frame, by, source)
    ax = style.axes(ax)
    if not len(rows):
        return style.empty(ax, "policies")
    ends = []
    for i, (name, part) in enumerate(found):
        if len(part) > 1:
            raise UserError(f"two rows give the line {name}{style.differing(part, (by,), ('joint',))}")
        joint = [0.0 if one is None else float(one) for one in part["joint"][0]]
        none = [None] * (len(joint) + 1)
        short = f"{name}: tau {sum(joint):.2f}"
        ends += style.line(ax, range(len(joint) + 1), [1.0, *joint], none, none, index=i, name=name)
        ends[-1] = (*ends[-1][:2], short, ends[-1][3])
    ax.set_ylim(-0.03, 1.03)
    ax.set_xticks(range(max(len(line.get_xdata()) for line in ax.lines)))  # type: ignore[arg-type]
    style.end_labels(ax, ends)
    style.titles(
        ax, "Survival of drafts", x="j (accepted tokens, without bonus)", y="share of rounds with ≥ j accepted"
    )
    style.caption(ax, f"{_n(rows, source, by)}; pooled over all rounds; tau: accepted per round, the sum over j ≥ 1")
    return ax


def pareto(
    frame: pl.DataFrame,
    *,
    ax: Axes | None = None,
    x: str = "drafted_per_token",
    y: str = "emitted_per_round",
    label: str = "policy",
    source: str | None = "all",
    labels: int = 8,
) -> Axes:
    """Yield against drafted tokens: every policy, those that none beats on both counts highlighted and named.

    Args:
        frame: A sweep frame: x, y and the column of names.
        ax: Axes to draw on; None for a new figure.
        x: Column to keep small; default "drafted_per_token".
        y: Column to make large; default "emitted_per_round".
        label: Column of names; default "policy".
        source: Rows of this source; default "all".
        labels: Points of the front that are named, evenly along it; default 8.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing, or ``labels`` is negative.
    """
    check_int("labels", labels, low=0)
    require(frame, (x, y, label), "a Pareto figure")
    rows = style.of_source(frame, source).drop_nulls([x, y])
    ax = style.axes(ax, height=4.6)
    if not len(rows):
        return style.empty(ax, "policies")
    front = non_dominated(rows[x].to_numpy(), rows[y].to_numpy())
    best, rest = rows.filter(front).sort(x, y), rows.filter(~front)
    ax.plot(rest[x], rest[y], "o", color=style.tone(ax, style.MUTED), markersize=3.5, alpha=0.5, label="dominated")
    ax.plot(
        best[x], best[y], color=style.colour(0), marker="o", markersize=5.5, linewidth=1.2, drawstyle="steps-post",
        label="front",
    )  # fmt: skip
    chosen = sorted({round(i) for i in np.linspace(0, len(best) - 1, min(labels, len(best)))}) if labels else []
    named = best.select(x, y, label).rows()
    ax.margins(0.06)
    style.end_labels(ax, [(*named[i][:2], str(named[i][2]), style.colour(0)) for i in chosen])
    axes_names = [style.MEASURE_NAMES.get(one, one.replace("_", " ")) for one in (x, y)]
    style.titles(ax, "What drafts buy", x=axes_names[0], y=axes_names[1])
    style.caption(ax, f"{_n(rows, source, None)}; blue: the {len(best)} that no other one beats on both counts")
    return ax


def predicted_vs_measured(
    frame: pl.DataFrame, *, ax: Axes | None = None, by: str | None = None, unit: str = "tokens/s"
) -> Axes:
    """Predictions against measurements, with the identity line and the median absolute error.

    Args:
        frame: Columns predicted and measured, in one unit; predicted_low and predicted_high, and measured_low and
            measured_high, draw intervals where they are there.
        ax: Axes to draw on; None for a new figure.
        by: Column that tells points apart, such as "family"; None for one kind.
        unit: Unit of both; default "tokens/s".

    Returns:
        The axes, one scale on both. The error is |predicted − measured| / measured.

    Raises:
        UserError: A column is missing, a measured value is not above 0, or there are more kinds than can be told
            apart.
    """
    require(frame, ("predicted", "measured", *([by] if by else [])), "predictions against measurements")
    rows = frame.drop_nulls(["predicted", "measured"])
    ax = style.axes(ax, width=5.4, height=5.0)
    if not len(rows):
        return style.empty(ax, "predictions")
    if (rows["measured"] <= 0).any():
        raise UserError(f"measured={rows['measured'].min()} is not valid: a relative error needs values above 0")
    low = float(min(rows["predicted"].min(), rows["measured"].min()))  # type: ignore[type-var, arg-type]
    high = float(max(rows["predicted"].max(), rows["measured"].max()))  # type: ignore[type-var, arg-type]
    room = 0.06 * (high - low) or 0.06 * high
    ends = [low - room, high + room]
    ax.plot(ends, ends, color=style.tone(ax, style.MUTED), linestyle="--", linewidth=1.0, label="predicted = measured")
    for i, (name, part) in enumerate(_parts(rows, by)):
        error = np.abs(part["predicted"].to_numpy() / part["measured"].to_numpy() - 1)
        text = f"{name if by else 'policies'}: median |error| {100 * np.median(error):.1f} % (n = {len(part)})"
        ink = style.colour(i)
        ax.plot(part["measured"], part["predicted"], style.marker(i), color=ink, markersize=5, alpha=0.8, label=text)
        for side, other, draw in (("predicted", "measured", ax.vlines), ("measured", "predicted", ax.hlines)):
            if {f"{side}_low", f"{side}_high"} <= {*part.columns}:
                known = part.drop_nulls([f"{side}_low", f"{side}_high"])
                draw(known[other], known[f"{side}_low"], known[f"{side}_high"], color=ink, linewidth=0.9, alpha=0.6)
    ax.set(xlim=ends, ylim=ends, aspect="equal")
    style.legend(ax, loc="upper left")
    style.titles(ax, "Predicted against measured", x=f"measured ({unit})", y=f"predicted ({unit})")
    every = np.abs(rows["predicted"].to_numpy() / rows["measured"].to_numpy() - 1)
    style.caption(
        ax, f"n = {len(rows)}; median |error| {100 * np.median(every):.1f} %, largest {100 * every.max():.1f} %"
    )
    return ax


def _lines(
    frame: pl.DataFrame, by: str | None, source: str | None
) -> tuple[pl.DataFrame, list[tuple[str, pl.DataFrame]]]:
    """The rows to draw, and their parts by name."""
    rows = frame.filter(frame["source"] != "all") if by == "source" else style.of_source(frame, source)
    return rows, _parts(rows, by)


def _parts(rows: pl.DataFrame, by: str | None) -> list[tuple[str, pl.DataFrame]]:
    """Parts of a frame by the values of a column: None first, numbers ascending."""
    import polars as pl

    if by is None:
        return [("all", rows)]
    values = rows[by].unique(maintain_order=True)
    if values.dtype.is_numeric():
        values = values.sort()
    if len(values) > MOST:
        raise UserError(
            f"by={by!r} gives {len(values)} lines, and {MOST} can be told apart: filter the frame to fewer of them"
        )
    word = "" if values.dtype == pl.String else f"{by} = "
    return [(f"{word}{style.setting(one)}", rows.filter(pl.col(by).eq_missing(one))) for one in values]


def _ends(part: pl.DataFrame, value: str) -> tuple[list[Any], list[Any]]:
    """Ends of the intervals, None where the frame has none."""
    names = (f"{value}_low", f"{value}_high")
    return tuple(part[one].to_list() if one in part.columns else [None] * len(part) for one in names)  # type: ignore[return-value]


def _n(rows: pl.DataFrame, source: str | None, by: str | None) -> str:
    """What the figure was drawn from, for a caption."""
    policies = f"n = {len(rows):,} {'policy' if len(rows) == 1 else 'policies'}"
    if "documents" in rows.columns and len(rows):
        policies += f" over {style.counted(int(rows['documents'].max()), 'document')}"  # type: ignore[arg-type]
    where = f"; source: {source}" if "source" in rows.columns and by != "source" and source is not None else ""
    return policies + where


def _bars(drawn: bool) -> str:
    """What intervals are, for a caption."""
    return "; bars: 95 % bootstrap by document" if drawn else ""


def _short(name: str) -> str:
    """A measure's name without its unit, capitalised."""
    short = name.partition(" (")[0]
    return short[:1].upper() + short[1:]
