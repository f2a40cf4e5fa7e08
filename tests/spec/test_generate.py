"""``generate`` and ``Session`` as users call them: lengths, prompts, given texts, options, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.core.errors import CapabilityError, NonFiniteError, UserError
from workbench.core.tape import Tape
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import FixedK
from workbench.spec.proposers import GivenProposer, ScriptedProposer
from workbench.spec.session import Session


def perfect(lively) -> ScriptedProposer:
    return ScriptedProposer(lively.truth, lambda at, slot: False, vocab_size=211)


def no_stop(lively, **given):
    return generate(lively.model, lively.ids, ignore_eos=True, **given)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_exactly_max_new_tokens(lively, k, n):
    for carry in (True, False):
        done = no_stop(lively, k=k, max_new_tokens=n, carry=carry)
        assert list(done.tokens) == lively.own[:n] and done.finish == "length"
        assert list(done.prompt) == lively.ids and done.exact
        assert sum(r.emitted for r in done.records) == n - 1


@pytest.mark.parametrize("adaptive, p_min", [(True, 0.0), (False, 0.3), (True, 0.9)])
def test_exactly_max_new_tokens_under_any_policy(lively, adaptive, p_min):
    proposer = ScriptedProposer(lively.truth, lambda at, slot: at % 4 == 0, vocab_size=211, confidence=0.5)
    for n in range(1, 20):
        done = no_stop(lively, k=5, adaptive=adaptive, p_min=p_min, max_new_tokens=n, proposer=proposer)
        assert list(done.tokens) == lively.own[:n]


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_of_one_token(lively, parts, k):
    own = parts.plain(lively.model, [9], 20)
    done = generate(lively.model, [9], k=k, max_new_tokens=20, ignore_eos=True)
    assert list(done.tokens) == own
    one = generate(lively.model, [9], k=k, max_new_tokens=1, ignore_eos=True)
    assert list(one.tokens) == own[:1] and one.records == ()
    assert one.summary["tokens_per_second"] is None and one.summary["tau"] is None


def test_the_whole_context_can_be_used(tiny, parts):
    model = tiny(tied=False, vocab_size=211, max_position_embeddings=40)
    own = parts.plain(model, [5, 6, 7, 8], 36)
    for k in (0, 5):
        assert list(generate(model, [5, 6, 7, 8], k=k, max_new_tokens=36, ignore_eos=True).tokens) == own
    with pytest.raises(UserError, match=r"prompt of 4 tokens \+ max_new_tokens=37 is over this model's context of 40"):
        generate(model, [5, 6, 7, 8], max_new_tokens=37)
    session = Session(model, options=GenerateOptions(k=5, ignore_eos=True))
    session.feed([5, 6, 7, 8])
    assert session.burst(500) == "context" and session.tokens[4:] == own


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopping(lively, monkeypatch):
    """A model whose end of text is the token that own text holds first at place 7."""
    assert lively.own.index(lively.own[7]) == 7
    monkeypatch.setattr(lively.model, "config", replace(lively.model.config, eos_token_id=(lively.own[7], 210)))
    return lively


@pytest.mark.parametrize("k", range(9))
def test_the_end_of_text_cuts_text_records_and_frame(stopping, k):
    """With K = 4 it is a bonus, with other K an accepted draft or a pick."""
    done = generate(stopping.model, stopping.ids, k=k, max_new_tokens=40, proposer=perfect(stopping))
    assert list(done.tokens) == stopping.own[:8] and done.finish == "stop"
    assert sum(r.emitted for r in done.records) == 7 == done.rounds["emitted"].sum()
    assert done.summary["tokens"] == 8 and done.summary["finish"] == "stop"
    inside = done.records[-1].round_stop == "stop"
    assert done.summary["cut"] == inside and (done.records[-1].bonus is None) == inside


def test_the_end_of_text_as_first_token_and_as_last_of_the_budget(stopping, monkeypatch):
    whole = generate(stopping.model, stopping.ids, k=3, max_new_tokens=8)
    assert whole.finish == "stop" and list(whole.tokens) == stopping.own[:8]
    monkeypatch.setattr(stopping.model, "config", replace(stopping.model.config, eos_token_id=(stopping.own[0],)))
    for n in (1, 5):
        first = generate(stopping.model, stopping.ids, k=3, max_new_tokens=n)
        assert first.finish == "stop" and list(first.tokens) == stopping.own[:1] and first.records == ()


def test_ignoring_the_end_of_text(stopping):
    done = no_stop(stopping, k=4, max_new_tokens=20, proposer=perfect(stopping))
    assert list(done.tokens) == stopping.own[:20] and done.finish == "length"
    assert stopping.own[7] in done.tokens


# --- given texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_given_text_is_the_output_whatever_the_target_picks(lively, k, carry):
    text = torch.randint(0, 211, (25,), generator=torch.Generator().manual_seed(k)).tolist()
    text[3:8] = lively.own[3:8]
    done = generate(lively.model, lively.ids, force=text, k=k, carry=carry)
    assert list(done.tokens) == text and done.finish == "forced"
    bounded = generate(lively.model, lively.ids, force=text, k=k, carry=carry, max_new_tokens=9)
    assert list(bounded.tokens) == text[:9]


def test_forcing_the_own_text_gives_the_same_rounds(lively):
    free = no_stop(lively, k=4, max_new_tokens=40)
    forced = generate(lively.model, lively.ids, force=lively.own[:40], k=4)
    assert [r.key() for r in forced.records] == [r.key() for r in free.records]
    assert [r.draft_top1 for r in forced.records] == [r.draft_top1 for r in free.records]


def test_a_draft_equal_to_the_pick_but_off_the_text_counts_and_ends_the_round(lively):
    """The text is the target's own but for one place; up to there drafts of own text are accepted."""
    text = list(lively.own[:20])
    text[6] = (text[6] + 1) % 211
    done = generate(lively.model, lively.ids, force=text, k=4, proposer=perfect(lively))
    first, second, *_ = done.records
    assert (first.accepted, first.emitted, first.round_stop) == (4, 5, "")
    assert (second.accepted, second.emitted, second.round_stop) == (1, 1, "forced")
    assert second.bonus == text[6] and list(done.tokens) == text


