"""Logits rebuilt from exported rows by each format's own rule are the demo model's, and by the other rule they are not.

Formats whose last rows lie after the norm: head alone. Records whose rows lie before it: norm, then head. The model
computes in float32: a row rounded to bfloat16 once keeps the mean total variation below 1e-3, and one that the store
rounded before the norm and the format after it, below 2e-3.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract
from workbench.datasets.bfloat import from_bfloat16_bits
from workbench.datasets.export import fidelity
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

TAPS = (1, 5, 9)
FACTS = ("export.json", "workbench.json")
TIE = 0.05  # top-2 margin in logits below which a pick may turn by what bfloat16 rounds away


@pytest.fixture(scope="module")
def demo(sequence_rows, tmp_path_factory):
    """The demo model, documents of every kind, their logits, and their stores."""
    model = wb.load("demo")
    tapes = wb.corpus("demo", split="heldout", tokenizer=model.tokenizer, max_tokens=160)
    tapes = tapes[:: len(tapes) // 5][:5]
    cut = [Tape(t.doc_id, t.tokens[:160], min(t.prompt_len, 4), t.source, t.split) for t in tapes]
    corpus = Corpus(cut, name="demo", tokenizer=tapes.tokenizer)
    base = tmp_path_factory.mktemp("demo")
    stores = {
        kind: sequence_rows.write_sequences(model, corpus, base / kind, taps=TAPS, hidden_dtype=kind)
        for kind in ("bfloat16", "float32")
    }
    logits = [sequence_rows.forward(model, tape).logits_BTV[0] for tape in corpus]
    return model, ModelParts.of(model), corpus, logits, stores


def agreement(found_SV: torch.Tensor, due_SV: torch.Tensor) -> tuple[float, float, float]:
    """Share of equal picks off ties, and the mean and largest total variation."""
    top = due_SV.topk(2, -1)
    clear = top.values[:, 0] - top.values[:, 1] > TIE
    same = (found_SV.argmax(-1) == top.indices[:, 0])[clear].float().mean()
    apart = (found_SV.double().softmax(-1) - due_SV.double().softmax(-1)).abs().sum(-1) / 2
    return float(same), float(apart.mean()), float(apart.max())


@pytest.mark.parametrize(
    "stored, dtype, bound",
    [("float32", "float32", 1e-5), ("float32", "bfloat16", 1e-3), ("bfloat16", "bfloat16", 2e-3)],
)
def test_rows_after_the_norm_give_logits_by_the_head_alone(demo, tmp_path, stored, dtype, bound):
    model, parts, corpus, logits, stores = demo
    out, name = tmp_path / "nemo", "nemo-automodel-dspark"
    exporter(name).run(stores[stored], out, parts, hidden_dtype=dtype)
    shard, again = load_file(out / "shard-000000.safetensors"), ModelParts.load(out)
    rows = [x[: len(t)] for x, t in zip(shard["target_last_hidden_states"], corpus)]
    same, mean, most = agreement(torch.cat([again.logits(x) for x in rows]), torch.cat(logits))
    assert same >= 0.999 and mean < bound and most < 10 * bound, (same, mean, most)
    wrong = agreement(torch.cat([again.logits(again.normed(x)) for x in rows]), torch.cat(logits))
    assert wrong[1] > 0.01  # the norm twice


@pytest.mark.parametrize("stored, bound", [("float32", 1e-3), ("bfloat16", 2e-3)])
def test_deepspecs_rows_give_the_same_logits(demo, tmp_path, stored, bound):
    model, parts, corpus, logits, stores = demo
    out, width = tmp_path / "deepspec", model.config.hidden_size
    exporter("deepspec").run(stores[stored], out, parts)
    assert exporter("deepspec").validate(out) == []
    raw, at, rows = np.fromfile(out / "shard-00000.bin", np.uint8), 0, []
    for tape in corpus:
        at += len(tape) * (6 + 2 * width * len(TAPS))
        last = np.frombuffer(raw[at : at + 2 * width * len(tape)].tobytes(), "<u2").reshape(-1, width)
        rows.append(torch.from_numpy(from_bfloat16_bits(last)))
        at += 2 * width * len(tape)
    assert at == len(raw)
    same, mean, _ = agreement(torch.cat([parts.logits(x) for x in rows]), torch.cat(logits))
    assert same >= 0.999 and mean < bound, (same, mean)


def test_records_rows_give_logits_by_norm_and_head(demo, tmp_path):
    model, parts, corpus, logits, _ = demo
    extract(model, corpus, out=tmp_path / "data", gamma=3, top_k=8, anchors=20)
    out = tmp_path / "columns"
    exporter("columnar").run(tmp_path / "data", out, parts)
    assert exporter("columnar").validate(out) == []
    hidden = from_bfloat16_bits(np.fromfile(out / "hiddens.bf16", "<u2")).reshape(-1, model.config.hidden_size)
    index = [line.split("\t") for line in (out / "index.tsv").read_text().splitlines()[1:]]
    due = torch.stack([logits[int(line[1])][int(line[2]) - 1] for line in index])
    rows_NH = torch.from_numpy(hidden)
    same, mean, _ = agreement(parts.logits(parts.normed(rows_NH)), due)
    assert same >= 0.999 and mean < 1e-3, (same, mean)
    assert agreement(parts.logits(rows_NH), due)[1] > 0.1  # without the norm


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_eagle3s_law_is_the_models(demo, tmp_path, dtype):
    model, parts, corpus, logits, stores = demo
    out = tmp_path / "eagle3"
    exporter("nemo-automodel-eagle3").run(stores[dtype], out, parts, hidden_dtype=dtype)
    assert json.loads((out / "manifest.json").read_text())["draft_vocab_size"] == model.config.vocab_size
    probs = load_file(out / "shard-000000.safetensors")["target_probs"].double()
    apart, turned = [], []
    for x_SV, tape, due_SV in zip(probs, corpus, logits):
        law_SV = due_SV[1:].double().softmax(-1)
        found_SV = x_SV[: len(tape) - 1]
        apart.append((found_SV / found_SV.sum(-1, keepdim=True) - law_SV).abs().sum(-1) / 2)
        turned.append((x_SV[: len(tape) - 1] - due_SV[:-1].double().softmax(-1)).abs().sum(-1) / 2)
    assert torch.cat(apart).mean() < (2e-3 if dtype == "bfloat16" else 1e-4), torch.cat(apart).mean()
    assert torch.cat(turned).mean() > 0.1  # unshifted


# ---------------------------------------------------------------- what an export says of it


def run_export(demo, to: str, stored: str, out, **options):
    model, parts, _, _, stores = demo
    return exporter(to).run(stores[stored], out, parts, model=model, **options)


@pytest.mark.parametrize(
    "to, stored, dtype, roundings, low, high",
    [
        ("deepspec", "bfloat16", "bfloat16", 2, 1e-3, 2e-3),
        ("deepspec", "float32", "bfloat16", 1, 5e-4, 1e-3),
        ("specforge-dspark", "bfloat16", "bfloat16", 2, 1e-3, 2e-3),
        ("specforge-dspark", "bfloat16", "float32", 1, 5e-4, 1e-3),
        ("specforge-eagle3", "float32", "float32", 0, 0, 1e-5),
        ("modelopt", "float32", "bfloat16", 1, 5e-4, 1e-3),
        ("nemo-automodel-dspark", "bfloat16", "bfloat16", 2, 1e-3, 2e-3),
        ("nemo-automodel-dspark", "float32", "float32", 0, 0, 1e-5),
        ("speculators", "bfloat16", "bfloat16", 1, 5e-4, 1e-3),
        ("speculators", "float32", "bfloat16", 1, 5e-4, 1e-3),
        ("nemo-automodel-eagle3", "float32", "float32", 0, 0, 1e-5),
    ],
)
def test_an_export_says_how_far_its_rows_are(demo, tmp_path, to, stored, dtype, roundings, low, high):
    report = run_export(demo, to, stored, tmp_path / "out", hidden_dtype=dtype)
    found = report.rounding
    assert found["roundings"] == roundings and found["rows"] > 200 and low <= found["total_variation"] < high, found
    assert found["total_variation"] <= found["largest"] and found["same_pick"] >= 0.999
    assert f"{stored} in the store" in found["path"] and f"{dtype} in the export" in found["path"]
    assert found["path"].count("rounded to") == roundings and found["sentence"] == report.notes[-1]
    assert ("that is not below 0.001" in found["sentence"]) == (found["total_variation"] >= 1e-3)
    facts = json.loads(next(p for p in map((tmp_path / "out").joinpath, FACTS) if p.exists()).read_text())
    assert facts["rounding"] == found


@pytest.mark.parametrize(
    "to, options, says",
    [
        ("deepspec", {}, "extract with hidden_dtype='float32' to round once"),
        ("specforge-dspark", {}, "or export with hidden_dtype='float32' to round once, or both to round never"),
        ("modelopt", {}, "or norm='pre', which keeps the rows of the data"),
    ],
)
def test_an_export_names_the_remedy(demo, tmp_path, to, options, says):
    assert says in run_export(demo, to, "bfloat16", tmp_path / "out", **options).notes[-1]


def test_what_an_export_says_is_what_its_files_give(demo, tmp_path, monkeypatch):
    model, parts, corpus, logits, _ = demo
    report = run_export(demo, "nemo-automodel-dspark", "bfloat16", tmp_path / "out")
    shard = load_file(tmp_path / "out" / "shard-000000.safetensors")["target_last_hidden_states"]
    first = fidelity.ROWS
    found_SV = torch.cat([parts.logits(x[: min(first, len(t))]) for x, t in zip(shard, corpus)])
    _, mean, most = agreement(found_SV, torch.cat([x[:first] for x in logits]))
    assert report.rounding["total_variation"] == pytest.approx(mean, rel=0.01)
    assert report.rounding["largest"] == pytest.approx(most, rel=0.01)
    # the control: rows of the other side of the norm
    monkeypatch.setattr(parts.__class__, "normed", lambda self, x_SH: x_SH.float())
    wrong = run_export(demo, "nemo-automodel-dspark", "bfloat16", tmp_path / "wrong").rounding
    assert wrong["total_variation"] > 0.1 and wrong["same_pick"] < 0.999


def test_a_model_of_sixteen_bits_loses_nothing_in_them(sequence_rows, tiny, tmp_path):
    model = tiny(tied=False).to(torch.bfloat16)
    store = sequence_rows.write_sequences(model, sequence_rows.documents(83), tmp_path / "data", taps=(0, 2, 3))
    parts = ModelParts.of(model)
    for to in ("deepspec", "speculators"):
        found = exporter(to).run(store, tmp_path / to, parts, model=model).rounding
        assert found["roundings"] == 0 and found["total_variation"] == 0 and found["same_pick"] == 1, found
    found = exporter("modelopt").run(store, tmp_path / "wide", parts, model=model, hidden_dtype="float32").rounding
    assert found["roundings"] == 0 and found["total_variation"] > 0
    coarse = sequence_rows.write_sequences(
        model, sequence_rows.documents(83), tmp_path / "fp8", taps=(0, 2, 3), hidden_dtype="fp8"
    )
    found = exporter("deepspec").run(coarse, tmp_path / "coarse", parts, model=model).rounding
    assert found["roundings"] == 1 and found["total_variation"] > 1e-3
    assert "extract with hidden_dtype='bfloat16'" in found["sentence"]


def test_without_the_model_or_without_rows_nothing_is_measured(demo, tmp_path):
    _, parts, _, _, stores = demo
    found = exporter("deepspec").run(stores["bfloat16"], tmp_path / "a", parts)
    assert found.rounding["rows"] == 0 and found.rounding["roundings"] == 2 and len(found.notes) == 1
    assert run_export(demo, "specforge-dflash", "bfloat16", tmp_path / "b").rounding == {}
