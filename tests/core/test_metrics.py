"""Metrics: the unit vector, the identities and what breaks them, aggregations, telemetry, bootstrap, frames."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core import metrics
from workbench.core.errors import UserError
from workbench.core.frames import phases_frame, records_from, round_schema, rounds_frame
from workbench.core.metrics import Telemetry, acceptance, bootstrap_by, bootstrap_difference, check_identities
from workbench.core.records import ROUND_STOPS, DraftStepTimes, PhaseTimes, RoundRecord, SetupTimes


def make(masks: str, *, stop: str = "", start: int = 10) -> list[RoundRecord]:
    """Rounds from masks such as "TTF": one letter per drafted token, T for accepted; "-" drafts nothing."""
    out = []
    for index, mask in enumerate(masks.split()):
        n = len(mask.strip("-"))
        accepted = len(mask) - len(mask.lstrip("T"))
        out.append(
            RoundRecord(
                index=index,
                start=start,
                base=1,
                k=3,
                draft_ids=tuple(range(n)),
                draft_top1=(0.5,) * n,
                accepted=accepted,
                emitted=accepted + 1,
                bonus=7,
                chain_stop="k" if n == 3 else "p_min" if n else "none",
                round_stop=stop,
                phases=PhaseTimes(draft=0.001 * (index + 1), verify_issue=0.002),
            )
        )
        start += accepted + 1
    return out


VECTOR = make("TTT TTF TFF FFF")
rounds_of = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.sampled_from(ROUND_STOPS))),
    max_size=30,
).map(
    lambda triples: [
        RoundRecord(i, i, 1, 6, (1,) * n, (0.5,) * n, a, a + 1, None, "k", stop)
        for i, (n, a, stop) in enumerate(triples)
    ]
)


def test_the_unit_vector():
    got = acceptance(VECTOR)
    assert (got.rounds, got.drafted, got.accepted, got.emitted, got.cut) == (4, 12, 6, 10, 0)
    assert got.joint == (3 / 4, 2 / 4, 1 / 4)
    assert got.reach == (1.0, 1.0, 1.0)
    assert got.cond == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert (got.tau, got.accepted_length, got.efficiency, got.full_accepts) == (1.5, 2.5, 0.5, 1)
    assert got.lengths == (1, 1, 1, 1)
    assert got.chain_stops == {"k": 4}
    assert got.aggregation == "pooled"
    assert [row["slot"] for row in got.positions()] == [1, 2, 3]
    json.dumps(got.row(), allow_nan=False)


def test_short_drafts_separate_reach_from_cond():
    got = acceptance(make("TTT T TF F -"))
    assert got.joint == (3 / 5, 1 / 5, 1 / 5)
    assert got.reach == pytest.approx((4 / 5, 2 / 3, 1.0))
    assert got.cond == pytest.approx((3 / 4, 1 / 2, 1.0))
    assert (got.pos_drafted, got.pos_tested) == ((4, 2, 1), (4, 2, 1))
    assert got.chain_stops == {"k": 1, "none": 1, "p_min": 3}


def test_cut_rounds_stay_out_of_accepted_length_and_in_everything_else():
    got = acceptance(make("TTF FFF") + make("TTT", stop="stop"))
    assert got.cut == 1 and got.round_stops == {"": 2, "stop": 1}
    assert got.accepted_length == pytest.approx((3 + 1) / 2)
    assert got.tau == pytest.approx(5 / 3)
    assert got.joint_whole == (1 / 2, 1 / 2, 0.0)
    assert got.emitted_per_round == pytest.approx(8 / 3)
    only_cut = acceptance(make("TTT", stop="budget"))
    assert only_cut.accepted_length is None and only_cut.joint_whole == (None, None, None)


def test_cuts_are_those_of_the_record():
    cuts = {stop for stop in ROUND_STOPS if make("TTT", stop=stop)[0].cut}
    assert cuts == {*metrics.CUTS}


def test_without_rounds_every_ratio_is_none():
    for aggregation in metrics.AGGREGATIONS:
        got = acceptance([], aggregation=aggregation)
        assert (got.rounds, got.tau, got.accepted_length, got.efficiency, got.joint) == (0, None, None, None, ())
        assert acceptance(rounds_frame([], doc_id="a"), aggregation=aggregation) == got
    assert Telemetry().tau is None
    nothing = acceptance(make("- -"))
    assert (nothing.tau, nothing.accepted_length, nothing.efficiency) == (0.0, 1.0, None)


def test_aggregations_differ_and_say_so():
    requests = {"long": make("TTT " * 9), "short": make("FFF")}
    pooled, mean = (acceptance(requests, aggregation=name) for name in metrics.AGGREGATIONS)
    assert (pooled.tau, mean.tau) == pytest.approx((2.7, 1.5))
    assert (pooled.joint[0], mean.joint[0]) == pytest.approx((0.9, 0.5))
    assert (pooled.aggregation, mean.aggregation) == metrics.AGGREGATIONS
    assert pooled.requests == mean.requests == 2
    # The short request never reaches slot 2: its cond there is unknown, not zero.
    assert mean.cond[1] == 1.0 and mean.joint[1] == 0.5
    frames = pl.concat(rounds_frame(records, doc_id=name) for name, records in requests.items())
    assert acceptance(frames, aggregation="request_mean") == mean


@given(st.lists(rounds_of, max_size=4), st.sampled_from(metrics.AGGREGATIONS))
def test_identities_hold_for_any_rounds(requests, aggregation):
    got = acceptance({str(i): records for i, records in enumerate(requests)}, aggregation=aggregation)
    flat = [record for records in requests for record in records]
    for j, joint in enumerate(acceptance(flat).joint, start=1):
        assert joint == pytest.approx(sum(record.accepted >= j for record in flat) / len(flat))
    assert got.rounds == len(flat)


@pytest.mark.parametrize(
    "wrong", ["cond over drafted", "joint over drafted", "bonus counted", "cut counted", "shifted"]
)
def test_a_wrong_definition_fails_the_identities(wrong):
    got = acceptance(make("TTT TFF FT F TF T") + make("TTT", stop="stop"))
    check_identities(got)
    over_drafted = tuple(a / d for a, d in zip(got.pos_accepted, got.pos_drafted))
    broken = {
        "cond over drafted": {"cond": over_drafted},
        "joint over drafted": {"joint": over_drafted},
        "bonus counted": {"tau": got.emitted / got.rounds},
        "cut counted": {"accepted_length": 1 + got.accepted / got.rounds},
        "shifted": {"reach": got.reach[1:] + (1.0,)},
    }[wrong]
    with pytest.raises(AssertionError):
        check_identities(replace(got, **broken))


def test_bad_rounds_are_refused():
    with pytest.raises(UserError, match="accepted 4 of 3"):
        acceptance([replace(VECTOR[0], accepted=4)])
    with pytest.raises(UserError, match="lacks round_stop"):
        acceptance(rounds_frame(VECTOR, doc_id="a").drop("round_stop"))
    with pytest.raises(UserError, match="aggregation"):
        acceptance(VECTOR, aggregation="mean")


def test_telemetry_counts_merges_and_subtracts():
    whole = Telemetry.of(VECTOR)
    assert (whole.rounds, whole.drafted, whole.accepted, whole.tau) == (4, 12, 6, 1.5)
    assert (whole.pos_drafted, whole.pos_tested, whole.pos_accepted) == ((4, 4, 4), (4, 3, 2), (3, 2, 1))
    first, rest = Telemetry.of(VECTOR[:3]), Telemetry.of(VECTOR[3:])
    assert whole.delta(first) == rest and first.merge(rest) == whole == rest.merge(first)
    assert whole.delta(Telemetry()) == whole and whole.delta(whole) == Telemetry()
    with pytest.raises(UserError, match="earlier reading"):
        first.delta(whole)


@given(rounds_of, rounds_of)
def test_telemetry_agrees_with_acceptance(a, b):
    got, counted = Telemetry.of(a).merge(Telemetry.of(b)), acceptance([*a, *b])
    assert (got.rounds, got.cut, got.tau) == (counted.rounds, counted.cut, counted.tau)
    for name in ("pos_drafted", "pos_tested", "pos_accepted"):
        # Telemetry holds no trailing zeros.
        assert getattr(got, name) == tuple(x for x in getattr(counted, name) if x)
    assert got.delta(Telemetry.of(a)) == Telemetry.of(b)


def test_telemetry_has_no_cap_on_positions():
    deep = RoundRecord(0, 0, 1, 20, (1,) * 20, (0.5,) * 20, 17, 18, 1, "k", "")
    assert len(Telemetry.of([deep]).pos_accepted) == 17
    assert len(acceptance([deep]).joint) == 20


def test_repeated_ngrams():
    assert metrics.repeated_ngrams(range(100)) == 0.0
    assert metrics.repeated_ngrams([1, 2, 3, 4] * 20) == pytest.approx(1 - 4 / 73)
    assert metrics.repeated_ngrams([1, 2, 1, 2, 1], n=2) == 0.5
    assert metrics.repeated_ngrams([1] * 7) is None and metrics.repeated_ngrams([]) is None
    with pytest.raises(UserError, match="n=0"):
        metrics.repeated_ngrams([1, 2], n=0)


def test_bootstrap_resamples_documents_and_not_rows():
    rng = np.random.default_rng(1)
    level = rng.normal(size=12)
    groups = np.repeat(np.arange(12), 200)
    by_document = bootstrap_by(groups, level[groups])[0]
    by_row = bootstrap_by(np.arange(len(groups)), level[groups])[0]
    assert by_document.value == pytest.approx(by_row.value)
    assert by_document.high - by_document.low > 5 * (by_row.high - by_row.low)
    # The spread of a mean of 12 documents, within what 2,000 draws and a percentile interval leave open.
    expected = 2 * 1.96 * level.std() / np.sqrt(12)
    assert by_document.high - by_document.low == pytest.approx(expected, rel=0.1)


def test_bootstrap_covers_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for seed in range(200):
        size = rng.integers(20, 60, size=40)
        hit = rng.binomial(size, 0.6)
        found = bootstrap_by(np.arange(40), hit, size, draws=400, seed=seed)[0]
        hits += found.low <= 0.6 <= found.high
    assert 175 <= hits <= 198  # 190 expected; percentile intervals fall a little short


def test_bootstrap_is_seeded_and_independent_of_chunks(monkeypatch):
    groups, values = list("abcdefghijka"), np.random.default_rng(0).normal(size=12)
    first = bootstrap_by(groups, values, seed=3)
    assert bootstrap_by(groups, values, seed=3) == first
    assert bootstrap_by(groups, values, seed=4) != first
    monkeypatch.setattr("workbench.core.bootstrap.CHUNK", 30)
    assert bootstrap_by(groups, values, seed=3) == first


def test_bootstrap_without_enough_documents_has_no_interval():
    one, none = bootstrap_by(["a", "a", "b"], [[1, 0], [1, 0], [0, 0]], [[2, 0], [2, 0], [0, 0]])
    assert (one.value, one.low, one.high, one.groups) == (0.5, None, None, 1)
    assert (none.value, none.low, none.groups) == (None, None, 0)
    assert bootstrap_by([], [])[0].value is None
    with pytest.raises(UserError, match="do not match"):
        bootstrap_by(["a"], [1, 2])


def test_paired_difference_cancels_what_documents_share():
    rng = np.random.default_rng(5)
    ids, level = np.arange(30), rng.normal(size=30)
    shared = (ids, level + 0.1 + rng.normal(scale=0.02, size=30), None)
    found = bootstrap_difference(shared, (ids, level, None))[0]
    assert found.low > 0 and found.value == pytest.approx(0.1, abs=0.02)
    broken = bootstrap_difference((rng.permutation(ids), *shared[1:]), (ids, level, None))[0]
    assert broken.low < 0 < broken.high
    with pytest.raises(UserError, match="same documents"):
        bootstrap_difference(shared, (ids[1:], level[1:], None))


def test_frames_hold_records_and_concatenate():
    frame = rounds_frame(VECTOR, doc_id="a", source="s")
    assert frame.schema == pl.Schema(round_schema()) == rounds_frame([], doc_id="b").schema
    assert records_from(frame) == VECTOR
    both = pl.concat([frame, rounds_frame([], doc_id="b"), rounds_frame(make("- F"), doc_id="c")])
    assert both["doc_id"].to_list() == ["a"] * 4 + ["c"] * 2
    assert records_from(both)[4:] == make("- F")


def test_phases_frame():
    steps = [DraftStepTimes(1e-3, 2e-3, 3e-3, 4e-3, 10, False), DraftStepTimes(2e-3, 2e-3, 3e-3, 4e-3, 30, True)]
    setup = [SetupTimes(init=1.0, capture=0.5, drafter_fill=2.0), SetupTimes(init=3.0)]
    frame = phases_frame(VECTOR, draft_steps=steps, setup=setup)
    rows = {(group, part): rest for group, part, *rest in frame.iter_rows()}
    assert len(rows) == len(frame) == 6 + 4 + 6
    assert rows["round", "draft"] == pytest.approx([2.5, 4, False])
    assert rows["round", "verify issue"] == pytest.approx([2.0, 4, False])
    assert rows["draft step", "glue"] == pytest.approx([1.75, 40, True])
    assert rows["setup", "init"] == pytest.approx([2000.0, 2, False])
    assert rows["setup", "capture"] == pytest.approx([250.0, 2, False])
    assert rows["setup", "drafter fill"] == pytest.approx([1000.0, 2, False])
    assert phases_frame(rounds_frame(VECTOR, doc_id="a"), draft_steps=steps, setup=setup).equals(frame)
    assert phases_frame([]).is_empty()