def test_a_draft_on_the_text_but_not_the_pick_is_rejected(lively):
    text = [(t + 1) % 211 for t in lively.own[:10]]
    chains = [text[i + 1 : i + 4] for i in range(9)]
    done = generate(lively.model, lively.ids, force=text, k=3, proposer=GivenProposer(chains))
    agree = [r for r in done.records if r.accepted]
    assert list(done.tokens) == text and len(done.records) >= 5
    truth = [*lively.ids, *text]
    logits = lively.model.forward(torch.tensor([truth]), lively.model.new_cache()).logits_BTV[0]
    for r in done.records:  # accepted exactly where the draft is the pick after the given text
        expected = 0
        while expected < r.drafted and r.draft_ids[expected] == int(logits[r.start + expected].argmax()):
            expected += 1
            if r.draft_ids[expected - 1] != truth[r.start + expected]:
                break
        assert r.accepted == expected
    assert len(agree) < len(done.records)


def test_a_tape_carries_its_own_prompt(lively):
    tokens = np.array([*lively.ids, *lively.own[:12]], dtype=np.int32)
    tape = Tape("doc-1", tokens, prompt_len=len(lively.ids), source="tests")
    done = generate(lively.model, tape, force=tape, k=3)
    assert list(done.prompt) == lively.ids and list(done.tokens) == lively.own[:12]
    assert done.doc_id == "doc-1" and set(done.rounds["source"]) == {"tests"}
    bare = Tape("doc-2", tokens)
    assert len(generate(lively.model, bare, force=bare, k=3).tokens) == len(tokens) - 1
    free = generate(lively.model, tape, k=3, max_new_tokens=12, ignore_eos=True)
    assert list(free.tokens) == lively.own[:12], "without force its prompt alone is used"


