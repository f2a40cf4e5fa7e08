"""Rounds: how long they are, what they emit and record, how stops, budget and context end them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.spec.policies import AdaptiveFloor, FixedK
from workbench.spec.proposers import DraftContext, GivenProposer, MTPProposer, Proposal, Proposer, ScriptedProposer
from workbench.spec.round import draft_length, run_round


class Perfect(ScriptedProposer):
    """Always right; remembers what it was asked for."""

    def __init__(self, setting) -> None:
        super().__init__(setting.truth, lambda at, slot: False, vocab_size=setting.model.config.vocab_size)
        self.asked: list[tuple[int, int, int]] = []

    def propose(self, ctx: DraftContext) -> Proposal:
        self.asked.append((ctx.k, ctx.pending, ctx.position))
        return super().propose(ctx)


def test_a_round_emits_the_accepted_drafts_and_the_bonus(lively):
    own = lively.own
    chains = [(own[1], own[2], 3), (own[4],), (), (9, 9, 9), (own[8], own[9], own[10])]
    session = lively.session(k=3, proposer=GivenProposer(chains, [[0.25] * len(chain) for chain in chains]))
    assert session.burst(11) == "length"
    records = session.state.records
    assert session.tokens == lively.truth[: len(lively.ids) + 12]
    assert [r.draft_ids for r in records] == chains
    assert [r.draft_top1 for r in records] == [(0.25,) * len(chain) for chain in chains]
    assert [r.accepted for r in records] == [2, 1, 0, 0, 3]
    assert [r.emitted for r in records] == [3, 2, 1, 1, 4]
    assert [r.bonus for r in records] == [own[3], own[5], own[6], own[7], own[11]]
    assert [r.chain_stop for r in records] == ["k", "proposer", "proposer", "k", "k"]
    assert [(r.index, r.base, r.k, r.round_stop) for r in records] == [(i, 1, 3, "") for i in range(5)]
    assert [r.start - len(lively.ids) for r in records] == [0, 3, 5, 6, 7]


@pytest.mark.parametrize("k, budget, asked", [(5, 10, [5, 3]), (5, 6, [5]), (5, 5, [4]), (3, 1, []), (8, 2, [1])])
def test_the_draft_never_passes_the_budget(lively, k, budget, asked):
    proposer = Perfect(lively)
    session = lively.session(k=k, proposer=proposer)
    assert session.burst(budget) == "length"
    assert len(session.tokens) == len(lively.ids) + 1 + budget
    assert [n for n, *_ in proposer.asked] == asked
    bounded = [r.round_stop for r in session.state.records]
    assert bounded == ["budget" if r.k < k else "" for r in session.state.records]


@pytest.mark.parametrize("k, room", [*product((1, 4, 8), (1, 2, 5, 9, 12))])
def test_the_text_ends_exactly_at_the_capacity(lively, k, room):
    capacity = len(lively.ids) + 1 + room
    session = lively.session(k=k, proposer=Perfect(lively), capacity=capacity)
    assert session.burst(70) == "context"
    assert session.tokens == lively.truth[:capacity]
    assert session.state.cache.lengths == [capacity - 1]
    last = session.state.records[-1]
    assert last.round_stop == ("context" if last.k < k else "")
    assert session.burst(3) == "context" and session.burst(0) == "length"
    assert len(session.tokens) == capacity


def test_when_budget_and_context_end_together_the_budget_is_named(lively):
    session = lively.session(k=8, proposer=Perfect(lively), capacity=len(lively.ids) + 5)
    assert session.burst(4) == "length"
    assert [r.round_stop for r in session.state.records] == ["budget"]


def test_draft_length_is_the_least_of_wish_budget_and_room(lively):
    state = lively.session(k=6, proposer=Perfect(lively), capacity=len(lively.ids) + 1 + 8).state
    assert [draft_length(state, n) for n in (1, 2, 6, 7, 8, 9, 50)] == [
        (0, "budget"), (1, "budget"), (5, "budget"), (6, ""), (6, ""), (6, ""), (6, ""),
    ]  # fmt: skip
    run_round(state, 4)
    assert draft_length(state, 4) == (3, "budget") and draft_length(state, 5) == (3, "context")
    state.policy = FixedK(k=0).start(width=1)
    assert draft_length(state, 50) == (0, "")
    state.proposer = None
    assert draft_length(state, 50) == (0, "")


def test_without_a_drafter_rounds_are_plain_decode(lively):
    session = lively.session(k=0)
    session.burst(20)
    assert session.tokens == lively.truth[: len(lively.ids) + 21]
    assert len(session.state.records) == 20
    assert {(r.k, r.drafted, r.emitted, r.chain_stop, r.round_stop) for r in session.state.records} == {
        (0, 0, 1, "none", "")
    }


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("carry", [True, False])
def test_both_forms_of_the_pending_token_feed_the_same_rows(lively, carry, rowwise, monkeypatch):
    fed, forward = [], lively.model.forward
    session = lively.session(k=3, proposer=Perfect(lively), carry=carry, rowwise=rowwise)
    monkeypatch.setattr(
        lively.model, "forward", lambda t, cache, **kw: (fed.append(t[0].tolist()), forward(t, cache, **kw))[1]
    )
    session.burst(8)
    rows = [lively.own[i : i + 4] for i in (0, 4)]
    cut = {(True, False): [4], (False, False): [1, 3]}.get((carry, rowwise), [1] * 4)
    expected = []
    for row in rows:
        at = 0
        for n in cut:
            expected.append(row[at : at + n])
            at += n
    assert fed == expected
    assert [(r.base, r.accepted) for r in session.state.records] == [(int(carry), 3)] * 2


def test_base_reaches_the_threshold(lively):
    """pmin0 cuts the first slot of a carried round only; then nothing is drafted, and decoding goes on."""
    unsure = ScriptedProposer(lively.truth, lambda at, slot: False, vocab_size=211, confidence=0.2)
    drafted = {}
    for carry, pmin0 in product((True, False), repeat=2):
        session = lively.session(k=3, proposer=unsure, carry=carry, p_min=0.5, pmin0=pmin0)
        session.burst(12)
        assert session.tokens == lively.truth[: len(lively.ids) + 13]
        whole = [r for r in session.state.records if r.round_stop == ""]
        drafted[carry, pmin0] = {r.drafted for r in whole}
        assert {r.chain_stop for r in whole} == {"p_min"}
    assert drafted == {(True, True): {0}, (True, False): {1}, (False, True): {1}, (False, False): {1}}


def test_a_dropped_token_is_neither_drafted_nor_accepted(lively):
    own = lively.own
    given = GivenProposer([own[1:5]], [[0.9, 0.5, 0.49, 0.9]])
    session = lively.session(k=4, p_min=0.5, proposer=given)
    session.burst(5)
    first = session.state.records[0]
    assert (first.drafted, first.accepted, first.emitted, first.chain_stop) == (2, 2, 3, "p_min")
    assert first.draft_ids == tuple(own[1:3]) and first.draft_top1 == (0.9, 0.5)


def test_adaptive_lengths_follow_what_was_accepted(lively):
    first = len(lively.ids)
    errs = {first + i for i in (3, 4, 6)}
    proposer = ScriptedProposer(lively.truth, lambda at, slot: at in errs, vocab_size=211)
    session = lively.session(k=5, adaptive=True, proposer=proposer)
    session.burst(20)
    pairs = [(r.k, r.accepted) for r in session.state.records]
    assert pairs[:5] == [(5, 2), (3, 0), (1, 1), (2, 2), (3, 3)]
    assert session.tokens == lively.truth[: first + 21]


# --- stops -----------------------------------------------------------------------------------------------------------


def stop_after(lively, emitted: int) -> int:
    """A token that occurs first as the text's token number ``emitted`` (from 0)."""
    token = lively.own[emitted]
    assert token not in lively.own[:emitted]
    return token


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("at, where", [(1, "first"), (2, "inside"), (4, "last"), (5, "bonus"), (8, "later")])
def test_a_stop_token_ends_text_ids_caches_and_counts(lively, at, where, carry):
    session = lively.session(k=4, proposer=Perfect(lively), carry=carry)
    session.state.stop_ids = frozenset({stop_after(lively, at)})
    assert session.burst(50) == "stop"
    known = len(lively.ids) + at + 1
    assert session.tokens == lively.truth[:known]
    assert session.state.cache.lengths == [known - 1]
    fresh = lively.model.new_cache()
    lively.model.forward(torch.tensor([lively.truth[: known - 1]]), fresh)
    assert session.state.cache.first_difference(fresh) is None
    records = session.state.records
    assert sum(r.emitted for r in records) == at
    last = records[-1]
    if where == "bonus":
        assert (last.accepted, last.emitted, last.bonus, last.round_stop) == (4, 5, lively.own[5], "")
    else:
        inside = (at - 1) % 5 + 1
        assert (last.accepted, last.emitted, last.bonus, last.round_stop) == (inside, inside, None, "stop")
        assert last.cut
    told = acceptance(records)
    assert told.emitted == at and told.accepted == sum(r.accepted for r in records)
    assert told.cut == (where != "bonus")
    assert session.burst(10) == "stop" and session.tokens == lively.truth[:known], "a stopped text stays as it is"


