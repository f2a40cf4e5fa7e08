"""NeMo Automodel's own readers on our caches, its producers' functions as the truth, and faults that it lets pass.

Run by `make test-exports`, in an environment that holds that project.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

pytestmark = pytest.mark.exports

DSPARK, EAGLE3 = "nemo-automodel-dspark", "nemo-automodel-eagle3"
TAPS, FINAL = (0, 2, 3), 4


@pytest.fixture(scope="module")
def world(tiny, sequence_rows, tmp_path_factory):
    """A model with a trimmed head, its documents, stores in both types, and rows and logits of every document."""
    model = tiny(tied=False)
    model.trim_draft_vocab(list(range(1, 83, 3)))
    tapes = sequence_rows.documents(83)
    base = tmp_path_factory.mktemp("nemo")
    stores = {
        dtype: sequence_rows.write_sequences(model, tapes, base / dtype, taps=TAPS, top_k=83, hidden_dtype=dtype)
        for dtype in ("bfloat16", "float32")
    }
    truths = [sequence_rows.forward(model, tape, (*TAPS, 1)) for tape in tapes]
    return SimpleNamespace(
        model=model, parts=ModelParts.of(model), tapes=tapes, stores=stores, truths=truths, reseal=sequence_rows.reseal
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dspark_items_are_the_models_rows(world, tmp_path, dtype):
    from nemo_automodel.components.datasets.llm import dspark_cache
    from nemo_automodel.components.speculative.dspark.common import extract_context_feature, validate_target_layer_ids

    layers, kind = [0, 2, 3, FINAL], getattr(torch, dtype)
    options = dict(hidden_dtype=dtype, shard_size=2, layers=layers, target="org/model")
    exporter(DSPARK).run(world.stores[dtype], tmp_path / "out", world.parts, **options)
    data = dspark_cache.CachedDSparkDataset(str(tmp_path / "out"))
    assert len(data) == len(world.tapes) and data.manifest["complete"] is True
    validate_target_layer_ids(data.manifest["target_layer_ids"], 5)
    for item, tape, rows in zip(data, world.tapes, world.truths):
        n = len(tape)
        assert torch.equal(item["input_ids"][:n], torch.from_numpy(tape.tokens).long())
        assert torch.equal(item["loss_mask"][:n].bool(), torch.from_numpy(tape.supervised))
        last_SH = world.parts.normed(rows.trunk_BTH[0].to(kind)).to(kind)
        states = {0: rows.trunk_BTH[0] * 0, **{i + 1: rows.taps[i][0] for i in (0, 1, 2, 3)}, FINAL + 1: last_SH}
        due_SLH = extract_context_feature({i: x.to(kind) for i, x in states.items()}, layers)
        assert torch.equal(item["target_hidden_states"][:n], due_SLH)
        assert torch.equal(item["target_last_hidden_states"][:n], last_SH)
        assert not any(value[n:].any() for value in item.values())
    batch = next(
        iter(dspark_cache.build_cached_dspark_dataloader(cache_dir=data.cache_dir, batch_size=3, shuffle=False))
    )
    assert batch["target_hidden_states"].shape == (3, 30, 120) and batch["target_hidden_states"].dtype is kind
    embedding, head = dspark_cache.read_target_weight_modules(data.cache_dir)
    assert torch.equal(embedding.weight, world.model.embed) and torch.equal(head.weight, world.model.head)


def test_the_dspark_manifest_is_the_producers(world, tmp_path):
    from nemo_automodel.components.datasets.llm.dspark_cache import build_cache_manifest, manifest_mismatch_fields

    exporter(DSPARK).run(world.stores["bfloat16"], tmp_path / "out", world.parts, target="org/model", seq_length=32)
    due = build_cache_manifest(
        target_model="org/model",
        target_model_type="qwen3_5_text",
        target_text_config=SimpleNamespace(hidden_size=30, vocab_size=83, num_hidden_layers=5),
        seq_length=32,
        dtype="bf16",
        num_samples=5,
        shard_size=256,
        target_layer_ids=list(TAPS),
        train_data_path="random",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256="",
    )
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest_mismatch_fields(found, due) == []
    assert manifest_mismatch_fields(found, {**due, "target_layer_ids": [1, 3, 4]}) == ["target_layer_ids"]


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eagle3_items_are_the_producers(world, tmp_path, dtype, k):
    from nemo_automodel.components.datasets.llm import eagle3_cache
    from nemo_automodel.components.speculative.eagle.core import _compute_target_distribution
    from nemo_automodel.components.speculative.eagle.target import _shift_left_with_zero

    kind = getattr(torch, dtype)
    exporter(EAGLE3).run(world.stores[dtype], tmp_path / "out", world.parts, hidden_dtype=dtype, top_k=k, shard_size=2)
    data = eagle3_cache.CachedEagle3Dataset(str(tmp_path / "out"))
    assert torch.equal(eagle3_cache.read_target_embeddings(data.cache_dir), world.model.embed)
    ids_D = torch.tensor(data.manifest["selected_token_ids"])
    among_V = torch.zeros(83, dtype=torch.bool).index_fill_(0, ids_D, True)
    exact, used = dtype == "float32", 0
    for item, tape, rows in zip(data, world.tapes, world.truths):
        n = len(tape)
        ids_BS, mask_BS = torch.from_numpy(tape.tokens)[None].long(), torch.from_numpy(tape.supervised)[None].long()
        mask_BS = _shift_left_with_zero(mask_BS)
        logits_BSV = (
            rows.logits_BTV if exact or k else world.parts.logits(world.parts.normed(rows.trunk_BTH[0].to(kind)))[None]
        )
        probs, position = _compute_target_distribution(_shift_left_with_zero(logits_BSV), ids_D, among_V, mask_BS)
        if k:
            kept = eagle3_cache.compress_target_probs(probs, k)
            probs = eagle3_cache.reconstruct_target_probs(*kept, len(ids_D))
        assert torch.equal(item["input_ids"][:n], _shift_left_with_zero(ids_BS)[0])
        assert torch.equal(item["loss_mask"][:n], mask_BS[0])
        assert torch.equal(item["position_mask"][:n], position[0])
        taps_SLH = torch.cat([rows.taps[i][0] for i in TAPS], -1).to(kind)
        assert torch.equal(item["aux_hidden_states"][:n], taps_SLH)
        at = position[0, :, 0]
        tolerance = 1e-5 if exact else 2.0**-8
        torch.testing.assert_close(item["target_probs"][:n][at].float(), probs[0][at], atol=1e-6, rtol=tolerance)
        used += int(at.sum())
    assert used > 0


def spoilt(reseal, out, change, name="shard-000000.safetensors"):
    """A copy of an export with other tensors in a file, under a seal of its own."""
    copy = shutil.copytree(out, out.with_name(f"copy{len(list(out.parent.iterdir()))}"))
    tensors = {key: value.clone() for key, value in load_file(copy / name).items()}
    change(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, copy / name)
    reseal(copy)
    return copy


def test_what_the_readers_let_pass_the_validators_do_not(world, tmp_path):
    from nemo_automodel.components.datasets.llm.dspark_cache import CachedDSparkDataset
    from nemo_automodel.components.datasets.llm.eagle3_cache import CachedEagle3Dataset

    n, trunk = len(world.tapes[0]), world.truths[0].trunk_BTH[0].to(torch.bfloat16)
    one = tmp_path / "dspark"
    exporter(DSPARK).run(world.stores["bfloat16"], one, world.parts)
    dspark = [
        lambda t: t["input_ids"].add_(1).remainder_(83),
        lambda t: t["target_hidden_states"].fill_(float("nan")),
        lambda t: t["target_last_hidden_states"][0, :n].copy_(trunk),
        lambda t: t.update(loss_mask=t["loss_mask"][:, :-1]),
        lambda t: t.update(target_hidden_states=t["target_hidden_states"].roll(30, -1)),
    ]
    two = tmp_path / "eagle3"
    exporter(EAGLE3).run(world.stores["bfloat16"], two, world.parts, top_k=5)
    eagle3 = [
        lambda t: t["input_ids"].copy_(t["input_ids"].roll(1, 1)),
        lambda t: t["aux_hidden_states"].fill_(float("nan")),
        lambda t: t["target_probs_values"].mul_(0.5),
        lambda t: t["target_probs_indices"].fill_(3),
        lambda t: t.update(aux_hidden_states=t["aux_hidden_states"].roll(30, -1)),
    ]
    for name, out, changes, reader in (
        (DSPARK, one, dspark, CachedDSparkDataset),
        (EAGLE3, two, eagle3, CachedEagle3Dataset),
    ):
        assert exporter(name).validate(spoilt(world.reseal, out, lambda t: None)) == []
        for change in changes:
            copy = spoilt(world.reseal, out, change)
            assert len(list(reader(str(copy)))) == 5  # in silence
            assert exporter(name).validate(copy)
