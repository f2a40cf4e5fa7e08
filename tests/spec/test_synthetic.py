"""A drafter of a given acceptance: it has that acceptance, the text stays plain decode's, and the head runs in full."""

from __future__ import annotations

import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.model.shapes import random_model
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import SyntheticProposer, conditional, synthetic_drafts
from workbench.spec.session import Session

CHANCES = (0.87, 0.69, 0.53)
PROMPT = [5, 6, 7, 8]
NEW = 1200


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", exact=True)


@pytest.fixture(scope="module")
def tape(model):
    made = generate(model, PROMPT, k=0, max_new_tokens=NEW, ignore_eos=True)
    return [*PROMPT, *made.tokens]


@pytest.fixture(scope="module")
def made(model, tape):
    proposer = SyntheticProposer(model, tape, CHANCES)
    return generate(model, PROMPT, k=3, max_new_tokens=NEW, ignore_eos=True, proposer=proposer)


def within(rounds) -> list[bool]:
    """Whether cond(j) of rounds lies within four standard deviations of the chance of each slot."""
    found = acceptance(rounds)
    sigmas = [(p * (1 - p) / n) ** 0.5 for p, n in zip(CHANCES, found.pos_tested, strict=True)]
    return [abs(c - p) < 4 * s for c, p, s in zip(found.cond, CHANCES, sigmas, strict=True)]


def test_acceptance_is_the_given_one_and_the_text_is_plain_decodes(made, tape):
    assert list(made.tokens) == tape[len(PROMPT) :]
    found = acceptance(made.records)
    assert min(found.pos_tested) > 200
    assert within(made.records) == [True] * 3, found.cond


def test_a_table_that_is_shifted_by_one_position_is_right_by_chance_alone(model, tape):
    proposer = SyntheticProposer(model, tape, CHANCES)
    proposer._plan = [*proposer._plan[1:], proposer._plan[0]]
    shifted = generate(model, PROMPT, k=3, max_new_tokens=300, ignore_eos=True, proposer=proposer)
    assert list(shifted.tokens) == tape[len(PROMPT) :][:300]
    assert acceptance(shifted.records).cond[0] < 0.2


def test_the_table_drives_rounds_as_the_proposer_does(made, tape, model):
    table = synthetic_drafts(tape, CHANCES, vocab_size=model.config.vocab_size)
    at, seen = len(PROMPT), []
    for record in made.records:
        drafts = table[at].tolist()[: record.drafted]
        stands = 0
        while stands < len(drafts) and drafts[stands] == tape[at + 1 + stands]:
            stands += 1
        seen.append((at, tuple(drafts), stands))
        at += stands + 1
    assert seen == [(r.start, r.draft_ids, r.accepted) for r in made.records]


def test_long_tables_have_the_chances_of_every_slot_and_never_a_right_id_by_accident():
    generator = torch.Generator().manual_seed(1)
    tape = torch.randint(7, (20_000,), generator=generator).tolist()
    table = synthetic_drafts(tape, (1.0, 0.5, 0.0), vocab_size=7)
    text = torch.tensor(tape)
    right = torch.stack([table[:-3, j] == text[1 + j : len(tape) - 2 + j] for j in range(3)], 1)
    assert bool(right[:, 0].all()) and not bool(right[:, 2].any())
    assert abs(float(right[:, 1].double().mean()) - 0.5) < 4 * (0.25 / len(right)) ** 0.5
    wrong = table[:-3, 2]
    assert wrong.min() >= 0 and set(wrong.tolist()) == set(range(7))


def test_decisions_depend_on_place_and_seed_alone(tape):
    size = 384
    whole = synthetic_drafts(tape, CHANCES, vocab_size=size)
    part = synthetic_drafts(tape[:500], CHANCES, vocab_size=size)
    assert torch.equal(whole[:497], part[:497])
    assert torch.equal(whole[:, :2], synthetic_drafts(tape, CHANCES[:2], vocab_size=size))
    assert not torch.equal(whole, synthetic_drafts(tape, CHANCES, vocab_size=size, seed=1))
    assert not torch.equal(whole, synthetic_drafts(tape, CHANCES, vocab_size=size, sequence=1))
    assert whole[-1].tolist() == [0, 0, 0]


def test_every_step_of_the_head_runs_on_the_planned_token(model, tape, monkeypatch):
    fed = []
    draft = type(model).draft

    def watched(self, tokens_BT, carrier_BTH, cache, **options):
        fed.append(tokens_BT[0].tolist())
        return draft(self, tokens_BT, carrier_BTH, cache, **options)

    monkeypatch.setattr(type(model), "draft", watched)
    options = GenerateOptions(k=3, ignore_eos=True)
    session = Session(model, options=options, proposer=SyntheticProposer(model, tape, CHANCES), capacity=200)
    session.feed(PROMPT)
    fed.clear()
    made = session.generate(max_new_tokens=60)
    calls, text = iter(fed), session.tokens
    for record in made.records:
        if record.drafted:
            assert next(calls)[-1] == text[record.start]
            assert [next(calls) for _ in record.draft_ids[1:]] == [[token] for token in record.draft_ids[:-1]]
    assert len(list(calls)) <= 2, "what is left was observed by the last rounds"
    assert any(record.accepted < record.drafted for record in made.records)


def test_joint_acceptance_is_the_product_of_the_chances():
    joint = (0.87, 0.69, 0.53)
    chances = conditional(joint)
    assert chances == pytest.approx((0.87, 0.69 / 0.87, 0.53 / 0.69)) and chances != joint
    assert conditional((1.0, 1.0, 0.0, 0.0)) == (1.0, 1.0, 0.0, 0.0)
    with pytest.raises(UserError, match="slot 2 cannot stand in more rounds than slot 1"):
        conditional((0.5, 0.51))
    with pytest.raises(UserError, match=r"joint acceptance of slot 1=1\.5 is not valid"):
        conditional((1.5,))


def test_what_cannot_be_is_refused(model, tape):
    with pytest.raises(UserError, match=r"k=4 is not valid here: acceptance was given for 3 slots"):
        proposer = SyntheticProposer(model, tape, CHANCES)
        generate(model, PROMPT, k=4, max_new_tokens=20, ignore_eos=True, proposer=proposer)
    with pytest.raises(UserError, match=r"part at position 4: make the tape by plain greedy decode"):
        other = [*tape[:4], tape[4] ^ 1, *tape[5:]]
        generate(model, PROMPT, k=3, max_new_tokens=20, proposer=SyntheticProposer(model, other, CHANCES))
    with pytest.raises(UserError, match=r"acceptance of slot 2=1.2 is not valid"):
        synthetic_drafts(tape, (0.5, 1.2), vocab_size=384)
    with pytest.raises(UserError, match="at least one of each"):
        synthetic_drafts(tape, (), vocab_size=384)
    with pytest.raises(UserError, match="out of range"):
        synthetic_drafts([1, 9], (0.5,), vocab_size=5)
