"""Planned rounds are what was planned, their phases add up, and what they measure fits a cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

import workbench as wb
from workbench.bench import phases, planned
from workbench.bench.phases import PhaseMeter
from workbench.bench.planned import batched, continuation, plain, run_plain, run_plan, speculative
from workbench.core.progress import quiet
from workbench.replay.cost import CostModel
from workbench.spec import bursts
from workbench.spec import round as rounds

K = 3
PROMPT = [5, 9, 2, 44, 7, 31, 5, 9]
PLAN = [(K, K), (2, 1), (0, 0), (3, 0), (3, 3), (1, 1), (3, 2), (1, 0), (2, 2), (2, 0), (3, 1)]


@pytest.fixture(params=["tape", "columns", "snapshot"])
def base(request, tiny):
    model = tiny(seed=3)
    text = continuation(model, PROMPT, 60)
    return speculative(model, PROMPT, text, request.param, K)


@pytest.fixture
def ticking(monkeypatch) -> Callable[[], float]:
    """A clock that moves by 1 whenever it is read."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    for module in (rounds, bursts, planned):
        monkeypatch.setattr(module, "perf_counter", clock)
    return clock


def test_rounds_draft_and_accept_as_planned(base):
    text, fork = base.state.proposer.text, base.fork()
    found = list(run_plan(fork, PLAN))
    records = fork.state.records
    assert [(r.drafted, r.accepted) for r in records] == PLAN and not any(r.cut for r in records)
    assert fork.tokens == text[: len(fork.tokens)]
    kept = Counter((m.phase, m.rows) for m in found)
    for k, a in PLAN[1:]:
        kept["verify", 1 + k] -= 1
        kept["accept", 1 + k] -= 1
        kept["other", None] -= 1
        kept[("commit whole", None) if a == k else ("commit part", 1 + a)] -= 1
        if k > 1:
            kept["draft step", None] -= 1
    first = [m.rows for m in found if m.phase == "draft first"]
    # what the drafter sees first: the pending token, and what was accepted since its last chain, one more after k = 0
    assert first == [1 + 3, 1 + 1 + 1, 1 + 0, 1 + 3, 1 + 1, 1 + 2, 1 + 0, 1 + 2, 1 + 0]
    assert {key: n for key, n in kept.items() if n and key[0] != "draft first"} == {}
    assert [m.context for m in found if m.phase == "other"] == [1 + r.start for r in records[1:]]


def test_another_text_is_not_accepted_as_planned(base):
    """Control: the planned acceptances come from the known text, not from the plan."""
    fork = base.fork()
    fork.state.proposer.text = [*fork.state.proposer.text[: len(fork.tokens)], *[1] * 60]
    list(run_plan(fork, PLAN))
    assert [(r.drafted, r.accepted) for r in fork.state.records] != PLAN


def test_the_phases_of_a_round_add_up_to_its_wall_time(base, ticking):
    alone, fork = base.fork(), base.fork()
    list(run_plan(alone, PLAN[:1]))
    warm_up = alone.times.rounds - base.times.rounds
    spent = 0.0
    steps = iter([k - 1 for k, _ in PLAN[1:] if k > 1])
    for item in run_plan(fork, PLAN):
        spent += item.seconds * (next(steps) if item.phase == "draft step" else 1)
    assert spent == fork.times.rounds - base.times.rounds - warm_up > 80


def test_plain_steps_are_rounds_without_a_drafter(tiny):
    model = tiny(seed=3)
    base = plain(model, PROMPT, continuation(model, PROMPT, 12), "columns")
    fork = base.fork()
    found = list(run_plain(fork, 5))
    assert [m.context for m in found] == [10, 11, 12, 13, 14] and all(m.phase == "plain" for m in found)
    assert [r.drafted for r in fork.state.records] == [0] * 6 and len(base.tokens) == 9


@pytest.mark.parametrize("strategy", ["tape", "columns", "snapshot"])
def test_batches_measure_every_number_of_rows(tiny, strategy):
    model = tiny(seed=3)
    prompts = torch.randint(0, 83, (2, 40), generator=torch.Generator().manual_seed(0))
    found = list(batched(model, prompts, strategy, (1, 2, 4), repeats=2, chunk=16))
    rows = Counter((m.phase, m.rows) for m in found)
    assert rows["verify", 4] == 2 * 4 and rows["verify", 2] == 2 * 2 and rows["verify", 1] == 2 == rows["plain", None]
    assert {n for phase, n in rows if phase == "commit part"} == {1, 2, 3}
    assert all(m.context == 36 and m.seconds > 0 for m in found)


def test_measured_phases_fit_a_cost_model():
    model = wb.load("demo", exact=False)
    with quiet():
        meter = PhaseMeter(model, exact=False, contexts=(16, 24), k_max=2, run="r", strategies=["columns"])
        meter.turn()
        meter.wide(2, 16, (1, 2, 3), repeats=1)
    rows = list(meter.rows())
    assert all(row["low"] <= row["value"] <= row["high"] and row["unit"] == "ms" for row in rows)
    cost = CostModel.fit(rows)
    assert cost.k_max == 2 and sorted(cost.widths) == [1, 2] and cost.facts["mode"] == "fast"
    for seconds in (cost.plain_seconds(context=16), cost.round_seconds(steps=2, drafted=2, context=16)):
        assert 0 < seconds < 60  # no order: one turn on a busy machine may stall anywhere
    assert cost.curve(2, context=20, width=2)[2] > 0
    assert not model.exact


def test_every_plan_holds_every_kind_of_round():
    meter = object.__new__(PhaseMeter)
    meter.k_max, meter.rng = 4, phases.random.Random(1)
    for _ in range(20):
        plan = meter._plan()
        assert plan[0] == (4, 4) and plan[1][0] > 0
        assert sorted(plan[1:]) == [(k, a) for k in range(5) for a in range(k + 1)]