def test_a_given_text_may_hold_the_end_of_text(stopping):
    text = [stopping.own[7], 1, 210, 2, 3]
    done = generate(stopping.model, stopping.ids, force=text, k=3)
    assert list(done.tokens) == text and done.finish == "forced"


# --- prompts and sessions --------------------------------------------------------------------------------------------


def test_ids_may_come_as_list_array_or_tensor(lively):
    expected = no_stop(lively, max_new_tokens=5).tokens
    for ids in (tuple(lively.ids), np.array(lively.ids), torch.tensor(lively.ids), [np.int64(t) for t in lively.ids]):
        done = generate(lively.model, ids, max_new_tokens=5, ignore_eos=True)
        assert done.tokens == expected and all(type(t) is int for t in done.prompt)


def test_text_goes_through_the_tokenizer(tiny_dir):
    model = wb.load(tiny_dir)
    done = wb.generate(model, "the cat", max_new_tokens=6, k=2)
    assert list(done.prompt) == model.tokenizer.encode("the cat")
    assert done.finish == "stop" and done.text == model.tokenizer.decode(done.tokens[:-1]), "a stop token shows no text"
    whole = wb.generate(model, "the cat", max_new_tokens=6, k=2, ignore_eos=True)
    assert whole.text == model.tokenizer.decode(whole.tokens)


@pytest.mark.parametrize("k", [0, 4])
def test_bursts_and_chunks_change_nothing(lively, k):
    for chunk, sizes in ((1, [40]), (3, [1] * 40), (512, [7, 1, 20, 12])):
        session = lively.session(k=k, chunk=chunk)
        for size in sizes:
            assert session.burst(size) == "length"
        assert session.tokens == lively.truth[: len(lively.ids) + 41]


@pytest.mark.parametrize("k", [0, 4])
def test_a_conversation_is_decoded_as_its_whole_text(lively, parts, k):
    session = lively.session(k=k)
    for turn in ([1, 2, 3], [9], list(range(20, 60))):
        session.burst(6)
        session.feed(turn)
        text = session.tokens
        assert text[-1] == parts.plain(lively.model, text[:-1], 1)[0]
        session.burst(6)
        assert session.tokens == [*text, *parts.plain(lively.model, text, 6)]
    fresh = lively.model.new_cache()
    lively.model.forward(torch.tensor([session.tokens[:-1]]), fresh)
    assert session.state.cache.first_difference(fresh) is None


def test_the_numerical_class_is_asked_for_per_call(lively):
    fast = no_stop(lively, max_new_tokens=10, exact=False)
    assert not fast.exact and lively.model.exact
    assert no_stop(lively, max_new_tokens=10, exact=None).exact


def test_options_as_one_object_and_by_name(lively):
    options = GenerateOptions(k=2, max_new_tokens=9, ignore_eos=True)
    a = generate(lively.model, lively.ids, options=options)
    b = generate(lively.model, lively.ids, options=options, max_new_tokens=12)
    assert list(a.tokens) == lively.own[:9] and list(b.tokens) == lively.own[:12]
    assert {r.k for r in a.records} <= {0, 1, 2}


def test_a_policy_or_proposer_of_ones_own(lively):
    done = no_stop(lively, policy=FixedK(k=6), proposer=perfect(lively), max_new_tokens=29)
    assert [r.accepted for r in done.records] == [6, 6, 6, 6]


