"""DeepSpec's cache against a reader written from the format, and a validator that finds what that reader accepts."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError, UserError
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

NAME = "deepspec"


def read(path: Path) -> tuple[dict, list[dict]]:
    """A cache by the format alone: 56-byte entries of a sample, a shard, a length and five offsets."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["version"] == 2 and manifest["index_record_size"] == 56
    assert (manifest["token_dtype"], manifest["mask_dtype"], manifest["hidden_dtype"]) == ("int32", "uint8", "bfloat16")
    index = (path / "samples.idx").read_bytes()
    width = manifest["hidden_size"]
    samples = []
    for i in range(manifest["num_samples"]):
        sample, shard, n = struct.unpack_from("<QII", index, 56 * i)
        offsets = struct.unpack_from("<5Q", index, 56 * i + 16)
        assert sample == i
        name = manifest["shards"][shard]["file_name"]
        data = np.memmap(path / name, np.uint8, "r")
        layers = len(manifest["target_layer_ids"])
        shapes = [(n,), (n,), (n,), (n, layers, width), (n, width)]
        kinds = ["<i4", "u1", "u1", "<i2", "<i2"]
        held = [
            torch.from_numpy(np.frombuffer(data[o : o + np.prod(s) * np.dtype(k).itemsize], k).reshape(s).copy())
            for o, s, k in zip(offsets, shapes, kinds)
        ]
        names = ["ids", "attention", "mask", "taps", "last"]
        entry = dict(zip(names, [*held[:3], *(x.view(torch.bfloat16) for x in held[3:])]))
        samples.append(entry | {"shard": name, "at": dict(zip(names, offsets))})
    assert len(index) == 56 * len(samples)
    return manifest, samples


@pytest.fixture(scope="module")
def cache(store, parts, tmp_path_factory):
    out = tmp_path_factory.mktemp("deepspec") / "cache"
    report = exporter(NAME).run(store(), out, parts, target="org/model", shard_bytes=6000)
    return out, report


def test_every_bit_of_the_source_is_there(cache, model, parts, tapes, sequence_rows):
    out, report = cache
    manifest, samples = read(out)
    assert exporter(NAME).validate(out) == []
    assert manifest["target_layer_ids"] == [0, 2, 3] and manifest["target_model_name_or_path"] == "org/model"
    assert manifest["num_shards"] > 1 and len(samples) == len(tapes) == report.documents
    for tape, held in zip(tapes, samples, strict=True):
        rows = sequence_rows.forward(model, tape, (0, 2, 3))
        assert np.array_equal(held["ids"].numpy(), tape.tokens) and (held["attention"] == 1).all()
        assert np.array_equal(held["mask"].bool().numpy(), tape.supervised)
        for j, layer in enumerate((0, 2, 3)):
            assert torch.equal(held["taps"][:, j], rows.taps[layer][0].to(torch.bfloat16))
        trunk_SH = rows.trunk_BTH[0].to(torch.bfloat16)
        assert torch.equal(held["last"], parts.normed(trunk_SH).to(torch.bfloat16))
    again = ModelParts.load(out)
    assert torch.equal(again.head_VH, parts.head_VH) and torch.equal(again.final_norm_H, parts.final_norm_H)
    assert report.norm == "post" and report.tokens == tapes.n_tokens
    assert report.bytes == sum(f.stat().st_size for f in out.iterdir())
    assert sum((out / s["file_name"]).stat().st_size for s in manifest["shards"]) == tapes.n_tokens * (6 + 2 * 30 * 4)


def test_chosen_layers_and_other_stores(store, parts, tmp_path, model, tapes, sequence_rows):
    for kind in ("float32", "fp8"):
        out = tmp_path / kind
        exporter(NAME).run(store(hidden_dtype=kind), out, parts, layers=[2])
        assert exporter(NAME).validate(out) == []
        manifest, samples = read(out)
        rows = sequence_rows.forward(model, tapes[0], (2,)).taps[2][0]
        held = samples[0]["taps"][:, 0].float()
        assert manifest["target_layer_ids"] == [2]
        error = (held - rows).abs().max() / rows.abs().max()
        assert error < (2**-8 if kind == "float32" else 2**-3)
        assert error > 0 and (kind == "fp8" or torch.equal(held, rows.to(torch.bfloat16).float()))


def edit(sample: dict, name: str, values: torch.Tensor, at: int = 0):
    """A change that writes values over a sample's tensor from a place on."""

    def change(path: Path) -> None:
        raw = values.contiguous().view(torch.uint8).numpy().tobytes()
        with open(path / sample["shard"], "r+b") as handle:
            handle.seek(sample["at"][name] + at)
            handle.write(raw)

    return change


def retold(**fields):
    """A change of the manifest."""

    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(manifest | fields))

    return change


