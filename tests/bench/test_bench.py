"""Benchmarks: rows mean what their columns say, and bad requests are sentences."""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep

import pytest

from workbench.bench import run
from workbench.bench.arms import interleave, ratio_row, speed_row
from workbench.core.errors import UserError

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


@pytest.mark.parametrize(
    "request_", [dict(name="speed"), dict(name="decode", threads=(0,)), dict(name="decode", threads="x")]
)
def test_bad_requests_are_sentences(request_: dict) -> None:
    with pytest.raises(UserError, match="is not valid"):
        run(**request_)


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.name)
def test_committed_rows_can_be_traced(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert rows and all(row["commit"] and row["date"] and row["mode"] for row in rows)
    assert not any(row.get("quick") for row in rows)
    text = path.read_text("utf-8")
    assert "/home/" not in text and "/root/" not in text


@pytest.mark.full
@pytest.mark.parametrize("name", ["decode", "replay", "extract", "memory", "shaping", "prefix", "walk"])
def test_a_quick_run_gives_rows(name: str, tmp_path: Path) -> None:
    rows = run(name, out=tmp_path / "rows.jsonl", threads=(1,), quick=True, progress=False)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows) > 2
    assert all(row["threads"] == 1 and row["quick"] for row in rows)
