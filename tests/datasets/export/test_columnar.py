"""Flat columns against a reader written from the format, and a validator that finds what such a reader accepts."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract, load_anchors, to_arrays
from workbench.datasets.bfloat import from_bfloat16_bits, to_bfloat16_bits
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

NAME = "columnar"
GAMMA, K = 3, 6


def read(path: Path) -> tuple[dict, list[dict[str, str]], dict[str, np.ndarray]]:
    """Columns by the format alone: flat little-endian files, and a text index with a line of names."""
    meta = json.loads((path / "extraction.meta.json").read_text())
    assert meta["format"] == "memra-dspark-anchors-v1"
    n, g, k, h = (meta[name] for name in ("records", "gamma", "top_k", "hidden_size"))
    shapes = {
        "hiddens.bf16": ("<u2", (n, h)),
        "tokens.u32": ("<u4", (n, g + 1)),
        "top_ids.u32": ("<u4", (n, g, k)),
        "top_logits.f32": ("<f4", (n, g, k)),
        "top_probs.f32": ("<f4", (n, g, k)),
        "tail_probs.f32": ("<f4", (n, g)),
    }
    columns = {name: np.fromfile(path / name, kind).reshape(shape) for name, (kind, shape) in shapes.items()}
    head, *lines = (path / "index.tsv").read_text().splitlines()
    assert head == "record\tpair_id\tanchor_pos\tprompt_len\tsplit\tmode\tcategory"
    return meta, [dict(zip(head.split("\t"), line.split("\t"), strict=True)) for line in lines], columns


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def anchors(request, model, tapes, tmp_path_factory):
    path = tmp_path_factory.mktemp("anchors") / "data"
    extract(model, tapes, out=path, gamma=GAMMA, top_k=K, anchors=3, hidden_dtype=request.param)
    return path


@pytest.fixture(scope="module")
def columns(anchors, trimmed, tmp_path_factory):
    out = tmp_path_factory.mktemp("columns") / "out"
    return out, exporter(NAME).run(anchors, out, ModelParts.of(trimmed), mode="think")


def test_every_bit_of_the_source_is_there(columns, anchors, trimmed, tapes):
    out, report = columns
    assert exporter(NAME).validate(out) == []
    records, (meta, index, held) = to_arrays(load_anchors(anchors)), read(out)
    names = {"tokens.u32": "tokens", "top_ids.u32": "top_ids", "top_logits.f32": "top_logits"}
    names |= {"top_probs.f32": "top_probs", "tail_probs.f32": "tail_probs"}
    for name, column in names.items():
        assert np.array_equal(held[name], records[column]), name
    assert np.array_equal(held["hiddens.bf16"], to_bfloat16_bits(records["hidden"]))
    assert np.array_equal(np.fromfile(out / "slot_mask.u8", "?").reshape(-1, GAMMA), records["slot_mask"])
    for name in ("logsumexp", "logsumexp_t"):
        assert np.array_equal(np.fromfile(out / f"{name}.f32", "<f4").reshape(-1, GAMMA), records[name])
    pairs = [line.split("\t") for line in (out / "documents.tsv").read_text().splitlines()[1:]]
    ids = {int(pair): json.loads(doc_id) for pair, doc_id in pairs}
    assert [ids[int(row["pair_id"])] for row in index] == list(records["doc_id"])
    assert [int(row["anchor_pos"]) for row in index] == records["position"].tolist()
    assert {(r["prompt_len"], r["split"], r["mode"], r["category"]) for r in index} == {("2", "train", "think", "s")}
    assert meta["records"] == len(index) == 15 and meta["pairs"] == 5 and meta["temperature"] == 0.7
    assert meta["seed"] == 20260811 and meta["anchors_per_pair"] == 3
    each = 2 * 30 + 4 * (GAMMA + 1 + 3 * GAMMA * K + 3 * GAMMA) + GAMMA
    assert report.notes == [f"15 anchor records of {each} bytes"] and report.norm == "pre"
    head, ids_D = trimmed.head.detach(), trimmed.draft_head.ids_D
    assert np.array_equal(np.fromfile(out / "draft_ids.u32", "<u4"), ids_D.numpy())
    for name, weight in (("lm_head.bf16", head), ("embedding.bf16", trimmed.embed.detach())):
        assert np.array_equal(np.fromfile(out / name, "<u2"), to_bfloat16_bits(weight[ids_D].numpy()).ravel()), name


def test_hidden_rows_are_those_before_the_anchor_and_the_norm(columns, model, tapes, sequence_rows):
    out, _ = columns
    _, index, held = read(out)
    for i, row in enumerate(index):
        rows = sequence_rows.forward(model, tapes[int(row["pair_id"])])
        p = int(row["anchor_pos"])
        due = to_bfloat16_bits(rows.trunk_BTH[0, p - 1].numpy())
        assert np.array_equal(held["hiddens.bf16"][i], due)
        assert held["top_ids.u32"][i, :, 0].tolist() == rows.logits_BTV[0, p : p + GAMMA].argmax(-1).tolist()


def put(name: str, kind: str, change):
    """A change of a file's values."""

    def run(path: Path) -> None:
        values = np.fromfile(path / name, kind)
        change(values)
        values.tofile(path / name)

    return run


