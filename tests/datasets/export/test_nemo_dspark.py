"""NeMo's DSpark cache by the format: alignment, padding, the last layer after the norm, and a validator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.core.errors import CapabilityError, UserError
from workbench.datasets.export.registry import exporter

NAME = "nemo-automodel-dspark"
KEYS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")


def sample(path: Path, number: int) -> dict[str, torch.Tensor]:
    """A sample by the format: sample i lies in shard i // shard_size."""
    size = json.loads((path / "manifest.json").read_text())["shard_size"]
    shard = load_file(path / f"shard-{number // size:06d}.safetensors")
    return {name: value[number % size] for name, value in shard.items()}


@pytest.fixture(scope="module")
def cache(store, parts, tmp_path_factory):
    out = tmp_path_factory.mktemp("nemo") / "cache"
    report = exporter(NAME).run(store(), out, parts, shard_size=2, layers=[0, 3, 4], seq_length=40)
    return out, report


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_bit_of_the_source_is_there(store, parts, model, tapes, sequence_rows, tmp_path, dtype):
    out, kind = tmp_path / "out", getattr(torch, dtype)
    report = exporter(NAME).run(store(hidden_dtype=dtype), out, parts, hidden_dtype=dtype, shard_size=2)
    assert exporter(NAME).validate(out) == []
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["format_version"] == 1 and manifest["complete"] is True and manifest["seq_length"] == 30
    assert manifest["target_layer_ids"] == [0, 2, 3] and manifest["dtype"] == {"bfloat16": "bf16"}.get(dtype, "fp32")
    assert len(list(out.glob("shard-*"))) == 3 and report.tokens == tapes.n_tokens
    shards = sum(f.stat().st_size for f in out.glob("shard-*"))
    assert report.bytes - report.parts_bytes >= shards > len(tapes) * 30 * (24 + 4 * 30 * kind.itemsize)
    for i, tape in enumerate(tapes):
        held, n = sample(out, i), len(tape)
        rows = sequence_rows.forward(model, tape, (0, 2, 3))
        assert set(held) == set(KEYS) and all(len(x) == 30 and not x[n:].any() for x in held.values())
        assert np.array_equal(held["input_ids"][:n], tape.tokens) and held["attention_mask"].sum() == n
        assert np.array_equal(held["loss_mask"][:n].bool(), tape.supervised)
        taps_SH = torch.cat([rows.taps[layer][0] for layer in (0, 2, 3)], -1)
        assert torch.equal(held["target_hidden_states"][:n], taps_SH.to(kind))
        last_SH = parts.normed(rows.trunk_BTH[0].to(kind)).to(kind)
        assert torch.equal(held["target_last_hidden_states"][:n], last_SH)
    weights = load_file(out / "target_weights.safetensors")
    assert torch.equal(weights["embed_tokens.weight"], parts.embedding_VH)
    assert torch.equal(weights["lm_head.weight"], parts.head_VH) and not parts.tied


def test_the_last_layer_lies_after_the_norm(cache, parts, model, tapes, sequence_rows):
    out, report = cache
    assert exporter(NAME).validate(out) == [] and report.layer_ids == (0, 3, 4)
    assert re.search("layer 4 is exported after the final norm", report.notes[0])
    held, n = sample(out, 0), len(tapes[0])
    taps = held["target_hidden_states"][:n].chunk(3, -1)
    assert torch.equal(taps[2], held["target_last_hidden_states"][:n])
    rows = sequence_rows.forward(model, tapes[0], (3, 4))
    assert torch.equal(rows.taps[4], rows.trunk_BTH)
    assert torch.equal(taps[1], rows.taps[3][0].to(torch.bfloat16))


def shard(change, file: str = "shard-000000.safetensors"):
    """A change of a file's tensors."""

    def run(path: Path) -> None:
        tensors = {name: value.clone() for name, value in load_file(path / file).items()}
        change(tensors)
        save_file({name: value.contiguous() for name, value in tensors.items()}, path / file)

    return run


