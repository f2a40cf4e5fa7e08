"""``workbench info`` and ``workbench bench``."""

from __future__ import annotations

import json

from workbench import bench
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
        row = {"benchmark": name, "name": "plain", "mode": "exact", "threads": 1, "unit": "tokens/s"}
        return [row | {"value": 12.3456, "low": 11.0, "high": 13.0}]

    monkeypatch.setattr(bench, "run", measure)
    ran = run("bench", "decode", "--quick", "--threads", "1", "--out", tmp_path / "rows.jsonl", "--quiet")
    assert ran.out == "decode  plain  exact  1 thread(s): 12.35 (11 to 13) tokens/s\n"
    wanted = {"out": tmp_path / "rows.jsonl", "threads": "1", "quick": True, "progress": False}
    assert calls == [("decode", wanted)]
    assert [row["benchmark"] for row in run("bench", "--json").data["rows"]] == list(bench.NAMES)
    assert "'sort' is not valid: choose one of 'decode', 'replay', 'extract'" in refused("bench", "sort")
    assert "the benchmarks measure the CPU" in refused("bench", "--device", "cuda")


def test_a_draft_vocabulary_is_given_left_out_or_found_beside_the_weights(run, refused, tiny_checkpoint, ids, tmp_path):
    from workbench.facade import load

    path = tiny_checkpoint()
    model = load(path)
    head = model.trim_draft_vocab([3, 5, 7], note="a test")
    file = model.save_draft_vocab(tmp_path / "map.safetensors")
    assert run("info", "--model", path, "--json").data["model"]["draft_head"] is None
    assert run("info", "--model", path, "--draft-vocab", file, "--json").data["model"]["draft_head"] == head.facts
    model.save_draft_vocab(path)
    assert run("info", "--model", path, "--json").data["model"]["draft_head"]["digest"] == head.digest
    assert run("info", "--model", path, "--draft-vocab", "none", "--json").data["model"]["draft_head"] is None
    assert "does not exist" in refused("info", "--model", path, "--draft-vocab", tmp_path / "nothing")
    said = ("replay", "--model", path, "--corpus", ids(list(range(1, 40))), "--k-max", "2", "--out", tmp_path / "t")
    assert run(*said).code == 0
    sweep = ("sweep", tmp_path / "t", "--k", "1", "--cost", "measure", "--model", path)
    assert f"draft head {head.digest}, and" in refused(*sweep, "--draft-vocab", "none")
    assert "parameters.draft_head" in refused(*said, "--draft-vocab", "none")
