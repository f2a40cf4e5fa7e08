"""Figures of a corpus' hygiene: near duplicates by estimated and counted similarity, and overlap with an evaluation.

Drawn from frames: "pairs" of near duplicates (kept, doc_id, estimate, jaccard, dropped), and the documents of a
contamination report (doc_id, source, grams, seen, share).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import check_real
from workbench.core.frames import require
from workbench.plot import frames, style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

TITLE = "Overlap of evaluation and training"
LABEL = "n-grams of a document that training holds (%)"


def duplicates(frame: pl.DataFrame, *, threshold: float | None = None, ax: Axes | None = None) -> Axes:
    """Candidate pairs by counted Jaccard similarity and its MinHash estimate; those that made a document go stand out.

    Args:
        frame: The report "pairs": kept, doc_id, estimate, jaccard, dropped.
        threshold: Similarity from which documents went; None draws no line.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes.

    Raises:
        UserError: A column is missing, or the threshold is no similarity.
    """
    require(frame, ("doc_id", "estimate", "jaccard", "dropped"), "a frame of near pairs")
    if threshold is not None:
        check_real("threshold", threshold, low=0.0, high=1.0)
    ax = style.axes(ax, width=4.6, height=4.2)
    if not len(frame):
        return style.empty(ax, "candidate pairs")
    ax.plot([0, 1], [0, 1], color=style.tone(ax, style.MUTED), linewidth=0.8)
    for i, (gone, name) in enumerate(((False, "stayed"), (True, "dropped"))):
        part = frame.filter(frame["dropped"] == gone)
        if len(part):
            what = f"{name} ({len(part):,})"
            ax.plot(part["jaccard"], part["estimate"], style.marker(i), color=style.colour(i), markersize=5, label=what)
    if threshold is not None:
        ax.axvline(threshold, color=style.tone(ax, style.MUTED), linewidth=0.8, linestyle=":")
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    style.legend(ax, loc="lower right")
    style.titles(ax, "Near duplicates", x="Jaccard similarity, counted", y="estimate of the signatures")
    style.caption(ax, f"n = {frames.counted(len(frame), 'candidate pair')}")
    return ax


def contamination(frame: pl.DataFrame, *, ax: Axes | None = None, title: str = TITLE, label: str = LABEL) -> Axes:
    """Share of every evaluation document's n-grams that the training documents hold, per source.

    Args:
        frame: The documents of a contamination report: doc_id, source, grams, seen, share.
        ax: Axes to draw on; None for a new figure.
        title: Title of the figure.
        label: Label of the horizontal axis.

    Returns:
        The axes; a dot per document that has an n-gram to judge by, and beside each source how many share one.

    Raises:
        UserError: A column is missing.
    """
    require(frame, ("doc_id", "source", "seen", "share"), "the documents of a contamination report")
    judged = frame.drop_nulls("share")
    rows = frames.series(judged, "source")
    ax = style.axes(ax, height=1.6 + 0.42 * max(len(rows), 2))
    if not rows:
        return style.empty(ax, "documents with an n-gram")
    for y, (_, part) in enumerate(rows):
        shares = np.sort(100 * part["share"].to_numpy())
        lift = 0.5 * (np.arange(len(shares)) + 0.5) / len(shares) - 0.25  # so that equal shares do not hide each other
        ax.plot(shares, y - lift, style.marker(y), color=style.colour(y), markersize=4, alpha=0.7)
        touched = int((part["seen"] > 0).sum())
        note = f"{touched:,} of {frames.counted(len(part), 'document')} touched"
        ax.text(
            1.02, y, note, transform=ax.get_yaxis_transform(), va="center", fontsize=style.SMALL, color=style.tone(ax)
        )
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(-2, 102)
    style.titles(ax, title, x=label)
    left = len(frame) - len(judged)
    short = f"; {frames.counted(left, 'document')} without an n-gram to judge by left out" if left else ""
    style.caption(ax, f"n = {frames.counted(len(judged), 'document')}, one dot each{short}")
    return ax
