"""Figures of the policy laboratory, tested by their artists: lines, bars, meshes, labels, and legibility."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from workbench import plot
from workbench.core.calibration import calibration
from workbench.core.errors import UserError
from workbench.core.frames import phases_frame, predicted_phases
from workbench.core.measures import non_dominated
from workbench.core.metrics import acceptance, slot_counts
from workbench.core.records import PhaseTimes, RoundRecord
from workbench.plot import style
from workbench.plot.trees import counts_of


def sweep_rows():
    """A sweep over K and p_min of two sources and both together; K = 2 with p_min = 0.5 is missing."""
    rows = []
    for source, k, p_min in itertools.product(("all", "novels", "python"), range(5), (0.0, 0.5)):
        if (k, p_min) == (2, 0.5) or (k == 0 and p_min):
            continue
        rate = 0.6 if source == "novels" else 0.75
        joint = [(rate - 0.1 * p_min) ** j for j in range(1, k + 1)]
        tau = sum(joint)
        gain = (1 + tau) / (1 + 0.25 * k)
        rows.append(
            dict(
                policy=f"K={k}, p_min={p_min:g}", family="fixed", source=source, k=k, p_min=p_min, floor=None,
                documents=12, tau=tau, joint=joint, emitted_per_round=1 + tau,
                drafted_per_token=k * (1 - 0.5 * p_min) / (1 + tau), speedup=gain, speedup_low=gain - 0.06,
                speedup_high=gain + 0.05,
            )
        )  # fmt: skip
    return rows


SWEEP = pl.DataFrame(sweep_rows(), infer_schema_length=None)
FIXED = SWEEP.filter(pl.col("p_min") == 0)
rng = np.random.default_rng(0)
DRAFTS = pl.DataFrame(
    {
        "doc_id": [f"d{i}" for i in rng.integers(0, 8, 600)],
        "source": rng.choice(["novels", "python"], 600).tolist(),
        "slot": rng.integers(1, 4, 600),
        "confidence": (confidence := rng.beta(3, 2, 600)),
        "hit": rng.random(600) < confidence**2,
        "token_class": rng.choice(["word start", "digit", "newline"], 600).tolist(),
    }
)
MEASURED = pl.DataFrame(
    {
        "policy": ["a", "b", "c", "d"],
        "family": ["fixed", "fixed", "adaptive", "adaptive"],
        "measured": [50.0, 40.0, 30.0, 80.0],
        "predicted": [51.0, 38.0, 30.0, 84.0],
        "predicted_low": [50.0, 37.0, 29.0, 80.0],
        "predicted_high": [52.0, 39.0, 31.0, 88.0],
    }
)
TREES = pl.DataFrame(
    {
        "shape": ["1", "1,1", "2", "1,1,1", "2,1", "1,2"],
        "source": ["all"] * 6,
        "yield": [1.7, 2.2, 1.8, 2.5, 2.3, 2.6],
        "yield_low": [1.6, 2.1, 1.7, 2.4, 2.2, 2.5],
        "yield_high": [1.8, 2.3, 1.9, 2.6, 2.4, 2.7],
    }
)
PHASES = pl.concat(
    [
        phases_frame([RoundRecord(0, 5, 1, 2, (1, 2), (0.5, 0.5), 1, 2, 3, "k", "", PhaseTimes(4e-3, 6e-3, 0, 1e-3))]),
        predicted_phases({"draft": 0.5, "verify": 0.7, "accept": 0.1}, rounds=100),
    ]
)
FIGURES = {
    "speedup": lambda ax=None: plot.speedup_by_k(FIXED, ax=ax),
    "speedup_by": lambda ax=None: plot.speedup_by_k(SWEEP, ax=ax, by="p_min"),
    "survival": lambda ax=None: plot.survival(FIXED.filter(pl.col("k") > 0), ax=ax),
    "pareto": lambda ax=None: plot.pareto(SWEEP, ax=ax),
    "predicted": lambda ax=None: plot.predicted_vs_measured(MEASURED, ax=ax, by="family"),
    "heatmap": lambda ax=None: plot.heatmap(SWEEP, "k", "p_min", "speedup", ax=ax),
    "reliability": lambda ax=None: plot.reliability(DRAFTS, ax=ax, by="source"),
    "classes": lambda ax=None: plot.acceptance_by_class(DRAFTS, ax=ax),
    "tree_shapes": lambda ax=None: plot.tree_shapes(TREES, ax=ax),
    "tree_gain": lambda ax=None: plot.tree_gain(TREES, ax=ax),
    "phases": lambda ax=None: plot.phase_anatomy(PHASES, ax=ax, scale="ms"),
}


def texts(ax) -> str:
    return "\n".join(text.get_text() for part in (ax, *ax.child_axes) for text in part.texts).replace("\n", " ")


def lines(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def ink_of(ax) -> list[Text]:
    return [text for part in (ax, *ax.child_axes) for text in (*part.texts, part.xaxis.label, part.yaxis.label)]


@pytest.mark.parametrize("name", FIGURES)
def test_labels_stay_on_the_figure_and_apart(name, tmp_path):
    ax = FIGURES[name]()
    ax.figure.savefig(tmp_path / "figure.png", dpi=100)
    drawn = [text for text in ink_of(ax) if text.get_text() and text.get_visible()]
    boxes = [Text.get_window_extent(text).padded(-1.5) for text in drawn]
    for text, box in zip(drawn, boxes):
        assert box.x0 >= 0 and box.x1 <= ax.figure.bbox.width + 1, f"{text.get_text()!r} leaves the figure"
        assert box.y0 >= 0 and box.y1 <= ax.figure.bbox.height + 1, f"{text.get_text()!r} leaves the figure"
    for (a, box_a), (b, box_b) in itertools.combinations(zip(drawn, boxes), 2):
        assert not box_a.overlaps(box_b), f"{a.get_text()!r} covers {b.get_text()!r}"


@pytest.mark.parametrize("name", FIGURES)
def test_given_axes_are_used_and_pyplot_is_left_alone(name):
    ax = Figure(figsize=(7, 5)).subplots()
    assert FIGURES[name](ax) is ax and plt.get_fignums() == []


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("theme", ["default", "dark_background"])
def test_text_stands_out_from_its_background(name, theme):
    with plt.style.context(theme):
        ax = FIGURES[name]()
        behind = style.luminance(ax.figure.get_facecolor())
        plain = [text for text in (ax.title, ax._left_title, *ink_of(ax)) if text.get_text()]
        boxed = [text for text in plain if text.get_bbox_patch() is not None]
        free = [text for text in plain if text not in boxed and not _in_cell(ax, text)]
        assert free and all(abs(style.luminance(text.get_color()) - behind) > 0.25 for text in free)
        assert all(style.luminance(text.get_color()) < 0.3 for text in boxed), "dark on its pale box"


def _in_cell(ax, text) -> bool:
    """Whether a text stands in a cell of a mesh, which has a background of its own."""
    return bool(ax.collections) and hasattr(ax.collections[0], "get_coordinates") and text.get_ha() == "center"


def test_dress_can_be_seen_to_fail_on_dark():
    ax = Figure(facecolor="black").subplots()
    ax.set_facecolor("black")
    assert style.tone(ax) != style.INK and style.tone(Figure().subplots()) == style.INK
    assert style.luminance(style.INK) < 0.25, "ink that does not follow the background would vanish on black"


def test_speedup_lines_are_the_frame_with_intervals_and_the_best_ringed():
    ax = plot.speedup_by_k(FIXED)
    mine = FIXED.filter(pl.col("source") == "all").sort("k")
    line = lines(ax)["all"]
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4] and list(line.get_ydata()) == mine["speedup"].to_list()
    bars = ax.collections[0].get_segments()
    assert [(bar[0][1], bar[1][1]) for bar in bars] == mine.select("speedup_low", "speedup_high").rows()
    best = int(mine["speedup"].arg_max())
    assert tuple(lines(ax)["_best"].get_xydata()[0]) == (mine["k"][best], mine["speedup"][best])
    assert lines(ax)["_plain"].get_ydata()[0] == 1 and "plain decode" in texts(ax)
    assert f"best; K = {best} (" in texts(ax) and "12 documents" in texts(ax)
    assert not plot.speedup_by_k(FIXED, ci=False).collections


def test_speedup_lines_part_by_a_setting_or_by_source():
    ax = plot.speedup_by_k(SWEEP, by="p_min")
    assert {"p_min = 0", "p_min = 0.5"} <= set(lines(ax))
    assert len(lines(ax)["p_min = 0.5"].get_ydata()) == 3
    assert {"novels", "python"} <= set(lines(plot.speedup_by_k(FIXED, by="source"))) - {"all"}
    with pytest.raises(UserError, match="same K; they differ in p_min"):
        plot.speedup_by_k(SWEEP)
    with pytest.raises(UserError, match="cost="):
        plot.speedup_by_k(FIXED.with_columns(speedup=pl.lit(None, dtype=pl.Float64)))
    with pytest.raises(UserError, match="source='poems' is not in the frame: choose one of 'all', 'novels', 'python'"):
        plot.speedup_by_k(FIXED, source="poems")
    with pytest.raises(UserError, match="k is missing"):
        plot.speedup_by_k(FIXED.drop("k"))
    many = pl.concat([FIXED.with_columns(floor=pl.lit(i)) for i in range(9)])
    with pytest.raises(UserError, match="9 lines, and 8"):
        plot.speedup_by_k(many, by="floor")


def test_survival_starts_at_one_and_sums_to_tau():
    ax = plot.survival(FIXED.filter(pl.col("k") > 0))
    for row in FIXED.filter(pl.col("k") > 0, pl.col("source") == "all").iter_rows(named=True):
        y = lines(ax)[row["policy"]].get_ydata()
        assert y[0] == 1 and sum(y[1:]) == pytest.approx(row["tau"])
        assert f"{row['policy']}: tau {row['tau']:.2f}" in texts(ax)
    with pytest.raises(UserError, match="two rows give the line K=1, p_min=0; they differ in source"):
        plot.survival(FIXED.filter(pl.col("k") > 0), source=None)
    with pytest.raises(UserError, match="joint is missing"):
        plot.survival(FIXED.drop("joint"))


def test_pareto_highlights_exactly_the_front():
    ax = plot.pareto(SWEEP)
    mine = SWEEP.filter(pl.col("source") == "all")
    front = non_dominated(mine["drafted_per_token"].to_numpy(), mine["emitted_per_round"].to_numpy())
    best = mine.filter(front).sort("drafted_per_token")
    assert list(lines(ax)["front"].get_xdata()) == best["drafted_per_token"].to_list()
    assert len(lines(ax)["dominated"].get_xdata()) == len(mine) - front.sum() > 0
    assert best["policy"][0] in texts(ax) and best["policy"][-1] in texts(ax)
    assert not plot.pareto(SWEEP, labels=0).texts[1:]
    with pytest.raises(UserError, match="drafted_per_token is missing"):
        plot.pareto(SWEEP.drop("drafted_per_token"))


def test_predictions_stand_against_measurements_with_their_median_error():
    ax = plot.predicted_vs_measured(MEASURED)
    points = ax.lines[1]
    assert list(points.get_xdata()) == MEASURED["measured"].to_list()
    assert list(points.get_ydata()) == MEASURED["predicted"].to_list()
    identity = lines(ax)["predicted = measured"].get_xydata()
    assert (identity[:, 0] == identity[:, 1]).all()
    assert points.get_label() == "policies: median |error| 3.5 % (n = 4)"  # of 2, 5, 0 and 5 %
    assert len(ax.collections[0].get_segments()) == 4
    with pytest.raises(UserError, match="above 0"):
        plot.predicted_vs_measured(MEASURED.with_columns(measured=pl.lit(0.0)))


def test_a_heat_map_is_the_frame_with_missing_cells_hatched_and_the_best_framed():
    ax = plot.heatmap(SWEEP, "k", "p_min", "speedup")
    mesh = ax.collections[0]
    mine = SWEEP.filter(pl.col("source") == "all")
    values = np.ma.filled(mesh.get_array(), np.nan).reshape(2, 5)
    for row in mine.iter_rows(named=True):
        assert values[[0.0, 0.5].index(row["p_min"]), row["k"]] == row["speedup"]
    hatched = [patch for patch in ax.patches if patch.get_hatch()]
    assert sorted(patch.get_xy() for patch in hatched) == [(-0.5, 0.5), (1.5, 0.5)]
    framed = [patch for patch in ax.patches if isinstance(patch, Rectangle) and not patch.get_hatch()]
    at = np.unravel_index(np.nanargmax(values), values.shape)
    assert [patch.get_xy() for patch in framed] == [(at[1] - 0.46, at[0] - 0.44)]
    assert mesh.norm.vcenter == 1 and mesh.norm(1.0) == 0.5, "speed-ups diverge around plain decode"
    faster, slower = (to_rgb(mesh.cmap(mesh.norm(one))) for one in (1.2, 0.8))
    assert faster[2] > faster[0] and slower[0] > slower[2]
    assert f"{mine['speedup'][0]:.2f}" in texts(ax) and "hatched: no value" in texts(ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "0.5"]


def test_a_heat_map_of_other_values_is_sequential_and_orders_settings():
    frame = pl.DataFrame(
        {"floor": [4, None, 2], "floor_context": [1024, 1024, 1024], "tau": [1.5, 1.0, 2.0], "source": ["all"] * 3}
    )
    ax = plot.heatmap(frame, "floor", "floor_context", "tau")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["none", "2", "4"]
    assert not hasattr(ax.collections[0].norm, "vcenter") and ax.collections[0].cmap.name == "cividis"
    assert np.ma.filled(ax.collections[0].get_array(), np.nan).ravel().tolist() == [1.0, 2.0, 1.5]
    with pytest.raises(UserError, match="same cell of 'k' and 'source'; they differ in p_min"):
        plot.heatmap(SWEEP, "k", "source", "tau")
    with pytest.raises(UserError, match="w is missing"):
        plot.heatmap(SWEEP, "k", "p_min", "w")
    assert "no cells" in texts(plot.heatmap(SWEEP.clear(), "k", "p_min", "tau"))


def test_reliability_draws_the_calibration():
    ax = plot.reliability(DRAFTS, binning="width", bins=5)
    top, low = ax.child_axes
    found = calibration(DRAFTS["confidence"], DRAFTS["hit"], groups=DRAFTS["doc_id"], bins=5, binning="width")
    curve = top.lines[1]
    assert curve.get_xdata() == pytest.approx([b.confidence for b in found.bins])
    assert curve.get_ydata() == pytest.approx([b.hits.value for b in found.bins])
    bars = top.collections[0].get_segments()
    assert [bar[0][1] for bar in bars] == pytest.approx([b.hits.low for b in found.bins])
    assert f"ECE {found.ece.value:.3f} ({found.ece.low:.3f}" in curve.get_label()
    assert f"Brier {found.brier:.3f}, AUROC {found.auroc:.3f}" in curve.get_label()
    assert sum(bar.get_height() for bar in low.patches) == len(DRAFTS)
    assert len(plot.reliability(DRAFTS, by="source").child_axes[0].lines) == 3
    with pytest.raises(UserError, match="hit is missing"):
        plot.reliability(DRAFTS.drop("hit"))
    with pytest.raises(UserError, match="rounds frame"):
        plot.reliability([0.5])


def test_reliability_takes_rounds():
    record = RoundRecord(0, 5, 1, 2, (1, 2), (0.9, 0.4), 1, 2, 3, "k", "")
    from workbench.core.frames import rounds_frame

    rounds = pl.concat([rounds_frame([record], doc_id=name, source="s") for name in "ab"])
    top, low = plot.reliability(rounds, bins=2).child_axes
    assert top.lines[1].get_xydata().tolist() == [[0.4, 0.0], [0.9, 1.0]]
    assert sum(bar.get_height() for bar in low.patches) == 4


def test_classes_are_conditional_acceptance_of_their_drafts():
    ax = plot.acceptance_by_class(DRAFTS)
    for name in ("word start", "digit", "newline"):
        part = DRAFTS.filter(pl.col("token_class") == name)
        wanted = part.group_by("slot").agg(pl.col("hit").mean()).sort("slot")["hit"].to_list()
        assert lines(ax)[name].get_ydata() == pytest.approx(wanted)
        assert f"{name} ({100 * len(part) / len(DRAFTS):.0f} %)" in texts(ax)
    assert len(lines(plot.acceptance_by_class(DRAFTS, slots=1))["digit"].get_ydata()) == 1
    with pytest.raises(UserError, match=r"token_class is missing"):
        plot.acceptance_by_class(DRAFTS.drop("token_class"))


def test_acceptance_by_depth_has_a_line_per_bucket_of_the_start():
    frame = pl.DataFrame(
        {
            "doc_id": ["a", "b"] * 6,
            "start": [10, 511, 512, 600, 9000, 9001] * 2,
            "drafted": [2] * 12,
            "accepted": [0, 1, 2, 2, 1, 0] * 2,
        }
    )
    ax = plot.acceptance_by_position(frame, by="depth", kind="joint")
    assert {"0–512", "512–1k", "8k+"} == {line.get_label() for line in ax.lines}
    assert lines(ax)["512–1k"].get_ydata().tolist() == [1, 1]
    assert lines(ax)["0–512"].get_ydata().tolist() == [0.5, 0]
    assert "12 rounds of 2 documents" in texts(ax)
    with pytest.raises(UserError, match="start is missing"):
        plot.acceptance_by_position(frame.drop("start"), by="depth")


def test_acceptance_takes_counts_of_a_walk():
    drafted, accepted, groups = [2, 2, 1, 2], [2, 0, 1, 1], [0, 0, 1, 1]
    counts = SimpleNamespace(slots=slot_counts(drafted, accepted, groups=groups), sources=("novels", "python"))
    ax = plot.acceptance_by_position(counts, by=None)
    base = dict(emitted=[1] * 4, chain_stop=["k"] * 4, round_stop=[""] * 4)
    wanted = acceptance(pl.DataFrame({"drafted": drafted, "accepted": accepted, **base}))
    assert lines(ax)["joint"].get_ydata().tolist() == list(wanted.joint)
    assert "4 rounds of 2 documents" in texts(ax)
    joint = plot.acceptance_by_position(counts, kind="joint")
    assert lines(joint)["novels"].get_ydata().tolist() == [0.5, 0.5]
    with pytest.raises(UserError, match="do not hold the depth"):
        plot.acceptance_by_position(counts, by="depth")


def test_phases_predicted_stand_beside_measured_on_one_scale():
    ax = plot.phase_anatomy(PHASES, scale="ms")
    rows = {}
    for bar in ax.patches:
        rows.setdefault(round(bar.get_y() + bar.get_height() / 2), []).append(bar)
    measured, predicted = rows[0], rows[1]
    widths = [sum(bar.get_width() for bar in bars) for bars in (measured, predicted)]
    assert widths == pytest.approx([100 * 11 / 13, 100])
    assert predicted[1].get_facecolor()[:3] == measured[1].get_facecolor()[:3], "the verify has one colour"
    assert predicted[1].get_facecolor()[3] < 1 and measured[1].get_facecolor()[3] == 1
    assert "13 ms per round" in texts(ax) and ax.get_xlabel() == "mean time (ms)"
    with pytest.raises(UserError, match="scale='log'"):
        plot.phase_anatomy(PHASES, scale="log")


def test_tree_shapes_have_a_node_each_and_hedges_without_children():
    ax = plot.tree_shapes(["1,2,3"])
    nodes = {name: [line for line in ax.lines if line.get_label() == name] for name in ("root", "spine", "hedges")}
    assert [len(line.get_xdata()) for line in nodes["spine"]] == [3]
    assert [len(line.get_xdata()) for line in nodes["hedges"]] == [0, 1, 2]
    edges = [line.get_xydata() for line in ax.lines if line.get_marker() == "None"]
    assert len(edges) == 6
    hedges = {tuple(xy) for line in nodes["hedges"] for xy in line.get_xydata()}
    assert all(tuple(edge[0]) not in hedges for edge in edges)
    assert "1,2,3 verify width 7" in texts(ax)
    assert "1,1 verify width 3 yield 2.20" in texts(plot.tree_shapes(TREES))
    for bad in ("", "1,0", "1,a", "1,,2"):
        with pytest.raises(UserError, match="nodes per depth"):
            counts_of(bad)
    with pytest.raises(UserError, match="shape is missing"):
        plot.tree_shapes(TREES.drop("shape"))


def test_tree_gain_compares_at_equal_verify_width():
    ax = plot.tree_gain(TREES)
    assert lines(ax)["best chain"].get_ydata().tolist() == [1.7, 2.2, 2.5]
    assert lines(ax)["best tree"].get_ydata().tolist() == [1.8, 2.6]
    assert [round(x) for x in lines(ax)["best tree"].get_xdata()] == [3, 4]
    assert "2 -18.2 %" in texts(ax) and "1,2 +4.0 %" in texts(ax)
    assert len(lines(ax)["all shapes"].get_xdata()) == 6
    with pytest.raises(UserError, match="two rows give one shape"):
        plot.tree_gain(pl.concat([TREES, TREES]))
    with pytest.raises(UserError, match="yield is missing"):
        plot.tree_gain(TREES.drop("yield"))


@pytest.mark.parametrize("draw", [
    lambda: plot.speedup_by_k(SWEEP.clear()), lambda: plot.survival(SWEEP.clear()),
    lambda: plot.pareto(SWEEP.clear()), lambda: plot.predicted_vs_measured(MEASURED.clear()),
    lambda: plot.reliability(DRAFTS.clear()), lambda: plot.acceptance_by_class(DRAFTS.clear()),
    lambda: plot.tree_shapes(TREES.clear()), lambda: plot.tree_gain(TREES.clear()),
])  # fmt: skip
def test_an_empty_frame_is_said_and_not_an_error(draw):
    assert texts(draw()).startswith("no ")
