"""``workbench info`` and ``workbench bench``."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

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
    import torch

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
        return [{"bench": name, "tokens_per_second": 12.3456}]

    monkeypatch.setitem(sys.modules, "workbench.bench", SimpleNamespace(run=measure))
    ran = run("bench", "decode", "--quick", "--threads", "1", "--out", tmp_path / "rows.jsonl", "--quiet")
    assert ran.out == "bench=decode  tokens_per_second=12.35\n"
    wanted = {"out": tmp_path / "rows.jsonl", "threads": "1", "quick": True, "progress": False}
    assert calls == [("decode", wanted)]
    assert [row["bench"] for row in run("bench", "--json").data["rows"]] == ["decode", "replay", "extract"]
    assert "'sort' is not valid: choose one of 'decode', 'replay', 'extract'" in refused("bench", "sort")
    assert "the benchmarks measure the CPU" in refused("bench", "--device", "cuda")
