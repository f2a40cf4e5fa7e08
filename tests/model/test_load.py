"""Checkpoint directories: every published layout loads, every damage is a sentence, and what is saved loads again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workbench.cache.hybrid import same_bits
from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model
from workbench.model.weights.names import canonical
from workbench.model.weights.save import published_tensors, save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every request to the hub is recorded and refused."""
    asked: list[str] = []

    def refuse(name: str, **kwargs: Any) -> str:
        asked.append(name)
        raise OSError("no network in tests")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    yield asked


@pytest.fixture
def checkpoint(tiny, tmp_path) -> Path:
    return tiny(ratio=2, tied=False, layer_types=(LINEAR, FULL)).save(tmp_path / "model")


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text("utf-8"))


def put_config(path: Path, config: Any) -> None:
    (path / "config.json").write_text(json.dumps(config), "utf-8")


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Replace the weights of a directory by a change of its tensors."""
    file = path / "model.safetensors"
    tensors = {name: x.clone() for name, x in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def rename(path: Path, name: Callable[[str], str]) -> None:
    rewrite(path, lambda tensors: {name(old): x for old, x in tensors.items()})


def shard(path: Path, pieces: int, *, listing: bool = True) -> list[Path]:
    """Split the weights into files, with or without an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = []
    table = {}
    for i in range(pieces):
        part = {name: tensors[name].clone() for name in names[i::pieces]}
        files.append(path / f"model-{i + 1:05d}-of-{pieces:05d}.safetensors")
        save_file(part, files[-1], metadata={"format": "pt"})
        table.update(dict.fromkeys(part, files[-1].name))
    if listing:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}), "utf-8")
    return files


def same_weights(a: HybridModel, b: HybridModel) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


# ------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mtp", [True, False])
def test_save_and_load_is_bit_equal(tiny, tmp_path, ratio, tied, mtp):
    model = tiny(ratio=ratio, tied=tied, mtp=mtp)
    path = model.save(tmp_path / "out")
    again = load_model(path)
    assert again.config == model.config
    assert same_weights(model, again)
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) is not tied
    assert again.can_draft is mtp
    assert again.exact and not again.training and not any(p.requires_grad for p in again.parameters())
    assert (again.source, again.path, again.tokenizer) == (str(path), path, None)
    assert not list(path.glob("*.partial"))


def test_bfloat16_is_kept_and_widened_without_loss(tiny, tmp_path):
    model = tiny()
    path = save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    assert {x.dtype for x in load_file(path / "model.safetensors").values()} == {torch.bfloat16}
    assert config_of(path)["dtype"] == "bfloat16"
    wide, narrow = load_model(path), load_model(path, dtype="bfloat16")
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    for (name, a), (_, b) in zip(wide.named_parameters(), narrow.named_parameters()):
        assert torch.equal(a.to(torch.bfloat16), b), name
        assert torch.equal(a, dict(model.named_parameters())[name].to(torch.bfloat16).float()), name
    rows = narrow.forward(torch.arange(6)[None], narrow.new_cache())
    assert rows.logits_BTV.dtype == torch.float32 and rows.trunk_BTH.dtype == torch.bfloat16
    double = load_model(path, dtype=torch.float64)
    assert double.dtype == torch.float64 and not double.exact
    with pytest.raises(CapabilityError, match=r"exact=True does not hold in float64.*dtype='float32'"):
        load_model(path, dtype=torch.float64, exact=True).numerics  # noqa: B018


def test_saving_over_its_own_directory(checkpoint):
    model = load_model(checkpoint)
    model.save(checkpoint)
    assert same_weights(load_model(checkpoint), model)


def test_saving_beside_other_weights_is_refused(tiny, checkpoint):
    files = shard(checkpoint, 2)
    with pytest.raises(
        CheckpointError, match=r"holds other weights \(model-00001-of-00002.*save to an empty directory"
    ):
        tiny().save(checkpoint)
    assert sorted(checkpoint.glob("*.safetensors")) == files


def test_the_tokenizer_travels(tiny_dir, tmp_path):
    model = load_model(tiny_dir)
    again = load_model(model.save(tmp_path / "copy"))
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert again.tokenizer.config == model.tokenizer.config


# ------------------------------------------------------------------------------------------- published layouts

TRUNK = {
    "model.language_model.": lambda n: n.replace("model.", "model.language_model.", 1),
    "model.": lambda n: n,
    "language_model.": lambda n: n.replace("model.", "language_model.", 1),
    "language_model.model.": lambda n: f"language_model.{n}",
    "bare": lambda n: n.removeprefix("model."),
}
HEADS = ("mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp.")


