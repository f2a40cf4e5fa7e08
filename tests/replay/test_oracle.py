"""The oracle: no policy needs fewer rounds, or less time, over the same text; and what else holds between walks."""

from __future__ import annotations

from itertools import product

import numpy as np
import polars as pl
import pytest

from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.model.config import FULL, LINEAR
from workbench.replay import DraftTable, oracle_schedules, own_tapes, replay, walk
from workbench.replay.oracle import best_lengths, hits
from workbench.replay.tracks import tracks
from workbench.spec.policies import (
    AdaptiveFloor,
    Cumulative,
    Ema,
    FixedK,
    Gate,
    Goodput,
    Ladder,
    MinConfidence,
    Oracle,
    Policy,
    Scripted,
    Suspend,
)


@pytest.fixture(scope="module")
def tables(tiny, sampled, tmp_path_factory) -> dict[str, DraftTable]:
    """Texts of a model whose drafts reach deep: its own, greedy and sampled, and one that is neither."""
    folder = tmp_path_factory.mktemp("oracle")
    model = tiny(ratio=1, tied=False, vocab_size=2, seed=0, layer_types=(LINEAR, FULL))
    asked = Corpus([Tape(f"p{n}", [i % 2 for i in range(n)], prompt_len=n) for n in (3, 8)])
    drawn = dict(temperature=0.9, seed=4)
    greedy = own_tapes(model, asked, max_new_tokens=40, k=0, ignore_eos=True)
    draws = own_tapes(model, asked, max_new_tokens=60, k=0, ignore_eos=True, **drawn)
    other = Corpus([Tape("other", sampled(model, 90, temperature=0.7))])
    return {
        "own": replay(model, greedy, out=folder / "own", k_max=8),
        "coupled": replay(model, draws, out=folder / "coupled", k_max=8, **drawn),
        "forced": replay(model, other, out=folder / "forced", k_max=8),
    }


def by_enumeration(hits_T: list[int], seconds: list[float]) -> float:
    """Least time over every sequence of draft lengths, by following each of them."""
    rows = len(hits_T)

    def least(at: int) -> float:
        if at >= rows:
            return 0.0
        top = min(len(seconds) - 1, rows - at - 1)
        return min(seconds[k] + least(at + min(hits_T[at], k) + 1) for k in range(top + 1))

    return least(0)


def taken(hits_T: list[int], ks: dict[int, int], seconds: list[float]) -> float:
    """Time that a schedule takes."""
    at, total = 0, 0.0
    while at < len(hits_T):
        total += seconds[ks[at]]
        at += min(hits_T[at], ks[at]) + 1
    return total


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    hits_T = [min(int(rng.integers(0, 4)), 8 - at) for at in range(9)]
    for seconds in ([1.0] * 4, [1.0, 1.25, 1.5, 2.0], [1.0, 3.0, 1.5, 4.0], sorted(rng.uniform(1, 2, 4).tolist())):
        found = best_lengths(hits_T, 0, seconds)
        assert taken(hits_T, found, seconds) == pytest.approx(by_enumeration(hits_T, seconds))


def test_to_take_all_that_is_accepted_is_not_the_best():
    """From 0 two drafts stand and lead to 3, where none does; one alone leads to 2, from where three do."""
    hits_T, seconds = [2, 0, 3, 0, 0, 0], [1.0] * 4
    greedy = {at: min(3, 5 - at) for at in range(6)}
    assert taken(hits_T, greedy, seconds) == 4 and taken(hits_T, best_lengths(hits_T, 0, seconds), seconds) == 2


def rounds_and_time(table: DraftTable, policy: Policy, cost, estimator: str) -> pl.DataFrame:
    """Rounds and modelled seconds per document."""
    walked = walk(table, policy=policy, estimator=estimator, cost=cost)
    seconds = [cost.round_seconds(steps=s, drafted=d) for s, d in walked.select("steps", "drafted").iter_rows()]
    rows = walked.with_columns(pl.Series("seconds", seconds)).group_by("doc_id", maintain_order=True)
    return rows.agg(pl.len().alias("rounds"), pl.col("seconds", "emitted", "drafted").sum())


@pytest.mark.parametrize("kind", ["own", "coupled", "forced"])
def test_no_policy_does_better_than_the_oracle(tables, policies_module, kind):
    table, estimator = tables[kind], "forced" if kind == "forced" else "own"
    cost, k = policies_module.Cost(), policies_module.K_MAX
    fewest = rounds_and_time(table, Oracle(k=k), cost, estimator)
    fastest = rounds_and_time(table, Oracle(k=k, seconds=cost.curve(k)), cost, estimator)
    policies = [p for _, p in policies_module.random_policies(120, seed=7)] + [FixedK(k=n) for n in range(k + 1)]
    equal = 0
    for policy in policies:
        one = rounds_and_time(table, policy, cost, estimator)
        assert one["emitted"].equals(fewest["emitted"])
        assert (one["rounds"] >= fewest["rounds"]).all(), policy
        assert (one["seconds"] >= fastest["seconds"]).all(), policy
        equal += (one["rounds"] == fewest["rounds"]).all()
    longest = rounds_and_time(table, FixedK(k=k), cost, estimator)
    assert (fewest["drafted"] < longest["drafted"]).all() and equal < len(policies)
    assert (fastest["seconds"] < rounds_and_time(table, FixedK(k=0), cost, estimator)["seconds"]).all()
    assert (fastest["seconds"] < longest["seconds"]).all()


