"""A cost model's arithmetic is what a hand would do, its fit finds what made the rows, and bad input is a sentence."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import workbench as wb
from workbench.core.errors import CheckpointError, UserError
from workbench.replay.cost import CostModel
from workbench.replay.curves import PHASES, Curve, RoundCost
from workbench.replay.fit import line
from workbench.replay.nonnegative import nonnegative
from workbench.replay.published import published_costs

BY_HAND = RoundCost(
    plain=Curve.constant(10, 0.01),
    first=Curve.of({1: (2, 0.001), 3: (3, 0.003)}),
    step=Curve.constant(1.5),
    verify=Curve.of({1: (11, 0.01), 2: (12, 0.01), 4: (16, 0.02)}),
    accept=Curve.of({1: (0.1, 0), 4: (0.4, 0)}),
    partial=Curve.of({1: (0.5, 0), 3: (0.9, 0.001)}),
    whole=Curve.constant(0.2),
    other=Curve.constant(0.3),
)
TWICE = replace(BY_HAND, verify=Curve.of({1: (20, 0.02), 4: (32, 0.04)}), plain=Curve.constant(18))


FACTS = {"mode": "fast", "threads": 2}


def model(**widths: RoundCost) -> CostModel:
    return CostModel(name="hand", source="a test", widths=widths or {1: BY_HAND}, contexts=(10, 500))  # type: ignore[arg-type]


def test_a_round_is_the_sum_of_its_phases():
    cost, at = model(), 100
    # two steps, one draft verified, none accepted: the row kept is the pending token's
    draft = (2 + 0.1) + 1.5
    assert cost.phases(steps=2, drafted=1, accepted=0, context=at) == pytest.approx(
        {"draft": draft, "verify": 12 + 1, "accept": 0.2, "commit": 0.5, "other": 0.3}
    )
    # three accepted would be a first step of four rows later, which this curve does not know
    with pytest.raises(UserError, match="1 to 3 rows, and 4"):
        cost.phases(steps=3, drafted=3, accepted=3, context=at)
    two = cost.phases(steps=2, drafted=2, accepted=2, context=at)
    unseen = (3 + 0.3) - (2 + 0.1)
    assert two["draft"] == pytest.approx(draft + unseen) and two["commit"] == pytest.approx(0.2)
    assert two["verify"] == pytest.approx((12 + 1 + 16 + 2) / 2)  # three rows, between two and four
    assert cost.round_seconds(steps=2, drafted=2, accepted=2, context=at) == pytest.approx(sum(two.values()))
    # without a chain: no step, but one row that the drafter has to see later
    none = cost.phases(steps=0, drafted=0, context=at)
    assert none["draft"] == pytest.approx(unseen / 2) and none["verify"] == pytest.approx(12)
    assert cost.plain_seconds(context=at) == pytest.approx(11)


def test_accepted_none_is_the_mean_over_accepted_counts():
    cost = model()
    each = [cost.round_seconds(steps=2, drafted=2, accepted=a, context=50) for a in range(3)]
    assert cost.round_seconds(steps=2, drafted=2, context=50) == pytest.approx(np.mean(each))
    assert len({round(x, 6) for x in each}) == 3


def test_grid_and_curve_are_round_seconds():
    cost, contexts = model(), [0, 7, 300]
    grid = cost.grid(2, contexts=contexts)
    assert grid.shape == (3, 3, 3)
    for c, context in enumerate(contexts):
        for s in range(3):
            for d in range(3):
                if d > s:
                    assert np.isnan(grid[c, s, d])
                else:
                    assert grid[c, s, d] == pytest.approx(cost.round_seconds(steps=s, drafted=d, context=context))
    assert cost.curve(2, context=7) == pytest.approx([grid[1, k, k] for k in range(3)])


def test_widths_are_interpolated_and_never_extrapolated():
    cost = CostModel(name="two", source="a test", widths={1: BY_HAND, 4: TWICE})
    one, four = (cost.round_seconds(steps=1, drafted=1, context=9, width=w) for w in (1, 4))
    assert four > one
    assert cost.round_seconds(steps=1, drafted=1, context=9, width=2) == pytest.approx(one + (four - one) / 3)
    assert cost.plain_seconds(width=3, context=0) == pytest.approx(10 + 8 * 2 / 3)
    assert cost.grid(1, contexts=[9], width=2)[0, 1, 1] == pytest.approx(one + (four - one) / 3)
    for call in (cost.plain_seconds, lambda width: cost.curve(1, width=width)):
        with pytest.raises(UserError, match="widths 1 to 4"):
            call(width=5)
    with pytest.raises(UserError, match="knows width 1;"):
        model().plain_seconds(width=2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda cost: cost.round_seconds(steps=1, drafted=2), "steps=1 is not valid"),
        (lambda cost: cost.round_seconds(steps=2, drafted=1, accepted=2), "accepted=2 is not valid"),
        (lambda cost: cost.round_seconds(steps=4, drafted=4), "1 to 4 rows, and 5 were asked for"),
        (lambda cost: cost.round_seconds(steps=1, drafted=1, context=-1), "context=-1 is not valid"),
        (lambda cost: cost.grid(7, contexts=[0]), "1 to 4 rows, and 8 were asked for"),
        (lambda cost: cost.curve(2, width=0), "width=0 is not valid"),
    ],
)
def test_what_a_model_does_not_know_is_a_sentence(call, said):
    with pytest.raises(UserError, match=said):
        call(model())


def test_ratios_are_the_payoff_formula():
    cost = wb.CostModel.from_ratios({1: 1.0, 2: 1.2, 4: 1.6}, draft=0.1, overhead=0.05, commit=0.3, plain_seconds=0.02)
    assert cost.round_seconds(steps=3, drafted=3, accepted=3) == pytest.approx(0.02 * (1.6 + 0.3 + 0.05))
    assert cost.round_seconds(steps=3, drafted=2, accepted=1) == pytest.approx(0.02 * (1.4 + 0.3 + 0.05 + 0.3))
    assert cost.plain_seconds(context=10_000) == 0.02 and cost.k_max == 3
    assert cost.curve(0)[0] == pytest.approx(0.02 * 1.05)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(verify={}), "verify={} is not valid"),
        (dict(verify=[1.0, 1.2]), r"verify=\[1.0, 1.2\] is not valid"),
        (dict(verify={2: 1.1}), "without 1 row"),
        (dict(verify={0: 1.0, 1: 1.0}), "rows of a verify=0"),
        (dict(verify={1: 1.0, 1.5: 1.2}), "rows of a verify=1.5"),
        (dict(verify={1: 0.0}), r"verify\[1\]=0.0"),
        (dict(verify={1: float("nan")}), "nan"),
        (dict(verify={1: "1"}), r"verify\[1\]='1'"),
        (dict(verify={1: 1.0}, draft=-0.1), "draft=-0.1"),
        (dict(verify={1: 1.0}, plain_seconds=0), "plain_seconds=0"),
    ],
)
def test_malformed_ratios_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        CostModel.from_ratios(**given)


def test_a_model_survives_its_file(tmp_path: Path):
    cost = CostModel(name="hand", source="a test", widths={1: BY_HAND, 4: TWICE}, contexts=(1, 9), facts=FACTS)
    path = cost.save(tmp_path / "deep" / "cost.json")
    again = CostModel.load(path)
    assert again.key() == cost.key() and again.widths == cost.widths and again.contexts == (1, 9)
    assert again.facts == FACTS and not list(path.parent.glob("*.tmp"))
    other = CostModel(name="hand", source="a test", widths={1: BY_HAND}, contexts=(1, 9))
    assert other.key() != cost.key()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: [],
        lambda data: {**data, "kind": "anchors"},
        lambda data: {**data, "format": 99},
        lambda data: {**data, "more": 1},
        lambda data: {name: value for name, value in data.items() if name != "widths"},
        lambda data: {**data, "widths": {}},
        lambda data: {**data, "widths": {"one": data["widths"]["1"]}},
        lambda data: {**data, "widths": {"1": {**data["widths"]["1"], "verify": {"knots": [2, 1]}}}},
        lambda data: {**data, "widths": {"1": {**data["widths"]["1"], "step": {"knots": [], "base": [], "slope": []}}}},
        lambda data: {
            **data,
            "widths": {"1": {**data["widths"]["1"], "step": {"knots": [], "base": ["1"], "slope": [0]}}},
        },
        lambda data: {**data, "contexts": ["a"]},
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, spoil):
    path = model().save(tmp_path / "cost.json")
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match="is not a cost model"):
        CostModel.load(path)


def test_a_file_that_is_no_json_or_is_not_there_is_refused(tmp_path: Path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a cost model"):
        CostModel.load(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="is not a file"):
        CostModel.load(tmp_path / "none.json")


# --- fit -------------------------------------------------------------------------------------------------------------


def phase_rows(**facts: Any) -> list[dict[str, Any]]:
    """Rows as the benchmark would give them on a machine of exactly the costs BY_HAND, in milliseconds."""
    out: list[dict[str, Any]] = []
    kinds = [("plain", "plain", None), ("draft step", "step", None), ("commit whole", "whole", None)]
    kinds += [("other", "other", None), *(("draft first", "first", n) for n in (1, 3))]
    kinds += [("verify", "verify", n) for n in (1, 2, 4)] + [("accept", "accept", n) for n in (1, 4)]
    kinds += [("commit part", "partial", n) for n in (1, 3)]
    for phase, curve, count in kinds:
        for context, n in ((20.0, 3), (200.0, 9), (450.0, 5)):
            seconds = getattr(BY_HAND, curve).lines(count or 1, "") @ [1.0, context]
            shared = phase in ("draft step", "draft first", "accept", "other")
            out.append(
                {"benchmark": "phases", "phase": phase, "rows": count, "context": context, "width": 1, "n": n,
                 "value": 900 * seconds, "mean": 1e3 * seconds, "mode": "fast", "threads": 1, "run": "a",
                 "strategy": None if shared else "columns", **facts}
            )  # fmt: skip
    return out


@pytest.mark.parametrize("form", ["list", "frame", "file"])
def test_a_fit_finds_the_costs_that_made_the_rows(tmp_path: Path, form: str):
    rows: Any = phase_rows()
    if form == "frame":
        rows = pl.DataFrame(rows)
    elif form == "file":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = tmp_path / "rows.jsonl"
    cost = CostModel.fit(rows)
    assert cost.contexts == (20, 450) and cost.facts["strategy"] == "columns" and cost.facts["threads"] == 1
    for steps, drafted, accepted in ((0, 0, 0), (2, 1, 0), (2, 2, 2), (2, 2, 1)):
        for context in (0, 100, 3000):
            asked = dict(steps=steps, drafted=drafted, accepted=accepted, context=context)
            assert cost.phases(**asked) == pytest.approx(model().phases(**asked))
    faster = CostModel.fit(rows, statistic="median")
    assert faster.plain_seconds(context=100) == pytest.approx(0.9 * cost.plain_seconds(context=100))


def test_a_fit_takes_one_kind_of_rows_only():
    both = phase_rows() + [{**row, "mode": "exact"} for row in phase_rows()]
    with pytest.raises(UserError, match="mode exact, fast: say which, such as mode='exact'"):
        CostModel.fit(both)
    assert CostModel.fit(both, mode="exact").facts["mode"] == "exact"
    with pytest.raises(UserError, match="run a, b: say which"):
        CostModel.fit(phase_rows() + phase_rows(run="b"))
    with pytest.raises(UserError, match="strategy='tape' is not among the rows"):
        CostModel.fit(phase_rows(), strategy="tape")
    with pytest.raises(UserError, match="no phase 'verify' at width 1 of 1 row"):
        CostModel.fit([row for row in phase_rows() if (row["phase"], row["rows"]) != ("verify", 1)])
    with pytest.raises(UserError, match="no phase 'other'"):
        CostModel.fit([row for row in phase_rows() if row["phase"] != "other"])
    with pytest.raises(UserError, match="no rows of"):
        CostModel.fit([{"benchmark": "decode", "name": "plain exact", "value": 1.0}])
    with pytest.raises(UserError, match="mean is missing"):
        CostModel.fit([{k: v for k, v in row.items() if k != "mean"} for row in phase_rows()])


def test_wider_batches_pay_the_host_once_per_sequence():
    wide = [
        {**row, "width": 2, "strategy": "columns"} for row in phase_rows() if row["phase"] not in ("accept", "other")
    ]
    cost = CostModel.fit(phase_rows() + wide)
    one, two = (cost.phases(steps=2, drafted=1, accepted=0, context=50, width=w) for w in (1, 2))
    for phase in PHASES:
        times = 2 if phase in ("accept", "other") else 1
        assert two[phase] == pytest.approx(times * one[phase])
    assert cost.plain_seconds(context=50, width=2) == pytest.approx(10.5 + 2 * (0.1 + 0.3))


def test_a_line_is_weighted_least_squares_and_neither_falls_nor_begins_below_zero():
    x, y, w = np.array([0.0, 1, 4]), np.array([1.0, 2, 9]), np.array([1.0, 5, 2])
    slope, base = np.polyfit(x, y, 1, w=np.sqrt(w))
    assert line(x, y, w) == pytest.approx((base, slope))
    assert line(x, 10 - y, w)[1] == 0 and line(x, 10 - y, w)[0] == pytest.approx(10 - (w @ y) / w.sum())
    assert line(np.array([3.0, 3]), np.array([1.0, 2]), np.array([1.0, 1])) == pytest.approx((1.5, 0.0))
    steep = np.array([0.1, 2, 30])
    assert np.polyfit(x, steep, 1, w=np.sqrt(w))[1] < 0, "what would begin below zero"
    assert line(x, steep, w) == pytest.approx((0, (w * x) @ steep / ((w * x) @ x)))


def test_nonnegative_least_squares_are_the_best_of_every_choice_of_unknowns():
    random = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        a, b = random.normal(size=(9, 5)) * 10.0 ** random.integers(-3, 4, 5), random.normal(size=9)
        a[:, 4] *= random.integers(0, 2)
        x, best = nonnegative(a, b), np.inf
        for mask in itertools.product((False, True), repeat=5):
            some = np.zeros(5)
            some[list(mask)] = np.linalg.lstsq(a[:, list(mask)], b, rcond=None)[0]
            if (some >= 0).all():
                best = min(best, float(np.linalg.norm(a @ some - b)))
        assert (x >= 0).all() and np.linalg.norm(a @ x - b) <= best * (1 + 1e-9)
        held += int((np.linalg.lstsq(a, b, rcond=None)[0] < 0).any())
    assert held > 30, "plain least squares would be negative in most of them"


def test_no_time_is_negative_after_a_noisy_turn():
    noisy = {
        ("verify", 1): (0.1, 9, 300),
        ("verify", 4): (1, 2, 90),
        ("draft first", 3): (0.5, 1, 2),
        ("plain", None): (0, 1, 99),
    }
    rows = phase_rows()
    for (phase, count), values in noisy.items():
        for row, ms in zip([row for row in rows if (row["phase"], row["rows"]) == (phase, count)], values, strict=True):
            row["mean"] = 1e3 * ms
    cost = CostModel.fit(rows)
    for context in (0, 1, 20, 5000):
        for steps, drafted in ((0, 0), (1, 1), (2, 1), (2, 2)):
            for accepted in range(drafted + 1):
                asked = dict(steps=steps, drafted=drafted, accepted=accepted, context=context)
                assert min(cost.phases(**asked).values()) >= 0
        assert cost.plain_seconds(context=context) >= 0
    taught = [row for row in rows if (row["phase"], row["rows"]) == ("draft first", 3)]
    one = [row for row in rows if (row["phase"], row["rows"]) == ("draft first", 1)]
    assert all(a["mean"] < b["mean"] for a, b in zip(taught, one)), "fewer rows took longer in that turn"


# --- published curves -------------------------------------------------------------------------------------------------


def speedup(cost: CostModel, k: int, accepted: float) -> float:
    """Of rounds that draft k and accept so many on average."""
    return (1 + accepted) * cost.plain_seconds() / cost.round_seconds(steps=k, drafted=k, accepted=k)


def test_published_costs_give_the_published_speeds():
    curves = published_costs()
    assert all(len(cost.source) > 60 and cost.name == name for name, cost in curves.items())
    laptop = curves["27B, RTX 5090 Laptop"]
    prose = {1: (0.855, 68.8), 2: (0.811, 88.0), 3: (0.663, 90.0), 4: (0.602, 84.9)}
    for k, (share, speed) in prose.items():
        assert speedup(laptop, k, share * k) / laptop.plain_seconds() == pytest.approx(speed, rel=0.02)
    assert speedup(laptop, 3, 3 * 0.715) == pytest.approx(2.18, rel=0.05)  # code, which nothing was fitted to
    moe = curves["35B-A3B, RTX 5090 Laptop"]
    assert speedup(moe, 2, 2 * 0.524) / moe.plain_seconds() == pytest.approx(212.7, rel=0.01)
    with pytest.raises(UserError, match="1 to 6 rows"):
        laptop.curve(8)


def test_published_break_evens_follow():
    mac = published_costs()["27B INT4, M4 Max"]
    for block, even, accepted, projected in ((2, 1.71, 1.84, 1.66), (4, 2.86, 3.20, 1.47), (8, 4.53, 4.29, 1.17)):
        assert mac.curve(block)[block] / mac.plain_seconds() == pytest.approx(even, rel=0.01)
        assert speedup(mac, block, accepted) == pytest.approx(projected, rel=0.01)
    assert mac.curve(15)[15] / mac.plain_seconds() == pytest.approx(7.96, rel=0.01)
    assert speedup(mac, 15, 4.29) == pytest.approx(0.66, rel=0.02)
    tree = published_costs()["27B, tree step"]
    assert tree.curve(7)[7] / 5.581 == pytest.approx(0.02127, rel=1e-3)
    one = published_costs()["35B MoE, one draft"]
    assert one.curve(1)[1] / one.plain_seconds() - 1 == pytest.approx(0.66, abs=0.01)  # acceptance to break even


def test_a_wrong_row_count_is_seen_by_the_published_numbers():
    """Control: verify rows taken as K instead of K + 1 misses the published speeds."""
    laptop = published_costs()["27B, RTX 5090 Laptop"]
    plain, verify = laptop.plain_seconds(), laptop.widths[1].verify
    wrong = laptop.round_seconds(steps=4, drafted=4, accepted=4) + verify.base[3] - verify.base[4]
    assert abs((1 + 4 * 0.602) * plain / wrong / plain / 84.9 - 1) > 0.05


def test_a_card_says_what_the_model_holds():
    text = repr(model().card())
    assert "hand" in text and "round of 2 drafts" in text
    assert "wb-card" in model()._repr_html_()
