"""The rules of layers and norms against the target itself and against transformers, with the wrong rule as control.

Legend: S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from workbench.core.tape import Corpus, Tape
from workbench.datasets.export import export, validate
from workbench.datasets.export.parts import ModelParts


def lines(out):
    return [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()]


def variation(a_SV, b_SV):
    """Total variation between laws at T = 1, by position."""
    return (a_SV.double().softmax(-1) - b_SV.double().softmax(-1)).abs().sum(-1) / 2


@pytest.fixture(scope="module")
def demo(stores, tmp_path_factory):
    """A store of three demo documents, float32: the data's directory, the model, and what it says."""
    import workbench as wb

    model = wb.load("demo")
    tapes = wb.corpus("demo", tokenizer=model.tokenizer, limit=3, max_tokens=96, overflow="truncate", min_tokens=96)
    data = tmp_path_factory.mktemp("demo") / "data"
    return data, model, stores.make_store(model, tapes, data, layers=(1, 5, 8), hidden_dtype="float32")


@pytest.mark.parametrize("to", ["speculators", "specforge-dspark", "specforge-eagle3", "modelopt"])
def test_logits_rebuilt_from_an_export_are_the_models(demo, tmp_path, to):
    data, model, known = demo
    export(data, to=to, model=model, out=tmp_path / "out", hidden_dtype="float32")
    assert validate(tmp_path / "out", to=to) == []
    parts = ModelParts.load(tmp_path / "out" / "parts")
    agree = positions = 0
    for line in lines(tmp_path / "out"):
        truth, file = known[line["doc_id"]], tmp_path / "out" / line["file"]
        if to == "speculators":
            last_SH = load_file(file)["hidden_states"][:, -1]
            right, wrong = parts.normed(last_SH), last_SH
        else:
            held = torch.load(file, weights_only=True)
            key = {"specforge-dspark": "target_last_hidden_states", "specforge-eagle3": "hidden_state"}.get(to)
            last_SH = held[key or "hidden_states"].reshape(len(truth.ids_S), -1)
            right, wrong = last_SH, parts.normed(last_SH)
        assert float(variation(parts.logits(right), truth.logits_SV).max()) < 1e-3
        assert float(variation(parts.logits(wrong), truth.logits_SV).mean()) > 1e-2  # the other side of the norm
        top = truth.logits_SV.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 1e-3
        agree += int((parts.logits(right).argmax(-1) == truth.logits_SV.argmax(-1))[clear].sum())
        positions += int(clear.sum())
    assert positions > 200 and agree / positions >= 0.999


def test_bfloat16_exports_stay_near_the_models_logits(demo, stores, tmp_path):
    data, model, known = demo
    export(data, to="specforge-dspark", model=model, out=tmp_path / "out")
    parts = ModelParts.load(tmp_path / "out" / "parts")
    off = []
    for line in lines(tmp_path / "out"):
        held = torch.load(tmp_path / "out" / line["file"], weights_only=True)
        logits_SV = parts.logits(held["target_last_hidden_states"])
        off.append(variation(logits_SV, known[line["doc_id"]].logits_SV))
    assert float(torch.cat(off).mean()) < 1e-2


def test_layers_are_those_of_transformers(hf_tiny, stores, tmp_path):
    """``hidden_states[k]`` of transformers is our layer k - 1, and the export of speculators numbers it k."""
    import workbench as wb

    published = hf_tiny(tied=False)
    model = wb.load(published.path)
    generator = np.random.default_rng(5)
    tapes = Corpus([Tape("a", generator.integers(0, 83, 24)), Tape("b", generator.integers(0, 83, 17))])
    stores.make_store(model, tapes, tmp_path / "data", layers=(0, 2, 3), hidden_dtype="float32")
    out = tmp_path / "out"
    report = export(tmp_path / "data", to="speculators", model=model, out=out, hidden_dtype="float32")
    assert report.layer_ids == [1, 3, 4]
    for i, tape in enumerate(tapes):
        ids = torch.from_numpy(tape.tokens.astype(np.int64))[None]
        with torch.no_grad():
            theirs = published.hf(ids, output_hidden_states=True).hidden_states
        held = load_file(out / f"hidden_states/hs_{i}.safetensors")["hidden_states"]
        for place, k in enumerate(report.layer_ids):
            right = (held[:, place] - theirs[k][0]).abs().max()
            wrong = min(float((held[:, place] - theirs[other][0]).abs().max()) for other in (k - 1, k + 1))
            assert float(right) < 5e-5 < 1e-2 < wrong
        # their last entry carries the final norm, which is why a layer named by it is refused as a tap
        last = theirs[-1][0]
        assert float((ModelParts.load(out / "parts").normed(held[:, -1]) - last).abs().max()) < 5e-5
        assert float((held[:, -1] - last).abs().max()) > 1e-2