def test_an_oracle_of_fewer_drafts_is_beaten(tables, policies_module):
    """The comparison above can fail: an oracle is best among policies of up to its own k."""
    few = walk(tables["coupled"], policy=Oracle(k=1))
    assert len(walk(tables["coupled"], policy=FixedK(k=8))) < len(few)


@pytest.mark.parametrize("kind", ["own", "coupled", "forced"])
def test_its_schedules_are_policies(tables, kind):
    table, estimator = tables[kind], "forced" if kind == "forced" else "own"
    for oracle in (Oracle(k=5), Oracle(k=3, seconds=(1.0, 1.1, 1.2, 1.6))):
        plans = oracle_schedules(table, oracle, estimator=estimator)
        walked = walk(table, policy=oracle, estimator=estimator)
        for (doc_id,), rounds in walked.group_by("doc_id", maintain_order=True):
            again = walk(table, policy=plans[doc_id], estimator=estimator).filter(pl.col("doc_id") == doc_id)
            assert rounds.equals(again)
            assert rounds["round_stop"].is_in(["", "forced"]).all(), "it never asks for more than there is room for"
            ks = plans[doc_id].by_start
            assert [ks[start] for start in rounds["start"]] == rounds["k"].to_list()


def test_hits_are_the_accepted_drafts_of_the_longest_round(tables):
    for kind, table in tables.items():
        estimator = "forced" if kind == "forced" else "own"
        for track in tracks(table):
            found = hits(track, 4, estimator)
            plan = Scripted(ks={at: 4 for at in range(track.length)})
            rounds = walk(table, policy=plan, estimator=estimator).filter(pl.col("doc_id") == track.doc_id)
            for start, k, emitted in rounds.select("start", "k", "emitted").iter_rows():
                assert min(found[start], k) + 1 == emitted


def test_refusals(tables, policies_module):
    table = tables["own"]
    with pytest.raises(UserError, match=r"Gate reads the duration of rounds.*give cost="):
        walk(table, policy=Gate())
    assert len(walk(table, policy=Gate(), cost=policies_module.Cost()))
    with pytest.raises(UserError, match="drafts up to 9 tokens and the table has 8 slots"):
        oracle_schedules(table, Oracle(k=9))
    with pytest.raises(UserError, match=r"oracle=FixedK.* is not valid"):
        oracle_schedules(table, FixedK())
    with pytest.raises(UserError, match="estimator='ratio' is not valid: choose one of 'own', 'forced'"):
        oracle_schedules(table, Oracle(), estimator="ratio")
    with pytest.raises(UserError, match="needs texts that this target generated greedily"):
        oracle_schedules(tables["forced"], Oracle(), estimator="own")
    with pytest.raises(UserError, match=r"estimator='ratio' with Oracle.* is not valid"):
        walk(tables["coupled"], policy=Oracle(), estimator="ratio")


# --- limits, over tables ---------------------------------------------------------------------------------------------

CURVE = (1.0, 1.1, 1.2, 1.3, 1.4)
PLAIN = [
    FixedK(k=4, p_min=1.0, pmin0=True),
    MinConfidence(k=4, tau=1.0),
    Cumulative(k=4, threshold=1.0),
    Ladder(max_lanes=0),
]
FIXED = [
    FixedK(k=4, p_min=0.0, pmin0=True),
    AdaptiveFloor(k=4, floor=4),
    MinConfidence(k=4),
    Cumulative(k=4),
    Ema(k=4, low=4),
    Suspend(k=4, floor=0.0),
    Ladder(steps="1:4", k=4),
    Goodput(k=4, seconds=CURVE, reprobe=1),
    Gate(k=4, context_floor=10**6),
    Scripted(ks=(4,)),
]
TEXT = ["doc_id", "start", "drafted", "accepted", "emitted", "draft_ids", "bonus"]


@pytest.mark.parametrize("kind", ["own", "coupled", "forced"])
def test_limits_are_plain_decode_and_fixed_k(tables, policies_module, kind):
    table, cost = tables[kind], policies_module.Cost()
    plain, fixed = walk(table, k=0), walk(table, k=4)
    assert len(plain) == plain["emitted"].sum() and fixed["accepted"].sum() > 0
    for policy in PLAIN:
        assert walk(table, policy=policy, cost=cost).select(TEXT).equals(plain.select(TEXT)), policy
    for policy in FIXED:
        assert walk(table, policy=policy, cost=cost).equals(fixed), policy
    pairs = product([FixedK(k=4, p_min=0.9), FixedK(k=3), Ema(k=4)], [plain, fixed])
    assert not any(walk(table, policy=policy).select(TEXT).equals(limit.select(TEXT)) for policy, limit in pairs)


def test_dropped_tokens_cost_steps_and_are_not_drafted(tables):
    table = tables["coupled"]
    whole = walk(table, policy=MinConfidence(k=5, tau=0.6))
    assert set(whole["chain_stop"]) == {"k", "policy", "none"}
    kept, gone = whole.filter(pl.col("chain_stop") == "k"), whole.filter(pl.col("chain_stop") == "policy")
    assert (kept["drafted"] == kept["k"]).all() and (kept["steps"] == kept["k"]).all()
    assert (gone["drafted"] == 0).all() and (gone["steps"] == gone["k"]).all() and (gone["emitted"] == 1).all()
    for policy, cause in ((FixedK(k=5, p_min=0.6), "p_min"), (Cumulative(k=5, threshold=0.4), "policy")):
        cut = walk(table, policy=policy).filter(pl.col("chain_stop") == cause)
        assert len(cut) and (cut["steps"] == cut["drafted"] + 1).all()
