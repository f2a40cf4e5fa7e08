"""Figures of kernels: where points stand, what is named, what is refused, and labels that stay on the figure, apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from workbench import plot
from workbench.core.bench_rows import latest_ops, op_ratios, phases_by_arm, read_rows
from workbench.core.errors import UserError
from workbench.core.frames import phase_schema

COMMITTED = read_rows(Path(__file__).resolve().parents[2] / "data" / "bench" / "kernels.jsonl")
PARTS = ("draft", "verify_issue", "verify_wait", "accept", "commit", "other")


def made_calls(n: int = 30) -> pl.DataFrame:
    """As many ops, every second one without counted bytes, some with a counted rate."""
    rng = np.random.default_rng(0)
    moved = [float(10 ** rng.uniform(4, 9)) if i % 2 else None for i in range(n)]
    times = [max(1.2, (x or 1e5) / 4e6) * float(rng.uniform(1, 3)) for x in moved]
    rates = [300.0 if i % 9 == 0 else None for i in range(n)]
    names = [f"operation_{i}" for i in range(n)]
    kinds = {"value": pl.Float64, "bytes": pl.Float64, "tflop_s": pl.Float64}
    given = {"name": names, "case": ["one"] * n, "value": times, "bytes": moved, "tflop_s": rates}
    return pl.DataFrame(given, schema_overrides=kinds).with_columns(copy_tb_s=pl.lit(4.0))


def made_errors() -> pl.DataFrame:
    """Two types of three shapes, the last of them out of bounds in bfloat16."""
    rows = [("m1", 1e-7, 1e-3), ("m0", 0.0, 0.0), ("m15-n97", 2e-7, 5e-2)]
    return pl.DataFrame(
        [
            {"case": case, "dtype": dtype, "error": error, "allowed": allowed}
            for case, *errors in rows
            for dtype, error, allowed in zip(("float32", "bfloat16"), errors, (2e-5, 1e-2))
        ]
    )


def made_phases() -> pl.DataFrame:
    """Synthetic rows of the phases of a round by arm."""
    values = {
        "eager": (3, 9, 0.6, 0.2, 2.2, 0.3),
        "graphed": (1.1, 0.2, 2.5, 0, 0.4, 0.1),
        "streamed": (0, 0, 0, 0, 0, 4),
    }
    same = {"piece": "anatomy", "shape": "4B", "mode": "fast", "group": "round", "unit": "ms", "n": 40}
    rows = [
        {**same, "arm": arm, "part": part, "value": float(ms)}
        for arm, times in values.items()
        for part, ms in zip((*PARTS, "total"), (*times, sum(times)))
        if ms
    ]
    return phases_by_arm(pl.DataFrame(rows), shape="4B")


FIGURES = {
    "roofline": lambda ax=None: plot.roofline(latest_ops(COMMITTED), ax=ax),
    "roofline_made": lambda ax=None: plot.roofline(made_calls(), ax=ax),
    "op_speeds": lambda ax=None: plot.op_speeds(op_ratios(COMMITTED), ax=ax),
    "op_errors": lambda ax=None: plot.op_errors(made_errors(), ax=ax),
    "phases_by_arm": lambda ax=None: plot.phase_anatomy(made_phases(), ax=ax, scale="ms", statistic="median"),
}


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_renders_and_its_labels_stay_on_it_and_apart(name, tmp_path):
    ax = FIGURES[name]()
    ax.figure.savefig(tmp_path / f"{name}.png", dpi=100)
    legend, (low, high) = ax.get_legend(), sorted(ax.get_ylim())
    ticks = [text for at, text in zip(ax.get_yticks(), ax.get_yticklabels()) if low <= at <= high]
    drawn = [*ax.texts, *ticks, *([] if legend is None else legend.get_texts())]
    drawn += [text for text in (ax._left_title, ax.xaxis.label) if text.get_text()]
    drawn = [text for text in drawn if text.get_text()]
    boxes = [Text.get_window_extent(text).padded(-1.5) for text in drawn]
    for text, box in zip(drawn, boxes):
        assert box.x0 >= -1 and box.x1 <= ax.figure.bbox.width + 1, f"{text.get_text()!r} leaves the figure"
        assert box.y0 >= -1 and box.y1 <= ax.figure.bbox.height + 1, f"{text.get_text()!r} leaves the figure"
    for (a, box_a), (b, box_b) in itertools.combinations(zip(drawn, boxes), 2):
        assert not box_a.overlaps(box_b), f"{a.get_text()!r} covers {b.get_text()!r}"
    assert any(text.startswith(("n = ", "n: ")) for text in texts(ax)), "the caption states n"


@pytest.mark.parametrize("name", FIGURES)
def test_given_axes_are_used_and_pyplot_is_left_alone(name):
    before = dict(matplotlib.rcParams)
    ax = Figure(figsize=(8, 5)).subplots()
    assert FIGURES[name](ax) is ax
    assert plt.get_fignums() == [] and dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot.roofline(made_calls().clear()),
        lambda: plot.op_speeds(op_ratios(COMMITTED).clear()),
        lambda: plot.op_errors(made_errors().clear()),
        lambda: plot.phase_anatomy(pl.DataFrame(schema=phase_schema())),
    ],
)
def test_an_empty_frame_is_said_and_not_an_error(draw):
    assert texts(draw())[0].startswith("no ")


def test_every_call_is_a_point_and_the_line_is_the_copy():
    frame = made_calls()
    ax = plot.roofline(frame)
    lines = {line.get_label(): line for line in ax.lines}
    x, y = (np.asarray(one, dtype=float) for one in lines["_copy"].get_data())
    np.testing.assert_allclose(x / y, 4.0e6)  # bytes per µs
    assert y[0] == pytest.approx(frame["value"].min()), "the copy's line begins where it passes the shortest call"
    counted = frame.drop_nulls("bytes")
    for name, moved, took in counted.select("name", "bytes", "value").iter_rows():
        assert lines[f"{name} (1)"].get_xdata() == [moved] and lines[f"{name} (1)"].get_ydata() == [took]
    assert sorted(lines["_not counted"].get_ydata()) == sorted(frame.filter(pl.col("bytes").is_null())["value"])
    looks = [(lines[f"{n} (1)"].get_color(), lines[f"{n} (1)"].get_marker()) for n in counted["name"]]
    assert len({*looks}) == len(looks), "no two ops look alike"
    assert "operation_0, 300 TFLOP/s" in texts(ax)
    with pytest.raises(UserError, match="takes more than 0"):
        plot.roofline(frame.with_columns(value=pl.lit(0.0)))
    with pytest.raises(UserError, match="copy_tb_s is null"):
        plot.roofline(frame.with_columns(copy_tb_s=pl.lit(None, pl.Float64)))
    with pytest.raises(UserError, match="bytes is missing"):
        plot.roofline(frame.drop("bytes"))


def test_speeds_are_points_in_order_beside_their_number():
    frame = op_ratios(COMMITTED)
    ax = plot.op_speeds(frame)
    points = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in points] == frame["ratio"].to_list()
    assert [text for text in texts(ax) if text.endswith("×")] == [f"{one:.2f}×" for one in frame["ratio"]]
    assert f"n = {len(frame)} calls, {(frame['ratio'] < 1).sum()} slower" in texts(ax)[-1]
    with pytest.raises(UserError, match="ratio of two times is above 0"):
        plot.op_speeds(frame.with_columns(ratio=pl.lit(-1.0)))


def test_a_bar_past_its_line_is_hatched_and_no_other():
    ax = plot.op_errors(made_errors())
    bars = [bar for bar in ax.patches if np.isfinite(bar.get_width())]
    assert [bar.get_width() for bar in bars] == pytest.approx([1e-7, 2e-7, 1e-3, 5e-2])
    assert [bool(bar.get_hatch()) for bar in bars] == [False, False, False, True]
    lines = {line.get_label(): line.get_xdata()[0] for line in ax.lines}
    assert lines == {"allowed in float32": 2e-5, "allowed in bfloat16": 1e-2}
    with pytest.raises(UserError, match="one shape in one type"):
        plot.op_errors(pl.concat([made_errors(), made_errors()]))
    with pytest.raises(UserError, match="has tolerances"):
        plot.op_errors(made_errors().with_columns(allowed=pl.col("error") + 1))


def test_arms_share_one_scale_and_an_unparted_round_has_its_own_colour():
    ax = plot.phase_anatomy(made_phases(), scale="ms", statistic="median")
    widths: dict[int, float] = {}
    for bar in ax.patches:
        at = round(bar.get_y() + bar.get_height() / 2)
        widths[at] = widths.get(at, 0.0) + bar.get_width()
    np.testing.assert_allclose([widths[i] for i in range(3)], [100, 100 * 4.3 / 15.3, 100 * 4 / 15.3])
    inks = [bar.get_facecolor() for bar in ax.patches]
    assert inks[-1] not in inks[:-1]
    assert "median of 40 rounds" in texts(ax)[-1] and "mean" not in texts(ax)[-1] + ax.get_xlabel()
    with pytest.raises(UserError, match="statistic"):
        plot.phase_anatomy(made_phases(), statistic="mode")
