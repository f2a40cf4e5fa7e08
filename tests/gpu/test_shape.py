"""Random models in published geometries on the device, a given acceptance there, and phases as graphs."""

from __future__ import annotations

import pytest
import torch

from workbench.bench.shape import PIECES, Setting
from workbench.core.metrics import acceptance
from workbench.model.shapes import random_model
from workbench.spec.generate import generate
from workbench.spec.proposers import SyntheticProposer

pytestmark = pytest.mark.gpu

CHANCES, PROMPT, NEW = (0.87, 0.69, 0.53), [5, 6, 7, 8], 400


def test_random_weights_are_drawn_on_the_device_and_stay_finite(device: torch.device) -> None:
    model = random_model("0.8B" if device.type == "cuda" else "tiny", device=device, dtype="bfloat16", exact=False)
    assert model.device.type == device.type
    text = generate(model, PROMPT, k=0, max_new_tokens=32, ignore_eos=True).tokens
    assert len(set(text)) > 8
    with torch.inference_mode():
        rows = model.forward(torch.arange(1, 300, device=device)[None], model.new_cache(capacity=512))
    assert rows.logits_BTV is not None and bool(torch.isfinite(rows.logits_BTV).all())
    assert 0.5 < float(rows.logits_BTV.std()) < 2


def test_acceptance_on_the_device_is_the_given_one(device: torch.device) -> None:
    model = random_model("tiny", device=device, dtype="float32", exact=False)
    plain = generate(model, PROMPT, k=0, max_new_tokens=NEW, ignore_eos=True)
    drafter = SyntheticProposer(model, [*PROMPT, *plain.tokens], CHANCES)
    made = generate(model, PROMPT, k=3, max_new_tokens=NEW, ignore_eos=True, proposer=drafter)
    assert made.tokens == plain.tokens
    found = acceptance(made.records)
    for p, c, n in zip(CHANCES, found.cond, found.pos_tested, strict=True):
        assert c is not None and abs(c - p) < 4 * (p * (1 - p) / n) ** 0.5


def test_phases_replay_as_graphs(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs need a CUDA device")
    model = random_model("tiny", device=device, dtype="bfloat16", exact=False)
    one = Setting(model, "tiny", context=40, acceptance=CHANCES, trim=100, quick=True)
    for name in ("decode", "verify", "verify cut", "draft", "draft trimmed"):
        assert min(one.phase(name, graph=True)) > 0 and min(one.phase(name, graph=False)) > 0


def test_the_anatomy_parts_every_arm(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "burst", 64)
    notes: list[str] = []
    model = random_model("tiny", device=device, dtype="bfloat16", exact=True)
    one = Setting(model, "tiny", context=40, acceptance=CHANCES, quick=True, note=notes.append)
    rows = list(PIECES["anatomy"](one))
    assert notes == [] and {row["arm"] for row in rows} == set(one.arms)
    by = {(row["group"], row["arm"], row["part"]): row["value"] for row in rows}
    for arm in one.arms:
        assert by["round", arm, "total"] > 0 and by["setup", arm, "prime"] > 0
        assert (by["setup", arm, "capture"] > 0) == (arm != "eager")
    steps = [row for row in rows if row["group"] == "draft step"]
    assert len(steps) == 4 and all(row["synchronised"] == (device.type == "cuda") for row in steps)
    if device.type == "cuda":
        assert ("round", "graphed", "draft") in by and ("round", "streamed", "draft") not in by
