"""What an export holds is the dataset, to the last bit that its format allows; read without the exporter's own code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.datasets.export import REGISTRY, ExportOptions, export, validate
from workbench.datasets.export.parts import ModelParts
from workbench.model.ops import rms_norm

FORMATS = ("modelopt", "specforge-dflash", "specforge-dspark", "specforge-eagle3", "speculators")
LAYERS = (0, 1, 3)


def lines(out):
    return [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()]


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def taps_of(truth, dtype=torch.bfloat16):
    return torch.stack([truth.taps[layer].to(dtype) for layer in LAYERS], 1)


@torch.no_grad()
def normed_of(trunk_SH, model, dtype=torch.bfloat16):
    """The model's own norm of stored rows."""
    return rms_norm(trunk_SH.float(), model.final_scale, model.config.rms_norm_eps).to(dtype)


def test_the_registry_knows_them():
    assert set(FORMATS) <= set(REGISTRY)
    assert all(REGISTRY[name].about and REGISTRY[name].name == name for name in FORMATS)


@pytest.mark.parametrize("to", FORMATS)
def test_an_untouched_export_is_sound_and_says_what_was_left_out(made, to, stores):
    one = made(to)
    assert validate(one.out, to=to) == []
    two_in_a_row = to in ("specforge-dflash", "specforge-dspark")
    assert set(one.report.left_out) == {"doc/2"} | ({"doc/3"} if two_in_a_row else set())
    kept = [doc_id for doc_id in one.truth if doc_id not in one.report.left_out]
    assert [line["doc_id"] for line in lines(one.out)] == kept and one.report.documents == len(kept)
    assert one.report.tokens == sum(len(one.truth[doc_id].ids_S) for doc_id in kept)
    held = sum(file.stat().st_size for file in one.out.rglob("*") if file.is_file())
    parts = (one.out / "parts" / "parts.safetensors").stat().st_size
    assert one.report.bytes == held and one.report.bytes_per_token == (held - parts) / one.report.tokens
    rows = 30 * (3 + (to != "specforge-dflash")) * 2  # three taps and the last rows, bfloat16
    assert one.report.bytes_per_token > rows + 16
    stores.bless(one.out)
    assert validate(one.out, to=to) == []  # so that what bless lets through is let through by the files alone


def test_layers_are_renumbered_as_each_format_counts(made):
    assert made("speculators").report.layer_ids == [1, 2, 4]  # hidden_states of transformers, 0 for the embedding
    for to in ("modelopt", "specforge-dflash", "specforge-dspark", "specforge-eagle3"):
        assert made(to).report.layer_ids == [0, 1, 3] and made(to).report.layers == LAYERS
    assert [made(to).report.norm for to in FORMATS] == ["post", "", "post", "post", "pre"]


def test_speculators_holds_the_stored_bits(made):
    import datasets
    from safetensors.torch import load_file

    one = made("speculators")
    rows = datasets.load_from_disk(str(one.out))
    assert rows.format["type"] == "torch" and len(rows) == one.report.documents
    for i, line in enumerate(lines(one.out)):
        truth, held = one.truth[line["doc_id"]], load_file(one.out / f"hidden_states/hs_{i}.safetensors")
        assert same(rows[i]["input_ids"], truth.ids_S) and same(held["token_ids"], truth.ids_S)
        assert same(rows[i]["loss_mask"], truth.mask_S.long()) and int(rows[i]["seq_len"]) == len(truth.ids_S)
        due = torch.cat([taps_of(truth), truth.trunk_SH.to(torch.bfloat16)[:, None]], 1)
        assert same(held["hidden_states"], due)
        assert not same(held["hidden_states"][:, :1].contiguous(), due[:, 1:2].contiguous())


def test_specforge_holds_the_stored_bits_and_the_models_own_norm_of_them(made, trimmed):
    for to in ("specforge-dspark", "specforge-dflash", "specforge-eagle3"):
        one = made(to)
        files = sorted(map(str, one.out.rglob("*.ckpt")))
        assert len(files) == one.report.documents
        for file, line in zip(files, lines(one.out), strict=True):  # the order of paths is the order of samples
            truth, held = one.truth[line["doc_id"]], torch.load(file, weights_only=True)
            assert same(held["input_ids"], truth.ids_S) and same(held["loss_mask"], truth.mask_S.long())
            taps, last = taps_of(truth).flatten(1), normed_of(truth.trunk_SH.to(torch.bfloat16), trimmed)
            if to == "specforge-eagle3":
                assert set(held) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
                assert same(held["aux_hidden_state"], taps[None]) and same(held["hidden_state"], last[None])
            else:
                assert same(held["hidden_states"], taps)
                assert ("target_last_hidden_states" in held) == (to == "specforge-dspark")
            if to == "specforge-dspark":
                assert same(held["target_last_hidden_states"], last)
                assert not same(held["target_last_hidden_states"], truth.trunk_SH.to(torch.bfloat16))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_modelopt_holds_either_side_of_the_norm_and_says_which(made, trimmed, norm):
    one = made("modelopt", norm=norm)
    assert validate(one.out, to="modelopt") == []
    for line in lines(one.out):
        truth, held = one.truth[line["doc_id"]], torch.load(one.out / line["file"], weights_only=True)
        stored = truth.trunk_SH.to(torch.bfloat16)
        assert held["hidden_states_prenorm"] is (norm == "pre") and held["conversation_id"] == truth.doc_id
        assert same(held["hidden_states"], stored if norm == "pre" else normed_of(stored, trimmed))
        assert same(held["aux_hidden_states"], taps_of(truth).flatten(1))
        assert same(held["input_ids"], truth.ids_S) and same(held["loss_mask"], truth.mask_S.long())


