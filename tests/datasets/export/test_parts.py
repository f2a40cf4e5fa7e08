"""Parts of a model on disk: the same bits back, logits as the model's, damage as sentences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench.core.errors import CheckpointError, UserError
from workbench.datasets.export.parts import FILE, ModelParts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_come_back_bit_for_bit(tiny, tmp_path, tied, dtype):
    model = tiny(tied=tied).to(dtype)
    model.trim_draft_vocab([3, 5, 80])
    parts = ModelParts.of(model)
    again = ModelParts.load(parts.save(tmp_path / "a").parent)
    for name in ("embedding_VH", "head_VH", "final_norm_H", "draft_ids_D", "draft_head_DH"):
        assert torch.equal(getattr(parts, name), getattr(again, name)), name
        assert getattr(again, name).dtype is getattr(parts, name).dtype
    assert again.tied is tied and again.eps == parts.eps and again.norm_kind == "1+w"
    assert not list((tmp_path / "a").glob("*.tmp"))


def test_the_map_leads_from_draft_ids_to_target_ids(trimmed, tmp_path):
    from safetensors.torch import load_file

    parts = ModelParts.of(trimmed)
    file = load_file(parts.save(tmp_path))
    ids_D = file["d2t"] + torch.arange(len(file["d2t"]))
    assert torch.equal(ids_D, trimmed.draft_head.ids_D) and torch.equal(file["t2d"].nonzero()[:, 0], ids_D)
    assert torch.equal(file["draft_head"], trimmed.draft_head.weight_DH)


def test_norm_and_head_give_the_models_logits(model, parts, tapes, sequence_rows):
    rows = sequence_rows.forward(model, tapes[0])
    normed_SH = parts.normed(rows.trunk_BTH[0])
    assert torch.equal(normed_SH, rows.normed_BTH[0])
    torch.testing.assert_close(parts.logits(normed_SH), rows.logits_BTV[0], atol=1e-5, rtol=0)
    other = dataclasses.replace(parts, norm_kind="w")
    assert (other.logits(other.normed(rows.trunk_BTH[0])) - rows.logits_BTV[0]).abs().max() > 0.1


@pytest.mark.parametrize(
    "change",
    [
        dict(norm_kind="2w"),
        dict(eps=float("nan")),
        dict(final_norm_H=torch.zeros(29)),
        dict(head_VH=torch.zeros(82, 30)),
        dict(draft_ids_D=torch.tensor([4, 3])),
        dict(draft_ids_D=torch.tensor([3, 3])),
        dict(draft_ids_D=torch.tensor([3, 83])),
        dict(draft_ids_D=torch.tensor([-1, 3])),
        dict(draft_ids_D=torch.tensor([3, 4], dtype=torch.int32)),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, change):
    with pytest.raises(UserError, match=r"not valid|not parts of one model"):
        dataclasses.replace(parts, **change)


def test_damage_is_found(trimmed, tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(CheckpointError, match=r"has no parts\.safetensors"):
        ModelParts.load(tmp_path)
    file = ModelParts.of(trimmed).save(tmp_path)
    good, meta = load_file(file), {"workbench": '{"eps": 1e-06, "norm_kind": "1+w", "tied": false}'}
    for name in ("d2t", "t2d", "draft_head"):
        wrong = {key: value.clone() for key, value in good.items()}
        wrong[name][0] = wrong[name][0] + 1 if name != "t2d" else ~wrong[name][0]
        save_file(wrong, file, metadata=meta)
        with pytest.raises(CheckpointError, match=f"'{name}' of"):
            ModelParts.load(tmp_path)
    for broken in (lambda: save_file(good, file), lambda: file.write_bytes(file.read_bytes()[:-5])):
        broken()
        with pytest.raises(CheckpointError, match="does not hold the parts"):
            ModelParts.load(tmp_path)
    assert file.name == FILE