# --- refusals --------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    (dict(k=-1), "k=-1 is not valid: it must be an integer from 0 to 64; k=0 is plain decode"),
    (dict(k=65), "k=65 is not valid: it must be an integer from 0 to 64"),
    (dict(k=1.5), "k=1.5 is not valid"),
    (dict(k="3"), "k='3' is not valid"),
    (dict(k=None), "k=None is not valid"),
    (dict(max_new_tokens=0), "max_new_tokens=0 is not valid: it must be an integer of at least 1"),
    (dict(max_new_tokens=-5), "max_new_tokens=-5 is not valid"),
    (dict(max_new_tokens=float("nan")), "max_new_tokens=nan is not valid"),
    (dict(max_new_tokens=True), "max_new_tokens=True is not valid"),
    (dict(p_min=float("nan")), "p_min=nan is not valid: it must be a number at least 0.0 and at most 1.0"),
    (dict(p_min=-0.5), "p_min=-0.5 is not valid"),
    (dict(p_min=1.5), "p_min=1.5 is not valid"),
    (dict(k=0, p_min=2.0), "p_min=2.0 is not valid"),
    (dict(adaptive=True, k=0), "adaptive=True with k=0 is not valid: give k of at least 1"),
    (dict(adaptive=True, floor=0), "floor=0 is not valid.*floor=None goes by the model's width"),
    (dict(adaptive=True, cap=0), "cap=0 is not valid"),
    (dict(adaptive=True, floor_context=-1), "floor_context=-1 is not valid"),
    (dict(floor=2), "floor=2 needs adaptive=True: a fixed k has no floor"),
    (dict(carrier="raw"), "carrier='raw' is not valid: choose one of 'normed', 'pre_norm'"),
    (dict(strategy="copy"), "strategy='copy' is not valid: choose one of 'tape', 'columns', 'snapshot'"),
    (dict(chunk=0), "chunk=0 is not valid: it must be an integer of at least 1"),
    (dict(shift=-1), "shift=-1 is not valid: it must be an integer from 0 to 4"),
    (dict(carry="no"), "carry='no' is not valid: it must be True or False"),
    (dict(ignore_eos=1), "ignore_eos=1 is not valid: it must be True or False"),
    (dict(temperatur=0.7), "unknown option 'temperatur': valid options are max_new_tokens, k, p_min"),
    (dict(max_tokens=3, kk=2), "unknown option 'kk', 'max_tokens': valid options are"),
    (dict(exact="yes"), "exact='yes' is not valid: it must be True or False"),
]
BAD_PROMPTS = [
    (dict(prompt=[]), "the prompt is empty: give text, or at least one token id"),
    (dict(prompt=np.array([], dtype=np.int64)), "the prompt is empty"),
    (dict(prompt=[5, 211]), "token id 211 is out of range at place 1 of the prompt: this model's ids are 0 to 210"),
    (dict(prompt=[-1]), "token id -1 is out of range"),
    (dict(prompt=[2**70]), "is out of range"),
    (dict(prompt=[5, 1.5]), "the prompt holds 1.5 at place 1, which is no token id: ids are integers"),
    (dict(prompt=[True]), "the prompt holds True at place 0"),
    (dict(prompt=["the"]), "the prompt holds 'the' at place 0"),
    (dict(prompt=[[1, 2]]), r"the prompt holds \[1, 2\] at place 0"),
    (dict(prompt=torch.zeros(1, 3, dtype=torch.long)), "the prompt holds tensor.* at place 0"),
    (dict(prompt=7), "the prompt=7 is not valid: give a sequence of token ids"),
    (dict(prompt="the cat"), "this checkpoint has no tokenizer: give token ids instead of text"),
    (
        dict(prompt=[1] * 500),
        "prompt of 500 tokens .*max_new_tokens=128 is over this model's context of 512.*at most 12",
    ),
    (dict(prompt=[1] * 600), "use max_new_tokens of at most 0"),
    (dict(max_new_tokens=509), r"prompt of 4 tokens \+ max_new_tokens=509 is over .* of 512: shorten .*at most 508"),
    (dict(force=[]), "force holds no token after the prompt: give a longer text"),
    (dict(force=[3, 999]), "token id 999 is out of range at place 1 of force"),
    (dict(force="text"), "force='text' is not valid: give a sequence of token ids"),
    (dict(force=Tape("t", np.array([1, 2]), prompt_len=2)), "force holds no token after the prompt"),
    (dict(force=[1] * 600), "is over this model's context of 512"),
]


