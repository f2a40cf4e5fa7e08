"""What a generation tells about itself: phases, draft-step anatomy, setup, summary, counters, frames."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import median
from time import perf_counter

import pytest
import torch

from workbench.core.frames import PHASES, STAGES, STEP_PARTS
from workbench.core.metrics import Telemetry, acceptance
from workbench.core.records import CHAIN_STOPS, ROUND_STOPS
from workbench.spec.generate import generate
from workbench.spec.proposers import ScriptedProposer
from workbench.spec.result import Generation
from workbench.spec.round import run_round
from workbench.spec.telemetry import StepProbe


@pytest.fixture(scope="module")
def done(lively) -> Generation:
    errs = {len(lively.ids) + i for i in (3, 7, 8, 15, 21)}
    proposer = ScriptedProposer(lively.truth, lambda at, slot: at in errs, vocab_size=211)
    return generate(lively.model, lively.ids, k=4, max_new_tokens=40, ignore_eos=True, proposer=proposer)


@torch.inference_mode()
def test_phases_sum_to_the_wall_time_of_a_round(lively):
    session = lively.session(k=4)
    covered = []
    for _ in range(12):
        began = perf_counter()
        record = run_round(session.state, 60)
        wall = perf_counter() - began
        phases = record.phases
        assert all(getattr(phases, name) >= 0 for name in PHASES)
        assert 0 < phases.total <= wall
        covered.append(phases.total / wall)
    assert median(covered) > 0.9


@torch.inference_mode()
def test_phases_leave_no_gap(lively, counting):
    """Under a clock that moves by one second per reading, the phases are what lies between first and last reading."""
    session = lively.session(k=4)
    record = run_round(session.state, 60)
    assert record.phases.total == counting[-1] - counting[0] == len(counting) - 1
    parts = record.phases
    assert (parts.draft, parts.verify_issue, parts.verify_wait, parts.accept, parts.commit) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("k", [0, 4])
def test_the_stages_of_a_generation(lively, k):
    began = perf_counter()
    done = generate(lively.model, lively.ids, k=k, max_new_tokens=30, ignore_eos=True)
    wall = perf_counter() - began
    times = {name: getattr(done.setup, name) for name in STAGES}
    assert all(value >= 0 for value in times.values()) and sum(times.values()) <= wall
    assert sum(times.values()) > 0.8 * wall
    assert sum(r.phases.total for r in done.records) <= times["rounds"]
    assert sum(r.phases.total for r in done.records) > 0.7 * times["rounds"]
    assert times["prime"] > 0 and (times["drafter_fill"] > 1e-4) == (k > 0)


def test_anatomy_measures_every_draft_step(lively):
    done = generate(lively.model, lively.ids, k=3, max_new_tokens=25, ignore_eos=True, anatomy=True)
    steps = done.draft_steps
    assert steps is not None and not steps.synchronised
    assert steps.steps == sum(r.k for r in done.records) == sum(r.drafted for r in done.records)
    parts = [getattr(steps, name) for name in STEP_PARTS]
    assert all(part > 0 for part in parts)
    drafting = sum(r.phases.draft for r in done.records)
    assert 0.5 * drafting < sum(parts) * steps.steps <= drafting
    frame = done.phases
    assert set(frame.filter(frame["group"] == "draft step")["part"]) == set(STEP_PARTS)
    plain = generate(lively.model, lively.ids, k=3, max_new_tokens=25, ignore_eos=True)
    assert plain.tokens == done.tokens and [r.key() for r in plain.records] == [r.key() for r in done.records]


def test_without_anatomy_there_is_none(lively, done):
    assert done.draft_steps is None
    assert set(done.phases["group"]) == {"round", "setup"}
    nothing = generate(lively.model, lively.ids, k=3, max_new_tokens=1, ignore_eos=True, anatomy=True)
    assert nothing.draft_steps is None and set(nothing.phases["group"]) == {"setup"}


def test_a_probe_counts_steps_at_their_head_and_time_between_marks():
    probe = StepProbe(torch.device("cpu"))
    assert probe.times() is None and not probe.synchronised
    for _ in range(3):
        for part in ("start", "glue", "attention", "ffn", "head"):
            probe(part)
    times = probe.times()
    assert times.steps == 3 and times.glue == probe.seconds["glue"] / 3


def test_the_summary_counts_and_names_its_aggregation(lively, done):
    told = done.summary
    records = done.records
    assert told["tokens"] == 40 and told["finish"] == "length" and told["exact"] is True
    assert told["aggregation"] == "pooled" and told["rounds"] == len(records)
    assert told["drafted"] == sum(r.drafted for r in records)
    assert told["accepted"] == sum(r.accepted for r in records) and told["emitted"] == 39
    assert told["tau"] == told["accepted"] / told["rounds"]
    whole = [r for r in records if not r.cut]
    assert told["accepted_length"] == pytest.approx(sum(1 + r.accepted for r in whole) / len(whole))
    assert told["repeated_8grams"] == 0.0
    assert told["tokens_per_second"] == pytest.approx(39 / told["seconds"])
    json.dumps(told, allow_nan=False)


def test_the_frame_is_the_records(done):
    frame = done.rounds
    assert frame["start"].to_list() == [r.start for r in done.records]
    assert frame["draft_ids"].to_list() == [list(r.draft_ids) for r in done.records]
    assert acceptance(frame).row() == acceptance(done.records).row()
    assert {r.chain_stop for r in done.records} <= set(CHAIN_STOPS)
    assert {r.round_stop for r in done.records} <= set(ROUND_STOPS)


def test_counters_of_a_session_by_burst(lively):
    """delta between readings, merge of parts, tau: the counters of the whole."""
    session = lively.session(k=4, proposer=ScriptedProposer(lively.truth, lambda a, s: a % 3 == 0, vocab_size=211))
    readings = [Telemetry.of(session.state.records)]
    for size in (5, 1, 13, 8):
        session.burst(size)
        readings.append(Telemetry.of(session.state.records))
    whole = readings[-1]
    assert whole.emitted == 27 and whole.rounds == len(session.state.records)
    parts = [after.delta(before) for before, after in pairwise(readings)]
    assert [part.emitted for part in parts] == [5, 1, 13, 8]
    merged = Telemetry()
    for part in parts:
        merged = merged.merge(part)
    assert merged == whole
    assert whole.tau == sum(r.accepted for r in session.state.records) / whole.rounds
    assert whole.pos_accepted[0] == sum(r.accepted >= 1 for r in session.state.records)
    assert whole.cut == sum(r.cut for r in session.state.records) >= 3
    assert Telemetry().tau is None


def test_a_generation_shows_itself(done):
    html = done._repr_html_()
    assert "accepted / drafted" in html and "exact" in html
