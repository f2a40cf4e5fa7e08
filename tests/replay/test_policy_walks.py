"""Live rounds against walks, for random policies of every family, each with its own tapes.

A clock that goes on as a cost model says stands in for time, so that policies that read it are reproducible, and the
drafter steps and rows of every live round are checked on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pytest

from workbench.core.tape import Corpus, Tape
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.replay import DraftTable, compare_rounds, live_rounds, oracle_schedules, own_tapes, replay, walk
from workbench.spec.policies import Oracle, Policy

Differences = Callable[[pl.DataFrame, pl.DataFrame], list[str]]
SAMPLED: dict[str, Any] = dict(temperature=0.8, top_p=0.95, seed=3)
COUNT, VOCAB = 48, 4


@dataclass(frozen=True)
class Lived:
    """A policy, what the engine did under it, and the table that a walk goes over.

    Args:
        kind: Family, or "user".
        policy: The policy.
        table: Draft table of its tapes alone.
        estimator: "own" or "forced".
        rounds: The live rounds.
    """

    kind: str
    policy: Policy
    table: DraftTable
    estimator: str
    rounds: pl.DataFrame


def live(
    model: HybridModel, table: DraftTable, tapes: Corpus, kind: str, policy: Policy, cost: Any, **options: Any
) -> Lived:
    """Run a policy over tapes, an oracle by its schedule of each."""
    estimator = options.pop("estimator", "own")
    plans: dict[str, Policy] = {}
    if isinstance(policy, Oracle):
        plans.update(oracle_schedules(table, policy, estimator=estimator))
    frames = []
    with cost.clock() as clock:
        for tape in tapes:
            run = plans.get(tape.doc_id, policy)
            given = dict(ignore_eos=True, policy=run, clock=clock, estimator=estimator, **options)
            frames.append(live_rounds(model, Corpus([tape]), **given))
    return Lived(kind, policy, table, estimator, pl.concat(frames))


def prompts(count: int, vocab: int, lengths: Sequence[int]) -> Corpus:
    """Prompts that differ, of the lengths in turn."""
    found = []
    for i in range(count):
        n = lengths[i % len(lengths)]
        found.append(Tape(f"p{i:03}", [(i * 5 + j * (i % 7 + 1) + j * j // 3) % vocab for j in range(n)], prompt_len=n))
    return Corpus(found, name="pool")


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=1, tied=False, vocab_size=VOCAB, seed=0, layer_types=(LINEAR, FULL))


@pytest.fixture(scope="module")
def lived(model, policies_module, tmp_path_factory) -> list[Lived]:
    """Every policy on a tape of its own, greedy and sampled by turns, some of them over the ends of key blocks."""
    asked = prompts(COUNT, VOCAB, (4, 7, 50, 11, 58))
    shapings: list[dict[str, Any]] = [{}, SAMPLED]
    pools = [own_tapes(model, asked, max_new_tokens=26, k=0, ignore_eos=True, **shaping) for shaping in shapings]
    cost, folder = policies_module.Cost(), tmp_path_factory.mktemp("lived")
    out = []
    for i, (kind, policy) in enumerate(policies_module.random_policies(COUNT, seed=11)):
        turn = i // len(policies_module.KINDS) % 2
        tapes = Corpus(pools[turn].tapes[i : i + 1])
        table = replay(model, tapes, out=folder / str(i), k_max=policies_module.K_MAX, **shapings[turn])
        out.append(live(model, table, tapes, kind, policy, cost, **shapings[turn]))
    return out


def against(one: Lived, differences: Differences, cost: Any) -> list[str]:
    """What a walk and the live rounds do not share, their modelled and measured seconds included."""
    walked = walk(one.table, policy=one.policy, estimator=one.estimator, cost=cost)
    found = differences(walked, one.rounds)
    total = pl.sum_horizontal(pl.col("^t_.*$"))
    rows = one.rounds.select("steps", "drafted", "start", total.alias("seconds"))
    for steps, drafted, start, seconds in rows.iter_rows():
        if seconds != cost.round_seconds(steps=steps, drafted=drafted):
            found.append(f"round at {start} took {seconds} s")
    return found


def test_a_walk_is_the_live_run_under_random_policies(lived, policies_module, differences):
    for one in lived:
        assert not (found := against(one, differences, policies_module.Cost())), (one.policy, found)
    assert {one.kind for one in lived} == set(policies_module.KINDS) and len(lived) >= 40


def test_the_random_policies_act(lived):
    """No family is idle: lengths move, chains end early, drafting stops and begins again."""
    by_kind: dict[str, pl.DataFrame] = {}
    for one in lived:
        by_kind[one.kind] = pl.concat([by_kind.get(one.kind, one.rounds.clear()), one.rounds])
    whole = {kind: frame.filter(pl.col("round_stop") == "") for kind, frame in by_kind.items()}
    for kind in ("floor", "ema", "suspend", "goodput", "gate", "oracle", "scripted", "user"):
        assert whole[kind]["k"].n_unique() > 1, kind
    for kind in ("suspend", "gate"):
        assert 0 in whole[kind]["k"] and whole[kind]["k"].max() > 0, kind
    for kind in ("min_confidence", "user"):
        dropped = by_kind[kind].filter(pl.col("chain_stop") == "policy")
        assert len(dropped) and (dropped["steps"] > dropped["drafted"]).all(), kind
    assert "policy" in by_kind["cumulative"]["chain_stop"]
    assert "p_min" in pl.concat([whole[kind] for kind in ("fixed", "floor", "ema", "gate")])["chain_stop"]
    everything = pl.concat(list(by_kind.values()))
    assert 0.1 < everything["accepted"].sum() / everything["drafted"].sum() < 0.9


def test_one_changed_parameter_is_found(lived, policies_module, differences):
    """The walk of a policy that differs in one field is not the live run, in some case of every kind and field."""
    cost, tried, caught = policies_module.Cost(), set(), set()
    for one in lived:
        for other in policies_module.changed(one.policy):
            if one.kind == "oracle" or other.k_max > one.table.k_max:
                continue
            fields = [name for name in vars(other) if vars(other)[name] != vars(one.policy)[name]]
            tried.add((one.kind, *fields))
            if differences(walk(one.table, policy=other, estimator="own", cost=cost), one.rounds):
                caught.add((one.kind, *fields))
    assert {kind for kind, *_ in caught} == set(policies_module.KINDS) - {"oracle"}
    assert len(caught) > 0.8 * len(tried), tried - caught


def test_a_slower_clock_is_found(lived, policies_module, differences):
    """Only policies that read time see that drafter steps take longer."""
    slow = policies_module.Cost(step=2.0)
    parted = {one.kind for one in lived if differences(walk(one.table, policy=one.policy, cost=slow), one.rounds)}
    assert parted == {"gate"}


def test_a_walk_by_forced_is_the_run_that_commits_the_text(model, policies_module, differences, tmp_path):
    """One policy of every kind, made to commit texts that the target would not have gone on with."""
    made = own_tapes(model, prompts(4, VOCAB, (5, 9)), max_new_tokens=22, k=0, ignore_eos=True, **SAMPLED)
    tapes = [Tape(t.doc_id, t.tokens, t.prompt_len) for t in made]
    tables = [replay(model, Corpus([t]), out=tmp_path / t.doc_id, k_max=8) for t in tapes]
    cost, stops = policies_module.Cost(), set()
    for i, (kind, policy) in enumerate(policies_module.random_policies(len(policies_module.KINDS), seed=5)):
        one = live(model, tables[i % 4], Corpus([tapes[i % 4]]), kind, policy, cost, estimator="forced")
        assert not (found := against(one, differences, cost)), (policy, found)
        stops |= set(one.rounds["round_stop"])
    assert "forced" in stops, "a draft that is the target's pick and not the text's ends its round"


def check_pool(
    model: HybridModel, pool: Corpus, policies: Any, differences: Differences, folder: Any, *, each: int, **options: Any
) -> None:
    """Every tape of a pool under some policy, every policy on tapes of its own."""
    cost, seen, kinds = policies.Cost(), set(), set()
    for i, (kind, policy) in enumerate(policies.random_policies(COUNT, seed=23)):
        tapes = Corpus([pool.tapes[(i * each + j) % len(pool.tapes)] for j in range(each)])
        table = replay(model, tapes, out=folder / str(i), k_max=policies.K_MAX, **options)
        one = live(model, table, tapes, kind, policy, cost, **options)
        assert not (found := against(one, differences, cost)), (policy, found)
        seen |= {tape.doc_id for tape in tapes}
        kinds.add(kind)
    assert len(seen) == len(pool.tapes) >= 100 and kinds == set(policies.KINDS)


@pytest.mark.full
@pytest.mark.parametrize("shaping", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_a_pool_of_demo_tapes(demo, heldout, policies_module, differences, tmp_path, shaping):
    registers = ("novels", "pycode", "pydocs", "speeches", "sqlite")
    documents = [tape for name in registers for tape in heldout(name, 4)]
    pieces = [
        Tape(f"{tape.doc_id}-{at}", tape.tokens[at : at + 24 + at % 50], 24 + at % 50, tape.source)
        for tape in documents
        for at in range(0, 175, 35)
        if len(tape) >= at + 75
    ]
    made = own_tapes(demo, pieces, max_new_tokens=128, ignore_eos=True, **shaping)
    long = own_tapes(demo, pieces[:3], max_new_tokens=600, ignore_eos=True, sequence=1000, **shaping)
    renamed = [Tape(f"{t.doc_id}-long", t.tokens, t.prompt_len, t.source, own=t.own) for t in long]
    pool = Corpus([*renamed, *made.tapes])
    each = -(-len(pool.tapes) // COUNT)
    assert sum(len(tape) - tape.prompt_len >= 128 for tape in pool) >= 100
    check_pool(demo, pool, policies_module, differences, tmp_path, each=each, **shaping)


@pytest.mark.full
def test_the_fast_class_parts_at_rounding_level_only(demo, heldout, policies_module, differences, tmp_path):
    """What differs between a walk and the live run of the fast class lies at margins of rounding, and is listed."""
    cost, listed, rounds = policies_module.Cost(), [], 0
    pool = own_tapes(demo, [t for n in ("novels", "pycode", "speeches") for t in heldout(n, 4)], exact=False)
    for i, (kind, policy) in enumerate(policies_module.random_policies(COUNT, seed=31)):
        tapes = Corpus(pool.tapes[i % 12 : i % 12 + 1])
        table = replay(demo, tapes, out=tmp_path / str(i), k_max=8, exact=False)
        one = live(demo, table, tapes, kind, policy, cost, exact=False)
        walked = walk(table, policy=policy, estimator="own", cost=cost)
        rounds += len(walked)
        listed.append(compare_rounds(walked, one.rounds, table))
        for first in listed[-1].head(1).iter_rows(named=True):  # later ones may follow from what this one taught
            at = getattr(policy, "p_min", None) or getattr(policy, "tau", None)
            near = at is not None and abs(first["draft_top1"] - at) < 1e-3
            assert first["decision"] != "stop" or near or kind == "cumulative", (policy, first)
    found = pl.concat(listed).filter(pl.col("decision").is_not_null())
    print(f"{len(found)} of {rounds} rounds differ", found)
    beyond = found.filter((pl.col("decision") != "stop") & (pl.col("margin") > 1e-2))
    assert not len(beyond), beyond
    assert len(found) < 0.01 * rounds
