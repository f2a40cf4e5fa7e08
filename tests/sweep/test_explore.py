"""The explorer: what its sliders show is the walk of the policy they stand for."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.replay import replay, walk
from workbench.replay.counts import counts_of
from workbench.replay.predict import predict
from workbench.replay.published import published_costs
from workbench.spec.policies import AdaptiveFloor, FixedK
from workbench.sweep.explore import policy_of

COST = published_costs()["27B, RTX 5090 Laptop"]
SETTINGS = [(0, 0.0, None), (3, 0.0, None), (4, 0.5, None), (4, 0.3, 2), (2, 0.0, 4)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of three short held-out texts."""
    model = wb.load("demo", exact=False)
    texts = wb.corpus("demo", tokenizer=model.tokenizer, limit=3, max_tokens=72, min_tokens=72, overflow="truncate")
    tapes = [replace(tape, prompt_len=24) for tape in texts]
    with wb.quiet():
        return replay(model, tapes, out=tmp_path_factory.mktemp("explore") / "table", k_max=4)


def test_sliders_stand_for_policies():
    assert policy_of(3, 0.2) == FixedK(k=3, p_min=0.2)
    assert policy_of(4, 0.2, 9) == AdaptiveFloor(k=4, cap=4, floor=4, p_min=0.2)
    assert policy_of(0, 0.0, 2) == FixedK(k=0)
    assert policy_of(9, 0.0, 2).k_max == 9, "the cap follows K past its default of 7"


@pytest.mark.parametrize("setting", SETTINGS)
def test_numbers_are_those_of_the_plain_walk(table, setting):
    k, p_min, floor = setting
    explorer = wb.explore(table, COST, k=k, p_min=p_min, floor=floor)
    policy = policy_of(*setting)
    rounds = walk(table, policy=policy)
    wanted, numbers = acceptance(rounds), explorer.numbers()
    assert numbers["tau (accepted per round, without bonus)"] == wanted.tau
    assert numbers["accepted length (with bonus, whole rounds)"] == wanted.accepted_length
    assert numbers["draft efficiency (accepted / drafted)"] == wanted.efficiency
    assert (numbers["rounds"], numbers["of these cut"], numbers["documents"]) == (wanted.rounds, wanted.cut, 3)
    counts = counts_of(rounds, policy=policy, k_max=4, estimator="forced")
    row = explorer.frame().row(k, named=True)
    assert row["speedup"] == pytest.approx(predict(counts, COST, draws=10).speedup.value)
    assert row["emitted_per_round"] == pytest.approx(wanted.emitted_per_round)
    assert numbers["predicted speed-up"].startswith(f"{row['speedup']:.2f}×")


def test_the_figure_shows_the_setting(table):
    explorer = wb.explore(table, COST, k=3, p_min=0.5)
    left, right = explorer.figure().axes
    joint = next(line for line in left.lines if line.get_label() == "joint")
    assert tuple(joint.get_ydata()) == acceptance(walk(table, k=3, p_min=0.5)).joint
    speed = next(line for line in right.lines if line.get_label() == "all")
    assert list(speed.get_ydata()) == explorer.frame()["speedup"].to_list()
    assert "speed-up" in right.get_ylabel()
    unpriced = wb.explore(table).figure().axes[1]
    assert "tokens per round" in unpriced.get_ylabel()


def test_a_walk_is_made_once_and_same_policies_share_it(table, monkeypatch):
    explorer = wb.explore(table, k=2)
    asked = []
    measure = explorer.measure
    monkeypatch.setattr(explorer, "measure", lambda settings: asked.append(len(settings)) or measure(settings))
    explorer.numbers()
    explorer.set(k=4).numbers()
    assert asked == [5]
    explorer.set(p_min=0.5).numbers()
    assert asked == [5, 4], "K = 0 does not read the threshold"
    explorer.set(p_min=0.0).numbers()
    assert asked == [5, 4]


def test_moving_a_slider_redraws_figure_and_numbers(table):
    explorer = wb.explore(table, COST, k=2)
    bundle = explorer._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    assert "application/vnd.jupyter.widget-view+json" in bundle
    before, card = bytes(explorer._picture.value), explorer._card.value
    assert before.startswith(b"\x89PNG") and "K = 2" in card
    explorer._k.value = 3
    assert bytes(explorer._picture.value) != before and "K = 3" in explorer._card.value
    explorer._floor.value = 2
    assert "K from 2 to 3, adaptive" in explorer._card.value and explorer.setting == (3, 0.0, 2)
    explorer.set(k=4, floor=None)
    assert (explorer._k.value, explorer._floor.value) == (4, 0) and "K = 4" in explorer._card.value


def test_a_drag_is_drawn_once_when_it_rests(table, monkeypatch):
    explorer = wb.explore(table, k=1)
    drawn = []
    assert explorer.widget is explorer.widget
    monkeypatch.setattr(explorer, "_redraw", lambda: drawn.append(explorer.setting))

    async def drag():
        for k in (2, 3, 4):
            explorer._k.value = k
        assert not drawn
        await asyncio.sleep(0.3)

    asyncio.run(drag())
    assert drawn == [(4, 0.0, None)]


def test_starting_values_out_of_range_are_refused(table):
    for bad, why in ((dict(k=5), "k=5"), (dict(p_min=1.5), "p_min=1.5"), (dict(floor=0), "floor=0"),
                     (dict(k_max=9), "k_max=9"), (dict(estimator="own"), "wb.own_tapes")):  # fmt: skip
        with pytest.raises(UserError, match=why):
            wb.explore(table, **bad).numbers()