@pytest.mark.parametrize("trunk", TRUNK)
@pytest.mark.parametrize("head", HEADS)
def test_every_published_prefix(checkpoint, trunk, head):
    expected = load_model(checkpoint)
    rename(checkpoint, lambda n: n.replace("mtp.", head, 1) if n.startswith("mtp.") else TRUNK[trunk](n))
    rewrite(checkpoint, lambda tensors: {**tensors, "model.visual.blocks.0.norm.weight": torch.ones(3)})
    assert same_weights(load_model(checkpoint), expected)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model."])
def test_the_head_under_a_prefix(checkpoint, prefix):
    expected = load_model(checkpoint)
    rename(checkpoint, lambda n: prefix + n if n.startswith("lm_head") else n)
    assert same_weights(load_model(checkpoint), expected)


def test_canonical_names():
    assert canonical("model.language_model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert canonical("language_model.mtp.fc.weight") == "mtp.fc.weight"
    assert canonical("norm.weight") == "model.norm.weight"
    assert canonical("lm_head.weight") == "lm_head.weight"


@pytest.mark.parametrize("listing", [True, False], ids=["with index", "without index"])
@pytest.mark.parametrize("pieces", [2, 5])
def test_sharded_weights(checkpoint, pieces, listing):
    expected = load_model(checkpoint)
    shard(checkpoint, pieces, listing=listing)
    assert same_weights(load_model(checkpoint), expected)


def test_files_outside_the_index_are_not_read(checkpoint):
    expected = load_model(checkpoint)
    shard(checkpoint, 2)
    save_file({"adapter.weight": torch.ones(2)}, checkpoint / "adapter.safetensors")
    assert same_weights(load_model(checkpoint), expected)


def nested(path: Path) -> None:
    text = config_of(path)
    text.pop("architectures")
    put_config(
        path, {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    )


def test_a_nested_config_reads_like_a_flat_one(checkpoint):
    expected = load_model(checkpoint)
    nested(checkpoint)
    model = load_model(checkpoint)
    assert model.config == expected.config and same_weights(model, expected)


def test_fields_of_the_top_level_serve_a_nested_config(checkpoint):
    raw = config_of(checkpoint)
    tied, eos = raw.pop("tie_word_embeddings"), raw.pop("eos_token_id")
    config = ModelConfig.from_dict({"text_config": raw, "tie_word_embeddings": tied, "eos_token_id": [eos, 7]})
    assert config.tie_word_embeddings is False and config.eos_token_id == (eos, 7)


def test_defaults_of_the_published_class():
    needed = dict(
        model_type="qwen3_5_text", vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=9,
        num_attention_heads=1, num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=1,
        linear_key_head_dim=4, linear_value_head_dim=4,
    )  # fmt: skip
    config = ModelConfig.from_dict(needed)
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [3, 7]
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (256, 64, 10_000.0)
    assert (config.linear_conv_kernel_dim, config.rms_norm_eps, config.tie_word_embeddings) == (4, 1e-6, False)
    assert ModelConfig.from_dict({**needed, "full_attention_interval": 3}).layer_types[2] == FULL
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "rope_type": "default"}
    config = ModelConfig.from_dict({**needed, "rope_parameters": rope})
    assert (config.rope_theta, config.rotary_dim) == (1e7, 128)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3_5TextConfig(**{k: v for k, v in needed.items() if k != "model_type"})
    ours = ModelConfig.from_dict(needed).to_dict()
    for name in (
        "head_dim",
        "rms_norm_eps",
        "layer_types",
        "tie_word_embeddings",
        "linear_conv_kernel_dim",
        "hidden_act",
    ):
        assert ours[name] == getattr(theirs, name), name
    for name in ("rope_theta", "partial_rotary_factor"):
        assert ours["rope_parameters"][name] == theirs.rope_parameters[name]
    assert ours["max_position_embeddings"] == theirs.max_position_embeddings


def test_stop_ids_come_from_the_generation_config_first(checkpoint):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}), "utf-8")
    model = load_model(checkpoint)
    assert model.config.eos_token_id == (5, 0)
    assert load_model(model.save(checkpoint.parent / "copy")).config.eos_token_id == (5, 0)


