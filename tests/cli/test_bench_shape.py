"""``workbench bench decode --shape``: its options, its lines and what it refuses."""

from __future__ import annotations

import torch

from workbench import bench
from workbench.bench import shape


def test_bench_of_a_shape_takes_its_options(run, refused, monkeypatch, tmp_path):
    calls = []

    def measure(name, **options):
        calls.append((name, options, torch.get_num_threads()))
        row = {"benchmark": "decode", "shape": name, "name": "plain decode, eager", "mode": "fast", "threads": 1}
        row |= {"unit": "tok/s", "value": 12.3456, "low": 11.0, "high": 13.0, "p20": 11.5, "p80": 12.5}
        return [row | {"of_floor": 0.25}, row | {"by_bytes": 1.25, "by_phases": {"graph": 1.5}, "same_text": False}]

    monkeypatch.setattr(shape, "run_shape", measure)
    out, before = tmp_path / "rows.jsonl", torch.get_num_threads()
    ran = run(
        "bench", "decode", "--shape", "4B", "--synthetic-acceptance", ".87,.69", "--context", "512", "--trim", "100",
        "--only", "plain,verify", "--dtype", "bfloat16", "--fast", "--threads", "1", "--seed", "3", "--out", out,
    )  # fmt: skip
    start = "decode  4B  plain decode, eager  fast  1 thread(s): 12.35 (p20 11.5, p80 12.5) tok/s"
    first, second = ran.out.splitlines()
    assert first == f"{start}; 25% of the copy bandwidth"
    assert second == f"{start}; by bytes 1.25, by graph phases 1.5, its text is not plain decode's"
    wanted = {"synthetic_acceptance": (0.87, 0.69), "context": 512, "trim": 100, "only": ("plain", "verify")}
    wanted |= {"dtype": "bfloat16", "exact": False, "seed": 3, "out": str(out), "quick": False}
    assert calls == [("4B", wanted, 1)] and torch.get_num_threads() == before
    run("bench", "--shape", "0.8B", "--device", "cuda", "--quick")
    assert calls[1][:2] == ("0.8B", {"device": "cuda", "quick": True})
    assert "one of 0.8B, 2B, 4B, 9B, 27B" in run("bench", "--help").out


def test_extraction_and_replay_take_a_shape_in_a_process_of_their_own(run, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(bench, "run", lambda name, **options: calls.append((name, options)) or [])
    run("bench", "replay", "--shape", "4B", "--trim", "100", "--threads", "2", "--seed", "3", "--quick", "--quiet")
    how = {"threads": (2,), "out": None, "quick": True, "progress": False, "shape": "4B"}
    run("bench", "extract", "--shape", "9B", "--device", "cuda", "--dtype", "float32", "--out", tmp_path / "x")
    assert calls[0] == ("replay", how | {"trim": 100, "seed": 3})
    assert calls[1][1].items() >= {"shape": "9B", "device": "cuda", "dtype": "float32"}.items()
    assert calls[1][1]["threads"] == (torch.get_num_threads(),) and calls[1][1]["out"] == tmp_path / "x"


def test_bench_of_a_shape_refuses_what_does_not_go_together(refused):
    assert "choose one of '0.8B', '2B'" in refused("bench", "decode", "--shape", "tiny")
    assert "decode, extract and replay, not with 'walk'" in refused("bench", "walk", "--shape", "4B")
    for name, flags in (
        ("extract", (("--trim", 9), ("--context", 9), ("--synthetic-acceptance", 0.5), ("--only", "plain"))),
        ("replay", (("--exact",), ("--fast",), ("--context", 9))),
    ):
        for flag in flags:
            said = refused("bench", name, "--shape", "4B", *flag)
            assert f"{flag[0]} goes with `bench decode --shape`, not with '{name}'" in said
    assert "--synthetic-acceptance goes with --shape" in refused("bench", "--synthetic-acceptance", "0.5")
    assert "--trim goes with --shape" in refused("bench", "decode", "--trim", "100")
    assert "'sort' is not valid: choose one of 'copy'" in refused("bench", "--shape", "4B", "--only", "plain,sort")
    assert "'1,2' is not valid with --shape" in refused("bench", "--shape", "4B", "--threads", "1,2")
    assert "without --shape the benchmarks measure" in refused("bench", "--device", "cuda")
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in refused("bench", "extract", "--shape", "4B", "--device", "cuda")
        assert "torch sees no GPU here" in refused("bench", "--shape", "4B", "--device", "cuda")
