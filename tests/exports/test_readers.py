"""Every export through the reader of the project it is for: its own classes give the dataset back, bit for bit.

Run by `make test-exports`, in an environment that holds these projects. Readers are also handed spoilt exports: what
one of them takes in silence, our own check must not.
"""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch

from workbench.datasets.export import validate
from workbench.datasets.export.parts import ModelParts
from workbench.model.ops import rms_norm

pytestmark = pytest.mark.exports

LAYERS, LONGEST = (0, 1, 3), 64


@pytest.fixture(autouse=True)
def eager_checks(monkeypatch):
    """SpecForge looks into files before training only where this is set."""
    monkeypatch.setenv("SPECFORGE_VALIDATE_OFFLINE_FEATURES", "1")


def lines(out):
    return [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()]


def kept(one, out=None):
    return [one.truth[line["doc_id"]] for line in lines(out or one.out)]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def taps_of(truth, layers=LAYERS):
    return torch.cat([truth.taps[layer].to(torch.bfloat16) for layer in layers], -1)


@torch.no_grad()
def normed_of(truth, model):
    stored = truth.trunk_SH.to(torch.bfloat16).float()
    return rms_norm(stored, model.final_scale, model.config.rms_norm_eps).to(torch.bfloat16)


# ---------------------------------------------------------------- speculators


def speculators_data(out):
    from speculators.train.data import ArrowDataset

    return ArrowDataset(LONGEST, str(out), on_missing="raise")


def test_speculators(made, trimmed, copied, stores):
    from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices
    from speculators.train.data import CollateFn
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    one = made("speculators")
    out = copied("speculators")  # the reader deletes lock files, so it gets a copy
    data, parts = speculators_data(out), ModelParts.load(out / "parts")
    assert len(data) == one.report.documents and list(data.approx_lengths) == [len(t.ids_S) for t in kept(one)]
    for i, truth in enumerate(kept(one)):
        item = data[i]
        assert same(item["input_ids"], truth.ids_S) and same(item["loss_mask"], truth.mask_S.long())
        assert same(item["hidden_states"], taps_of(truth))
        assert same(item["verifier_last_hidden_states"], truth.trunk_SH.to(torch.bfloat16))
        logits = parts.logits(parts.normed(item["verifier_last_hidden_states"]))
        assert float((logits - truth.logits_SV).abs().max()) < 0.05
        assert float((parts.logits(item["verifier_last_hidden_states"]) - truth.logits_SV).abs().max()) > 0.2
        file = data.transfer.get_cached(i)
        check_hidden_states(file, truth.ids_S.tolist())
    assert not list(find_corrupt_hidden_state_indices(out / "hidden_states", range(len(data))))
    batch = CollateFn(256, 30, num_target_layers=3)([data[i] for i in range(len(data))])
    total = one.report.tokens
    assert same(batch["input_ids"][0, :total], torch.cat([t.ids_S for t in kept(one)]))
    assert same(batch["hidden_states"][0, :total], torch.cat([taps_of(t) for t in kept(one)]))
    counts = torch.load(out / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == sum(int(t.mask_S.sum()) for t in kept(one))
    d2t, t2d = build_vocab_mappings_from_distribution(counts, 20, 83)
    ids = torch.arange(20) + d2t
    assert int(t2d.sum()) == 20 and set(ids.tolist()) == set(t2d.nonzero().flatten().tolist())


def test_what_speculators_takes_in_silence_is_not_sound(copied, stores):
    def shorter(held):
        held["hidden_states"] = held["hidden_states"][:-1]

    out = copied("speculators")
    stores.change_sample(out, 1, shorter)
    assert len(speculators_data(out)[1]["hidden_states"]) == len(speculators_data(out)[1]["input_ids"]) - 1
    assert any("rows have shape" in problem for problem in validate(out, to="speculators"))

    def other_ids(held):
        held["token_ids"][0] += 1

    shutil.rmtree(out)
    out = copied("speculators")
    stores.change_sample(out, 0, other_ids)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        item = speculators_data(out)[0]
    assert not isinstance(item, dict) and said
    assert any("token_ids of its hidden rows" in problem for problem in validate(out, to="speculators"))


# ---------------------------------------------------------------- SpecForge


def specforge_batches(out, to, batch_size):
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    common = {"run_id": "r", "ttt_length": 7, "max_len": LONGEST}
    if to == "specforge-eagle3":
        from specforge.algorithms.eagle3 import data

        reader, normal = data.build_offline_reader(str(out), **common), data.build_offline_normalizer(LONGEST)
        collate = data.build_offline_collator()
    else:
        from specforge.algorithms.common import dflash_family_data as data

        if to == "specforge-dspark":
            reader = data.build_dspark_offline_reader("dspark", str(out), **common)
            normal, collate = data.build_dspark_offline_normalizer(LONGEST), data.build_dspark_collator()
        else:
            reader = data.build_offline_reader("dflash", str(out), **common)
            normal, collate = data.build_offline_normalizer(LONGEST), data.build_collator()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=reader.read(),
        batch_size=batch_size,
        strategy=to.removeprefix("specforge-"),
        per_sample_transform=normal,
        collate_fn=collate,
        drop_last=False,
    )
    return [batch.tensors for batch in loader]