def test_a_session_goes_on_after_a_stop_when_it_is_fed(lively, parts):
    session = lively.session(k=4, proposer=MTPProposer(lively.model))
    session.state.stop_ids = frozenset({stop_after(lively, 6)})
    session.burst(50)
    session.feed([3, 1])
    text = [*lively.truth[: len(lively.ids) + 7], 3, 1]
    session.state.stop_ids = frozenset()
    session.burst(10)
    assert session.tokens == [*text, *parts.plain(lively.model, text, 11)]


def test_a_rejected_draft_of_the_stop_token_is_nothing(lively):
    token = next(t for t in range(211) if t not in lively.own[:12])
    session = lively.session(k=2, proposer=GivenProposer([[token, 1]] * 20))
    session.state.stop_ids = frozenset({token})
    assert session.burst(10) == "length"


# --- K = 0 rounds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("carry", [True, False])
@torch.inference_mode()
def test_rounds_that_draft_nothing_write_drafter_rows_too(lively, parts, carry, refresh):
    """After any mixture of lengths the next chain is that of a head primed over the same text."""
    first = len(lively.ids)
    proposer = parts.obedient(lively.model, lively.truth, lambda at: at % 3 == 0, refresh=refresh)
    script = parts.script((0, 0, 2, 0, 4, 0, 0, 0, 1))
    session = lively.session(k=4, proposer=proposer, policy=script, carry=carry)
    for _ in script.ks:
        run_round(session.state, 50)
        known = session.tokens
        assert known == lively.truth[: len(known)]
        if refresh:
            twin = MTPProposer(lively.model)
            text = torch.tensor([known[:-1]])
            twin.prime(text, lively.model.forward(text, lively.model.new_cache(), logits="none"))
            ask = DraftContext(3, known[-1], len(known) - 1, lambda slot, p, top: None)
            mark = proposer.mark()
            live = MTPProposer.propose(proposer, ask)
            proposer.rewind(mark)
            assert live == twin.propose(ask)
    records = session.state.records
    assert [r.k for r in records] == list(script.ks)
    assert {r.chain_stop for r in records if r.k == 0} == {"none"}
    proposer.flush()
    assert proposer.cache.lengths == [len(session.tokens) - 2] and first < len(session.tokens)


