"""NeMo's EAGLE-3 cache by the format: what is shifted, the law over the draft ids, and a validator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workbench.core.errors import CapabilityError, UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets.export.draft_law import full_law, kept_law
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

NAME = "nemo-automodel-eagle3"


def shifted(x_BS: torch.Tensor) -> torch.Tensor:
    """One to the left, zero at the end."""
    return torch.cat([x_BS[:, 1:], torch.zeros_like(x_BS[:, :1])], 1)


def due(model, ids_D, tape, sequence_rows) -> dict[str, torch.Tensor]:
    """A sample as the producer of the format makes it from the model's logits: shift, then restrict, then softmax."""
    rows = sequence_rows.forward(model, tape, (0, 2, 3))
    logits_BSV = shifted(rows.logits_BTV)
    mask_BS = shifted(torch.from_numpy(tape.supervised)[None])
    among_V = torch.zeros(83, dtype=torch.bool)
    among_V[ids_D] = True
    return {
        "input_ids": shifted(torch.from_numpy(tape.tokens)[None].long())[0],
        "loss_mask": mask_BS.long()[0],
        "position_mask": (among_V[logits_BSV.argmax(-1)] & mask_BS)[0, :, None],
        "aux_hidden_states": torch.cat([rows.taps[i][0] for i in (0, 2, 3)], -1),
        "probs": logits_BSV[..., ids_D].softmax(-1)[0],
    }


def read(path: Path, number: int) -> dict[str, torch.Tensor]:
    """A sample by the format, its law at full width."""
    manifest = json.loads((path / "manifest.json").read_text())
    size, width, k = (manifest[name] for name in ("shard_size", "draft_vocab_size", "target_probs_topk"))
    held = {n: x[number % size] for n, x in load_file(path / f"shard-{number // size:06d}.safetensors").items()}
    if 0 < k < width:
        values, indices = held.pop("target_probs_values"), held.pop("target_probs_indices")
        held["target_probs"] = torch.zeros(len(values), width, dtype=values.dtype).scatter_(-1, indices.long(), values)
    return held


def compressed(probs_SD: torch.Tensor, k: int) -> torch.Tensor:
    """The law as the format's own producer keeps k of it."""
    values, indices = probs_SD.topk(k, -1)
    return torch.zeros_like(probs_SD).scatter_(-1, indices, values / values.sum(-1, keepdim=True))


@pytest.fixture(scope="module", params=[(False, 0), (False, 8), (True, 0), (True, 4)], ids=str)
def cache(request, store, model, trimmed, tmp_path_factory):
    trim, k = request.param
    out, parts = tmp_path_factory.mktemp("eagle3") / "cache", ModelParts.of(trimmed if trim else model)
    exporter(NAME).run(store(hidden_dtype="float32"), out, parts, hidden_dtype="float32", top_k=k, shard_size=3)
    return out, parts, k


def test_samples_are_what_the_formats_producer_makes(cache, model, tapes, sequence_rows):
    out, parts, k = cache
    assert exporter(NAME).validate(out) == []
    manifest = json.loads((out / "manifest.json").read_text())
    ids_D = torch.tensor(manifest["selected_token_ids"])
    assert torch.equal(ids_D, parts.kept_ids_D) and manifest["format_version"] == 2
    assert manifest["aux_layer_ids"] == [0, 2, 3] and manifest["aux_hidden_dim"] == 90
    slots = {"supervised": 0, "used": 0}
    for i, tape in enumerate(tapes):
        held, expected, n = read(out, i), due(model, ids_D, tape, sequence_rows), len(tape)
        for name in ("input_ids", "loss_mask", "position_mask", "aux_hidden_states"):
            assert torch.equal(held[name][:n], expected[name]) and not held[name][n:].any(), name
        assert held["attention_mask"].sum() == n and held["attention_mask"][:n].all()
        used = expected["position_mask"][:, 0]
        slots["used"] += int(used.sum())
        slots["supervised"] += int(expected["loss_mask"].sum())
        law_SD = held["target_probs"][:n][used]
        if not k:
            torch.testing.assert_close(law_SD, expected["probs"][used], atol=1e-6, rtol=1e-4)
        else:
            whole = compressed(expected["probs"], k)[used]
            if parts.draft_ids_D is None:
                torch.testing.assert_close(law_SD, whole, atol=1e-6, rtol=1e-4)
            else:  # of the kept ids only those that drafts may use: as many as the store has, k at most
                few = law_SD > 0
                assert (few.sum(-1) <= k).all() and (few.sum(-1) >= 1).all()
                ratio_SD = expected["probs"][used] * few
                again = ratio_SD / ratio_SD.sum(-1, keepdim=True)
                torch.testing.assert_close(law_SD, again, atol=1e-6, rtol=1e-4)
            assert torch.equal(law_SD.argmax(-1), expected["probs"][used].argmax(-1))
    assert 0 < slots["used"] < slots["supervised"] or parts.draft_ids_D is None
    assert torch.equal(load_file(out / "target_embeddings.safetensors")["weight"], parts.embedding_VH)


