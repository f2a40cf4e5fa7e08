"""What keeping k ids of the target's law costs, drawn from the frame of ``topk_cost``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core.frames import require
from workbench.plot import frames, style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

SERIES = {
    "tail": "tail: most that renormalising can be off",
    "bound": "bound: width of the bracket",
    "error_bucket": "upper end: tails as one more id",
    "error_renorm": "kept law renormalised",
    "error_middle": "middle of the bracket",
}


def topk_cost(frame: pl.DataFrame, *, ax: Axes | None = None) -> Axes:
    """The mass that k kept ids miss, and by how much acceptance judged through them is off, against k.

    Args:
        frame: What ``topk_cost`` returned: k, positions, documents, tail with tail_low and tail_high, bound,
            error_bucket, error_renorm and error_middle; columns that are null, as from records, are not drawn.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes, both scales logarithmic; a share of 0 is not drawn, and signs of errors are left out.

    Raises:
        UserError: A column is missing.
    """
    require(frame, ("k", "positions", "documents", "tail_low", "tail_high", *SERIES), "a frame of topk_cost")
    ax = style.axes(ax)
    if not len(frame):
        return style.empty(ax, "ks")
    rows = frame.sort("k")
    ax.set(xscale="log", yscale="log")
    ks = rows["k"].to_list()
    for i, (column, name) in enumerate(SERIES.items()):
        values = _shares(rows, column)
        low, high = (_shares(rows, end) if column == "tail" else [None] * len(ks) for end in ("tail_low", "tail_high"))
        style.line(ax, ks, values, low, high, index=i, name=name)
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.minorticks_off()
    style.legend(ax, loc="lower left")
    style.titles(ax, "What keeping k ids hides", x="kept ids k", y="share of the law, or error of acceptance")
    counts = frames.counted(int(rows["positions"][0]), "position")
    documents = int(rows["documents"][0])
    of = f"n = {counts} of {frames.counted(documents, 'document')}; means"
    style.caption(ax, f"{of}{frames.interval_note(documents, True, 'bars of the tail')}")
    return ax


def _shares(rows: pl.DataFrame, column: str) -> list[float | None]:
    """Magnitudes of a column; None where it is unknown or 0, which a logarithmic scale does not have."""
    return [None if value is None or value == 0 else abs(value) for value in rows[column].to_list()]