@pytest.mark.parametrize("bad, sentence", [*BAD_OPTIONS, *BAD_PROMPTS], ids=lambda x: str(x)[:40])
def test_what_is_not_valid_is_a_sentence_and_changes_nothing(lively, bad, sentence):
    model, bad = lively.model, dict(bad)
    bad.setdefault("exact", False)  # another class than the model's, which must come back
    prompt = bad.pop("prompt", lively.ids)
    with pytest.raises(UserError, match=sentence) as caught:
        generate(model, prompt, **bad)
    assert model.exact is True
    assert "\n" not in str(caught.value)


def test_the_class_comes_back_after_an_error_of_the_run(lively, monkeypatch):
    monkeypatch.setitem(vars(lively.model), "unembed", lambda h: torch.full((*h.shape[:2], 211), float("nan")))
    with pytest.raises(NonFiniteError, match="logits of position 3 hold NaN; every logit must be finite: check"):
        generate(lively.model, lively.ids, exact=False)
    assert lively.model.exact is True


def test_a_checkpoint_without_a_head_decodes_plainly_and_says_that_it_cannot_draft(tiny):
    model = tiny(mtp=False, tied=False, vocab_size=211)
    assert len(generate(model, [1, 2], k=0, max_new_tokens=5, ignore_eos=True).tokens) == 5
    for ask in (dict(), dict(policy=FixedK(k=2))):
        with pytest.raises(CapabilityError, match=r"tiny has no mtp\.\* weights.*use k=0 .*or give a proposer"):
            generate(model, [1, 2], exact=False, **ask)
    assert model.exact
    given = generate(model, [1, 2], k=2, max_new_tokens=5, ignore_eos=True, proposer=GivenProposer([[3, 4]]))
    assert len(given.tokens) == 5


@pytest.mark.parametrize("capacity", [0, -1, 513, 2.5, "many"])
def test_a_session_longer_than_the_context_is_refused(lively, capacity):
    with pytest.raises(UserError, match=rf"capacity={capacity!r} is not valid: it must be an integer from 1 to 512"):
        Session(lively.model, capacity=capacity)


@pytest.mark.parametrize(
    "size, force, sentence",
    [
        (-1, None, "max_new_tokens=-1 is not valid: it must be an integer of at least 0"),
        (1.5, None, r"max_new_tokens=1\.5 is not valid"),
        (4, [1, 2, 3], "force holds 3 tokens, but max_new_tokens=4: give a text at least that long, or ask for fewer"),
        (2, [1, 300], "token id 300 is out of range at place 1 of force"),
    ],
)
def test_a_burst_refuses_what_is_not_valid_and_changes_nothing(lively, parts, size, force, sentence):
    session = lively.session(k=3)
    before = parts.frozen.of(session.state)
    with pytest.raises(UserError, match=sentence):
        session.burst(size, force=force)
    assert before.difference(parts.frozen.of(session.state)) is None


def test_a_session_is_fed_before_it_is_decoded_and_within_its_capacity(lively):
    session = Session(lively.model, capacity=6)
    with pytest.raises(UserError, match="this session holds no text yet: feed a prompt before a burst"):
        session.burst(3)
    with pytest.raises(UserError, match=r"6 tokens and the one after them do not fit: .* 0 of at most 6 .*at most 5"):
        session.feed([1] * 6)
    with pytest.raises(UserError, match="token id 400 is out of range at place 0 of force"):
        session.feed([1, 2], force=400)
    session.feed([1] * 5)
    assert session.burst(4) == "context" and len(session.tokens) == 6
