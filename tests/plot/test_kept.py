"""The figure of what k costs draws its frame, and leaves out what the frame does not know."""

from __future__ import annotations

import polars as pl
import pytest

from workbench import plot
from workbench.core.errors import UserError

COST = pl.DataFrame(
    {
        "k": [1, 4, 16],
        "positions": [900] * 3,
        "documents": [12] * 3,
        "tail": [0.3, 0.1, 0.0],
        "tail_low": [0.2, 0.05, 0.0],
        "tail_high": [0.4, 0.15, 0.0],
        "error_middle": [0.02, -0.001, 0.0],
        "bound": [0.2, 0.06, 0.0],
        "error_bucket": [0.1, 0.02, 0.0],
        "error_renorm": [-0.05, 0.01, 0.0],
    }
)
DRAFTER = ("bound", "error_bucket", "error_renorm", "error_middle")


def lines(ax) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


def test_every_share_is_a_line_over_k():
    ax = plot.topk_cost(COST)
    drawn = lines(ax)
    assert drawn["tail: most that renormalising can be off"][:2] == [0.3, 0.1]
    assert drawn["kept law renormalised"][:2] == [0.05, 0.01] and len(drawn) == 5
    assert ax.get_xscale() == ax.get_yscale() == "log" and ax.get_xlabel() == "kept ids k"
    texts = " ".join(text.get_text() for text in ax.texts)
    assert "900 positions of 12 documents" in texts and "bars of the tail" in texts


def test_what_records_do_not_know_is_not_drawn():
    frame = COST.with_columns(pl.lit(None, pl.Float64).alias(name) for name in DRAFTER)
    assert len(lines(plot.topk_cost(frame))) == 1


def test_a_missing_column_is_named():
    with pytest.raises(UserError, match="bound is missing"):
        plot.topk_cost(COST.drop("bound"))
    assert "no ks" in " ".join(text.get_text() for text in plot.topk_cost(COST.head(0)).texts)
