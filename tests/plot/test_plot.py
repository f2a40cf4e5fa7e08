"""Figures, tested by what they draw: data of lines and bars, labels, captions, and nothing left behind."""

from __future__ import annotations

import itertools

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from workbench import plot
from workbench.core.errors import UserError
from workbench.core.frames import phases_frame, rounds_frame
from workbench.core.metrics import acceptance
from workbench.core.records import DraftStepTimes, PhaseTimes, RoundRecord, SetupTimes
from workbench.plot import style

SOURCES = {"novels": 0.55, "python": 0.8, "speeches": 0.6}


def make_rounds(n_docs: int = 4, n_rounds: int = 30, k: int = 4) -> pl.DataFrame:
    """Rounds of a few documents per source, acceptance falling with position."""
    rng, frames = np.random.default_rng(0), []
    for source, rate in SOURCES.items():
        for d in range(n_docs):
            records, start = [], int(rng.integers(5, 2500))
            for i in range(n_rounds):
                n = int(rng.integers(0, k + 1))
                a = int(np.cumprod(rng.random(n) < rate).sum())
                phases = PhaseTimes(0.004, 0.006, 0.0, 0.0001, 0.001, 0.0002)
                records.append(RoundRecord(i, start, 1, k, (1,) * n, (0.5,) * n, a, a + 1, 2, "k", "", phases))
                start += a + 1
            frames.append(rounds_frame(records, doc_id=f"{source}-{d}", source=source))
    return pl.concat(frames)


ROUNDS = make_rounds()
PHASES = phases_frame(
    ROUNDS,
    draft_steps=DraftStepTimes(1e-4, 2e-4, 3e-4, 4e-4, 200, True),
    setup=SetupTimes(init=0.002, capture=0.5, prime=0.25, drafter_fill=0.03, rounds=4.2, tail=0.01),
)
DOCUMENTS = pl.DataFrame(
    {
        "doc_id": ["a", "b", "c", "d"],
        "source": ["novels", "novels", "python", "python"],
        "nll": [3.0, 2.0, 1.0, 1.5],
        "n_tokens": [100, 300, 200, 200],
        "n_bytes": [400, 1200, 600, 600],
    }
)
TOKENS = pl.DataFrame(
    [
        {"doc_id": f"{source}{d}", "source": source, "position": p, "nll": level + 2.0 / p}
        for source, level in (("novels", 3.0), ("python", 1.5))
        for d in range(3)
        for p in range(1, 401)
    ]
)
FIGURES = {
    "acceptance": lambda ax=None: plot.acceptance_by_position(ROUNDS, ax=ax),
    "acceptance_pooled": lambda ax=None: plot.acceptance_by_position(ROUNDS, ax=ax, by=None),
    "acceptance_cond": lambda ax=None: plot.acceptance_by_position(ROUNDS, ax=ax, kind="cond"),
    "histogram": lambda ax=None: plot.accepted_histogram(ROUNDS, ax=ax),
    "histogram_by_source": lambda ax=None: plot.accepted_histogram(ROUNDS, ax=ax, by="source"),
    "depth": lambda ax=None: plot.depth(ROUNDS, ax=ax),
    "phases": lambda ax=None: plot.phase_anatomy(PHASES, ax=ax),
    "nll": lambda ax=None: plot.nll(DOCUMENTS, ax=ax),
    "nll_by_position": lambda ax=None: plot.nll_by_position(TOKENS, ax=ax),
}