def test_float32_rows_are_the_models_own(made):
    one = made("specforge-dspark", stored="float32", hidden_dtype="float32")
    for line in lines(one.out):
        truth, held = one.truth[line["doc_id"]], torch.load(one.out / line["file"], weights_only=True)
        assert same(held["hidden_states"], taps_of(truth, torch.float32).flatten(1))
        torch.testing.assert_close(held["target_last_hidden_states"], truth.normed_SH, atol=1e-6, rtol=1e-6)
    assert validate(one.out, to="specforge-dspark") == []


@pytest.mark.parametrize("to", ["speculators", "specforge-dspark", "modelopt"])
def test_fp8_rows_come_out_as_what_they_stand_for(made, to, stores):
    one = made(to, stored="fp8")
    assert validate(one.out, to=to) == []
    line = lines(one.out)[0]
    truth = one.truth[line["doc_id"]]
    packed = stores.pack(truth.taps[3], "x", "fp8")
    value_SH = torch.from_numpy(packed["x"]).view(torch.float8_e4m3fn).view(len(truth.ids_S), -1).float()
    due = (value_SH * torch.from_numpy(packed["x_scale"])[:, None]).to(torch.bfloat16)
    if to == "speculators":
        from safetensors.torch import load_file

        found = load_file(one.out / line["file"])["hidden_states"][:, 2]
    else:
        held = torch.load(one.out / line["file"], weights_only=True)
        found = held["hidden_states" if to == "specforge-dspark" else "aux_hidden_states"].split(30, -1)[2]
    assert same(found.contiguous(), due)


def test_the_maps_between_vocabularies_go_there_and_back(made, trimmed):
    ids = trimmed.draft_head.ids_D
    specforge = torch.load(made("specforge-dspark").out / "vocab_mapping/vocab_mapping.pt", weights_only=True)
    spec = made("speculators").out
    found = {
        "specforge": (specforge["d2t"], specforge["t2d"]),
        "speculators": tuple(torch.from_numpy(np.load(spec / f"{name}-{len(ids)}.npy")) for name in ("d2t", "t2d")),
        "modelopt": (torch.load(made("modelopt").out / "d2t.pt", weights_only=True), None),
    }
    for d2t, t2d in found.values():
        assert d2t.dtype == torch.int64 and torch.equal(torch.arange(len(d2t)) + d2t, ids)
        assert t2d is None or (t2d.dtype == torch.bool and torch.equal(t2d.nonzero().flatten(), ids))
    counts = torch.load(spec / "token_freq.pt", weights_only=True)
    one = made("speculators")
    kept = [one.truth[line["doc_id"]] for line in lines(spec)]
    assert sum(counts.values()) == sum(int(truth.mask_S.sum()) for truth in kept)
    every = torch.cat([truth.ids_S[truth.mask_S] for truth in kept])
    assert all(int((every == i).sum()) == n for i, n in counts.items())


def test_parts_travel_with_the_export(made, trimmed):
    parts = ModelParts.load(made("modelopt").out / "parts")
    assert torch.equal(parts.head_VH, trimmed.head) and torch.equal(parts.embedding_VH, trimmed.embed)
    assert torch.equal(parts.final_norm_H, trimmed.norm) and torch.equal(parts.draft_ids_D, trimmed.draft_head.ids_D)


def test_a_whole_head_has_no_map_and_a_choice_of_layers_is_kept(tiny, stores, tmp_path):
    model = tiny()
    stores.make_store(model, stores.documents(), tmp_path / "data")
    report = export(tmp_path / "data", to="specforge-dflash", model=model, out=tmp_path / "a", layers=[1])
    assert report.layer_ids == [1] and not (tmp_path / "a" / "vocab_mapping").exists()
    report = export(tmp_path / "data", to="speculators", model=model, out=tmp_path / "b", layers=[])
    assert report.layers == () and not list((tmp_path / "b").glob("*.npy"))
    assert validate(tmp_path / "a", to="specforge-dflash") == validate(tmp_path / "b", to="speculators") == []


