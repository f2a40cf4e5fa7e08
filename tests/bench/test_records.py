"""Bytes of records and exports: measured on the disk, held against predictions, and a wrong prediction is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.bench import records
from workbench.core.progress import quiet
from workbench.core.tape import Corpus, Tape
from workbench.datasets.export import REGISTRY
from workbench.datasets.layouts import LAYOUTS
from workbench.datasets.sequence_options import SequenceOptions

K, WIDTH, VOCAB = 64, 128, 97
LENGTHS = (300, 220, 260)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Any]) -> Any:
    return tiny(exact=False, vocab_size=VOCAB, hidden_size=WIDTH)


def measured(model: Any) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(0)
    tapes = Corpus([Tape(f"d{i}", random.integers(0, VOCAB, n), source="s") for i, n in enumerate(LENGTHS)], name="c")
    with quiet():
        return {row["name"]: row for row in records.measure_model(model, tapes, anchors=24, top_k=K)}


@pytest.fixture(scope="module")
def rows(model: Any) -> dict[str, dict[str, Any]]:
    return measured(model)


def test_every_format_is_measured_and_is_as_large_as_predicted(rows):
    assert {arm.partition(",")[0] for arm in rows} == {*REGISTRY, "anchor records", "sequence store"}
    wrong = {name: row["of_predicted"] for name, row in rows.items() if not row["agrees"]}
    assert not wrong
    assert all(0.95 <= row["of_predicted"] <= 1.05 for row in rows.values())


def test_bytes_are_those_of_the_formulas(rows):
    tokens, longest = sum(LENGTHS), max(LENGTHS)
    deepspec = rows["deepspec"]
    assert (
        0 <= deepspec["bytes"] - tokens * (4 + 1 + 1 + 5 * 2 * WIDTH) < 8000
    )  # four taps, the last rows, lists beside
    assert deepspec["value"] == deepspec["bytes"] / tokens and deepspec["unit"] == "bytes/token"
    padded = rows["nemo-automodel-dspark"]["bytes"]
    assert 0 <= padded - len(LENGTHS) * longest * (8 + 8 + 8 + 5 * 2 * WIDTH) < 8000
    law = rows["nemo-automodel-eagle3, whole law"]["bytes"] - rows[f"nemo-automodel-eagle3, top {K}"]["bytes"]
    assert abs(law - len(LENGTHS) * longest * (2 * VOCAB - 6 * K)) < 1000
    assert rows["specforge-dflash"]["bytes"] < rows["specforge-dspark"]["bytes"] - tokens * 2 * WIDTH
    by_type = [rows[f"sequence store, {kind}"]["bytes"] for kind in ("fp8", "bfloat16", "float32")]
    assert 1.9 < by_type[2] / by_type[1] < 2.1 and 1.9 < by_type[1] / by_type[0] < 2.1


def test_anchors_and_ratios_are_of_the_anchor_records(rows):
    first = rows["anchor records"]
    assert first["anchors"] == 72 and first["over_records"] == 1 and first["per_anchor"] == first["bytes"] / 72
    every = rows["anchor records, every position"]
    assert every["per_anchor"] == every["bytes"] / sum(n - 6 for n in LENGTHS)  # 1 <= p and p + 5 < n
    assert rows["speculators"]["per_anchor"] == rows["speculators"]["bytes"] / 72
    assert rows["speculators"]["over_records"] == rows["speculators"]["bytes"] / first["bytes"] > 1


@pytest.mark.parametrize(
    "layout, spoilt, arm",
    [
        ("deepspec", dict(value=1), "deepspec"),
        ("speculators", dict(last=0), "speculators"),
        ("specforge eagle3", dict(taps=2), "specforge-eagle3"),
        ("nemo-automodel dspark", dict(padded=False), "nemo-automodel-dspark"),
    ],
)
def test_a_wrong_layout_is_seen(rows, model, monkeypatch, layout: str, spoilt: dict[str, Any], arm: str):
    """Control: the same files, and another prediction."""
    changed = [replace(one, **spoilt) if one.name == layout else one for one in LAYOUTS]
    monkeypatch.setattr(records, "LAYOUTS", changed)
    monkeypatch.setattr(records, "_written", lambda arm, *_: (rows[arm.name]["bytes"], 0))
    found = measured(model)
    assert [name for name, row in found.items() if not row["agrees"]] == [arm]
    assert abs(found[arm]["of_predicted"] - 1) > 0.05 and found[arm]["bytes"] == rows[arm]["bytes"]


def test_a_wrong_estimate_of_a_store_is_seen(rows, model, monkeypatch):
    """Control: an estimate that forgets the scales and half of the values of fp8."""
    right = SequenceOptions.token_bytes
    wrong = lambda self, width: right(self, width) / (2 if self.hidden_dtype == "fp8" else 1)  # noqa: E731
    monkeypatch.setattr(SequenceOptions, "token_bytes", wrong)
    monkeypatch.setattr(records, "_written", lambda arm, *_: (rows[arm.name]["bytes"], 0))
    assert [name for name, row in measured(model).items() if not row["agrees"]] == ["sequence store, fp8"]


def test_committed_rows_hold_every_format_and_agree():
    path = Path(__file__).resolve().parents[2] / "data" / "bench" / "records.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert {row["name"].partition(",")[0] for row in rows} == {*REGISTRY, "anchor records", "sequence store"}
    assert all(row["agrees"] and abs(row["of_predicted"] - 1) <= records.AGREES for row in rows)
    assert all(row["value"] == row["bytes"] / row["tokens"] for row in rows)