def texts(ax) -> list[str]:
    """All text drawn on axes and their panels."""
    return [text.get_text() for part in (ax, *ax.child_axes) for text in part.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_renders_and_its_labels_stay_on_it_and_apart(name, tmp_path):
    ax = FIGURES[name]()
    figure = ax.figure
    figure.savefig(tmp_path / f"{name}.png", dpi=100)
    drawn = [text for part in (ax, *ax.child_axes) for text in part.texts if text.get_text()]
    # Of the text alone: an annotation's own extent would include its leader.
    boxes = [Text.get_window_extent(text).padded(-1.5) for text in drawn]
    for text, box in zip(drawn, boxes):
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width + 1, f"{text.get_text()!r} leaves the figure"
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height + 1, f"{text.get_text()!r} leaves the figure"
    for (a, box_a), (b, box_b) in itertools.combinations(zip(drawn, boxes), 2):
        assert not box_a.overlaps(box_b), f"{a.get_text()!r} covers {b.get_text()!r}"
    assert any("n = " in text or text.startswith("n: ") for text in texts(ax)), "the caption states n"


@pytest.mark.parametrize("name", FIGURES)
def test_given_axes_are_used_and_pyplot_is_left_alone(name):
    before = dict(matplotlib.rcParams)
    ax = Figure(figsize=(6, 4)).subplots()
    assert FIGURES[name](ax) is ax
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before
    assert FIGURES[name]() is not ax and len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot.acceptance_by_position(ROUNDS.clear()),
        lambda: plot.acceptance_by_position(ROUNDS.filter(pl.col("drafted") == 0)),
        lambda: plot.accepted_histogram(ROUNDS.clear(), by="source"),
        lambda: plot.depth(ROUNDS.clear()),
        lambda: plot.phase_anatomy(PHASES.clear()),
        lambda: plot.nll(DOCUMENTS.clear()),
        lambda: plot.nll_by_position(TOKENS.clear()),
    ],
)
def test_an_empty_frame_is_said_and_not_an_error(draw):
    assert texts(draw())[0].startswith("no ")


def test_acceptance_lines_are_the_metrics():
    ax = plot.acceptance_by_position(ROUNDS, by=None)
    expected = acceptance(ROUNDS)
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    for label, name in (("joint", "joint"), ("reach", "reach"), ("conditional", "cond")):
        np.testing.assert_allclose(lines[label], getattr(expected, name))
    assert {"joint", "reach", "conditional"} <= set(texts(ax))


def test_acceptance_per_source_has_a_panel_per_kind():
    ax = plot.acceptance_by_position(ROUNDS)
    assert [panel.get_title(loc="left") for panel in ax.child_axes] == ["joint", "reach", "conditional"]
    for panel, name in zip(ax.child_axes, ("joint", "reach", "cond")):
        assert [line.get_label() for line in panel.lines] == sorted(SOURCES)
        for line in panel.lines:
            part = acceptance(ROUNDS.filter(pl.col("source") == line.get_label()))
            np.testing.assert_allclose(line.get_ydata(), getattr(part, name))


def test_intervals_cover_their_values_and_can_be_left_out():
    ax = plot.acceptance_by_position(ROUNDS, by=None, kind="joint")
    values = ax.lines[0].get_ydata()
    for value, ((_, low), (_, high)) in zip(values, ax.collections[0].get_segments()):
        assert low <= value <= high
    assert "bars: 95 % bootstrap by document" in texts(ax)[-1].replace("\n", " ")
    assert not plot.acceptance_by_position(ROUNDS, by=None, ci=False).collections
    one = plot.acceptance_by_position(ROUNDS.filter(pl.col("doc_id") == "python-0"), kind="joint")
    assert not one.collections and "no interval" in texts(one)[-1]


def test_a_table_is_asked_for_its_rounds():
    class Table:
        def rounds(self):
            return ROUNDS

    class Generation:
        rounds = ROUNDS

    for thing in (Table(), Generation()):
        assert plot.acceptance_by_position(thing, by=None).lines
    with pytest.raises(UserError, match="rounds frame"):
        plot.acceptance_by_position([1, 2])
    with pytest.raises(UserError, match="accepted is missing"):
        plot.acceptance_by_position(ROUNDS.drop("accepted"))
    with pytest.raises(UserError, match="source is missing"):
        plot.acceptance_by_position(ROUNDS.drop("source"))
    with pytest.raises(UserError, match="kind"):
        plot.acceptance_by_position(ROUNDS, kind="conditional")


def test_histogram_bars_are_shares():
    ax = plot.accepted_histogram(ROUNDS)
    heights = [bar.get_height() for bar in ax.patches]
    lengths = np.array(acceptance(ROUNDS).lengths)
    np.testing.assert_allclose(heights, 100 * lengths[: len(heights)] / lengths.sum())
    assert sum(heights) == pytest.approx(100)


