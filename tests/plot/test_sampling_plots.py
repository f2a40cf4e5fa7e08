"""Figures of sampled decoding draw what their frames hold, and refuse what they cannot."""

from __future__ import annotations

import polars as pl
import pytest

from workbench import plot
from workbench.core.errors import UserError

LAWS = pl.DataFrame(
    [("exact p", " a", 0.7), ("exact p", "\n", 0.3), ("ratio", " a", 0.6)],
    schema=["name", "token", "share"],
    orient="row",
)


def test_laws_stand_side_by_side():
    ax = plot.laws(LAWS)
    heights = sorted(round(bar.get_height(), 3) for bar in ax.patches)
    assert heights == [0.0, 0.3, 0.6, 0.7]  # a law without a token has none of its mass
    assert [label.get_text() for label in ax.get_xticklabels()] == [" a", "\\n"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["exact p", "ratio"]


def test_laws_draw_the_first_tokens_only():
    assert len(plot.laws(LAWS, most=1).patches) == 2


def test_a_law_with_two_shares_of_one_token_is_refused():
    with pytest.raises(UserError, match="same token of one law"):
        plot.laws(pl.concat([LAWS, LAWS]))


def test_a_measure_along_a_setting():
    frame = pl.DataFrame(
        [(0.0, "ratio", 0.8, 0.7, 0.9), (1.0, "ratio", 0.6, 0.5, 0.7), (1.0, "coupled", 0.5, None, None)],
        schema=["temperature", "name", "value", "low", "high"],
        orient="row",
    )
    assert (
        plot.by_setting(frame, "temperature", label="accepted in MiB").get_title(loc="left")[:15] == "Accepted in MiB"
    )
    ax = plot.by_setting(frame, "temperature", label="accepted")
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert lines["ratio"].get_ydata().tolist() == [0.8, 0.6] and lines["coupled"].get_xdata().tolist() == [1.0]
    assert ax.get_ylabel() == "accepted" and ax.get_xlabel() == "temperature"
    assert len(ax.collections[0].get_paths()) == 1  # the band of the line that has an interval


@pytest.mark.parametrize("draw", [plot.laws, lambda frame: plot.by_setting(frame, "temperature")])
def test_an_empty_frame_and_a_missing_column(draw):
    schema = {"name": pl.String, "token": pl.String, "share": pl.Float64, "temperature": pl.Float64}
    empty = pl.DataFrame(schema={**schema, "value": pl.Float64})
    draw(empty)
    with pytest.raises(UserError, match=r"share|value"):
        draw(empty.drop("share", "value"))
