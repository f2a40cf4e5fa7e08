"""The MTP head as a proposer: which rows its cache holds, from which carriers, and what its chains are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cache.hybrid import same_bits
from workbench.core.errors import NonFiniteError, UserError
from workbench.model.hybrid import HybridModel
from workbench.spec.proposers import DraftContext, MTPProposer
from workbench.spec.round import run_round


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def keep_all(slot: int, p: float, top: float | None = None) -> str | None:
    return None


def primed(model: HybridModel, text: list[int], **options) -> MTPProposer:
    """A fresh proposer over a text whose last token is pending."""
    proposer = MTPProposer(model, **options)
    known = torch.tensor([text[:-1]])
    proposer.prime(known, model.forward(known, model.new_cache(), logits="none"))
    proposer.flush()
    return proposer


def rows_differ(a: MTPProposer, b: MTPProposer) -> str | None:
    a.flush()
    b.flush()
    return a.cache.first_difference(b.cache)


@settings(max_examples=25)
@given(
    ks=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    wrong=st.sets(st.integers(0, 80)),
    drops=st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))),
    carry=st.booleans(),
    chunk=st.integers(1, 5),
    bursts=st.lists(st.integers(1, 9), max_size=3),
    carrier=st.sampled_from(["normed", "pre_norm"]),
)
def test_after_any_rounds_the_rows_are_those_of_a_fresh_proposer(
    lively, parts, ks, wrong, drops, carry, chunk, bursts, carrier
):
    proposer = parts.obedient(lively.model, lively.truth, lambda at: at in wrong, carrier=carrier)
    policy = parts.script(tuple(ks), drop=lambda index, slot: (index, slot) in drops)
    session = lively.session(k=9, policy=policy, proposer=proposer, carry=carry, chunk=chunk)
    for size in bursts:
        session.burst(size)
    for _ in ks:
        run_round(session.state, 30)
        slots = len(session.tokens) - 2
        assert proposer.held + sum(t.shape[1] for t, _ in proposer.queue) == slots == proposer.position - 1
    assert session.tokens[: len(lively.truth)] == lively.truth[: len(session.tokens)]  # the known text may be over
    assert rows_differ(proposer, primed(lively.model, session.tokens, carrier=carrier)) is None


def test_without_refresh_rows_of_accepted_drafts_are_draft_rows(lively, parts):
    """The control: same rounds, same number of rows, other bits, and only in rows that a chain wrote."""
    kept, rows = {}, {}
    for refresh in (True, False):
        proposer = parts.obedient(lively.model, lively.truth, lambda at: at % 5 == 0, refresh=refresh)
        session = lively.session(k=4, proposer=proposer, refresh=refresh)
        session.burst(25)
        kept[refresh], rows[refresh] = session, proposer
    assert kept[True].tokens == kept[False].tokens
    twin = primed(lively.model, kept[True].tokens)
    assert rows_differ(rows[True], twin) is None
    assert rows[False].cache.lengths == twin.cache.lengths
    a, b = (p.cache.planes[0].rows(0, p.cache.lengths[0])[0] for p in (rows[False], twin))
    other = {i for i in range(a.shape[1]) if not same_bits(a[:, i], b[:, i])}
    drafted = set()
    for r in kept[False].state.records:  # the chain wrote the rows of its drafts but the last
        drafted |= {r.start + j for j in range(1, 1 + min(r.accepted, r.drafted - 1))}
    assert other == {position - 1 for position in drafted}
    assert len(other) > 5


def test_a_chain_is_the_head_run_on_true_rows_and_then_on_its_own_carriers(lively):
    model, text = lively.model, lively.truth[:30]
    proposal = primed(model, text).propose(DraftContext(5, text[-1], 29, keep_all))
    known = torch.tensor([text])
    rows = model.forward(known, model.new_cache(), logits="none")
    cache = model.new_draft_cache()
    hidden = model.draft(known[:, 1:], rows.normed_BTH[:, :-1], cache)[:, -1:]
    tokens, seen = [], []
    for _ in range(5):
        logits = model.unembed(hidden)[0, 0].double()
        tokens.append(int(logits.argmax()))
        seen.append(float(logits.softmax(-1).max()))
        hidden = model.draft(torch.tensor([[tokens[-1]]]), hidden, cache)
    assert proposal.tokens == tuple(tokens) and proposal.stop_cause == "k"
    assert proposal.top1 == pytest.approx(seen, rel=1e-5)
    assert proposal.q is None and MTPProposer.has_q


def test_a_chain_does_not_depend_on_how_it_was_primed(lively):
    text = lively.truth[:50]
    ask = DraftContext(4, text[-1], 49, keep_all)
    expected = primed(lively.model, text).propose(ask)
    for sizes in ([1] * 49, [20, 29], [48, 1]):
        proposer, cache, at = MTPProposer(lively.model), lively.model.new_cache(), 0
        for i, n in enumerate(sizes):
            piece = torch.tensor([text[at : at + n]])
            proposer.prime(piece, lively.model.forward(piece, cache, logits="none"))
            at += n
            if i % 3 == 0:
                proposer.flush()
        assert proposer.propose(ask) == expected


def test_the_threshold_ends_a_chain_before_the_token_it_drops(lively):
    text = lively.truth[:20]
    calls = []

    def drops(slot: int, p: float, top: float) -> str | None:
        calls.append((slot, p))
        return "p_min" if slot == 2 else None

    whole = primed(lively.model, text).propose(DraftContext(4, text[-1], 19, keep_all))
    cut = primed(lively.model, text).propose(DraftContext(4, text[-1], 19, drops))
    assert (cut.tokens, cut.top1, cut.stop_cause) == (whole.tokens[:2], whole.top1[:2], "p_min")
    assert calls == list(enumerate(whole.top1[:3]))


def test_position_zero_has_no_row(lively):
    proposer = primed(lively.model, [3, 4])
    assert proposer.cache.lengths == [0] and proposer.position == 1
    proposer.propose(DraftContext(2, 4, 1, keep_all))
    assert proposer.held == 1


@pytest.mark.parametrize("shift", [1, 3])
def test_a_shift_pairs_tokens_with_earlier_carriers(lively, shift):
    model, text = lively.model, lively.truth[:12]
    shifted = primed(model, text, shift=shift)
    known = torch.tensor([text[:-1]])
    rows = model.forward(known, model.new_cache(), logits="none").normed_BTH
    at = (torch.arange(1, 11) - 1 - shift).clamp(min=0)
    cache = model.new_draft_cache()
    model.draft(known[:, 1:], rows[:, at], cache)
    assert shifted.cache.first_difference(cache) is None
    assert shifted.cache.first_difference(primed(model, text).cache) is not None


def test_an_unprimed_proposer_starts_at_the_end_of_the_prompt(lively, parts):
    proposer = parts.obedient(lively.model, lively.truth, primed=False)
    session = lively.session(k=3, proposer=proposer)
    assert proposer.cache.lengths == [0]
    session.burst(7)
    assert proposer.cache.lengths == [7], "a row for every token from the first pending one on, but the last"
    session.feed([1, 2, 3])
    proposer.truth = [*session.tokens, *parts.plain(lively.model, session.tokens, 9)]
    session.burst(8)
    assert proposer.cache.lengths == [15]
    assert session.tokens == proposer.truth[: len(session.tokens)]


def test_reset_forgets_everything(lively):
    proposer = primed(lively.model, lively.truth[:20])
    proposer.propose(DraftContext(3, lively.truth[19], 19, keep_all))
    proposer.reset()
    assert (proposer.position, proposer.held, proposer.queue, proposer.tail) == (0, 0, [], None)
    assert proposer.cache.lengths == [0]


def test_a_session_takes_a_used_proposer_as_new(lively):
    proposer = MTPProposer(lively.model)
    seen = []
    for _ in range(2):
        session = lively.session(k=3, proposer=proposer)
        session.burst(15)
        seen.append([(r.draft_ids, r.draft_top1) for r in session.state.records])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("step", [0, 2])
def test_a_draft_that_is_not_finite_names_its_position(lively, step, monkeypatch):
    proposer = primed(lively.model, lively.truth[:20])
    unembed, calls = lively.model.unembed, iter(range(9))
    monkeypatch.setitem(
        vars(lively.model), "unembed", lambda h: unembed(h) * (math.nan if next(calls) == step else 1.0)
    )
    with pytest.raises(NonFiniteError, match=f"logits of position {19 + step} hold NaN"):
        proposer.propose(DraftContext(4, lively.truth[19], 19, keep_all))


def test_a_batch_of_contexts_is_answered_one_by_one(lively):
    proposer = primed(lively.model, lively.truth[:20])
    mark = proposer.mark()
    ask = DraftContext(3, lively.truth[19], 19, keep_all)
    one = proposer.propose(ask)
    proposer.rewind(mark)
    assert proposer.propose_batch([ask]) == [one]


def test_a_carrier_of_another_name_is_refused(lively):
    with pytest.raises(UserError, match="carrier='raw' is not valid: choose one of 'normed', 'pre_norm'"):
        MTPProposer(lively.model, carrier="raw")
