"""A trimmed draft head costs acceptance and nothing else: texts, laws, walks, keys; each with a mistake that shows."""

from __future__ import annotations

from dataclasses import replace as with_fields
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.core.errors import NonFiniteError, UserError
from workbench.core.tape import Corpus, Tape
from workbench.model.hybrid import HybridModel
from workbench.replay import compare_rounds, live_rounds, own_tapes, replay, walk
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import capture, restore
from workbench.spec.session import Session

KEPT = (0, 2, 3, 5, 6, 8, 9, 11)
OFF = (1, 4, 7, 10)
GO = GenerateOptions(k=3, ignore_eos=True)
SAMPLED: dict[str, Any] = dict(temperature=0.8, top_p=0.95, seed=3)
SHAPES = {"greedy": {}, "coupled": SAMPLED, "penalties": dict(repetition_penalty=1.1)}


@pytest.fixture
def model(tiny) -> HybridModel:
    return tiny(ratio=2, tied=False, vocab_size=12, seed=1)


def prompts(count: int, length: int = 3) -> Corpus:
    rows = np.random.default_rng(5).integers(0, 12, (count, length))
    return Corpus([Tape(f"p{i:03}", row, prompt_len=length, source="s") for i, row in enumerate(rows)], name="c")


def texts(model: HybridModel, k: int = 3, **given: Any) -> tuple[list[tuple[int, ...]], float]:
    """Texts after several prompts, and the share of drafts accepted."""
    made = [generate(model, t.tokens.tolist(), k=k, max_new_tokens=40, ignore_eos=True, **given) for t in prompts(6)]
    counts = [(r.accepted, r.drafted) for one in made for r in one.records]
    accepted, drafted = (sum(column) for column in zip(*counts))
    return [one.tokens for one in made], accepted / max(drafted, 1)


# ------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_is_that_of_the_whole_head(model, shape):
    given = SHAPES[shape]
    whole, before = texts(model, **given)
    assert whole == texts(model, k=0, **given)[0]
    model.trim_draft_vocab(KEPT)
    some, after = texts(model, **given)
    assert some == whole and 0 < after < before
    drafted = [t for p in prompts(6) for r in generate(model, p.tokens.tolist(), max_new_tokens=40, **given).records
               for t in r.draft_ids]  # fmt: skip
    assert set(drafted) <= set(KEPT) and set(t for text in whole for t in text) & set(OFF)


@pytest.mark.parametrize("shape", SHAPES)
def test_control_a_map_off_by_one_costs_acceptance_only(model, shape, monkeypatch):
    given = SHAPES[shape]
    whole, _ = texts(model, **given)
    head = model.trim_draft_vocab(KEPT)
    _, right = texts(model, **given)
    wrong = with_fields(head, ids_D=(head.ids_D + 1) % 12)
    monkeypatch.setattr(type(model), "draft_head", property(lambda self: wrong))
    some, off = texts(model, **given)
    assert some == whole and off < right


@pytest.mark.parametrize("shape", SHAPES)
def test_control_a_target_that_goes_through_the_map_says_something_else(model, shape, monkeypatch):
    given = SHAPES[shape]
    whole, _ = texts(model, **given)
    model.trim_draft_vocab(KEPT)

    plain = type(model)._logits

    def trimmed(self: HybridModel, normed_BTH: torch.Tensor, first: int, weight: torch.Tensor | None = None) -> Any:
        if weight is not None:
            return plain(self, normed_BTH, first, weight)
        return self.unembed_draft(normed_BTH)[:, :first].clamp_min(-1e30)  # finite, as check_finite wants a target

    monkeypatch.setattr(type(model), "_logits", trimmed)
    assert texts(model, **given)[0] != whole


def test_one_id_is_enough_of_a_head(model):
    whole, _ = texts(model)
    model.trim_draft_vocab([9])
    some, share = texts(model)
    assert some == whole and 0 < share < 0.5


def test_rows_over_a_prompt_are_those_of_the_whole_head(model):
    """So that an entry of a prefix store serves any trim: the map is no term of it."""
    text = own_tapes(model, prompts(1), max_new_tokens=40)[0].tokens.tolist()
    first = Session(model, options=GO)
    first.feed(text[:3])
    first.burst(20)
    entry = capture(first)
    model.trim_draft_vocab(KEPT)
    sessions = [Session(model, options=GO) for _ in range(2)]
    restore(sessions[0], entry, first.tokens)
    sessions[1].feed(first.tokens)
    for session in sessions:
        session.burst(20)
    found = [[(r.start, r.draft_ids, r.draft_top1, r.accepted) for r in s.state.records] for s in sessions]
    assert found[0] == found[1] and set(t for r in found[0] for t in r[1]) <= set(KEPT)
    model.untrim_draft_vocab()
    again = Session(model, options=GO)
    restore(again, entry, first.tokens)
    again.burst(20)
    assert [r.draft_ids for r in again.state.records] != [row[1] for row in found[0]], "the trim shows in the drafts"


# ------------------------------------------------------------------------------------------------------- walks


