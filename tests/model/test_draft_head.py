"""The trimmed draft head: which ids, whose rows, how it follows the model, and the file beside a checkpoint."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workbench.cache.hybrid import same_bits
from workbench.cli.info import model_facts
from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.model.draft_vocab import choose_vocab, read_counts
from workbench.model.fingerprint import fingerprint
from workbench.model.weights.draft_file import DRAFT_FILE, head_fingerprint
from workbench.model.weights.load import load_model
from workbench.model.weights.save import save_model

IDS = [70, 3, 9, 41, 0]
V = 83


def carriers(model: Any, rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, rows, model.config.hidden_size, generator=generator).to(model.dtype)


def head_of(model: Any) -> torch.Tensor:
    return model.embed if model.head is None else model.head


# ------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_rows_are_the_heads_and_every_other_id_has_no_chance(tiny, tied, exact):
    model = tiny(tied=tied, exact=exact)
    assert model.draft_head is None
    head = model.trim_draft_vocab(IDS)
    assert head is model.draft_head, "gathered once"
    assert head.ids_D.tolist() == sorted(IDS) and head.ids_D.dtype == torch.int64
    assert head.weight_DH.is_contiguous() and torch.equal(head.weight_DH, head_of(model)[sorted(IDS)])
    rows = carriers(model, 7)
    whole, some = model.unembed(rows), model.unembed_draft(rows)
    assert some.shape == whole.shape and some.dtype == torch.float32
    assert torch.allclose(some[..., head.ids_D], whole[..., head.ids_D], atol=1e-5)
    off = torch.ones(V, dtype=torch.bool)
    off[head.ids_D] = False
    assert (some[..., off] == float("-inf")).all()
    model.untrim_draft_vocab()
    assert model.draft_head is None and same_bits(model.unembed_draft(rows), whole)


def test_in_exact_mode_the_bits_of_a_row_are_its_own(tiny):
    model, rows = tiny(), carriers(tiny(), 9)
    model.trim_draft_vocab(range(0, V, 2))
    whole = model.unembed_draft(rows)
    for lo, hi in ((0, 1), (3, 4), (2, 9), (5, 8)):
        assert same_bits(model.unembed_draft(rows[:, lo:hi]), whole[:, lo:hi])


def test_only_drafts_go_through_it(tiny):
    model, tokens = tiny(), torch.arange(6)[None]
    before, name = model.forward(tokens, model.new_cache()).logits_BTV, fingerprint(model)
    weights = sum(p.numel() for p in model.parameters())
    model.trim_draft_vocab(IDS)
    assert same_bits(model.forward(tokens, model.new_cache()).logits_BTV, before)
    assert fingerprint(model) == name, "own tapes stay the model's own"
    assert sum(p.numel() for p in model.parameters()) == weights and not any("trim" in n for n in model.state_dict())


def test_it_follows_the_weights(tiny):
    model = tiny(tied=False)
    first = model.trim_draft_vocab(IDS, note="a test")
    with torch.inference_mode():
        assert model.draft_head is first
    with torch.no_grad():
        model.head[9] = 2.0
    second = model.draft_head
    assert second is not first and (second.weight_DH[1:3] == 2.0).all(1).tolist() == [False, True]
    model.to(torch.bfloat16)
    third = model.draft_head
    assert third.weight_DH.dtype == torch.bfloat16 and torch.equal(third.weight_DH, model.head[sorted(IDS)])
    assert (third.ids_D.tolist(), third.source, third.digest) == (sorted(IDS), first.source, first.digest)


def test_rows_made_in_inference_mode_serve_outside_of_it(tiny):
    model = tiny()
    model.trim_draft_vocab(IDS)
    model.requires_grad_(True)
    with torch.inference_mode():
        model.unembed_draft(carriers(model, 2))
    rows = carriers(model, 2).requires_grad_()
    model.unembed_draft(rows)[..., IDS].sum().backward()
    assert torch.isfinite(rows.grad).all()


# -------------------------------------------------------------------------------------------------- choosing ids


@given(
    counts=st.dictionaries(st.integers(0, 40), st.integers(0, 5), min_size=1).filter(lambda c: sum(c.values())),
    top_n=st.integers(1, 41),
    special=st.sets(st.integers(0, 40), max_size=4),
)
def test_the_most_frequent_ids_are_kept(counts, top_n, special):
    order = sorted(range(41), key=lambda i: (-counts.get(i, 0), i))
    chosen = choose_vocab(None, top_n, counts, vocab_size=41, special=sorted(special))
    expected = set(order[:top_n]) | special
    assert chosen.ids.tolist() == sorted(expected) and chosen.ids.dtype == np.int64
    kept = sum(n for i, n in counts.items() if i in expected)
    assert chosen.coverage == pytest.approx(kept / sum(counts.values()))
    extra = len(expected) - top_n
    assert chosen.source == f"{top_n} most frequent ids" + (f" and {extra} special" if extra else "")


@given(ids=st.lists(st.integers(0, 40), min_size=1, unique=True))
def test_ids_given_are_kept_as_they_are(ids):
    chosen = choose_vocab(ids, None, {0: 1, 40: 3}, vocab_size=41, special=[1, 2])
    assert chosen.ids.tolist() == sorted(ids)
    assert chosen.coverage == pytest.approx(((0 in ids) + 3 * (40 in ids)) / 4)


def test_counts_come_in_several_forms():
    frame = pl.DataFrame({"id": [4, 0, 2], "count": [3, 0, 1], "share": [0.75, 0.0, 0.25]})
    forms = [frame, {4: 3, 2: 1}, [0, 0, 1, 0, 3], np.array([0, 0, 1, 0, 3]), torch.tensor([0, 0, 1, 0, 3])]
    for form in forms:
        assert read_counts(form, 6).tolist() == [0, 0, 1, 0, 3, 0]


def test_special_tokens_are_kept_however_rare(tiny_dir):
    model = load_model(tiny_dir)
    ends = model.tokenizer.encode("<|im_end|>")[0]
    head = model.trim_draft_vocab(top_n=2, counts={90: 5, 91: 4, 92: 1}, note="a test")
    assert {ends, 90, 91, *model.config.eos_token_id} <= set(head.ids_D.tolist())
    assert len(head) == 2 + len(model.tokenizer.special_ids) and 92 not in head.ids_D
    assert head.coverage == pytest.approx(0.9) and head.source == "2 most frequent ids and 3 special of a test"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({}, "made from ids or from top_n with counts: give one of the two"),
        (dict(ids=[1], top_n=2), "give one of the two"),
        (dict(top_n=2), "top_n=2 needs counts of tokens: give counts=wb.token_counts"),
        (dict(top_n=0, counts={1: 1}), "top_n=0 is not valid: it must be an integer from 1 to 83"),
        (dict(top_n=84, counts={1: 1}), "top_n=84 is not valid"),
        (dict(ids=[]), "0 draft ids are not valid: give distinct ids of the target, from 0 to 82, at least one"),
        (dict(ids=[3, 3]), "2 draft ids are not valid"),
        (dict(ids=[3, 83]), "from 0 to 82"),
        (dict(ids=[-1]), "from 0 to 82"),
        (dict(ids=[0.5]), "ids of a draft vocabulary must be whole numbers in one row; these are float64"),
        (dict(top_n=2, counts={83: 1}), "counts name id 83, and this model's ids are 0 to 82"),
        (dict(top_n=2, counts=[1] * 84), "counts name id 83"),
        (dict(top_n=2, counts={1: -1}), "hold a negative number or nothing at all"),
        (dict(top_n=2, counts={}), "hold a negative number or nothing at all"),
        (dict(top_n=2, counts={1: 0.5}), "counts of a draft vocabulary must be whole numbers"),
        (dict(top_n=2, counts=7), "counts of type int are not valid: give what wb.token_counts"),
        (dict(top_n=2, counts=pl.DataFrame({"id": [1]})), "have the columns 'id' and lack 'count'"),
        (dict(top_n=2, counts=pl.DataFrame({"id": [1, 1], "count": [1, 2]})), "counts name an id twice"),
    ],
)
def test_what_is_not_valid_is_refused_and_leaves_the_head(tiny, arguments, sentence):
    model = tiny()
    before = model.trim_draft_vocab(IDS)
    with pytest.raises(UserError, match=re.escape(sentence)):
        model.trim_draft_vocab(**arguments)
    assert model.draft_head is before


def test_without_a_head_there_is_nothing_to_trim(tiny):
    with pytest.raises(CapabilityError, match=r"has no mtp\.\* weights, so it has no drafts to trim"):
        tiny(mtp=False).trim_draft_vocab(IDS)
    with pytest.raises(CapabilityError, match="is not trimmed, so there is no map to save"):
        tiny().save_draft_vocab("anywhere")


def test_the_card_and_info_say_what_drafts(tiny):
    model = tiny()
    assert model_facts(model)["draft_head"] is None
    head = model.trim_draft_vocab([0, 1, 2], counts={0: 1, 9: 3}, note="a test")
    said = "3 of 83 ids (3 ids given, a test, 25.00 % of the counted tokens)"
    assert repr(head) == f"DraftHead({said})" and f"drafter: MTP head over {said}" in repr(model)
    assert said in model._repr_html_()
    assert "25.00 %" in head._repr_html_() and head.digest in head._repr_html_()
    facts = model_facts(model)["draft_head"]
    assert facts == {"ids": 3, "digest": head.digest, "source": "3 ids given, a test", "coverage": 0.25}
    assert json.loads(json.dumps(facts)) == facts


# ----------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("tied", [True, False])
def test_a_trim_is_saved_beside_the_weights_and_comes_back(tiny, tmp_path, tied):
    model = tiny(tied=tied)
    head = model.trim_draft_vocab(IDS, counts={3: 1, 4: 1}, note="a test")
    path = model.save(tmp_path / "out")
    assert {name: x.shape for name, x in load_file(path / DRAFT_FILE).items()} == {"ids": (5,)}, "rows lie there once"
    again = load_model(path)
    assert same_bits(again.draft_head.weight_DH, head.weight_DH) and again.draft_head.facts == head.facts
    again.save(path)
    assert load_model(path).draft_head.facts == head.facts, "over itself"
    again.untrim_draft_vocab()
    again.save(path)
    assert not (path / DRAFT_FILE).exists() and load_model(path).draft_head is None


def test_the_map_belongs_to_the_head_in_any_type(tiny, tmp_path):
    model = tiny()
    model.trim_draft_vocab(IDS)
    path = save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    for dtype in ("float32", "bfloat16", "float64"):
        again = load_model(path, dtype=dtype)
        assert again.draft_head.ids_D.tolist() == sorted(IDS) and again.draft_head.weight_DH.dtype == again.dtype


def test_a_map_alone_goes_beside_published_weights(tiny, tmp_path):
    path = tiny(tied=False).save(tmp_path / "published")
    weights = (path / "model.safetensors").read_bytes()
    model = load_model(path)
    model.trim_draft_vocab(IDS)
    file = model.save_draft_vocab(path)
    assert file == path / DRAFT_FILE and (path / "model.safetensors").read_bytes() == weights
    assert load_model(path).draft_head.ids_D.tolist() == sorted(IDS)
    apart = model.save_draft_vocab(tmp_path / "apart.safetensors")
    other = tiny(tied=False)
    assert other.trim_draft_vocab(apart).ids_D.tolist() == sorted(IDS)


def test_transformers_loads_the_directory(tiny, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    model = tiny(tied=False)
    model.trim_draft_vocab(IDS)
    path = model.save(tmp_path / "out")
    theirs, told = transformers.Qwen3_5ForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not told["missing_keys"] and "ids" not in told["unexpected_keys"]
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
    assert torch.allclose(model.forward(tokens, model.new_cache()).logits_BTV, expected, atol=1e-4)


def test_a_map_of_another_head_is_refused(tiny, tmp_path):
    model = tiny(tied=False)
    model.trim_draft_vocab(IDS)
    path = model.save(tmp_path / "out")
    kept = load_file(path / "model.safetensors")
    save_file({**kept, "lm_head.weight": kept["lm_head.weight"] * 1.5}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"was cut from head \w{16}, and this model's head is \w{16}: trim this"):
        load_model(path)
    other = tiny(tied=False, vocab_size=97)
    with pytest.raises(CheckpointError, match="a draft vocabulary over 83 ids, and this model has 97: trim this model"):
        other.trim_draft_vocab(path / DRAFT_FILE)
    assert other.draft_head is None
    whole = tiny(tied=False, mtp=False)
    whole.save(path.parent / "no_mtp")
    model.save_draft_vocab(path.parent / "no_mtp")
    with pytest.raises(CapabilityError, match="no drafts to trim"):
        load_model(path.parent / "no_mtp")


def test_a_file_that_is_no_map_is_refused(tiny, tmp_path):
    model, file = tiny(), tmp_path / "map.safetensors"
    with pytest.raises(CheckpointError, match="does not exist: save_draft_vocab writes"):
        model.trim_draft_vocab(file)
    save_file({"ids": torch.tensor([1])}, file)
    with pytest.raises(CheckpointError, match="is not a draft vocabulary: save_draft_vocab writes one"):
        model.trim_draft_vocab(file)
    model.trim_draft_vocab(IDS)
    model.save_draft_vocab(file)
    data = file.read_bytes()
    file.write_bytes(data[:-9])
    with pytest.raises(CheckpointError, match="is not a whole draft vocabulary"):
        model.trim_draft_vocab(file)
    file.write_bytes(data[:-40] + data[-8:] + data[-32:])  # the ids in another order
    with pytest.raises(CheckpointError, match="ids that are not ascending ids below 83"):
        model.trim_draft_vocab(file)


def test_the_fingerprint_sees_every_row_and_the_shape(tiny):
    weight = tiny().embed.detach().clone()
    seen = {head_fingerprint(weight), head_fingerprint(weight.view(30, 83))}
    for row in (0, 40, 82):
        other = weight.clone()
        other[row, -1] += 0.5
        seen.add(head_fingerprint(other))
    assert len(seen) == 5 and head_fingerprint(weight.double()) in seen
