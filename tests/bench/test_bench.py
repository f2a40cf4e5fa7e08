"""Benchmarks: rows mean what their columns say, and bad requests are sentences."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from time import sleep

import pytest
import torch

from workbench.bench import NAMES, run
from workbench.bench.arms import interleave, ratio_row, speed_row
from workbench.bench.paired import paired
from workbench.core.errors import UserError
from workbench.core.progress import quiet

ROWS = sorted((Path(__file__).resolve().parents[2] / "data" / "bench").glob("*.jsonl"))


def test_arms_take_turns_and_the_slow_one_is_slower() -> None:
    order: list[str] = []
    arms = {"slow": lambda item: (order.append(f"slow{item}"), sleep(0.01)), "quick": lambda i: order.append(f"q{i}")}
    seconds = interleave(arms, [1, 2], repeats=2, desc="test")
    assert order == ["slow1", "q1", *["slow1", "q1", "slow2", "q2"] * 2]
    row = ratio_row("quick / slow", seconds["slow"], seconds["quick"])
    assert row["n"] == 4 and row["low"] <= row["value"] <= row["high"] and row["value"] > 1


def test_speeds_are_medians_of_tokens_per_second() -> None:
    row = speed_row("arm", [1.0, 2.0, 4.0], [8, 8, 8], mode="fast")
    assert (row["value"], row["low"], row["high"], row["mode"]) == (4.0, 2.0, 8.0, "fast")


def test_arms_on_a_device_take_turns_and_the_slow_one_is_slower() -> None:
    order: list[str] = []
    arms = {"slow": lambda: (order.append("slow"), sleep(0.01)), "quick": lambda: order.append("quick")}
    seconds = paired(arms, device=torch.device("cpu"), repeats=2, desc="test")
    assert order == ["slow", "quick"] * 3 and [len(s) for s in seconds.values()] == [2, 2]
    assert min(seconds["slow"]) > max(seconds["quick"])


@pytest.mark.parametrize("benchmark", ["extract", "replay"])
def test_shapes_are_measured_against_forwards_of_the_same_rows(tiny, monkeypatch, benchmark: str) -> None:
    model = tiny(exact=False, vocab_size=97)
    module = importlib.import_module(f"workbench.bench.{benchmark}")
    calls: list[int] = []
    forward = type(model).forward

    def counted(self, tokens, cache, *, counts=None, **more):
        calls.append(sum(counts) if counts is not None else tokens.numel())
        return forward(self, tokens, cache, counts=counts, **more)

    monkeypatch.setattr(type(model), "forward", counted)
    with quiet():
        trim = {"trim": 30} if benchmark == "replay" else {}
        made = module.measure_model(model, [40, 70], repeats=1, chunk=32, shape="tiny", **trim)
        rows = {row["name"]: row for row in made}
    assert model.draft_head is None
    ratios = [row for row in rows.values() if row["unit"] == "ratio"]
    assert len(ratios) == 2 and len(rows) == (6 if benchmark == "extract" else 5)
    assert all(
        0 < row["low"] <= row["p20"] <= row["value"] <= row["p80"] and row["shape"] == "tiny" for row in rows.values()
    )
    turn = calls[: len(calls) // 2]
    assert turn == calls[len(calls) // 2 :], "both turns run the same rows"
    if benchmark == "replay":
        assert sum(turn) == (1 + len(ratios)) * (39 + 69), "every arm runs every row but the last"
    else:
        assert all(n % 2 == 0 for n in Counter(turn).values()), "each extraction runs the rows of its forward"


@pytest.mark.parametrize(
    "request_",
    [
        dict(name="speed"),
        dict(name="decode", threads=(0,)),
        dict(name="decode", threads="x"),
        dict(name="walk", shape="tiny"),
        dict(name="decode", shape="tiny"),
        dict(name="extract", shape="5B"),
        dict(name="extract", shape="tiny", trim=9),
        dict(name="replay", shape="tiny", trim=385),
        dict(name="replay", shape="tiny", device="tpu"),
        dict(name="replay", shape="tiny", dtype="int8"),
        dict(name="replay", shape="tiny", seed=-1),
    ],
)
def test_bad_requests_are_sentences(request_: dict) -> None:
    with pytest.raises(UserError, match="is not valid"):
        run(**request_)


def test_options_of_a_shape_need_one() -> None:
    with pytest.raises(UserError, match="device='cuda' goes with a shape"):
        run("extract", device="cuda")


@pytest.mark.parametrize("name", ["extract", "replay"])
def test_a_shape_runs_in_a_process_of_its_own(name: str) -> None:
    trim = {"trim": 50} if name == "replay" else {}
    rows = run(name, threads=(1,), quick=True, progress=False, shape="tiny", seed=1, **trim)
    assert {row["shape"] for row in rows} == {"tiny"} and all(row["quick"] and row["commit"] for row in rows)
    assert {row["machine"]["device"] for row in rows} == {"cpu"} and not any("device_name" in row for row in rows)
    assert ("head of 50 ids" in str(rows)) == (name == "replay")


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.name)
def test_committed_rows_can_be_traced(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert rows and all(row["commit"] and row["date"] and row["mode"] for row in rows)
    assert not any(row.get("quick") for row in rows)
    text = path.read_text("utf-8")
    assert "/home/" not in text and "/root/" not in text


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_gives_rows(name: str, tmp_path: Path) -> None:
    rows = run(name, out=tmp_path / "rows.jsonl", threads=(1,), quick=True, progress=False)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) > 2
    assert all(row["threads"] == 1 and row["quick"] for row in rows)