def test_the_kept_mass_is_said(store, parts, model, tapes, sequence_rows, tmp_path):
    report = exporter(NAME).run(store(), tmp_path / "out", parts, top_k=8)
    kept = []
    for tape in tapes:
        law_SV = shifted(sequence_rows.forward(model, tape).logits_BTV)[0].softmax(-1)
        kept.append(law_SV.topk(8, -1).values.sum(-1)[:-1][torch.from_numpy(tape.supervised[1:])])
    mean, least = torch.cat(kept).mean(), torch.cat(kept).min()
    assert (
        f"{mean:.4f} of the target's law on average" in report.notes[0] and f"{least:.4f} at least" in report.notes[0]
    )
    facts = json.loads((tmp_path / "out" / "workbench.json").read_text())
    assert facts["kept_mass"]["mean"] == pytest.approx(float(mean), abs=1e-5)


def test_bfloat16_rounds_and_nothing_else(store, parts, tapes, tmp_path):
    wide, short = tmp_path / "wide", tmp_path / "short"
    exporter(NAME).run(store(), wide, parts, top_k=8, hidden_dtype="float32")
    exporter(NAME).run(store(), short, parts, top_k=8)
    assert exporter(NAME).validate(short) == []
    for i in range(len(tapes)):
        a, b = read(wide, i), read(short, i)
        for name in ("target_probs", "aux_hidden_states"):
            assert torch.equal(a[name].to(torch.bfloat16), b[name]), name


@given(st.data())
def test_indices_are_distinct_and_a_law_is_a_law(data):
    vocab, stored = data.draw(st.integers(4, 40)), data.draw(st.integers(1, 12))
    stored = min(stored, vocab)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    draft = np.sort(generator.choice(vocab, data.draw(st.integers(2, vocab)), replace=False))
    k = data.draw(st.integers(1, min(stored, len(draft) - 1)))
    logits_SV = generator.normal(size=(7, vocab)).astype(np.float32) * 3
    ids_SK = np.argsort(-logits_SV, -1, kind="stable")[:, :stored].astype(np.int32)
    norm, head = torch.zeros(2), torch.zeros(vocab, 2)
    parts = ModelParts(head, head, norm, 1e-6, "1+w", torch.from_numpy(draft.astype(np.int64)))
    whole = np.log(np.exp(logits_SV.astype(np.float64)).sum(-1))
    law = kept_law(ids_SK, np.take_along_axis(logits_SV, ids_SK, -1), whole, parts, k)
    index_Sk, probs_Sk = law.indices_Sk.numpy(), law.probs_Sk.numpy()
    assert all(len(set(row)) == k for row in index_Sk) and (index_Sk >= 0).all() and (index_Sk < len(draft)).all()
    target = np.exp(logits_SV - whole[:, None])
    for s in range(7):
        inside = [t for t in ids_SK[s] if t in draft][:k]
        assert draft[index_Sk[s, : len(inside)]].tolist() == inside and not probs_Sk[s, len(inside) :].any()
        mass = target[s, inside].sum()
        assert law.mass_S[s] == pytest.approx(mass, abs=1e-6) and law.best_S[s] == logits_SV[s].argmax()
        if inside:
            np.testing.assert_allclose(probs_Sk[s, : len(inside)], target[s, inside] / mass, rtol=1e-4)


def test_the_whole_law_in_blocks_is_the_law(model, trimmed, tapes, sequence_rows, monkeypatch):
    from workbench.datasets.export import draft_law

    rows, parts = sequence_rows.forward(model, tapes[4]), ModelParts.of(trimmed)
    monkeypatch.setattr(draft_law, "ROWS", 7)
    monkeypatch.setattr(draft_law, "BLOCK", 10)
    blocks = list(full_law(rows.trunk_BTH[0], parts))
    assert len(blocks) == 5
    torch.testing.assert_close(torch.cat([p for p, _ in blocks]), rows.logits_BTV[0][:, parts.kept_ids_D].softmax(-1))
    assert torch.equal(torch.cat([b for _, b in blocks]), rows.logits_BTV[0].argmax(-1))


def shard(change, file: str = "shard-000000.safetensors"):
    def run(path: Path) -> None:
        tensors = {name: value.clone() for name, value in load_file(path / file).items()}
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path / file)

    return run


def retold(**fields):
    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | fields))

    return change


