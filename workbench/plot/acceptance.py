"""Acceptance figures: by position, by context depth, and the histogram of accepted lengths.

Drawn from rounds frames (``core.frames.rounds_frame``) and nothing else; definitions are those of ``core.metrics``.
Columns needed: doc_id, drafted, accepted; source for ``by="source"``; start for depth and ``by="depth"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import Interval, bootstrap_by
from workbench.core.errors import UserError, check_choice
from workbench.core.measures import MEASURES, parts
from workbench.core.metrics import slot_counts
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

KINDS = {
    "joint": "joint: 1..j accepted, of all rounds",
    "reach": "reach: j drafted, of 1..j−1 accepted",
    "cond": "conditional: j accepted, of reached",
}
SHORT = {"joint": "joint", "reach": "reach", "cond": "conditional"}


def acceptance_by_position(
    frame: Any,
    *,
    ax: Axes | None = None,
    by: str | None = "source",
    kind: str | Sequence[str] = ("joint", "reach", "cond"),
    ci: bool = True,
    seed: int = 0,
) -> Axes:
    """Pooled acceptance against draft position, with intervals by document.

    One kind, or one series, is drawn on the axes; several of both become one panel per kind inside them
    (``ax.child_axes``), a line per source in each.

    Args:
        frame: A rounds frame, or an object with ``rounds()``.
        ax: Axes to draw on; None for a new figure.
        by: "source" for a line per source (default), "depth" for a line per bucket of context depth at the round's
            start (edges 0, 512, 1,024, 2,048, 4,096, 8,192), None to pool them.
        kind: Any of "joint", "reach" and "cond"; default all three.
        ci: Draw 95 % bootstrap intervals by document; default True.
        seed: Seed of the bootstrap.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing or an option is unknown.
    """
    kinds = [check_choice("kind", one, KINDS) for one in ([kind] if isinstance(kind, str) else kind)]
    if not kinds:
        raise UserError("kind=() draws nothing: choose any of 'joint', 'reach', 'cond'")
    rounds = style.as_rounds(frame, ("doc_id", "drafted", "accepted"))
    lines = style.series(rounds, by)
    panels = len(lines) > 1 and len(kinds) > 1
    ax = style.axes(ax, width=3.0 * len(kinds) + 1.2 if panels else style.WIDTH, height=3.6 if panels else style.HEIGHT)
    if not len(rounds) or not rounds["drafted"].max():
        return style.empty(ax, "drafted tokens")
    found = {name: _positions(part, kinds, seed) for name, part in lines}
    if panels:
        _in_panels(ax, found, kinds, ci)
    else:
        named = [
            (SHORT[one] if len(kinds) > 1 else name, found[name][one], i)
            for i, (name, one) in enumerate((name, one) for name in found for one in kinds)
        ]
        _lines(ax, named, ci)
        one = "Acceptance" if len(kinds) > 1 else SHORT[kinds[0]].capitalize() + " acceptance"
        style.titles(
            ax, f"{one} by draft position", x="draft position j (tokens into the draft)", y="share of rounds, pooled"
        )
    note = "; lines: tokens of context at the round's start" if by == "depth" else ""
    style.caption(ax, f"{_counts(rounds)}; pooled{note}{style.intervals(rounds, ci, 'bars')}")
    return ax


def accepted_histogram(frame: Any, *, ax: Axes | None = None, by: str | None = None) -> Axes:
    """Share of rounds with each number of accepted tokens.

    Args:
        frame: A rounds frame, or an object with ``rounds()``.
        ax: Axes to draw on; None for a new figure.
        by: "source" for bars per source, None to pool them (default).

    Returns:
        The axes.

    Raises:
        UserError: A column is missing or ``by`` is unknown.
    """
    rounds = style.as_rounds(frame, ("doc_id", "drafted", "accepted"))
    lines, ax = style.series(rounds, by), style.axes(ax)
    if not len(rounds):
        return style.empty(ax, "rounds")
    longest = int(rounds["accepted"].max())  # type: ignore[arg-type]
    width = 0.8 / len(lines)
    for i, (name, part) in enumerate(lines):
        share = np.bincount(part["accepted"].to_numpy(), minlength=longest + 1) / len(part)
        x = np.arange(longest + 1) + (i - (len(lines) - 1) / 2) * width
        bars = ax.bar(x, 100 * share, width=0.92 * width, color=style.colour(i), label=name)
        if len(lines) == 1:
            ax.bar_label(bars, fmt="%.0f %%", fontsize=style.SMALL, color=style.tone(ax), padding=2)
    ax.grid(False, axis="x")
    ax.set_xticks(range(longest + 1))
    if len(lines) > 1:
        style.legend(ax)
    style.titles(
        ax, "Accepted tokens per round", x="accepted tokens in a round, without bonus", y="share of rounds (%)"
    )
    style.caption(ax, f"{_counts(rounds)}; {_undrafted(rounds)}")
    return ax


def depth(
    frame: Any,
    *,
    ax: Axes | None = None,
    by: str | None = "source",
    value: str = "tau",
    edges: Sequence[int] = style.DEPTHS,
    ci: bool = True,
    seed: int = 0,
) -> Axes:
    """Acceptance against the context depth at which a round starts, in buckets.

    Args:
        frame: A rounds frame, or an object with ``rounds()``.
        ax: Axes to draw on; None for a new figure.
        by: "source" for a line per source (default), None to pool them.
        value: "tau" (accepted per round, default), "efficiency" (accepted / drafted) or "slot1" (joint of slot 1).
        edges: Ascending lower edges of the buckets, tokens; the last bucket also holds everything deeper.
            Default 0, 512, 1,024, 2,048, 4,096, 8,192.
        ci: Draw 95 % bootstrap intervals by document; default True.
        seed: Seed of the bootstrap.

    Returns:
        The axes; buckets without rounds leave a gap.

    Raises:
        UserError: A column is missing or an option is unknown.
    """
    check_choice("value", value, MEASURES)
    if len(edges) < 1 or list(edges) != sorted(set(edges)):
        raise UserError(f"edges={edges!r} is not valid: give ascending token counts, such as {style.DEPTHS}")
    rounds = style.as_rounds(frame, ("doc_id", "drafted", "accepted", "start"))
    lines, ax = style.series(rounds, by), style.axes(ax)
    if not len(rounds):
        return style.empty(ax, "rounds")
    names = style.buckets(edges)
    bucket = np.searchsorted(edges, rounds["start"].to_numpy(), side="right") - 1
    last = int(bucket.max()) + 1
    ends = []
    for i, (name, part) in enumerate(lines):
        intervals = _by_bucket(part, edges, last, value, seed)
        shift = 0.05 * (i - (len(lines) - 1) / 2)
        ends += _draw(ax, np.arange(last) + shift, intervals, i, ci, name)
    ax.set_xticks(range(last), [f"{name}\nn={int((bucket == b).sum()):,}" for b, name in enumerate(names[:last])])
    ax.set_xlim(-0.4, last - 0.6)
    ax.set_ylim(bottom=0)
    if len(lines) > 1:
        style.end_labels(ax, ends)
    title = f"{MEASURES[value].partition(' (')[0].capitalize()} by context depth"
    style.titles(ax, title, x="position of the round's start (tokens)", y=MEASURES[value])
    style.caption(ax, f"{_counts(rounds)}; pooled{style.intervals(rounds, ci, 'bars')}", below=54)
    return ax


def _positions(part: pl.DataFrame, kinds: Sequence[str], seed: int) -> dict[str, list[Interval]]:
    """Intervals per kind and slot of one series."""
    names, index_N = np.unique(part["doc_id"].to_numpy(), return_inverse=True)
    counts = slot_counts(part["drafted"].to_numpy(), part["accepted"].to_numpy(), groups=index_N)
    return {one: bootstrap_by(np.arange(len(names)), *counts.parts(one), seed=seed) for one in kinds}


def _in_panels(ax: Axes, found: dict[str, dict[str, list[Interval]]], kinds: Sequence[str], ci: bool) -> None:
    """One inset panel per kind, a line per series in each, named at the last panel's right."""
    gap = 0.05
    width = (1 - gap * (len(kinds) - 1)) / len(kinds)
    ax.axis("off")
    for p, one in enumerate(kinds):
        panel = ax.inset_axes((p * (width + gap), 0, width, 1))
        style.dress(panel)
        panel.set_ylim(-0.03, 1.03)
        named = [(name, found[name][one], i) for i, name in enumerate(found)]
        _lines(panel, named, ci, labels=p == len(kinds) - 1)
        panel.set_title(SHORT[one], loc="left", fontsize=style.BODY, color=style.tone(panel))
        panel.set_xlabel("draft position j", fontsize=style.BODY, color=style.tone(panel))
        if p:
            panel.tick_params(labelleft=False)
        else:
            panel.set_ylabel("share of rounds, pooled", fontsize=style.BODY, color=style.tone(panel))
    style.panel_title(ax, "Acceptance by draft position", pad=22)


