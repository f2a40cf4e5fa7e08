"""Figures of hygiene show the frames they are given."""

from __future__ import annotations

import polars as pl
import pytest

import workbench as wb
from workbench.core.errors import UserError

PAIRS = pl.DataFrame(
    {
        "kept": ["a", "a", "b"],
        "doc_id": ["c", "d", "e"],
        "estimate": [0.9, 0.5, 0.75],
        "jaccard": [0.92, 0.45, 0.8],
        "dropped": [True, False, True],
    }
)
DOCUMENTS = pl.DataFrame(
    {"doc_id": ["a", "b", "c"], "source": ["x", "x", "y"], "seen": [0, 3, 0], "share": [0.0, 0.3, None]}
)


def points(ax) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata())) for line in ax.get_lines()}


def test_pairs_are_drawn_by_what_became_of_them():
    ax = wb.plot.duplicates(PAIRS, threshold=0.8)
    drawn = points(ax)
    assert drawn["dropped (2)"] == [(0.92, 0.9), (0.8, 0.75)] and drawn["stayed (1)"] == [(0.45, 0.5)]
    assert any(list(line.get_xdata()) == [0.8, 0.8] for line in ax.get_lines())
    assert "3 candidate pairs" in ax.texts[-1].get_text()
    assert wb.plot.duplicates(PAIRS.clear()).texts[0].get_text() == "no candidate pairs"


def test_documents_are_drawn_by_source_and_those_too_short_are_counted():
    ax = wb.plot.contamination(DOCUMENTS)
    (line,) = ax.get_lines()
    assert list(line.get_xdata()) == [0.0, 30.0]
    said = [text.get_text() for text in ax.texts]
    assert said[0] == "1 of 2 documents touched" and "1 document without an n-gram" in said[1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["x"]
    assert wb.plot.contamination(DOCUMENTS.clear()).texts[0].get_text() == "no documents with an n-gram"


def test_frames_without_their_columns_are_refused():
    with pytest.raises(UserError, match="a frame of near pairs needs the columns"):
        wb.plot.duplicates(DOCUMENTS)
    with pytest.raises(UserError, match="the documents of a contamination report needs the columns"):
        wb.plot.contamination(PAIRS)