def test_depth_puts_rounds_into_the_bucket_of_their_start():
    starts = [0, 511, 512, 1023, 1024, 9000]
    frame = ROUNDS.head(6).with_columns(start=pl.Series(starts, dtype=pl.Int32), accepted=pl.Series([0, 2, 3, 3, 1, 4]))
    ax = plot.depth(frame, by=None)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 3, 1, np.nan, np.nan, 4])
    labels = [tick.get_text() for tick in ax.get_xticklabels()]
    assert labels == ["0–512\nn=2", "512–1k\nn=2", "1k–2k\nn=1", "2k–4k\nn=0", "4k–8k\nn=0", "8k+\nn=1"]
    with pytest.raises(UserError, match="edges"):
        plot.depth(frame, edges=(512, 0))


def test_phase_bars_are_shares_of_their_group_and_synchronised_ones_are_marked():
    ax = plot.phase_anatomy(PHASES)
    rows: dict[float, list] = {}
    for bar in ax.patches:
        rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(bar)
    assert [len(bars) for bars in rows.values()] == [6, 4, 6]
    for bars in rows.values():
        assert sum(bar.get_width() for bar in bars) == pytest.approx(100)
    assert [bool(bars[0].get_hatch()) for bars in rows.values()] == [False, True, False]
    names = [tick.get_text() for tick in ax.get_yticklabels()]
    assert names == ["one round", "one draft step\n(synchronised)", "whole generation"]
    assert any("no throughput number" in text for text in texts(ax))
    assert any(text == "11.3 ms\nper round" for text in texts(ax))


def test_nll_is_token_weighted_with_perplexity_and_bits():
    ax = plot.nll(DOCUMENTS)
    means = [float(line.get_xdata()[0]) for line in ax.lines]
    assert means == pytest.approx([(3 * 100 + 2 * 300) / 400, 1.25])
    bits = 2.25 * 400 / np.log(2) / 1600
    assert any(f"ppl {np.exp(2.25):.2f}" in text and f"{bits:.3f} bits/byte" in text for text in texts(ax))
    unknown = DOCUMENTS.with_columns(n_bytes=pl.lit(None, dtype=pl.Int64))
    assert any("bytes unknown" in text for text in texts(plot.nll(unknown)))


def test_nll_by_position_is_a_rolling_mean():
    ax = plot.nll_by_position(TOKENS, window=50)
    line = ax.lines[0]
    for x, y in zip(line.get_xdata(), line.get_ydata()):
        assert y == pytest.approx(3.0 + np.mean(2.0 / np.arange(x - 49, x + 1)))
    assert line.get_xdata()[0] == 50 and line.get_xdata()[-1] == 400


def test_spread_keeps_labels_apart_and_inside():
    got = style.spread([0.5, 0.5, 0.1], [0.2, 0.2, 0.2], low=0.0, high=1.0)
    assert got == pytest.approx([0.5, 0.7, 0.1])
    assert style.spread([0.9, 0.95], [0.2, 0.2], low=0.0, high=1.0) == pytest.approx([0.7, 0.9])
    assert style.spread([0.5] * 4, [0.5] * 4, low=0.0, high=1.0) == pytest.approx([0.125, 0.375, 0.625, 0.875])


@pytest.mark.parametrize("scale", ["linear", "log", "symlog"])
def test_labels_stand_beside_their_lines_on_every_scale(scale: str):
    ax = Figure().subplots()
    ax.set_yscale(scale)
    ax.set(xlim=(0, 1), ylim=(1, 1e4))
    heights = {"linear": (2e3, 8e3), "log": (1e1, 1e3), "symlog": (1e1, 1e3)}[scale]
    style.end_labels(ax, [(1.0, y, f"at {y:g}", "black") for y in heights])
    for note, y in zip(ax.texts, heights):
        beside = ax.transAxes.inverted().transform(ax.transData.transform((1.0, y)))[1]
        assert 0.1 < beside < 0.9 and note.xyann[1] == pytest.approx(beside)
