"""Turn checkpoints, growth, copies, comparisons and demotion of sessions, with grammars too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.kv import KVPlane
from workbench.core.errors import CapabilityError, UserError
from workbench.spec.compare import compare_sessions
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import GivenProposer, MTPProposer
from workbench.spec.proposers.base import Proposer
from workbench.spec.session import Session

SAMPLED = dict(temperature=0.9, top_k=40, repetition_penalty=1.1, presence_penalty=0.2, seed=5)


# --- turn checkpoints ------------------------------------------------------------------------------------------------


def test_rewind_returns_to_the_prompt_end_as_often_as_asked(lively, parts):
    session = lively.begin(adaptive=True, logprobs=True, **SAMPLED)
    session.generate(lively.ids, max_new_tokens=9)
    session.feed([9, 8, 7])
    before, firsts = parts.frozen.of(session.state), list(session.first_logprobs)
    told = []
    for n in (1, 12, 12, 0):
        session.rewind()
        assert before.difference(parts.frozen.of(session.state)) is None and session.first_logprobs == firsts
        told.append(session.generate(max_new_tokens=n).tokens if n else ())
    assert told[1] == told[2] and told[0] == told[1][:1]
    lively.same(session)
    session.feed([4])
    known = session.tokens
    session.generate(max_new_tokens=3)
    session.rewind()
    assert session.tokens == known


@pytest.mark.parametrize("stable", range(1, 6))
@pytest.mark.parametrize("held", [0, 6])
def test_a_stable_position_inside_the_prompt(lively, parts, stable, held):
    session = lively.begin(chunk=2, logprobs=True)
    if held:
        session.generate(lively.ids, max_new_tokens=held)
    text, prompt = session.tokens, [9, 3, 5, 1, 2]
    session.feed(prompt, stable=stable)
    assert session.tokens == [*text, *prompt, *parts.plain(lively.model, [*text, *prompt], 1)]
    lively.same(session)
    session.generate(max_new_tokens=6)
    session.rewind()
    assert session.tokens == [*text, *prompt[:stable]]
    assert len(session.first_logprobs) == bool(held)
    if len(session.tokens) > 1:
        lively.same(session)
    after = session.generate(max_new_tokens=1, stop_token_ids=prompt).tokens  # a given token ends nothing
    assert list(after) == parts.plain(lively.model, [*text, *prompt[:stable]], 1)
    session.rewind()
    session.generate([7, 7], max_new_tokens=4, stop_token_ids=())
    assert session.tokens[len(text) + stable + 2 :] == parts.plain(
        lively.model, [*text, *prompt[:stable], 7, 7], len(session.tokens) - len(text) - stable - 2
    )
    lively.same(session)


def test_a_rewind_takes_the_session_s_own_policy_back(lively, parts):
    drafter = parts.obedient(lively.model, lively.truth, lambda at: at % 5 == 0)
    session = lively.begin(adaptive=True, k=6, proposer=drafter)
    session.generate(lively.ids, max_new_tokens=1, k=2, adaptive=False)
    told = [[r.key() for r in session.generate(max_new_tokens=14).records]]
    assert session.state.policy.state.any()
    session.rewind()
    assert not session.state.policy.state.any() and session.telemetry.rounds == 0
    told.append([r.key() for r in session.generate(max_new_tokens=14).records])
    assert told[0] == told[1] and len({drafted for _, drafted, _, _ in told[0]}) > 1


def test_a_stable_position_out_of_range(lively):
    session = lively.begin()
    for bad in (0, 5, -1):
        with pytest.raises(UserError, match="stable"):
            session.feed(lively.ids, stable=bad)
    with pytest.raises(UserError, match="no turn to return to"):
        session.rewind()


def test_a_failed_prompt_keeps_the_turn_before(lively, monkeypatch):
    session = lively.begin(chunk=2)
    session.generate(lively.ids, max_new_tokens=5)
    turn, text = session.turn, session.tokens
    for stable in (None, 3):
        with monkeypatch.context() as patch:
            patch.setattr(MTPProposer, "flush", lambda self: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                session.feed([1, 2, 3, 4], stable=stable)
        assert session.turn is turn and session.tokens == text and not turn.saved.stale
    session.rewind()
    assert session.tokens == lively.truth[:5]
    lively.same(session)


def test_grow_and_rewind(lively):
    session = lively.begin(capacity=20)
    session.generate(lively.ids, max_new_tokens=16)
    session.rewind(capacity=200)
    assert session.capacity == 200 and session.tokens == lively.truth[:5]
    lively.same(session)
    session.generate(max_new_tokens=75)
    assert session.tokens == lively.truth[:80]
    lively.same(session)
    with pytest.raises(UserError, match="capacity"):
        session.grow(199)
    with pytest.raises(UserError, match="capacity"):
        session.rewind(capacity=513)
    assert session.tokens == lively.truth[:80]


@pytest.mark.parametrize("how", ["grow", "rewind"])
@pytest.mark.parametrize("call", range(3))
def test_a_grow_without_memory_changes_nothing(lively, monkeypatch, parts, how, call):
    session = lively.begin(capacity=20)
    session.generate(lively.ids, max_new_tokens=9)
    before, held = parts.frozen.of(session.state), session.summary
    original, uses = KVPlane.enlarged, []

    def failing(self: KVPlane, capacity: int) -> Any:
        uses.append(capacity)
        if len(uses) == call + 1:  # two attention layers, then the drafter's
            raise MemoryError
        return original(self, capacity)

    with monkeypatch.context() as patch:
        patch.setattr(KVPlane, "enlarged", failing)
        with pytest.raises(MemoryError):
            session.grow(200) if how == "grow" else session.rewind(capacity=200)
    assert before.difference(parts.frozen.of(session.state)) is None and session.summary == held
    assert session.state.proposer.cache.capacity == 20
    session.grow(200)
    session.generate(max_new_tokens=60)
    assert session.tokens == lively.truth[:73]


def test_rows_that_were_cut_back_are_refused(lively):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=9)
    cache = session.state.cache
    late = cache.save()
    session.rewind()
    with pytest.raises(UserError, match="cut back below it"):
        cache.restore(late)
    with pytest.raises(UserError, match="another cache"):
        cache.restore(lively.begin().state.cache.save())
    lively.same(session)


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("strategy", ["tape", "columns", "snapshot"])
def test_every_way_to_cut_a_verify_can_be_rewound_grown_and_forked(lively, parts, strategy, carry):
    drafter = parts.obedient(lively.model, lively.truth, lambda at: at % 4 == 3, capacity=30)
    session = lively.begin(strategy=strategy, carry=carry, proposer=drafter, capacity=30)
    session.generate(lively.ids, max_new_tokens=9)
    assert session.telemetry.accepted > 2
    twin = session.fork()
    session.generate(max_new_tokens=8)
    session.rewind(capacity=60)
    lively.same(session)
    session.generate(max_new_tokens=40)
    twin.generate(max_new_tokens=5)
    assert session.tokens == lively.truth[:45] and twin.tokens == lively.truth[:18]
    lively.same(session)
    lively.same(twin)


def test_ratio_bursts_are_reproduced_by_the_same_calls(lively):
    def calls(session: Session) -> list[tuple[int, ...]]:
        return [session.generate(max_new_tokens=n).tokens for n in (3, 7, 5)]

    session = lively.begin(accept="ratio", temperature=0.8, seed=3, p_min=0.1, p_min_reads="top")
    session.feed(lively.ids)
    twin, told = session.fork(), calls(session)
    session.rewind()
    assert calls(session) == told == calls(twin)
    lively.same(session)


# --- copies and comparisons ------------------------------------------------------------------------------------------


def test_a_fork_goes_on_as_the_session_does_and_neither_touches_the_other(lively):
    session = lively.begin(adaptive=True, anatomy=True)
    session.generate(lively.ids, max_new_tokens=7)
    twin = session.fork()
    assert not compare_sessions(session, twin)
    steps = session.probe.steps
    there = twin.generate(max_new_tokens=9)
    assert session.probe.steps == steps < twin.probe.steps and twin.state.model is session.state.model
    assert [r.key() for r in session.generate(max_new_tokens=9).records] == [r.key() for r in there.records]
    assert not compare_sessions(session, twin)
    twin.generate([1, 2], max_new_tokens=4)
    session.generate([3], max_new_tokens=4)
    found = compare_sessions(session, twin)
    assert found and found.text == len(lively.ids) + 16
    lively.same(session)
    lively.same(twin)
    twin.rewind()
    session.rewind()
    lively.same(session)
    lively.same(twin)


def test_a_fork_of_a_drafter_that_cannot_be_copied(lively):
    class Bare(MTPProposer):
        fork = Proposer.fork

    session = lively.begin(proposer=Bare(lively.model))
    session.feed(lively.ids)
    with pytest.raises(CapabilityError, match="does not define fork"):
        session.fork()
    given = lively.begin(proposer=GivenProposer([[1], [2], [3]]))
    given.feed(lively.ids)
    twin = given.fork()
    assert given.burst(3) == twin.burst(3) and given.tokens == twin.tokens


@pytest.mark.parametrize("owner, layer, plane", [
    ("target", 0, "conv"), ("target", 3, "state"), ("target", 2, "k"), ("target", 4, "v"),
    ("drafter", 0, "k"), ("drafter", 0, "v"), ("drafter", None, "carrier"),
])  # fmt: skip
def test_a_flipped_bit_is_found_and_named(lively, owner, layer, plane):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=9)
    twin = session.fork()
    whole = compare_sessions(session, twin)
    assert not whole and whole.first is None and "equal in every bit" in str(whole)
    assert whole.bytes_held[0] == session.summary["cache_bytes"] + session.summary["drafter_bytes"]
    assert 0 < whole.bytes_compared <= whole.bytes_held[0] + 4 * lively.model.config.hidden_size
    cache = twin.state.cache if owner == "target" else twin.state.proposer.cache
    rows = twin.state.proposer.tail.clone() if plane == "carrier" else None
    with torch.inference_mode():
        if rows is not None:
            twin.state.proposer.tail = rows
            part = rows[0]
        else:
            part = cache.planes[layer].parts(0, cache.lengths[0])[plane]
        row = len(part) - 1
        flat = part[row].reshape(-1).clone()
        offset = len(flat) - 2
        flat.view(torch.int32)[offset] ^= 1
        part[row] = flat.reshape(part[row].shape)
    found = compare_sessions(session, twin)
    assert found and found.text is None and len(found.differences) == 1
    first = found.first
    assert (first.owner, first.layer, first.plane, first.row, first.offset) == (owner, layer, plane, row, offset)
    assert plane in str(found) and f"row {row} at offset {offset}" in str(found) and "equal" in found._repr_html_()


def test_comparisons_of_sessions_of_other_lengths_and_without_a_drafter(lively):
    one, two, plain = lively.begin(), lively.begin(), lively.begin(k=0)
    for session, n in ((one, 6), (two, 9), (plain, 6)):
        session.generate(lively.ids, max_new_tokens=n)
    found = compare_sessions(one, two)
    assert found and found.text == 10 and any(d.plane == "rows" and (d.a, d.b) == (9, 12) for d in found.differences)
    assert not compare_sessions(one, plain) and compare_sessions(one, plain).owners == ("target",)


# --- demotion --------------------------------------------------------------------------------------------------------


def test_demote_and_promote(lively):
    session = lively.begin(adaptive=True)
    session.generate(lively.ids, max_new_tokens=8)
    session.demote()
    session.demote()
    assert not session.summary["drafting"] and session.summary["drafter_bytes"] == 0
    assert all(r.drafted == 0 for r in session.generate(max_new_tokens=5).records)
    session.generate([9, 8], max_new_tokens=3)
    with pytest.raises(UserError, match="call promote"):
        session.generate(k=3)
    text = session.tokens
    session.promote()
    session.promote()
    assert session.tokens == text
    lively.same(session)
    assert any(r.drafted for r in session.generate(max_new_tokens=8).records)
    lively.same(session)
    session.rewind()
    lively.same(session)
    with pytest.raises(CapabilityError, match="without a drafter"):
        lively.begin(k=0).promote()


@pytest.mark.parametrize("order", ["demote rewind promote", "demote promote rewind", "demote grow rewind promote"])
def test_demotion_rewinds_and_growth_in_any_order(lively, order):
    session = lively.begin(capacity=60)
    session.generate(lively.ids, max_new_tokens=6)
    session.generate([9, 8, 7], max_new_tokens=9)
    for step in order.split():
        session.grow(100) if step == "grow" else getattr(session, step)()
    assert session.tokens[:-1] == [*lively.truth[:10], 9, 8, 7]
    lively.same(session)
    session.generate(max_new_tokens=12)
    lively.same(session)
    twin = session.fork()
    assert not compare_sessions(session, twin)


def test_a_promotion_that_fails_leaves_plain_decode(lively, monkeypatch):
    session = lively.begin(chunk=3)
    session.generate(lively.ids, max_new_tokens=8)
    session.demote()
    with monkeypatch.context() as patch:
        patch.setattr(MTPProposer, "flush", lambda self: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            session.promote()
    assert session.state.proposer is None and session.parked is not None
    session.generate(max_new_tokens=4)
    session.promote()
    session.generate(max_new_tokens=4)
    assert session.tokens == lively.truth[: len(session.tokens)]
    lively.same(session)


def test_negative_control_a_drafter_rewound_to_the_wrong_place_is_seen(lively, monkeypatch):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=9)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="the drafter has seen"):
        patch.setattr(MTPProposer, "rewind", lambda self, to: None)
        session.rewind()


def test_negative_control_a_state_not_restored_is_seen(lively, monkeypatch):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=9)
    plane = session.state.cache.recurrent[1]
    late = plane.state_BHKV
    session.rewind()
    plane.state_BHKV = late
    found = compare_sessions(session, lively.fresh(session))
    assert found and (found.first.layer, found.first.plane) == (1, "state")


# --- grammars and text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
def test_a_grammar_is_rewound_and_forked_with_the_text(demo, engine):
    pytest.importorskip(engine)
    grammar = wb.grammars.regex(
        "[a-f]{6}[0-9]{8}",
        demo.tokenizer,
        vocab_size=demo.config.vocab_size,
        eos_ids=demo.config.eos_token_id,
        engine=engine,
    )
    session = Session(demo, options=GenerateOptions(k=3, temperature=1.0, seed=4), grammar=grammar)
    first = session.generate("value = ", max_new_tokens=4)
    twin = session.fork()
    rest = session.generate(max_new_tokens=40)
    assert rest.finish == "stop" and rest.tokens == twin.generate(max_new_tokens=40).tokens
    assert session.state.constraint.tokens == (*first.tokens, *rest.tokens)
    for one in (session, twin):
        one.rewind()
        assert one.state.constraint.tokens == first.tokens[:1]
        again = one.generate(max_new_tokens=40)
        assert (first.tokens[0], *again.tokens) == (*first.tokens, *rest.tokens)


def test_a_burst_of_text_with_stop_strings_for_itself(demo):
    session = Session(demo, options=GenerateOptions(k=3, ignore_eos=True))
    whole = session.generate("def main(", max_new_tokens=30)
    assert whole.text == demo.tokenizer.decode(whole.tokens)
    cut = whole.text[5:8]
    session = Session(demo, options=GenerateOptions(k=3, ignore_eos=True))
    found = session.generate("def main(", max_new_tokens=30, stop=cut)
    assert found.finish == "stop_string" and found.text == whole.text[: whole.text.index(cut)]
    assert session.options.stop == () and session.tokens == [*whole.prompt, *whole.tokens][: len(session.tokens)]
    rest = session.generate(max_new_tokens=30 - len(found.tokens))
    assert found.tokens + rest.tokens == whole.tokens
    assert session.generate(" return", max_new_tokens=2).prompt[len(whole.prompt) + 30 :] == tuple(
        demo.tokenizer.encode(" return")
    )