def _lines(ax: Axes, named: Sequence[tuple[str, list[Interval], int]], ci: bool, *, labels: bool = True) -> None:
    """Lines over positions 1..K, dodged so that their intervals do not hide each other."""
    ends, slots = [], max(len(intervals) for _, intervals, _ in named)
    for name, intervals, i in named:
        shift = 0.07 * (i - (len(named) - 1) / 2)
        ends += _draw(ax, 1 + np.arange(len(intervals)) + shift, intervals, i, ci, name)
    ax.set_xticks(range(1, slots + 1))
    ax.set_xlim(0.6, slots + 0.4)
    ax.set_ylim(-0.03, 1.03)
    if labels and (len(named) > 1 or named[0][0] not in ("all", "no source")):
        style.end_labels(ax, ends)


def _draw(
    ax: Axes, x: np.ndarray, intervals: Sequence[Interval], index: int, ci: bool, name: str
) -> list[tuple[float, float, str, str]]:
    """A line with interval bars; returns its end label, or nothing when no value is defined."""
    values, lows, highs = zip(*((one.value, one.low, one.high) for one in intervals)) if intervals else ((), (), ())
    return style.line(ax, x, values, lows, highs, index=index, name=name, ci=ci)


def _by_bucket(part: pl.DataFrame, edges: Sequence[int], buckets: int, value: str, seed: int) -> list[Interval]:
    """Intervals per depth bucket of one series."""
    documents, top, bottom = parts(part, value)
    inside = (np.searchsorted(edges, part["start"].to_numpy(), side="right") - 1)[:, None] == np.arange(buckets)
    return bootstrap_by(documents, top[:, None] * inside, bottom[:, None] * inside, seed=seed)


def _counts(rounds: pl.DataFrame) -> str:
    """Counts for a caption."""
    return f"n = {style.counted(len(rounds), 'round')} of {style.counted(rounds['doc_id'].n_unique(), 'document')}"


def _undrafted(rounds: pl.DataFrame) -> str:
    """How many rounds drafted nothing, for a caption."""
    none = int((rounds["drafted"] == 0).sum())
    return f"{style.counted(none, 'round')} drafted nothing and count as 0 accepted"