@pytest.mark.parametrize("name", ["fixed", "p_min", "floor"])
def test_a_walk_is_the_live_run(demo, heldout, policies, against_live, differences, tmp_path, name):
    own = own_tapes(demo, heldout("pydocs"), prompt_tokens=58, max_new_tokens=40)
    whole = replay(demo, own, out=tmp_path / "whole", k_max=4)
    demo.trim_draft_vocab(top_n=200, counts=wb.token_counts(own, part="all"))
    table = replay(demo, own, out=tmp_path / "some", k_max=4)
    walked, lived = against_live(demo, own, table=table, k=4, **policies[name])
    demo.untrim_draft_vocab()
    assert not (found := differences(walked, lived)), found
    assert set(walked["accepted"]) >= {0, 2}
    assert differences(walk(whole, k=4, **policies[name]), lived), "another head drafts otherwise, or more surely"


@pytest.mark.parametrize("shape", ["coupled", "penalties"])
def test_a_walk_over_draws_is_the_live_run(model, differences, tmp_path, shape):
    given = SHAPES[shape]
    own = own_tapes(model, prompts(4), max_new_tokens=40, ignore_eos=True, **given)
    whole = replay(model, own, out=tmp_path / "whole", k_max=4, **given)
    model.trim_draft_vocab(KEPT)
    table = replay(model, own, out=tmp_path / "some", k_max=4, **given)
    lived = live_rounds(model, own, k=4, ignore_eos=True, **given)
    assert not (found := differences(walk(table, k=4), lived)), found
    assert len(compare_rounds(walk(whole, k=4), lived))


def test_forced_probabilities_are_zero_off_the_map(model, tmp_path):
    given: dict[str, Any] = dict(k_max=3, forced=True, **SAMPLED)
    own = own_tapes(model, prompts(6), max_new_tokens=40, ignore_eos=True, **SAMPLED)
    whole = replay(model, own, out=tmp_path / "whole", **given).frame
    model.trim_draft_vocab(KEPT)
    table = replay(model, own, out=tmp_path / "some", **given)
    seen = {"on": 0, "off": 0}
    for row, full in zip(table.frame.iter_rows(named=True), whole.iter_rows(named=True), strict=True):
        tokens = own[int(row["doc_id"][1:])].tokens
        for j, (q, before) in enumerate(zip(row["forced_q"] or [], full["forced_q"] or [], strict=True)):
            if q is None:
                continue
            off = int(tokens[row["position"] + 1 + j]) in OFF
            assert not off or q == 0.0
            assert off or q >= before - 1e-6 or q == 0.0, "what is left of the law is renormalised, then filtered"
            seen["off"] += off and before > 0
            seen["on"] += not off and q > 0
    assert min(seen.values()) > 20
    rounds = walk(table, k=3, estimator="ratio")
    assert 0 < rounds["accepted"].sum() < rounds["drafted"].sum()


# ------------------------------------------------------------------------------------------------- keys and refusals


def test_a_table_names_the_head_that_drafted(model, tmp_path):
    own = own_tapes(model, prompts(2), max_new_tokens=20, ignore_eos=True)
    whole = replay(model, own, out=tmp_path / "whole", k_max=2)
    head = model.trim_draft_vocab(KEPT, note="a test")
    some = replay(model, own, out=tmp_path / "some", k_max=2)
    assert (whole.draft_head, whole.key["draft_head"]) == (None, None) and "whole" in whole._repr_html_()
    assert some.draft_head == head.facts and some.key == {**whole.key, "draft_head": head.digest}
    assert "8 ids, 8 ids given, a test" in some._repr_html_()
    with pytest.raises(UserError, match=r"parameters\.draft_head is None there and"):
        replay(model, own, out=tmp_path / "whole", k_max=2)
    model.trim_draft_vocab(KEPT[:-1])
    with pytest.raises(UserError, match=rf"parameters\.draft_head\.digest is '{head.digest}' there"):
        replay(model, own, out=tmp_path / "some", k_max=2)
    model.trim_draft_vocab(KEPT, note="other words")
    assert replay(model, own, out=tmp_path / "some", k_max=2).draft_head["source"].endswith("a test")


def test_candidates_beyond_the_head_are_refused(model, tmp_path):
    model.trim_draft_vocab([1, 5, 9])
    own = own_tapes(model, prompts(1), max_new_tokens=20, ignore_eos=True)
    with pytest.raises(UserError, match="shadow=4 is not valid: the draft head has 3 ids; record fewer"):
        replay(model, own, out=tmp_path / "table", k_max=2, shadow=4)
    table = replay(model, own, out=tmp_path / "table", k_max=2, shadow=3, ranks=True, overlap=1.0)
    ids = {i for row in table.frame["shadow_ids"].drop_nulls() for i in row if i is not None}
    assert ids == {1, 5, 9}
    assert table.frame["overlap"].explode().drop_nulls().is_between(0, 1).all()


def test_a_draft_row_that_is_not_finite_is_refused(model, tmp_path):
    own = own_tapes(model, prompts(1), max_new_tokens=20, ignore_eos=True)
    model.trim_draft_vocab(KEPT)
    with torch.no_grad():
        model.mtp.norm[:] = float("nan")
    with pytest.raises(NonFiniteError, match="hold NaN"):
        replay(model, own, out=tmp_path / "table", k_max=2)