def test_a_tied_checkpoint_may_hold_the_head_too(tiny, tmp_path):
    path = tiny(tied=True).save(tmp_path)
    rewrite(path, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert load_model(path).head is None


def test_the_files_decide_about_the_drafter(checkpoint):
    put_config(checkpoint, {**config_of(checkpoint), "mtp_num_hidden_layers": 0})
    assert load_model(checkpoint).can_draft
    put_config(checkpoint, {**config_of(checkpoint), "mtp_num_hidden_layers": 1})
    rewrite(checkpoint, lambda tensors: {n: x for n, x in tensors.items() if not n.startswith("mtp.")})
    model = load_model(checkpoint)
    assert not model.can_draft and model.config.mtp_num_hidden_layers == 0
    model.forward(torch.arange(4)[None], model.new_cache())
    with pytest.raises(CapabilityError, match=r"has no mtp\.\* weights, so it cannot draft: use k=0"):
        model.new_draft_cache()


def test_parameters_are_nan_until_filled(tiny):
    fresh = HybridModel(tiny().config)
    assert all(bool(p.isnan().all()) for p in fresh.parameters())
    assert set(published_tensors(fresh)) == set(published_tensors(tiny()))


# ----------------------------------------------------------------------------------------------------- the hub


def test_a_directory_is_never_asked_of_the_hub(checkpoint, monkeypatch, no_network):
    monkeypatch.chdir(checkpoint.parent)
    shutil.copytree(checkpoint, "org/name")
    assert load_model("org/name").source == "org/name"
    assert load_model(Path("model")).can_draft
    assert no_network == []


def test_an_id_that_is_no_directory_is_asked_once(no_network, tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"'org/nothing' is not a directory.*OSError: no network.*check the id"):
        load_model("org/nothing")
    assert no_network == ["org/nothing"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kwargs: str(checkpoint))
    assert load_model("org/name").source == "org/name"


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../up", "org/", "https://host/x", "./local/dir", "org name/x"])
def test_what_is_neither_directory_nor_id_is_refused_without_asking(name, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match="is not a directory here; give a checkpoint directory, 'demo', or a hub id"
    ):
        load_model(name)
    assert no_network == []


# ------------------------------------------------------------------------------------------------------ damage


def refused(path: Path | str, sentence: str, **options: Any) -> str:
    with pytest.raises(UserError, match=sentence) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_left_over_names_are_all_listed(checkpoint):
    gone = ("model.norm.weight", "mtp.fc.weight", "model.layers.1.self_attn.k_norm.weight")
    extra = ("model.layers.7.input_layernorm.weight", "mtp.head.weight")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**{n: x for n, x in tensors.items() if n not in gone}, **dict.fromkeys(extra, torch.ones(2))}

    rewrite(checkpoint, lambda tensors: {n: x.clone() for n, x in change(tensors).items()})
    sentence = refused(
        checkpoint, "3 missing: .*; 2 left over: .*Check that config.json and the weights belong together"
    )
    assert all(name in sentence for name in (*gone, *extra))


def test_a_tensor_held_twice_is_refused(checkpoint):
    rewrite(checkpoint, lambda t: {**t, "model.language_model.norm.weight": t["model.norm.weight"].clone()})
    refused(checkpoint, r"holds model\.norm\.weight twice \('.*norm.weight' and '.*norm.weight'\); keep one")


def test_a_wrong_shape_names_the_tensor_and_both_shapes(checkpoint):
    rewrite(checkpoint, lambda t: {**t, "model.layers.0.linear_attn.A_log": torch.zeros(3)})
    refused(checkpoint, r"linear_attn\.A_log in model\.safetensors has shape \(3,\).*asks for \(4,\)")


def test_a_transposed_matrix_is_refused(checkpoint):
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(checkpoint, lambda t: {**t, name: t[name].T.contiguous()})
    refused(checkpoint, r"down_proj\.weight in .* has shape \(46, 30\), but config.json asks for \(30, 46\)")


@pytest.mark.parametrize("keep", [0, 5, 300, -10])
def test_a_truncated_file_is_named(checkpoint, keep):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(checkpoint, r"model\.safetensors is not a whole safetensors file .*fetch it again")


@pytest.mark.parametrize("value, kind", [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_weights_that_are_not_finite_are_refused(checkpoint, value, kind):
    def damage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
        return tensors

    rewrite(checkpoint, damage)
    refused(checkpoint, r"weights of layers\.1\.ffn\.gate_up hold NaN or infinity; the checkpoint is damaged")


def test_missing_files(checkpoint, tmp_path):
    shard(checkpoint, 3)[1].unlink()
    refused(checkpoint, rf"{INDEX} lists model-00002-of-00003\.safetensors, which is not in .*fetch the missing shard")
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    refused(checkpoint, r"has no \*\.safetensors file; only safetensors weights are read")
    (checkpoint / "config.json").unlink()
    refused(checkpoint, r"has no config\.json; a checkpoint directory needs it")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX, "tokenizer_config.json"])
def test_corrupt_json_names_the_file(tiny_dir, tmp_path, file):
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy"))
    (path / file).write_text('{"a": ', "utf-8")
    refused(path, rf"{file} is not valid JSON \(.*restore it from the checkpoint")
    (path / file).write_bytes(b"\xff\xfe\x00")
    refused(path, rf"{file} is not valid JSON")


def test_json_of_another_kind(checkpoint):
    put_config(checkpoint, [1, 2])
    refused(checkpoint, r"config\.json holds a list; a JSON object is needed")
    put_config(checkpoint, {"model_type": "qwen3_5", "text_config": None})
    refused(checkpoint, "text_config=None is not valid: it must be a JSON object")


