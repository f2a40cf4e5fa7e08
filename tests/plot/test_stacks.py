"""Stacked bars draw every part where the parts below it end, and refuse what cannot be stacked."""

from __future__ import annotations

import matplotlib.pyplot as plt
import polars as pl
import pytest

from workbench import plot
from workbench.core.errors import UserError

TURNS = pl.DataFrame(
    [(1, 0, 20, "fresh"), (2, 30, 12, "extended"), (3, None, 5, "rewound")],
    schema=["turn", "saved", "computed", "how"],
    orient="row",
)


def test_parts_stand_on_one_another_and_notes_above_the_whole():
    ax = plot.stacked(TURNS, "turn", ("saved", "computed"), label="tokens", note="how")
    lower, upper = ax.containers
    assert [bar.get_height() for bar in lower] == [0, 30, 0] and [bar.get_y() for bar in lower] == [0, 0, 0]
    assert [bar.get_height() for bar in upper] == [20, 12, 5] and [bar.get_y() for bar in upper] == [0, 30, 0]
    assert [(note.get_text(), note.xy) for note in ax.texts] == [
        ("fresh", (0, 20)),
        ("extended", (1, 42)),
        ("rewound", (2, 5)),
    ]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["saved", "computed"]
    assert (ax.get_ylabel(), ax.get_title(loc="left")) == ("tokens", "Tokens by turn") and ax.get_ylim()[1] > 42


def test_given_axes_titles_and_single_parts():
    _, ax = plt.subplots()
    assert plot.stacked(TURNS, "how", ["computed"], ax=ax, title="What is fed") is ax
    assert ax.get_title(loc="left") == "What is fed" and len(ax.containers) == 1 and not ax.texts


def test_what_cannot_be_stacked():
    with pytest.raises(UserError, match="at least 0"):
        plot.stacked(TURNS.with_columns(saved=-pl.col("computed")), "turn", ("saved", "computed"))
    with pytest.raises(UserError, match="parts is empty"):
        plot.stacked(TURNS, "turn", ())
    with pytest.raises(UserError, match="bytes is missing"):
        plot.stacked(TURNS, "turn", ("saved", "bytes"))
    assert plot.stacked(TURNS.head(0), "turn", ("saved",)).texts[0].get_text() == "no bars"
