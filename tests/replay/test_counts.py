"""Counts of rounds say what the rounds say: totals, slots, every acceptance metric, parts and sums of documents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import UserError
from workbench.core.frames import rounds_frame
from workbench.core.metrics import AGGREGATIONS, acceptance, slot_counts
from workbench.core.records import CUTS, RoundRecord
from workbench.replay import counts_of
from workbench.spec.policies import FixedK

K = 5
POLICY = FixedK(k=K)


def record(start: int, steps: int, drafted: int, accepted: int, stop: str) -> RoundRecord:
    """A round with these numbers."""
    return RoundRecord(
        index=0,
        start=start,
        base=1,
        k=steps,
        draft_ids=(7,) * drafted,
        draft_top1=(0.5,) * drafted,
        accepted=accepted,
        emitted=accepted + (stop != "forced"),
        bonus=1,
        chain_stop="k",
        round_stop=stop,
        steps=steps,
    )


@st.composite
def records(draw: st.DrawFn) -> list[RoundRecord]:
    out = []
    for _ in range(draw(st.integers(0, 12))):
        steps = draw(st.integers(0, K))
        drafted = draw(st.integers(0, steps))
        accepted = draw(st.integers(0, drafted))
        stop = draw(st.sampled_from(["", "budget", "stop", *(["forced"] if accepted else [])]))
        out.append(record(draw(st.integers(0, 3000)), steps, drafted, accepted, stop))
    return out


def frame_of(documents: dict[str, list[RoundRecord]]) -> pl.DataFrame:
    parts = [rounds_frame(rounds, doc_id=name, source=name[0]) for name, rounds in documents.items()]
    return pl.concat(parts)


@given(st.lists(records(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_counts_of_rounds_are_their_metrics(texts: list[list[RoundRecord]]) -> None:
    documents = {f"{'ab'[i % 2]}{i}": rounds for i, rounds in enumerate(texts)}
    frame = frame_of(documents)
    named = {name: name[0] for name in documents}
    counts = counts_of(frame, policy=POLICY, k_max=K, estimator="own", documents=named)
    assert counts.documents == tuple(named) and counts.sources == tuple(named.values())
    for g, rounds in enumerate(documents.values()):
        assert counts.rounds_G[g] == len(rounds) == counts.work_GCSD[g].sum()
        assert counts.cut_G[g] == sum(one.round_stop in CUTS for one in rounds)
        assert counts.drafted_G[g] == sum(one.drafted for one in rounds)
        assert counts.accepted_G[g] == sum(one.accepted for one in rounds)
        assert counts.steps_G[g] == sum(one.steps for one in rounds)
        assert counts.emitted_G[g] == sum(one.emitted for one in rounds)
    groups = [list(named).index(name) for name in frame["doc_id"]]
    plain = slot_counts(frame["drafted"], frame["accepted"], groups=groups, slots=K)
    for name in ("rounds_G", "drafted_GK", "tested_GK", "accepted_GK"):
        mine = getattr(counts.slots, name)
        assert np.array_equal(mine[: len(getattr(plain, name))], getattr(plain, name))
    for aggregation in AGGREGATIONS:
        mine, plain = counts.acceptance(aggregation), acceptance(frame, aggregation=aggregation)
        assert mine.chain_stops == mine.round_stops == {}
        for name, value in replace(plain, chain_stops={}, round_stops={}).row().items():
            assert getattr(mine, name) == (value if aggregation == "pooled" else pytest.approx(value)), name


@given(records(), records())
@settings(max_examples=30, deadline=None)
def test_parts_and_sums(first: list[RoundRecord], second: list[RoundRecord]) -> None:
    both = counts_of(
        frame_of({"a": first, "b": second}), policy=POLICY, k_max=K, estimator="own", documents={"a": "a", "b": "b"}
    )
    one, two = both.select(source="a"), both.select(documents=["b"])
    assert one.documents == ("a",) and two.sources == ("b",) and one.merge(two) == both
    assert (one == two) is False and both.select() == both


def test_rounds_are_counted_by_the_length_they_began_with() -> None:
    starts = (126, 127, 511, 2047, 40_000)  # 127, 128, 512, 2048 and 40,001 tokens known
    frame = frame_of({"a": [record(start, 3, 2, 1, "") for start in starts]})
    counts = counts_of(frame, policy=POLICY, k_max=K, estimator="own")
    assert counts.work_GCSD[0, :, 3, 2].tolist() == [1, 1, 1, 1, 0, 1]
    counts = counts_of(frame, policy=POLICY, k_max=K, estimator="own", contexts=(0, 127))
    assert counts.work_GCSD[0, :, 3, 2].tolist() == [0, 5] and counts.work_GCSD.sum() == 5


def test_what_does_not_fit_is_refused() -> None:
    frame = frame_of({"a": [record(1, 3, 2, 1, "")], "b": [record(1, 5, 5, 5, "")]})
    made = counts_of(frame, policy=POLICY, k_max=K, estimator="own")
    refusals = {
        "k_max=4": lambda: counts_of(frame, policy=POLICY, k_max=4, estimator="own"),
        "ascend": lambda: counts_of(frame, policy=POLICY, k_max=K, estimator="own", contexts=(0, 5, 5)),
        "ascend from 0": lambda: counts_of(frame, policy=POLICY, k_max=K, estimator="own", contexts=(1, 5)),
        "'b'": lambda: counts_of(frame, policy=POLICY, k_max=K, estimator="own", documents={"a": ""}),
        "steps is missing": lambda: counts_of(frame.drop("steps"), policy=POLICY, k_max=K, estimator="own"),
        "hold document 'a'": lambda: made.merge(made.select(documents=["a"])),
        "do not merge": lambda: made.merge(replace(made, estimator="forced")),
        "'c', which was not walked": lambda: made.select(documents=["a", "c"]),
        "source='z'": lambda: made.select(source="z"),
        "aggregation": lambda: made.acceptance("mean"),
    }
    for words, call in refusals.items():
        with pytest.raises(UserError, match=words):
            call()