def test_what_the_reader_accepts_in_silence_is_found(cache, model, parts, tapes, sequence_rows, harmed):
    out, _ = cache
    _, samples = read(out)
    first = samples[0]
    rows = sequence_rows.forward(model, tapes[0])
    trunk_SH = rows.trunk_BTH[0].to(torch.bfloat16)
    nan = torch.full((1,), float("nan"), dtype=torch.bfloat16)
    twice_SH = parts.normed(first["last"]).to(torch.bfloat16)
    plain_SH = (parts.normed(trunk_SH) / parts.scale_H * parts.final_norm_H).to(torch.bfloat16)
    cases = {
        "ids is not": edit(first, "ids", first["ids"].flip(0)),
        "outside the vocabulary": edit(first, "ids", torch.tensor([83], dtype=torch.int32)),
        "mask is not": edit(first, "mask", 1 - first["mask"]),
        "attention_mask is not": edit(first, "attention", torch.zeros(3, dtype=torch.uint8)),
        "target_last_hidden_states holds NaN": edit(first, "last", nan, 40),
        "target_hidden_states holds NaN": edit(first, "taps", nan, 40),
        "17 of 17 last rows do not lie after": edit(first, "last", trunk_SH),  # rows before the norm
        "of 17 last rows do not lie after": edit(first, "last", plain_SH),  # times w where 1 + w is due
        "last is not": edit(first, "last", twice_SH),  # the norm twice
        "layer_0 is not": edit(first, "taps", first["taps"].flip(1)),  # layers in another order
        "are \\[1, 3, 4\\]|reach the last": retold(target_layer_ids=[1, 3, 4]),  # counted with the embedding
        "are \\[1, 2, 3\\]": retold(target_layer_ids=[1, 2, 3]),
        "do not ascend": retold(target_layer_ids=[0, 2, 2]),
        "hidden_size is 15": retold(hidden_size=15, target_layer_ids=[0, 1, 2, 3, 4, 5, 6]),  # the same bytes
        "num": retold(num_samples=4),
        "version": retold(version=1),
    }
    import re

    for expected, change in cases.items():
        problems = harmed(out, NAME, change)
        assert any(re.search(expected, p) for p in problems), (expected, problems)
    assert harmed(out, NAME, lambda path: None) == []


def test_short_tensors_are_found(cache, harmed):
    out, _ = cache
    manifest, samples = read(out)
    name = manifest["shards"][0]["file_name"]

    def cut(path: Path) -> None:  # a tensor one row short, the next ones moved up: its reader reads on into them
        raw, at = (path / name).read_bytes(), samples[0]["at"]["taps"]
        (path / name).write_bytes(raw[:at] + raw[at + 2 * 30 * 3 :])

    def longer(path: Path) -> None:
        with open(path / name, "ab") as handle:
            handle.write(b"12")

    def moved(path: Path) -> None:
        raw = bytearray((path / "samples.idx").read_bytes())
        struct.pack_into("<Q", raw, 16 + 24, samples[0]["at"]["taps"] + 60)
        (path / "samples.idx").write_bytes(raw)

    def shortened(path: Path) -> None:
        raw = bytearray((path / "samples.idx").read_bytes())
        struct.pack_into("<I", raw, 12, 16)
        (path / "samples.idx").write_bytes(raw)

    for change in (cut, longer, moved, shortened):
        assert harmed(out, NAME, change), change.__name__


def test_the_seal_finds_any_flipped_byte(cache, harmed):
    out, _ = cache
    for file in sorted(out.iterdir()):

        def flip(path: Path, name: str = file.name) -> None:
            raw = bytearray((path / name).read_bytes())
            raw[len(raw) // 2] ^= 1
            (path / name).write_bytes(raw)

        assert harmed(out, NAME, flip, sealed_again=False), file.name
        assert harmed(out, NAME, lambda path, name=file.name: (path / name).unlink(), sealed_again=False)
    assert "does not belong" in harmed(out, NAME, lambda path: (path / "x").write_text(""), sealed_again=False)[0]
    assert exporter("nemo-automodel-dspark").validate(out) == [
        f"{out} is an export to 'deepspec' and was to be checked as 'nemo-automodel-dspark'"
    ]


def test_refusals_leave_nothing(store, parts, tmp_path, tiny, sequence_rows, model, tapes):
    run, out = exporter(NAME).run, tmp_path / "out"
    with pytest.raises(UserError, match="holds the last layer"):
        run(store(taps=(2, 4)), out, parts)
    with pytest.raises(CapabilityError, match="needs one"):
        run(store(taps=()), out, parts)
    with pytest.raises(CapabilityError, match="not of 1"):
        run(store(), out, parts, layers=[1])
    with pytest.raises(UserError, match="'bfloat16' only"):
        run(store(), out, parts, hidden_dtype="float32")
    with pytest.raises(UserError, match="give the model that made the data"):
        run(store(), out, ModelParts.of(tiny(tied=False, seed=1)))
    after = sequence_rows.write_sequences(model, tapes, tmp_path / "after", taps=(2,), pre_norm=False)
    with pytest.raises(UserError, match="before the final norm"):
        run(after, out, parts)
    assert not out.exists() and not list(tmp_path.glob("*partial*"))
    out.mkdir()
    (out / "mine").write_text("")
    with pytest.raises(UserError, match="holds files already"):
        run(store(), out, parts)
    assert [f.name for f in out.iterdir()] == ["mine"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(store, parts, tmp_path, monkeypatch):
    from workbench.datasets.export import deepspec

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(deepspec._Writer, "add", full)
    with pytest.raises(UserError, match="No space left"):
        exporter(NAME).run(store(), tmp_path / "out", parts)
    assert list(tmp_path.iterdir()) == []
