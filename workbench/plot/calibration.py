"""Figures of drafts one by one: reliability of the drafter's confidence, and acceptance by class of token.

Drawn from drafts frames (``core.drafts.drafts_frame``), or from rounds frames, which are turned into such.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import bootstrap_by
from workbench.core.calibration import Calibration, calibration
from workbench.core.drafts import CLASSES, drafts_frame
from workbench.core.frames import require
from workbench.plot import style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

COUNTED = 20  # bars of the histogram of confidences


def reliability(
    frame: Any,
    *,
    ax: Axes | None = None,
    by: str | None = None,
    bins: int = 10,
    binning: str = "mass",
    ci: bool = True,
    seed: int = 0,
) -> Axes:
    """Share of drafts that stood against the drafter's confidence in them, and how confidences are distributed.

    Args:
        frame: A drafts frame (doc_id, confidence, hit), a rounds frame, or an object with ``rounds()``. Drafts of
            unknown confidence are left out.
        ax: Axes to draw on, split into two panels (``ax.child_axes``); None for a new figure.
        by: "source" for a line per source, None to pool them (default).
        bins: Number of bins; default 10.
        binning: "mass" (default): bins of equally many drafts; "width": equally wide bins.
        ci: Draw 95 % bootstrap intervals by document; default True.
        seed: Seed of the bootstrap.

    Returns:
        The axes; the legend gives expected calibration error, Brier score and AUROC of each line.

    Raises:
        UserError: A column is missing or an option is not valid.
    """
    drafts = _drafts(frame, ("doc_id", "confidence", "hit")).drop_nulls("confidence")
    lines = style.series(drafts, by)
    ax = style.axes(ax, width=5.6, height=5.6)
    if not lines:
        return style.empty(ax, "drafts with a confidence")
    ax.axis("off")
    room = 0.05 * (len(lines) + 1) + 0.01  # of the legend, above the upper panel, where no line can run behind it
    top, low = (ax.inset_axes(place) for place in ((0, 0.27, 1, 0.73 - room), (0, 0, 1, 0.2)))
    for panel in (top, low):
        style.dress(panel)
        panel.set_xlim(-0.02, 1.02)
    ink = style.tone(top, style.MUTED)
    top.plot([0, 1], [0, 1], color=ink, linestyle="--", linewidth=1.0, label="perfectly calibrated")
    edges = np.linspace(0, 1, COUNTED + 1)
    below = np.zeros(COUNTED)
    for i, (name, part) in enumerate(lines):
        p, hit = part["confidence"].to_numpy(), part["hit"].to_numpy()
        ids = part["doc_id"].to_numpy()
        found = calibration(p, hit, groups=ids, bins=bins, binning=binning, seed=seed)
        x, rates = [b.confidence for b in found.bins], [b.hits for b in found.bins]
        values, lows, highs = zip(*((one.value, one.low, one.high) for one in rates))
        style.line(top, x, values, lows, highs, index=i, name=_scores(name if by else "", found), ci=ci)
        count = np.histogram(p, edges)[0]
        low.bar(edges[:-1], count, 1 / COUNTED, below, align="edge", color=style.colour(i), linewidth=0)
        below += count
    top.set_ylim(-0.03, 1.03)
    top.tick_params(labelbottom=False)
    style.legend(top, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    top.set_ylabel("share of drafts that stood", fontsize=style.BODY, color=style.tone(top))
    low.set_ylabel("drafts", fontsize=style.BODY, color=style.tone(low))
    low.set_xlabel("drafter's probability of its draft (T = 1)", fontsize=style.BODY, color=style.tone(low))
    style.panel_title(ax, "Reliability of the drafter's confidence")
    counts = f"n = {style.counted(len(drafts), 'draft')} of {style.counted(drafts['doc_id'].n_unique(), 'document')}"
    kind = "equally many drafts" if binning == "mass" else "equal width"
    note = f"{bins} bins of {kind}; below the dashed line the drafter is overconfident"
    style.caption(ax, f"{counts}; {note}{style.intervals(drafts, ci, 'bars')}")
    return ax


def acceptance_by_class(
    frame: pl.DataFrame, *, ax: Axes | None = None, slots: int | None = None, ci: bool = True, seed: int = 0
) -> Axes:
    """Conditional acceptance by draft position, a line per class of the drafted token.

    Args:
        frame: A drafts frame made with ``pieces``: doc_id, slot, hit, token_class.
        ax: Axes to draw on; None for a new figure.
        slots: Positions drawn; None for all.
        ci: Draw 95 % bootstrap intervals by document; default True.
        seed: Seed of the bootstrap.

    Returns:
        The axes. A class is that of the draft, which a rejected draft does not share with the text.

    Raises:
        UserError: A column is missing.
    """
    import polars as pl

    require(frame, ("doc_id", "slot", "hit", "token_class"), "acceptance by class (drafts_frame(..., pieces=...))")
    drafts = frame.drop_nulls("token_class")
    if slots is not None:
        drafts = drafts.filter(pl.col("slot") <= slots)
    ax = style.axes(ax)
    if not len(drafts):
        return style.empty(ax, "drafts with a class")
    last = int(drafts["slot"].max())  # type: ignore[arg-type]
    known = [one for one in CLASSES if one in {*drafts["token_class"]}]
    ends = []
    for i, name in enumerate(known):
        part = drafts.filter(pl.col("token_class") == name)
        inside = part["slot"].to_numpy()[:, None] == np.arange(1, last + 1)
        found = bootstrap_by(part["doc_id"].to_numpy(), part["hit"].to_numpy()[:, None] * inside, inside, seed=seed)
        values, lows, highs = zip(*((one.value, one.low, one.high) for one in found))
        x = np.arange(1, last + 1) + 0.06 * (i - (len(known) - 1) / 2)
        text = f"{name} ({100 * len(part) / len(drafts):.0f} %)"
        end = style.line(ax, x, values, lows, highs, index=i, name=name, ci=ci)
        ends += [(*one[:2], text, one[3]) for one in end]
    ax.set_xticks(range(1, last + 1))
    ax.set_xlim(0.6, last + 0.4)
    ax.set_ylim(-0.03, 1.03)
    style.end_labels(ax, ends)
    y = "share accepted, of those compared"
    style.titles(ax, "Conditional acceptance by class of the draft", x="draft position j (tokens into the draft)", y=y)
    counts = f"n = {style.counted(len(drafts), 'draft')} of {style.counted(drafts['doc_id'].n_unique(), 'document')}"
    style.caption(ax, f"{counts}, shares of them in brackets; pooled{style.intervals(drafts, ci, 'bars')}")
    return ax


def _drafts(frame: Any, columns: tuple[str, ...]) -> pl.DataFrame:
    """A drafts frame, made from rounds where rounds are given."""
    if "confidence" not in getattr(frame, "columns", ()):
        frame = drafts_frame(style.as_rounds(frame, ("doc_id", "draft_top1")))
    require(frame, columns, "a drafts frame")
    return frame


def _scores(name: str, found: Calibration) -> str:
    """The legend of one line."""
    ece = f"ECE {found.ece.value:.3f}"
    if found.ece.low is not None:
        ece += f" ({found.ece.low:.3f}–{found.ece.high:.3f})"
    rank = "AUROC undefined" if found.auroc is None else f"AUROC {found.auroc:.3f}"
    return f"{name + ': ' if name else ''}{ece}, Brier {found.brier:.3f}, {rank}"
