"""Benchmark rows as frames: which rows count, which are refused, and in what order they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from workbench.core.bench_rows import (
    UNPARTED,
    arm_ratios,
    latest_ops,
    op_ratios,
    phase_floors,
    phases_by_arm,
    read_rows,
    round_times,
)
from workbench.core.errors import UserError

COMMITTED = Path(__file__).resolve().parents[2] / "data" / "bench" / "kernels.jsonl"
PHASES = ("draft", "verify_issue", "verify_wait", "accept", "commit", "other")


def op(name: str, value: float, **more: Any) -> dict[str, Any]:
    """A kernel's row with a speed-up of 60 µs over its value."""
    given = {"name": name, "case": "m4", "check": "passed", "value": value, "low": 0.9 * value, "high": 1.1 * value}
    return {**given, "stock_us": 60.0, "speedup": 60.0 / value, "superseded": None, **more}


def shaped(piece: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of ``workbench bench decode --shape``."""
    spread = {"value": value, "p20": 0.9 * value, "p80": 1.1 * value, "n": 40}
    return {"piece": piece, "shape": "4B", "mode": "fast", "unit": "ms", **spread, **more}


def part(arm: str, name: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of the piece "anatomy"."""
    return shaped("anatomy", value, **{"arm": arm, "group": "round", "part": name, "synchronised": False, **more})


def anatomy() -> list[dict[str, Any]]:
    """Rows of three arms, each once measured before; a streamed round is not parted; and what is no phase."""
    rows = [part(arm, name, 99.0) for arm in ("streamed", "eager") for name in (*PHASES[-1:], "total")]
    rows += [part("eager", name, 1.0 + i) for i, name in enumerate(PHASES)] + [part("eager", "total", 20.5)]
    rows += [part("graphed", name, 0.5 + i) for i, name in enumerate(PHASES) if name != "accept"]
    rows += [part("graphed", "total", 14.0), part("streamed", "other", 4.0), part("streamed", "total", 4.0)]
    return [*rows, part("eager", "glue", 0.3, group="draft step"), part("eager", "draft", 0.3, group="setup")]


def ratio(arm: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of speculative over plain decode."""
    return shaped("speculative", value, **{"arm": arm, "unit": "ratio", "by_bytes": 2.1, **more})


def test_the_last_row_that_passed_and_still_holds_counts():
    rows = pl.DataFrame(
        [
            op("a", 3.0),
            op("b", 5.0, superseded="since 1234567"),
            op("a", 2.0),
            op("a", 1.0, check="failed: output 0 is off"),
        ]
    )
    assert latest_ops(rows).select("name", "value").rows() == [("a", 2.0)]
    assert latest_ops(rows.drop("superseded")).select("name", "value").rows() == [("b", 5.0), ("a", 2.0)]
    with pytest.raises(UserError, match="check is missing"):
        latest_ops(rows.drop("check"))


def test_ratios_have_the_ends_of_the_ops_own_time_and_peers_have_none():
    peer = op("b", 4.0, check=None, speedup=None, peer="another kernel", speedup_over_peer=1.5)
    frame = op_ratios(pl.DataFrame([{**op("a", 2.0), "peer": None, "speedup_over_peer": None}, peer]))
    assert frame["against"].to_list() == ["library", "another kernel"]
    assert frame["ratio"].to_list() == [30.0, 1.5]
    low, high = frame.select("low", "high").row(0)
    assert low == pytest.approx(60 / 2.2) and high == pytest.approx(60 / 1.8)
    assert frame.select("low", "high").row(1) == (None, None)


def test_committed_kernel_rows_are_read(tmp_path):
    rows = latest_ops(read_rows(COMMITTED))
    assert rows["name"].n_unique() > 20 and not rows.select("name", "case").is_duplicated().any()
    empty = tmp_path / "shape.jsonl"
    for _ in range(2):
        with pytest.raises(UserError, match=r"shape\.jsonl holds no benchmark rows here: measure them first"):
            read_rows(empty)
        empty.touch()


def test_phases_come_by_arm_and_an_unparted_round_says_so(tmp_path):
    path = tmp_path / "shape.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in anatomy()))
    frame = phases_by_arm(read_rows(path), shape="4B")
    assert frame["group"].unique(maintain_order=True).to_list() == ["eager", "graphed", "streamed"]
    assert frame.filter(pl.col("group") == "eager")["part"].to_list() == [name.replace("_", " ") for name in PHASES]
    assert frame.filter(pl.col("group") == "eager")["ms"].to_list() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert "accept" not in frame.filter(pl.col("group") == "graphed")["part"]
    assert frame.filter(pl.col("group") == "streamed").select("part", "ms").rows() == [(UNPARTED, 4.0)]
    assert not frame["synchronised"].any()
    whole = round_times(read_rows(path), shape="4B")
    assert whole["arm"].to_list() == ["eager", "graphed", "streamed"] and whole["ms"].to_list() == [20.5, 14.0, 4.0]
    assert (whole["p20"] < whole["ms"]).all() and (whole["p80"] > whole["ms"]).all()


@pytest.mark.parametrize("arm", ["eager", "graphed", "streamed"])
def test_an_arm_without_rows_is_refused(arm):
    rows = pl.DataFrame(anatomy(), infer_schema_length=None)
    with pytest.raises(UserError, match=f"no row of the phases of the arm '{arm}' for 4B, fast"):
        phases_by_arm(rows.filter(pl.col("arm") != arm), shape="4B")
    with pytest.raises(UserError, match=f"arm '{arm}'"):
        round_times(rows.filter((pl.col("arm") != arm) | (pl.col("part") != "total")), shape="4B")
    with pytest.raises(UserError, match="for 9B, fast"):
        phases_by_arm(rows, shape="9B")
    with pytest.raises(UserError, match="for 4B, exact"):
        phases_by_arm(rows, shape="4B", mode="exact")


def test_ratios_come_by_arm_and_head():
    rows = [ratio("streamed", 2.0), ratio("eager", 1.2), ratio("eager", 1.3), ratio("graphed", 1.8, trim=32768)]
    rows += [ratio("graphed", 1.7), part("graphed", "draft", 1.0)]
    frame = arm_ratios(pl.DataFrame(rows, infer_schema_length=None), shape="4B")
    assert frame["arm"].to_list() == ["eager", "graphed", "graphed", "streamed"]
    assert frame["head"].to_list() == ["whole", "whole", "trimmed", "whole"]
    assert frame["ratio"].to_list() == [1.3, 1.7, 1.8, 2.0]
    with pytest.raises(UserError, match="no row of speculative over plain decode for 4B"):
        arm_ratios(pl.DataFrame([*rows[-1:], ratio("eager", 1.0, shape="9B")], infer_schema_length=None), shape="4B")


def test_floors_are_of_one_kind_and_the_last_row_of_a_phase():
    floor = {"phase": "verify", "kind": "graph", "rows": 4, "floor_ms": 2.0, "of_floor": 0.5}
    rows = [shaped("verify", 5.0, **floor), shaped("verify", 4.0, **floor), *anatomy()]
    rows += [shaped("verify", 9.0, **{**floor, "kind": "eager"})]
    frame = pl.DataFrame(rows, infer_schema_length=None)
    assert phase_floors(frame, shape="4B").rows() == [("verify", 4, 4.0, 2.0, 0.5)]
    assert phase_floors(frame, shape="4B", kind="eager")["ms"].to_list() == [9.0]
    with pytest.raises(UserError, match="no row of the phases of 9B alone, fast, graph"):
        phase_floors(frame, shape="9B")