def test_documents_of_one_token(tiny, stores, tmp_path):
    model = tiny()
    known = stores.make_store(model, stores.documents(lengths=(1, 9)), tmp_path / "data")
    for to in FORMATS:
        report = export(tmp_path / "data", to=to, model=model, out=tmp_path / to)
        assert validate(tmp_path / to, to=to) == []
        fits = to in ("speculators", "modelopt")  # the others supervise pairs of tokens
        assert report.documents == (2 if fits else 1) and ("doc/0" in report.left_out) != fits
    held = torch.load(tmp_path / "modelopt" / "samples" / "00000000.pt", weights_only=True)
    assert same(held["aux_hidden_states"], taps_of(known["doc/0"]).flatten(1)) and len(held["input_ids"]) == 1


def test_exports_have_the_same_bytes_twice(made, trimmed, tmp_path):
    for to in FORMATS:
        one = made(to)
        export(one.data, to=to, model=trimmed, out=tmp_path / to)
        files = {file.relative_to(one.out) for file in one.out.rglob("*") if file.is_file()}
        assert files == {file.relative_to(tmp_path / to) for file in (tmp_path / to).rglob("*") if file.is_file()}
        differ = [
            str(name)
            for name in files
            if name.name not in ("samples.jsonl", "export.json")
            and (one.out / name).read_bytes() != (tmp_path / to / name).read_bytes()
        ]
        assert not differ, (to, differ)


# ---------------------------------------------------------------- what is refused, in a sentence, leaving nothing


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(made, trimmed, tiny, stores, tmp_path):
    one, out = made("speculators"), tmp_path / "out" / "deep"

    def refused(says, error=UserError, *, to="specforge-dspark", model=trimmed, data=one.data, **options):
        with pytest.raises(error, match=says):
            export(data, to=to, model=model, out=out, **options)
        assert not out.exists() and not out.parent.exists()

    refused("did you mean 'specforge-dspark'", to="specforge-dsparc")
    refused("holds the output rows of layers 0, 1, 3 and not of 2", CapabilityError, layers=[2])
    refused("needs the rows of at least one layer", CapabilityError, layers=[])
    refused("exactly three layers and 2 were chosen", CapabilityError, to="specforge-eagle3", layers=[0, 1])
    refused("ascending and none of them twice", layers=[1, 1])
    refused("ascending and none of them twice", layers=[3, 1])
    refused("hidden_dtype='float16' is not valid", hidden_dtype="float16")
    refused("norm='both' is not valid", to="modelopt", norm="both")
    refused("was made with model", model=tiny(tied=False, seed=3))


def test_the_last_layer_is_no_tap(trimmed, stores, tmp_path):
    stores.make_store(trimmed, stores.documents(), tmp_path / "data", layers=(1, 4))
    with pytest.raises(CapabilityError, match="holds the last layer, 4"):
        export(tmp_path / "data", to="speculators", model=trimmed, out=tmp_path / "out")
    assert export(tmp_path / "data", to="speculators", model=trimmed, out=tmp_path / "out", layers=[1]).layers == (1,)


def test_data_of_another_kind_or_damaged_are_refused(trimmed, stores, tmp_path):
    from workbench.datasets import extract

    extract(trimmed, stores.documents()[:1], out=tmp_path / "anchors", gamma=3, top_k=4)
    with pytest.raises(CapabilityError, match="anchor records, with the rows of single positions"):
        export(tmp_path / "anchors", to="modelopt", model=trimmed, out=tmp_path / "out")
    stores.make_store(trimmed, stores.documents(), tmp_path / "data")
    shard = next((tmp_path / "data").glob("data-*.arrow"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match the hash"):
        export(tmp_path / "data", to="modelopt", model=trimmed, out=tmp_path / "out")
    from workbench.datasets.norm import norm_facts

    facts = {"norm": norm_facts(trimmed)}
    stores.make_store(trimmed, stores.documents(), tmp_path / "silent", extra=facts)
    with pytest.raises(CheckpointError, match="does not say that its rows lie before the final norm"):
        export(tmp_path / "silent", to="modelopt", model=trimmed, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_store_whose_documents_do_not_fit_is_refused(trimmed, stores, tmp_path):
    stores.make_store(trimmed, stores.documents()[2:3], tmp_path / "data")
    with pytest.raises(UserError, match=r"can hold no document of .* \(no token of it is supervised\)"):
        export(tmp_path / "data", to="speculators", model=trimmed, out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_taken_name_and_a_full_disk_keep_what_was_there(made, trimmed, tmp_path, monkeypatch):
    one = made("modelopt")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("mine")
    with pytest.raises(UserError, match="holds files already"):
        export(one.data, to="modelopt", model=trimmed, out=tmp_path / "taken")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"could not be written \(No space left on device\), and nothing of it is kept"):
        export(one.data, to="modelopt", model=trimmed, out=tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "mine").read_text() == "mine"


def test_options_say_what_is_valid():
    assert ExportOptions(layers=[1, 4]).layers == (1, 4) and ExportOptions().layers is None
    for wrong in ("1,4", [1.0], [True], [-1], 3):
        with pytest.raises(UserError, match="layers="):
            ExportOptions(layers=wrong)