def test_what_the_reader_accepts_in_silence_is_found(store, trimmed, model, tapes, sequence_rows, tmp_path, harmed):
    parts, out, whole = ModelParts.of(trimmed), tmp_path / "kept", tmp_path / "whole"
    exporter(NAME).run(store(), out, parts, top_k=4)
    exporter(NAME).run(store(), whole, parts)
    held = load_file(out / "shard-000000.safetensors")
    at = int(held["position_mask"][0, :, 0].nonzero()[0])
    free = [i for i in range(83) if i not in parts.kept_ids_D.tolist()]

    def unshifted(tensors):
        for name in ("input_ids", "loss_mask"):
            tensors[name] = tensors[name].roll(1, 1)

    def target_ids(tensors):  # places of the vocabulary instead of places among the draft ids, where they fit
        ids = parts.kept_ids_D[tensors["target_probs_indices"].long()]
        tensors["target_probs_indices"] = torch.where(ids < 28, ids, tensors["target_probs_indices"]).int()

    def reversed_ids(path: Path) -> None:
        retold(selected_token_ids=parts.kept_ids_D.flip(0).tolist())(path)

    cases = [
        ("ids is not", shard(unshifted)),
        ("ids is not", shard(lambda t: t["input_ids"][0, 2].add_(1))),
        ("last slot is not zero", shard(lambda t: t["input_ids"][0, len(tapes[0]) - 1].add_(1))),
        ("position is not", shard(lambda t: t["position_mask"].zero_())),
        ("position_mask holds slots", shard(lambda t: t["loss_mask"].zero_())),
        ("aux_hidden_states holds NaN", shard(lambda t: t["aux_hidden_states"][0, 0, 0].fill_(float("nan")))),
        ("layer_0 is not", shard(lambda t: t.update(aux_hidden_states=t["aux_hidden_states"].roll(30, -1)))),
        ("layer_0 is not", shard(lambda t: t.update(aux_hidden_states=t["aux_hidden_states"].roll(1, 1)))),
        ("do not sum to 1", shard(lambda t: t["target_probs_values"][0, at].mul_(0.5))),
        ("do not sum to 1", shard(lambda t: t["target_probs_values"][0, at, 0].fill_(float("nan")))),
        ("law is not", shard(target_ids)),
        (
            "best is not",
            shard(lambda t: t["target_probs_indices"][0, at].copy_(t["target_probs_indices"][0, at].roll(1))),
        ),
        ("not distinct", shard(lambda t: t["target_probs_indices"][0, at, 1:].fill_(3))),
        ("not distinct places", shard(lambda t: t["target_probs_indices"][0, at, 0].fill_(28))),
        ("another shape", shard(lambda t: [t.update({n: t[n][..., :-1]}) for n in t if "probs" in n])),
        ("selected_token_ids", retold(selected_token_ids=[*free[:1], *parts.kept_ids_D.tolist()[1:]])),
        ("selected_token_ids", reversed_ids),
        ("aux_layer_ids", retold(aux_layer_ids=[1, 3, 4])),
        ("target_probs_topk", retold(target_probs_topk=0)),
        ("draft_vocab_size", retold(draft_vocab_size=83)),
        ("embedding", shard(lambda t: t["weight"].neg_(), "target_embeddings.safetensors")),
    ]
    for expected, change in cases:
        problems = harmed(out, NAME, change)
        assert any(re.search(expected, p) for p in problems), (expected, problems)
    assert harmed(out, NAME, shard(lambda tensors: None)) == []
    law = load_file(whole / "shard-000000.safetensors")["target_probs"]
    assert harmed(whole, NAME, shard(lambda t: t["target_probs"].copy_(law.roll(1, 1))))
    assert harmed(whole, NAME, shard(lambda t: t["target_probs"].copy_(law.roll(1, 2))))
    assert harmed(whole, NAME, shard(lambda tensors: None)) == []


def test_refusals_leave_nothing(store, parts, tmp_path):
    run, out = exporter(NAME).run, tmp_path / "out"
    with pytest.raises(CapabilityError, match="takes three layers"):
        run(store(), out, parts, layers=[0, 2])
    with pytest.raises(CapabilityError, match="lacks top_ids"):
        run(store(top_k=0), out, parts, top_k=4)
    with pytest.raises(UserError, match="at most 12"):
        run(store(), out, parts, top_k=13)
    assert not list(tmp_path.iterdir())
    run(store(), out, parts, layers=[0, 2, 4])
    assert exporter(NAME).validate(out) == []


def test_the_last_layer_lies_before_the_norm(store, parts, model, tapes, sequence_rows, tmp_path):
    exporter(NAME).run(store(), tmp_path / "out", parts, layers=[0, 2, 4])
    rows, n = sequence_rows.forward(model, tapes[0]), len(tapes[0])
    held = read(tmp_path / "out", 0)["aux_hidden_states"][:n].chunk(3, -1)
    assert torch.equal(held[2], rows.trunk_BTH[0].to(torch.bfloat16))


@pytest.mark.parametrize("k", [0, 4])
def test_documents_of_one_token_and_without_supervision(model, parts, sequence_rows, tmp_path, k):
    bare = Tape("bare", np.arange(6), supervised=np.zeros(6, bool))
    tapes = Corpus([Tape("one", np.array([7])), bare, Tape("two", np.array([7, 9]))])
    data = sequence_rows.write_sequences(model, tapes, tmp_path / "data", taps=(0, 2, 3), top_k=12)
    exporter(NAME).run(data, tmp_path / "out", parts, top_k=k)
    exporter("nemo-automodel-dspark").run(data, tmp_path / "dspark", parts)
    assert exporter(NAME).validate(tmp_path / "out") == []
    assert exporter("nemo-automodel-dspark").validate(tmp_path / "dspark") == []
    assert [int(read(tmp_path / "out", i)["position_mask"].sum()) for i in range(3)] == [0, 0, 1]