def test_a_chain_dropped_whole_still_writes_the_pending_pair(lively, parts):
    proposer = parts.obedient(lively.model, lively.truth)
    script = parts.script((3,), drop=lambda index, slot: index % 2 == 0)
    session = lively.session(k=3, proposer=proposer, policy=script)
    session.burst(14)
    assert [r.drafted for r in session.state.records][:4] == [0, 3, 0, 3]
    assert [r.chain_stop for r in session.state.records][:2] == ["policy", "k"]
    assert proposer.cache.lengths == [len(session.tokens) - 2]


# --- proposers that do not behave ------------------------------------------------------------------------------------


class Eager(Proposer):
    """Gives what it likes."""

    name = "eager"

    def __init__(self, tokens: tuple[int, ...], top1: tuple[float, ...]) -> None:
        self.given = Proposal(tokens, top1, "k")

    def propose(self, ctx: DraftContext) -> Proposal:
        return self.given


@pytest.mark.parametrize(
    "tokens, top1, sentence",
    [
        ((1, 2, 3), (1.0,) * 3, "proposer 'eager' gave 3 tokens with 3 probabilities where 2 were asked for"),
        ((1, 2), (1.0,), "gave 2 tokens with 1 probabilities"),
        ((211,), (1.0,), "token id 211 is out of range: this model's ids are 0 to 210"),
        ((-1,), (1.0,), "token id -1 is out of range"),
    ],
)
def test_a_proposer_that_does_not_do_as_asked_is_named(lively, tokens, top1, sentence):
    session = lively.session(k=2, proposer=Eager(tokens, top1))
    before = session.state.cache.fork()
    with pytest.raises(UserError, match=sentence):
        session.burst(10)
    assert session.state.cache.first_difference(before) is None
    assert session.tokens == lively.truth[: len(lively.ids) + 1] and not session.state.records


def test_policies_see_every_round_after_it_is_recorded(lively, parts):
    session = lively.session(policy=AdaptiveFloor(k=4), proposer=Perfect(lively))
    session.state.policy = run = parts.script((2, 0, 3)).start(width=1)
    session.burst(9)
    assert [(v.drafted, v.accepted) for v in run.seen] == [(r.drafted, r.accepted) for r in session.state.records]
    ends = [r.start + r.emitted + 1 for r in session.state.records]
    assert [v.committed for v in run.seen] == ends
