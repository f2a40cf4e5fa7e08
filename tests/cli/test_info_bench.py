"""``workbench info`` and ``workbench bench``."""

from __future__ import annotations

import json

import torch

from workbench import bench
from workbench.bench import shape
from workbench.cli.info import cache_facts


def test_info_tells_the_checkpoint_the_cache_the_machine_and_the_corpora(run, tmp_path):
    out = tmp_path / "info.json"
    ran = run("info", "--json", "--out", out)
    data = ran.data
    assert json.loads(out.read_text("utf-8")) == data
    assert data["model"]["can_draft"] and data["model"]["vocab_size"] == 4096 and data["model"]["training"]
    assert {one["source"] for one in data["corpora"]} >= {"demo/novels", "demo/pycode"}
    assert "torch" in data["versions"] and data["machine"]["threads"] >= 1
    text = run("info").out
    assert "bytes per token" in text and "held-out loss" in text and "demo/novels" in text


def test_the_cost_of_a_cache_is_what_a_cache_takes(tiny):
    model = tiny()
    facts = cache_facts(model)
    cache = model.new_cache(capacity=64)
    with torch.inference_mode():
        model.forward(torch.arange(1, 65)[None], cache, logits="none")
    planes = [plane for plane in cache.planes if plane not in cache.recurrent]
    used = sum(2 * rows.numel() * rows.element_size() for plane in planes for rows in plane.rows(0, 64)[:1])
    assert facts["bytes_per_token"] * 64 == used
    assert facts["fixed_bytes"] == sum(plane.nbytes for plane in cache.recurrent)
    assert cache_facts(tiny(mtp=False))["drafter_bytes_per_token"] == 0


def test_a_checkpoint_without_a_report_has_no_training(run, tiny_checkpoint):
    data = run("info", "--model", tiny_checkpoint(mtp=False), "--json").data
    assert data["model"]["training"] == [] and data["model"]["can_draft"] is False
    assert data["model"]["tokenizer"] is None


def test_bench_runs_one_or_all_and_returns_rows(run, refused, monkeypatch, tmp_path):
    calls = []

    def measure(name, **options):
        calls.append((name, options))
        row = {"benchmark": name, "name": "plain", "mode": "exact", "threads": 1, "unit": "tokens/s"}
        return [row | {"value": 12.3456, "low": 11.0, "high": 13.0}]

    monkeypatch.setattr(bench, "run", measure)
    ran = run("bench", "decode", "--quick", "--threads", "1", "--out", tmp_path / "rows.jsonl", "--quiet")
    assert ran.out == "decode  plain  exact  1 thread(s): 12.35 (11 to 13) tokens/s\n"
    wanted = {"out": tmp_path / "rows.jsonl", "threads": "1", "quick": True, "progress": False}
    assert calls == [("decode", wanted)]
    assert [row["benchmark"] for row in run("bench", "--json").data["rows"]] == list(bench.NAMES)
    assert "'sort' is not valid: choose one of 'decode', 'replay', 'extract'" in refused("bench", "sort")
    assert "without --shape the benchmarks measure the CPU" in refused("bench", "--device", "cuda")


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
    wanted |= {"dtype": "bfloat16", "exact": False, "seed": 3, "out": str(out), "device": None, "quick": False}
    assert calls == [("4B", wanted, 1)] and torch.get_num_threads() == before
    run("bench", "--shape", "0.8B", "--device", "cuda", "--quick")
    assert calls[1][:2] == ("0.8B", {"device": "cuda", "quick": True})
    assert "one of 0.8B, 2B, 4B, 9B, 27B" in run("bench", "--help").out


def test_bench_of_a_shape_refuses_what_does_not_go_together(refused):
    assert "choose one of '0.8B', '2B'" in refused("bench", "decode", "--shape", "tiny")
    assert "--shape goes with decode, not with 'replay'" in refused("bench", "replay", "--shape", "4B")
    assert "--synthetic-acceptance goes with --shape" in refused("bench", "--synthetic-acceptance", "0.5")
    assert "--trim goes with --shape" in refused("bench", "decode", "--trim", "100")
    assert "'sort' is not valid: choose one of 'copy'" in refused("bench", "--shape", "4B", "--only", "plain,sort")
    assert "'1,2' is not valid with --shape" in refused("bench", "--shape", "4B", "--threads", "1,2")
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in refused("bench", "--shape", "4B", "--device", "cuda")