@pytest.mark.parametrize("to", ["specforge-dspark", "specforge-dflash"])
def test_specforge_dflash_family(made, trimmed, to):
    one = made(to)
    batches = specforge_batches(one.out, to, 1)
    assert len(batches) == one.report.documents
    for batch, truth in zip(batches, kept(one), strict=True):
        assert same(batch["input_ids"][0], truth.ids_S) and same(batch["loss_mask"][0], truth.mask_S.long())
        assert same(batch["hidden_states"][0], taps_of(truth))
        if to == "specforge-dspark":
            last = batch["target_last_hidden_states"][0]
            assert same(last, normed_of(truth, trimmed))
            parts = ModelParts.load(one.out / "parts")
            assert float((parts.logits(last) - truth.logits_SV).abs().max()) < 0.05
            assert float((parts.logits(parts.normed(last)) - truth.logits_SV).abs().max()) > 0.2
    (padded,) = specforge_batches(one.out, to, 8)
    assert padded["hidden_states"].shape == (len(batches), max(len(t.ids_S) for t in kept(one)), 90)


def test_specforge_eagle3(made, trimmed):
    one = made("specforge-eagle3")
    batches = specforge_batches(one.out, "specforge-eagle3", 1)
    assert len(batches) == one.report.documents
    for batch, truth in zip(batches, kept(one), strict=True):
        mask = truth.mask_S.long()
        mask[-1] = 0
        assert same(batch["input_ids"][0], truth.ids_S) and same(batch["loss_mask"][0], mask)
        assert same(batch["hidden_state"][0], taps_of(truth))
        assert same(batch["target"][0], normed_of(truth, trimmed))


def test_what_specforge_takes_in_silence_is_not_sound(made, copied, stores):
    def shorter(held):
        held["hidden_state"] = held["hidden_state"][:, :-1]

    out = copied("specforge-eagle3")
    stores.change_sample(out, 0, shorter)
    assert (
        len(specforge_batches(out, "specforge-eagle3", 8)[0]["input_ids"]) == made("specforge-eagle3").report.documents
    )
    assert any("last rows have shape" in problem for problem in validate(out, to="specforge-eagle3"))

    def poisoned(held):
        held["hidden_states"][2, 5] = float("nan")

    out = copied("specforge-dspark")
    stores.change_sample(out, 0, poisoned)
    assert specforge_batches(out, "specforge-dspark", 1)[0]["hidden_states"].isnan().any()
    assert any("NaN or infinity, first at position 2" in problem for problem in validate(out, to="specforge-dspark"))


# ---------------------------------------------------------------- ModelOpt


def modelopt_batch(out, train_len=LONGEST):
    from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

    files = [str(out / line["file"]) for line in lines(out)]
    data = OfflineSupervisedDataset(files, answer_only_loss=True)
    return data, EagleOfflineDataCollator(train_len)([data[i] for i in range(len(data))])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_modelopt(made, trimmed, norm):
    one = made("modelopt", norm=norm)
    data, batch = modelopt_batch(one.out)
    assert len(data) == one.report.documents
    for i, truth in enumerate(kept(one)):
        item, n = data[i], len(truth.ids_S)
        last = truth.trunk_SH.to(torch.bfloat16) if norm == "pre" else normed_of(truth, trimmed)
        assert same(item["input_ids"], truth.ids_S) and same(item["loss_mask"], truth.mask_S.long())
        assert same(item["aux_hidden_states"], taps_of(truth)) and same(item["base_model_hidden_states"], last)
        assert same(batch["base_model_outputs"]["base_model_hidden_states"][i, :n], last)
        assert same(item["labels"][:-1], truth.ids_S[1:])


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_modelopt_rebuilds_the_models_logits_by_the_flag(made, norm):
    from modelopt.torch.speculative.plugins.modeling_dflash import DFlashBaseModelOutput

    one = made("modelopt", norm=norm)
    data, batch = modelopt_batch(one.out)
    parts = ModelParts.load(one.out / "parts")
    truth = kept(one)[0]
    found = DFlashBaseModelOutput.from_offline_dict(
        batch["base_model_outputs"], parts.normed, parts.logits, need_logits=True
    )
    logits = found.logits[0, : len(truth.ids_S)]
    assert float((logits - truth.logits_SV).abs().max()) < 0.05
    turned = {**batch["base_model_outputs"], "base_hidden_prenorm": norm == "post"}
    wrong = DFlashBaseModelOutput.from_offline_dict(turned, parts.normed, parts.logits, need_logits=True)
    assert float((wrong.logits[0, : len(truth.ids_S)] - truth.logits_SV).abs().max()) > 0.2


def test_what_modelopt_takes_in_silence_is_not_sound(copied, stores):
    def word(held):
        held["hidden_states_prenorm"] = "post"

    out = copied("modelopt")
    for index in range(len(lines(out))):
        stores.change_sample(out, index, word)
    _, batch = modelopt_batch(out)
    assert batch["base_model_outputs"]["base_hidden_prenorm"] is True
    assert any("which any reader takes for True" in problem for problem in validate(out, to="modelopt"))