def test_an_index_without_a_map(checkpoint):
    (checkpoint / INDEX).write_text('{"weight_map": [1]}', "utf-8")
    refused(checkpoint, "has no weight_map of names to files; restore it")


def test_stop_ids_that_are_no_ids(checkpoint):
    for value in ("end", [1, "x"], -4, 2.5, True):
        (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": value}), "utf-8")
        refused(
            checkpoint, "generation_config.json eos_token_id=.* is not valid: it must be a token id, a list of them"
        )


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(model_type="llama"), r"model_type='llama' is not supported: a dense Qwen3\.5 text model"),
        (dict(model_type="qwen3_5_moe_text"), r"model_type='qwen3_5_moe_text' is not supported"),
        (dict(hidden_size="wide"), "hidden_size='wide' is not valid: it must be an integer"),
        (dict(hidden_size=30.0), "hidden_size=30.0 is not valid: it must be an integer"),
        (dict(vocab_size=0), "vocab_size=0 is not valid: it must be a positive integer"),
        (dict(head_dim=None), "head_dim=None is not valid: it must be an integer"),
        (dict(num_hidden_layers=3), r"layer_types=\[.*\] does not fit num_hidden_layers=3"),
        (
            dict(layer_types=["linear_attention", "mamba"]),
            r"layer_types=\[.*'mamba'\] is not valid: each entry must be",
        ),
        (dict(layer_types=None, full_attention_interval=0), "full_attention_interval=0 is not valid: .* at least 1"),
        (dict(linear_num_value_heads=3), "3 linear value heads over 2 key heads; the first must be a multiple"),
        (dict(num_attention_heads=3), "3 query heads over 2 key/value heads; the first must be a multiple"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim=1 is not valid: it must be at least 2"),
        (dict(rms_norm_eps=0), "rms_norm_eps=0 is not valid: it must be a positive number"),
        (dict(rms_norm_eps="small"), "rms_norm_eps='small' is not valid: it must be a positive number"),
        (dict(rope_parameters=[1]), r"rope_parameters=\[1\] is not valid: it must be a JSON object"),
        (dict(rope_parameters={"rope_type": "yarn"}), "rope_type='yarn' is not supported: 'default' is"),
        (dict(rope_parameters={"rope_theta": -1}), "rope_theta=-1 is not valid: it must be a positive number"),
        (dict(rope_parameters={"partial_rotary_factor": 0.21}), "gives 5 rotated dimensions; an even number from 2"),
        (dict(attention_bias=True), "attention_bias=true is not supported: Qwen3.5 projections have no bias"),
        (dict(attn_output_gate=False), "attn_output_gate=false is not supported: Qwen3.5 attention is gated"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported: 'silu' is"),
        (dict(mtp_num_hidden_layers=2), "mtp_num_hidden_layers=2 is not supported: 0 or 1 is"),
        (dict(eos_token_id="</s>"), "eos_token_id='</s>' is not valid: it must be a token id"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_every_wrong_field_of_the_config_is_a_sentence(checkpoint, change, sentence):
    put_config(checkpoint, {**config_of(checkpoint), **change})
    refused(checkpoint, sentence)


def test_missing_fields_are_listed(checkpoint):
    config = config_of(checkpoint)
    del config["hidden_size"], config["linear_num_key_heads"]
    put_config(checkpoint, config)
    refused(checkpoint, "config.json lacks hidden_size, linear_num_key_heads; every one of these is needed")


def test_unknown_options(checkpoint):
    for dtype in ("float16", "fp32", torch.float16, torch.int8, 3):
        refused(checkpoint, "dtype=.* is not valid: choose one of 'float32', 'bfloat16', 'float64'", dtype=dtype)
    for device in ("gpu", "meta", "mps", "cpu:x"):
        refused(checkpoint, rf"device='{device}' is not valid: use 'cpu' or 'cuda'", device=device)
    if not torch.cuda.is_available():
        refused(checkpoint, "torch sees no GPU here: use 'cpu', or install a CUDA torch", device="cuda")


def test_files_given_in_place_of_a_directory(checkpoint, tmp_path, no_network):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    for name in (gguf, str(gguf), "absent.gguf"):
        refused(name, r"gguf'?: GGUF files are not read yet; convert to a safetensors directory")
    refused(
        checkpoint / "model.safetensors", "is not a directory here; give a checkpoint directory, 'demo', or a hub id"
    )
    assert no_network == []


def test_a_broken_tokenizer_is_named(tiny_dir, tmp_path):
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy"))
    (path / "tokenizer.json").write_text("{}", "utf-8")
    refused(path, r"tokenizer\.json is not a tokenizer \(.*restore it from the checkpoint")