def put(name: str, place, value):
    def change(tensors):
        tensors[name][place] = value

    return shard(change)


def retold(**fields):
    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | fields))

    return change


def test_what_the_reader_accepts_in_silence_is_found(cache, parts, model, tapes, sequence_rows, harmed):
    out, _ = cache
    n = len(tapes[0])
    trunk_SH = sequence_rows.forward(model, tapes[0]).trunk_BTH[0].to(torch.bfloat16)

    def swap(tensors):
        tensors["target_hidden_states"] = tensors["target_hidden_states"].roll(30, -1)

    def short(tensors):
        for name in tensors:
            tensors[name] = tensors[name][:, :-1]

    def one_short(tensors):
        tensors["target_last_hidden_states"] = tensors["target_last_hidden_states"][:, :-1]

    cases = {
        "ids is not": put("input_ids", (0, 3), 5),
        "ids is  not|ids is not": shard(lambda t: t["input_ids"].copy_(t["input_ids"].roll(-1, 1))),  # shifted
        "outside the vocabulary": put("input_ids", (1, 0), 83),
        "mask is not": put("loss_mask", (0, 0), 1),
        "attention_mask does not cover": put("attention_mask", (0, 0), 0),
        "attention_mask is not zero behind": put("attention_mask", (0, 39), 1),
        "states is not zero behind": put("target_hidden_states", (0, 39, 0), 1.0),
        "target_hidden_states holds NaN": put("target_hidden_states", (0, 1, 1), float("nan")),
        "target_last_hidden_states holds NaN": put("target_last_hidden_states", (0, 1, 1), float("inf")),
        "17 of 17 last rows": put("target_last_hidden_states", (0, slice(n)), trunk_SH),
        "layer_4 is not": put("target_hidden_states", (0, slice(n), slice(60, 90)), trunk_SH),
        "layer_0 is not": shard(swap),
        "another shape": shard(short),
        "target_last_hidden_states of shard-000000": shard(one_short),
        "and must hold": shard(lambda t: t.pop("loss_mask")),
        "another shape or type": shard(lambda t: t.update(input_ids=t["input_ids"].int())),
        "float32|another shape or type": shard(lambda t: t.update({k: t[k].float() for k in KEYS[3:]})),
        "cannot be read": lambda path: (path / "shard-000001.safetensors").write_bytes(b"12"),
        r"are|target_layer_ids of the manifest is \[1, 4, 5\]": retold(target_layer_ids=[1, 4, 5]),
        "complete of the manifest": retold(complete=False),
        "num_samples of the manifest": retold(num_samples=4),
        "must be 5": retold(num_hidden_layers=6),
        "dtype|shape or type": retold(dtype="fp32"),
        "does not hold the documents": retold(seq_length=8),
        "format_version": retold(format_version=2),
        "embedding and head": shard(
            lambda t: t["lm_head.weight"].copy_(t["embed_tokens.weight"]), "target_weights.safetensors"
        ),
    }
    for expected, change in cases.items():
        problems = harmed(out, NAME, change)
        assert any(re.search(expected, p) for p in problems), (expected, problems)
    assert harmed(out, NAME, shard(lambda tensors: None)) == []


def test_refusals_leave_nothing(store, parts, tmp_path):
    run, out = exporter(NAME).run, tmp_path / "out"
    with pytest.raises(UserError, match="document 'd4' has 30 tokens"):
        run(store(), out, parts, seq_length=29)
    with pytest.raises(CapabilityError, match=r"give layers=\[4\]"):
        run(store(taps=()), out, parts)
    with pytest.raises(UserError, match="shard_size=0"):
        run(store(), out, parts, shard_size=0)
    assert not list(tmp_path.iterdir())
    run(store(taps=()), out, parts, layers=[4])
    assert exporter(NAME).validate(out) == []
