"""Live runs by the ratio rule, from texts that follow the target's law: by hand, by draws, and against live runs."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace as with_fields
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from workbench.core.bootstrap import bootstrap_by, bootstrap_difference
from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.core.tape import Corpus, Own, Tape
from workbench.model.config import FULL, LINEAR
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.replay import DraftTable, compare_rounds, expected_rounds, live_rounds, own_tapes, replay, walk
from workbench.replay.own import shaping_text
from workbench.replay.ratio import chances, expect, ratio_rounds
from workbench.replay.tracks import Track
from workbench.sampling.shaping import law
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import AdaptiveFloor, Cumulative, FixedK, Ladder, MinConfidence, RoundView, trimmed

FEW: dict[str, Any] = dict(ignore_eos=True)


def track(stands: list[list[float]], *, tops: np.ndarray | None = None, p: float = 0.5) -> Track:
    """A text with a pending token at position 1 whose drafts stand with these probabilities, by start from 1 on."""
    rows, k = len(stands) + 1, max(len(row) for row in stands)
    q = np.full((rows, k), np.nan)
    for at, row in enumerate(stands, start=1):
        q[at, : len(row)] = np.array(row) * p
    tops = np.ones((rows, k)) if tops is None else tops
    none, ids = np.zeros(rows), np.zeros((rows, k), np.int64)
    tokens = np.arange(rows + 1)
    return Track("d", "s", "sampled", 1, rows + 1, tokens, none, none, ids, q, q, np.full(rows, p), q, tops)


HAND = [[1 / 2, 1 / 3, 1 / 4], [1 / 4, 1 / 2], [1 / 5], []]


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2, tied=False, vocab_size=12, seed=1)


def prompts(count: int, length: int = 3) -> Corpus:
    rows = np.random.default_rng(5).integers(0, 12, (count, length))
    return Corpus([Tape(f"p{i:03}", row, prompt_len=length, source="s") for i, row in enumerate(rows)], name="c")


SHAPING: dict[str, Any] = dict(temperature=0.8, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def table(model, tmp_path_factory) -> DraftTable:
    own = own_tapes(model, prompts(12), max_new_tokens=16, **FEW, **SHAPING)
    return replay(model, own, out=tmp_path_factory.mktemp("ratio") / "x", k_max=5, forced=True, **SHAPING)


# ---------------------------------------------------------------- by hand


def test_three_slots_by_hand():
    """Budgets allow 3, 2, 1 and 0 drafts at the four starts; a start at t + m + 1 follows m accepted at t.

    Visits: 1 at the first; 1/2 at the second; 1/3 + 1/2 * 3/4 = 17/24 at the third; 1/2 * 1/3 * 3/4 + 1/2 * 1/4 * 1/2
    + 17/24 * 4/5 = 181/240 at the fourth.
    """
    found = expect(track(HAND), FixedK(k=3).start(width=8), 3)
    assert found.rounds == pytest.approx(1 + 1 / 2 + 17 / 24 + 181 / 240)
    assert found.cut == pytest.approx(found.rounds - 1), "only the first round has all its slots"
    assert found.drafted_K == pytest.approx([53 / 24, 3 / 2, 1])
    assert found.tested_K == pytest.approx([53 / 24, 1 / 2 + 1 / 8, 1 / 6])
    assert found.accepted_K == pytest.approx([92 / 120, 11 / 48, 1 / 24])
    assert found.rounds + found.accepted_K.sum() == pytest.approx(4), "every token is accepted or a bonus"
    one = expect(track(HAND), FixedK(k=1).start(width=8), 1)
    visits = [1, 1 / 2, 1 / 2 + 1 / 2 * 3 / 4]
    visits.append(visits[1] * 1 / 4 + visits[2] * 4 / 5)
    assert one.rounds == pytest.approx(sum(visits)) and one.cut == pytest.approx(visits[3])
    none = expect(track(HAND), FixedK(k=0).start(width=8), 0)
    assert (none.rounds, none.cut, none.drafted_K.sum()) == (4, 0, 0)


def test_a_draft_that_is_likelier_than_the_token_always_stands():
    given = track([[3.0, 0.5], [0.0]])
    assert np.array_equal(chances(given)[1:], [[1.0, 0.5], [0.0, 0.0]])
    assert expect(given, FixedK(k=2).start(width=8), 2).accepted_K == pytest.approx([1, 0])


def by_paths(given: Track, policy: Any) -> dict[str, float]:
    """The same by following every path with a policy of its own."""
    total = dict(rounds=0.0, accepted=0.0, drafted=0.0, cut=0.0)
    stands = chances(given)

    def follow(at: int, run: Any, weight: float) -> None:
        if at >= given.length - 1 or weight == 0:
            return
        wish, budget = run.next_k(at + 1), given.length - 1 - at
        k = min(wish, budget - 1)
        drafted = next((j for j in range(k) if run.drops(j, given.forced_top[at, j], 1)), k)
        drafted = trimmed(run, drafted, 1)
        total["rounds"] += weight
        total["drafted"] += weight * drafted
        total["cut"] += weight * (k < wish)
        reach = 1.0
        for m in range(drafted + 1):
            ends = reach * (1 - stands[at, m] if m < drafted else 1.0)
            after = copy.copy(run)
            after.observe(RoundView(drafted, m, at + m + 2))
            total["accepted"] += weight * ends * m
            follow(at + m + 1, after, weight * ends)
            reach *= stands[at, m] if m < drafted else 0.0

    follow(given.first, policy.start(width=8), 1.0)
    return total


POLICIES = [
    FixedK(k=4),
    FixedK(k=4, p_min=0.4, pmin0=True, statistic="top"),
    AdaptiveFloor(k=4),
    AdaptiveFloor(k=4, floor=2, cap=3),
    AdaptiveFloor(k=4, p_min=0.5, statistic="top", floor_context=4),
    Cumulative(k=4, threshold=0.3, statistic="top"),
    MinConfidence(k=1, tau=0.4, statistic="top"),
    Ladder(k=3, lanes=5, p_min=0.3, statistic="top"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policies_with_memory_and_thresholds_by_paths(policy):
    rng = np.random.default_rng(2)
    given = track([rng.random(4)[: 8 - i].tolist() for i in range(9)], tops=rng.random((10, 4)))
    found, paths = expect(given, policy.start(width=8), policy.k_max), by_paths(given, policy)
    assert found.rounds == pytest.approx(paths["rounds"]) and found.cut == pytest.approx(paths["cut"])
    assert found.accepted_K.sum() == pytest.approx(paths["accepted"])
    assert found.drafted_K.sum() == pytest.approx(paths["drafted"])


@pytest.mark.parametrize("policy", POLICIES[::2], ids=repr)
def test_draws_have_the_expected_mean(policy):
    rng = np.random.default_rng(4)
    given = track([rng.random(4)[: 11 - i].tolist() for i in range(12)], tops=rng.random((13, 4)))
    found = expect(given, policy.start(width=8), policy.k_max)
    drawn = [ratio_rounds(given, policy.start(width=8), seed, 0) for seed in range(400)]
    counts = np.array([[len(x), x["drafted"].sum(), x["accepted"].sum()] for x in drawn], float)
    error = counts.std(0, ddof=1) / 20
    off = np.abs(counts.mean(0) - [found.rounds, found.drafted_K.sum(), found.accepted_K.sum()])
    assert (off < 3.5 * error + 1e-12).all(), (off, error)
    joint = np.array([[(x["accepted"] > j).sum() for j in range(policy.k_max)] for x in drawn])
    error = joint.std(0, ddof=1) / 20
    assert (np.abs(joint.mean(0) - found.accepted_K) < 3.5 * error + 1e-12).all()


# ---------------------------------------------------------------- over a table


def test_forced_columns_are_the_laws_of_a_chain_fed_the_tape(model, tmp_path):
    shaping = dict(temperature=0.7, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2, seed=3)
    tape = own_tapes(model, prompts(1, 20), max_new_tokens=30, **FEW, **shaping)[0]
    frame = replay(model, tape, out=tmp_path / "x", k_max=4, chunk=16, forced=True, **shaping).frame
    rule, n = GenerateOptions(**shaping).shaping(), len(tape)
    x = torch.from_numpy(tape.tokens.astype(np.int64))[None]
    with torch.inference_mode():
        run = model.forward(x, model.new_cache(capacity=n))
        for p in (20, 31, 40, n - 3):
            row, state = frame.row(p, named=True), model.new_draft_cache(capacity=n + 8)
            found = law(run.logits_BTV[0, p], rule, history=tape.tokens[: p + 1]).prob(int(tape.tokens[p + 1]))
            assert row["target_p"] == pytest.approx(found, rel=1e-9) and found > 0
            hidden = model.draft(x[:, 1 : p + 1], run.normed_BTH[:, :p], state)[:, -1:]
            for j in range(min(4, n - 1 - p)):
                logits, token = model.unembed(hidden)[0, 0], int(tape.tokens[p + 1 + j])
                found = law(logits, rule, history=tape.tokens[: p + 1 + j]).prob(token)
                assert row["forced_q"][j] == pytest.approx(found, rel=1e-9), (p, j)
                assert row["forced_top"][j] == pytest.approx(float(logits.double().softmax(0).max()), rel=1e-5)
                hidden = model.draft(torch.tensor([[token]]), hidden, state)
            assert row["forced_q"][n - 1 - p :] == [None] * max(0, 4 - (n - 1 - p))


def test_a_drawn_walk_is_a_rounds_frame(table):
    walked = walk(table, k=4, estimator="ratio", seed=1)
    assert walked.equals(walk(table, k=4, estimator="ratio", seed=1))
    assert not walked.equals(walk(table, k=4, estimator="ratio"))
    assert walked["estimator"].unique().to_list() == ["ratio"]
    text = {name[0]: part["token"].to_list() for name, part in table.frame.group_by("doc_id")}
    for doc_id, part in walked.group_by("doc_id", maintain_order=True):
        tokens, at = [*text[doc_id[0]]], 3
        for row in part.iter_rows(named=True):
            n = row["accepted"]
            assert row["start"] == at and row["emitted"] == n + 1
            assert row["draft_ids"] == [*tokens[at + 1 : at + 1 + n], *[None] * (row["drafted"] - n)]
            assert row["draft_top1"] == [None] * row["drafted"]
            at += n + 1
        assert at == 18
    metrics = acceptance(walked)
    assert 0.05 < metrics.efficiency < 0.95 and metrics.emitted == 12 * 15
    top = walk(table, k=5, estimator="ratio", p_min=0.5, p_min_reads="top")
    assert "p_min" in set(top["chain_stop"]) and top["emitted"].sum() == 12 * 15


def test_expectations_over_a_table(table):
    frame = expected_rounds(table, k=range(0, 6))
    assert len(frame) == 6 * 12 and frame["emitted"].unique().to_list() == [15]
    totals = frame.group_by("k", maintain_order=True).agg(pl.col("rounds", "accepted", "emitted").sum())
    assert totals["rounds"][0] == pytest.approx(180) and (np.diff(totals["rounds"]) < 0).all()
    np.testing.assert_allclose(totals["rounds"] + totals["accepted"], totals["emitted"])
    row = frame.row(-1, named=True)
    assert row["tau"] == pytest.approx(row["accepted"] / row["rounds"]) == pytest.approx(sum(row["joint"]))
    assert row["emitted_per_round"] == pytest.approx(15 / row["rounds"])
    assert [len(row[name]) for name in ("joint", "pos_drafted", "pos_tested", "pos_accepted")] == [5] * 4
    adaptive = expected_rounds(table, policy=AdaptiveFloor(k=5))
    assert adaptive.equals(expected_rounds(table, k=5, adaptive=True)) and adaptive["k"].unique().to_list() == [5]
    drawn = [walk(table, k=5, estimator="ratio", seed=seed, adaptive=True) for seed in range(40)]
    counts = np.array([len(x) for x in drawn])
    assert abs(counts.mean() - adaptive["rounds"].sum()) < 3.5 * counts.std(ddof=1) / 40**0.5


# ---------------------------------------------------------------- against live runs


def backwards(given: Track) -> np.ndarray:
    """The wrong way round: min(1, p / q), what a draft is accepted with before its token is known."""
    rows, k = given.forced_q.shape
    at = np.minimum(np.arange(rows)[:, None] + np.arange(k), rows - 1)
    p, q = np.broadcast_to(given.target_p[at], (rows, k)), np.nan_to_num(given.forced_q)
    return np.minimum(1.0, np.divide(p, q, out=np.ones((rows, k)), where=q > 0))


def against_live_runs(table: DraftTable, lived: pl.DataFrame, k: int) -> None:
    """Tokens per round, expected less live: 0 lies in the interval over tapes, and not when the rule is inverted."""
    live = (lived["doc_id"].to_numpy(), lived["emitted"].to_numpy(), None)

    def difference() -> Any:
        found = expected_rounds(table, k=k)
        rows = (found["doc_id"].to_numpy(), found["emitted"].to_numpy(), found["rounds"].to_numpy())
        return bootstrap_difference(rows, live)[0]

    right, value = difference(), bootstrap_by(*live)[0].value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[expect.__module__], "chances", backwards)
        wrong = difference()
    print(f"live {value:.3f}, expected less live {right}, inverted {wrong}")
    assert right.groups >= 200 and right.low <= 0 <= right.high, (right, value)
    assert right.high - right.low < 0.25 * value, "an interval that can exclude something"
    assert wrong.low > 0, (wrong, "the inverted rule is off by more than the interval")


LIVE: dict[str, Any] = dict(temperature=0.8)


@pytest.fixture(scope="module")
def quick(tiny) -> tuple[HybridModel, Corpus, pl.DataFrame]:
    """A model, texts it drew by the ratio rule, and the rounds that drew them."""
    model = tiny(ratio=1, tied=False, vocab_size=7, seed=1, exact=False, layer_types=(LINEAR, FULL))
    rows = np.random.default_rng(5).integers(0, 7, (220, 3))
    tapes, rounds, here = [], [], fingerprint(model)
    for i, row in enumerate(rows):
        prompt = Tape(f"p{i:03}", row, prompt_len=3)
        made = generate(model, prompt, k=3, max_new_tokens=8, accept="ratio", seed=9, sequence=i, **FEW, **LIVE)
        shaping = shaping_text(GenerateOptions(**LIVE).shaping())
        own = Own("sampled", here, seed=9, temperature=0.8, sequence=i, shaping=shaping, accept="ratio")
        tapes.append(Tape(prompt.doc_id, np.array([*made.prompt, *made.tokens]), 3, own=own))
        rounds.append(made.rounds)
    return model, Corpus(tapes), pl.concat(rounds)


def test_the_expected_yield_is_that_of_live_runs(quick, tmp_path):
    """Texts by plain sampling on the one side, live runs by the ratio rule with another seed on the other."""
    model, tapes, lived = quick
    own = own_tapes(model, tapes, max_new_tokens=8, k=0, seed=7, **FEW, **LIVE)
    table = replay(model, own, out=tmp_path / "x", k_max=3, forced=True, seed=7, **LIVE)
    assert lived["emitted"].sum() == 220 * 7 and 0.05 < lived["accepted"].sum() / lived["drafted"].sum() < 0.95
    against_live_runs(table, lived, 3)


def test_texts_that_the_ratio_rule_drew_itself(quick, tmp_path):
    """The expectation given each text against the rounds that made this very text."""
    model, tapes, lived = quick
    again = live_rounds(model, tapes[:3], estimator="ratio", k=3, seed=9, **FEW, **LIVE)
    assert compare_rounds(again, lived.filter(pl.col("doc_id") < "p003")).is_empty()
    marks = own_tapes(model, tapes[:3], max_new_tokens=8, k=3, accept="ratio", seed=9, **FEW, **LIVE)
    assert [x.own for x in marks] == [x.own for x in tapes[:3]]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(marks, tapes))
    table = replay(model, tapes, out=tmp_path / "x", k_max=3, forced=True, seed=5, **LIVE)
    assert walk(table, k=2)["estimator"][0] == "forced"
    found = expected_rounds(table, k=3)
    gap = lived.group_by("doc_id", maintain_order=True).len()["len"].to_numpy() - found["rounds"].to_numpy()
    assert abs(gap.mean()) < 3 * gap.std(ddof=1) / len(gap) ** 0.5
    slots = np.array(found["pos_accepted"].to_list()).sum(0)
    live = np.array([(lived["accepted"] > j).sum() for j in range(3)])
    assert (np.abs(slots - live) < 4 * np.sqrt(live)).all(), (slots, live)


@pytest.mark.full
@pytest.mark.parametrize("policy", [dict(k=4), dict(k=5, adaptive=True, p_min=0.3, p_min_reads="top")], ids=str)
def test_filters_penalties_and_policies(model, tmp_path, policy):
    shaping = dict(temperature=1.0, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1)
    own = own_tapes(model, prompts(220), max_new_tokens=12, exact=False, k=0, seed=7, **FEW, **shaping)
    table = replay(model, own, out=tmp_path / "x", k_max=5, forced=True, exact=False, seed=7, **shaping)
    lived = live_rounds(model, own, estimator="ratio", exact=False, seed=99, **FEW, **policy, **shaping)
    found = expected_rounds(table, **policy)
    rows = (found["doc_id"].to_numpy(), found["emitted"].to_numpy(), found["rounds"].to_numpy())
    gap = bootstrap_difference(rows, (lived["doc_id"].to_numpy(), lived["emitted"].to_numpy(), None))[0]
    assert gap.low <= 0 <= gap.high, gap


@pytest.mark.full
def test_the_expected_yield_on_demo_texts(demo, heldout, tmp_path):
    texts = [t for name in ("novels", "pycode", "pydocs", "speeches", "sqlite") for t in heldout(name, 8)]
    cuts = [(t, at) for at in range(0, 480, 24) for t in texts if at + 24 <= len(t)]
    pieces = [Tape(f"{t.doc_id}@{at}", t.tokens[at : at + 24]) for t, at in cuts[:200]]
    shaping = dict(temperature=0.9, top_p=0.95)
    own = own_tapes(demo, Corpus(pieces), prompt_tokens=24, max_new_tokens=24, exact=False, seed=7, **FEW, **shaping)
    table = replay(demo, own, out=tmp_path / "x", k_max=4, forced=True, exact=False, seed=7, **shaping)
    lived = live_rounds(demo, own, estimator="ratio", k=4, exact=False, seed=99, **FEW, **shaping)
    against_live_runs(table, lived, 4)


# ---------------------------------------------------------------- sentences


class Strange(FixedK):
    """A policy with a memory of its own."""

    def start(self, *, width: int) -> Any:
        run = FixedK.start(self, width=width)

        class Other(type(run)):  # type: ignore[misc]
            pass

        return Other(self, self.params(width=width))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(k=3, p_min=0.5), r"estimator='ratio' with FixedK.* is not valid.*p_min_reads='top' or p_min=0"),
        (dict(k=3, p_min=0.5, adaptive=True), "is not valid, as accept='ratio' is not"),
        (dict(k=6), "drafts up to 6 tokens and the table has 5 slots"),
        (dict(k=3, speed=1), "option 'speed' is not valid in a walk"),
    ],
)
def test_a_bad_request_is_a_sentence(table, given, says):
    for run in (lambda **more: walk(table, estimator="ratio", **more), lambda **more: expected_rounds(table, **more)):
        with pytest.raises(UserError, match=says):
            run(**given)


def test_more_sentences(model, table, tmp_path):
    with pytest.raises(UserError, match="has no exact expectation: average walk"):
        expected_rounds(table, policy=Strange(k=2))
    assert len(walk(table, policy=Strange(k=2), estimator="ratio"))
    with pytest.raises(UserError, match="seed=4 goes with estimator='ratio': a walk by 'own' draws nothing"):
        walk(table, k=2, seed=4)
    with pytest.raises(UserError, match="seed=-1"):
        walk(table, k=2, estimator="ratio", seed=-1)
    own = own_tapes(model, prompts(2), max_new_tokens=5, **FEW, **SHAPING)
    for i, (tapes, options, says) in enumerate(
        [
            (own, SHAPING, r"needs the chains fed with the tape's tokens: make the table with replay\(.*forced=True"),
            (own, dict(SHAPING, top_p=0.9, forced=True), "'p000' is none: top_p is 0.95 there and 0.9 here"),
            (prompts(2), dict(SHAPING, forced=True), "this target did not generate it"),
            (own_tapes(model, prompts(2), max_new_tokens=5, **FEW), dict(SHAPING, forced=True), "it is greedy"),
        ]
    ):
        made = replay(model, tapes, out=tmp_path / str(i), k_max=3, **options)
        for run in (lambda made=made: walk(made, k=2, estimator="ratio"), lambda made=made: expected_rounds(made, k=2)):
            with pytest.raises(UserError, match=says):
                run()
    reseeded = replay(model, own, out=tmp_path / "y", k_max=3, forced=True, **{**SHAPING, "seed": 50})
    assert len(expected_rounds(reseeded, k=2)) == 2, "the law is what matters, not the seed"


def test_a_token_the_target_never_draws():
    given = track(HAND)
    never = np.full(5, 0.5)
    never[2] = 0.0
    with pytest.raises(UserError, match="the text of d holds a token at position 3 that this target never draws"):
        chances(with_fields(given, target_p=never))