def text(name: str, change):
    def run(path: Path) -> None:
        (path / name).write_text(change((path / name).read_text()))

    return run


def test_what_a_reader_accepts_in_silence_is_found(columns, parts, harmed):
    out, _ = columns
    _, _, held = read(out)
    hidden = torch.from_numpy(from_bfloat16_bits(held["hiddens.bf16"]))
    normed = to_bfloat16_bits(parts.normed(hidden).numpy()).ravel()

    def meta(**fields):
        return text("extraction.meta.json", lambda s: json.dumps(json.loads(s) | fields))

    def cut(name: str):
        return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-4])

    def renormalised(path: Path) -> None:
        probs = held["top_probs.f32"] / held["top_probs.f32"].sum(-1, keepdims=True)
        probs.tofile(path / "top_probs.f32")

    cases = [
        ("ids is not", put("tokens.u32", "<u4", lambda x: x.__setitem__(slice(None), np.roll(x, -1)))),
        ("outside the vocabulary", put("tokens.u32", "<u4", lambda x: x.__setitem__(0, 83))),
        ("outside the vocabulary", put("top_ids.u32", "<u4", lambda x: x.__setitem__(0, 83))),
        ("NaN or infinity", put("hiddens.bf16", "<u2", lambda x: x.__setitem__(7, 0x7FC0))),
        ("after the final norm", put("hiddens.bf16", "<u2", lambda x: x.__setitem__(slice(None), normed))),
        ("hidden is not", put("hiddens.bf16", "<u2", lambda x: x.__setitem__(slice(None), np.roll(x, 30)))),
        ("do not sum to 1", put("tail_probs.f32", "<f4", lambda x: x.__imul__(0.9))),
        ("do not sum to 1", put("tail_probs.f32", "<f4", lambda x: x.__setitem__(3, np.nan))),
        ("do not sum to 1", renormalised),
        ("not those of the logits", put("top_logits.f32", "<f4", lambda x: x.__imul__(0.7))),
        ("order of their logits", put("top_logits.f32", "<f4", lambda x: x.__imul__(-1))),
        ("order of their logits", put("top_logits.f32", "<f4", lambda x: x.__setitem__(2, np.nan))),
        ("law is not", put("top_ids.u32", "<u4", lambda x: x.__setitem__(slice(None), x[::-1].copy()))),
        ("slots is not", put("slot_mask.u8", "u1", lambda x: x.__setitem__(slice(None), 1 - x))),
        ("bytes, which is not", cut("hiddens.bf16")),
        ("bytes, which is not", cut("top_probs.f32")),
        ("cannot be read|must be", lambda path: (path / "extraction.meta.json").write_text("{}")),
        ("top_k of", meta(top_k=3)),
        ("temperature of", meta(temperature=1.0)),
        ("does not follow", text("index.tsv", lambda s: s.replace("\n1\t0\t", "\n1\t9\t", 1))),
        ("columns and a line", text("index.tsv", lambda s: s[: s[:-1].rindex("\n") + 1])),
        ("place is not", text("index.tsv", lambda s: s.replace("\t2\ttrain", "\t3\ttrain", 1))),
        ("lm_head.bf16 does not", put("lm_head.bf16", "<u2", lambda x: x.__setitem__(slice(None), np.roll(x, 30)))),
        ("draft_ids.u32 does not", put("draft_ids.u32", "<u4", lambda x: x.__iadd__(1))),
    ]
    for expected, change in cases:
        problems = harmed(out, NAME, change)
        assert any(re.search(expected, p) for p in problems), (expected, problems)
    assert harmed(out, NAME, lambda path: None) == []
    before = hashlib.sha256((out / "hiddens.bf16").read_bytes()).hexdigest()
    assert json.loads((out / "workbench.json").read_text())["files"]["hiddens.bf16"] == before


def test_refusals_leave_nothing(anchors, parts, model, store, tmp_path, tiny):
    run, out = exporter(NAME).run, tmp_path / "out"
    with pytest.raises(UserError, match="leave layers"):
        run(anchors, out, parts, layers=[0])
    with pytest.raises(UserError, match="index is text"):
        run(anchors, out, parts, mode="a\tb")
    with pytest.raises(UserError, match="'anchors' is needed"):
        run(store(), out, parts)
    with pytest.raises(UserError, match="give the model that made the data"):
        run(anchors, out, ModelParts.of(tiny(seed=4)))
    tape = Tape("x", np.arange(20), source="a\tb")
    extract(model, Corpus([tape]), out=tmp_path / "tabs", gamma=GAMMA, top_k=K)
    with pytest.raises(UserError, match="source='a"):
        run(tmp_path / "tabs", out, parts)
    assert [p.name for p in tmp_path.iterdir()] == ["tabs"]
