"""``workbench extract`` and ``workbench replay``: what they write, resume and refuse."""

from __future__ import annotations

import json

import pytest

LONG = list(range(1, 40))
SMALL = ("--corpus", "demo/sqlite", "--limit", "1", "--max-tokens", "40", "--overflow", "truncate", "--threads", "1")


def test_extract_writes_what_datasets_opens_and_goes_on(run, tmp_path):
    import datasets

    out = tmp_path / "anchors"
    argv = ("extract", *SMALL, "--out", out, "--gamma", "2", "--top-k", "8", "--seed", "5", "--anchors", "1,5,9")
    first = run(*argv, "--json")
    assert first.code == 0 and first.out.count("\n") == 1
    assert first.data["records"] == len(datasets.load_from_disk(str(out))) == 3
    assert first.data["parameters"]["seed"] == 5 and first.data["parameters"]["anchors"] == [1, 5, 9]
    again = run(*argv)
    assert again.code == 0 and again.out.startswith("3 records of 1 tape (40 tokens)")


def test_a_directory_of_another_run_is_refused(run, refused, tmp_path):
    out = tmp_path / "anchors"
    assert run("extract", *SMALL, "--out", out).code == 0
    assert "--gamma" not in (said := refused("extract", *SMALL, "--out", out, "--gamma", "2")) and "another run" in said
    assert "is not empty and --no-resume was given" in refused("extract", *SMALL, "--out", out, "--no-resume")


@pytest.mark.parametrize("kind", ["anchors", "sequence"])
def test_extract_says_what_it_leaves_out(run, refused, tiny, ids, monkeypatch, tmp_path, kind):
    model = tiny(tied=False)
    model.embed.data[7] = float("nan")
    monkeypatch.setattr("workbench.facade.load", lambda *given, **more: model)
    source = ids(LONG, [*range(10, 50)], [*range(20, 60)])
    argv = ("extract", "--corpus", source, "--kind", kind, "--top-k", "8", "--out", tmp_path / "x")
    assert "position" in refused(*argv) and not (tmp_path / "x").exists()
    assert "--on-bad 'skip' is not valid: choose one of 'stop', 'quarantine'" in refused(*argv, "--on-bad", "skip")
    ran = run(*argv, "--on-bad", "quarantine")
    assert ran.code == 0 and f"3 tapes = 2 stored + 1 left out; reasons are in {tmp_path}/x/quarantine.jsonl" in ran.out
    assert "1 of 3 documents is left out" in ran.err
    data = run(*argv, "--on-bad", "quarantine", "--json").data
    assert data["documents"] == 2 and data["tokens"] == 80 and len(data["quarantined"]) == 1
    assert "position" in data["quarantined"][0]["reason"]
    assert "on_bad" not in data["parameters"]


def test_replay_tells_acceptance_and_likelihood(run, tmp_path):
    from workbench.replay import load_table

    out = tmp_path / "table"
    data = run("replay", *SMALL, "--out", out, "--k-max", "3", "--json").data
    assert [row["k"] for row in data["acceptance"]] == [1, 2, 3] and data["acceptance"][0]["estimator"] == "forced"
    assert data["nll"][0]["source"] == "sqlite" and data["nll"][0]["n_tokens"] == len(load_table(out).frame) == 39
    text = run("replay", *SMALL, "--out", out, "--k-max", "3").out
    assert "k=3: " in text and "nats per token, perplexity" in text and "load_table" in text


def test_replay_records_more_when_asked(run, tmp_path):
    from workbench.replay import load_table

    more = ("--k-max", "3", "--shadow", "2", "--target", "--ranks", "--overlap", "0.5,1", "--forced")
    made = run("replay", *SMALL, "--out", tmp_path / "x", *more)
    table = load_table(tmp_path / "x")
    assert table.k_shadow == 2 and table.manifest.parameters["overlap"] == [0.5, 1.0]
    assert table.bytes_per_row["shadow"] == 48 and "shadow 48, target 20, ranks 36, overlap 8" in made.out
    again = run("replay", *SMALL, "--out", tmp_path / "x", *more, "--json").data
    assert again["bytes_per_row"] == table.bytes_per_row


def test_replay_of_the_targets_own_text_walks_as_own(run, tmp_path):
    argv = ("--own", "--prompt-tokens", "8", "--max-new-tokens", "10", "--k-max", "2", "--json")
    data = run("replay", *SMALL, "--out", tmp_path / "own", *argv).data
    assert data["acceptance"][0]["estimator"] == "own" and data["tokens"] == 18
    assert data["nll"][0]["bits_per_byte"] is None


def test_replay_of_text_that_the_target_samples_walks_as_own(run, tmp_path):
    argv = ("--own", "--prompt-tokens", "8", "--max-new-tokens", "10", "--k-max", "2", "--json", "--seed", "3")
    shaping = ("--temperature", "0.8", "--top-p", "0.9", "--logit-bias", "5:-inf,7:0.5", "--forced")
    data = run("replay", *SMALL, "--out", tmp_path / "own", *argv, *shaping).data
    assert data["acceptance"][0]["estimator"] == "own" and data["acceptance"][1]["drafted"] > 0
    manifest = json.loads((tmp_path / "own" / "manifest.json").read_text("utf-8"))["parameters"]
    assert manifest["seed"] == 3 and manifest["shaping"]["logit_bias"] == [[5, "-inf"], [7, 0.5]]


def test_scoring_alone_needs_no_head(run, tmp_path, tiny_checkpoint, ids):
    model = tiny_checkpoint(mtp=False)
    argv = ("replay", "--model", model, "--corpus", ids(LONG, LONG[:9]), "--score-only", "--hidden")
    data = run(*argv, "--out", tmp_path / "scores", "--json").data
    assert "acceptance" not in data and data["nll"][0]["n_tokens"] == 38 + 8
    assert data["nll"][0]["documents"] == 2 and data["nll"][0]["bits_per_byte"] is None
    packed = run(*argv, "--k-format", "fp8", "--window", "5", "--out", tmp_path / "packed", "--json").data
    assert packed["nll"][0]["nll"] != data["nll"][0]["nll"]


def test_two_tokens_are_scored_and_not_walked(run, tmp_path, tiny_checkpoint, ids):
    data = run("replay", "--model", tiny_checkpoint(), "--corpus", ids([1, 2]), "--out", tmp_path / "t", "--json").data
    assert data["acceptance"] == [] and data["nll"][0]["n_tokens"] == 1


EXTRACT = [
    (("--gamma", "0"), "--gamma 0 is not valid"),
    (("--temperature", "0"), "--temperature 0.0 is not valid"),
    (("--temperature", "-1"), "--temperature -1.0 is not valid"),
    (("--temperature=-1e-3",), "--temperature -0.001 is not valid"),
    (("--temperature", "nan"), "--temperature nan is not valid"),
    (("--top-k", "4097"), "--top-k 4097 is not valid: it must be an integer from 1 to 4096"),
    (("--anchors", "0"), "--anchors 0 is not valid"),
    (("--anchors", "5,3"), "--anchors 5,3 is not valid"),
    (("--anchors", "some"), "--anchors 'some' is not valid"),
    (("--hidden-dtype", "float16"), "choose one of 'bfloat16', 'float32'"),
    (("--corpus", "no-such-file"), "source 'no-such-file' does not exist"),
    (("--corpus", "demo/poems"), "choose 'demo' or one of demo/novels"),
    (("--limit", "0"), "--limit 0 is not valid"),
    (("--split", "train"), "has no split 'train'"),
    (("--max-tokens", "6", "--overflow", "truncate", "--limit", "1"), "--gamma 5 needs at least 7"),
    (("--max-tokens", "none", "--limit", "5"), "this model's context is 8192"),
    (("--min-tokens", "100000000"), "is empty: none of its 126 documents could be kept within"),
]


@pytest.mark.parametrize(("argv", "says"), EXTRACT)
def test_extract_refuses_in_a_sentence_and_leaves_nothing(refused, tmp_path, argv, says):
    if says.startswith("this model's context") and "5" not in argv:
        pytest.skip("needs a long document")
    assert says in refused("extract", "--out", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()


REPLAY = [
    (("--k-max", "0"), "--k-max 0 is not valid"),
    (("--stride", "0"), "--stride 0 is not valid"),
    (("--chunk", "1"), "--chunk 1 is not valid"),
    (("--max-new-tokens", "3"), "--max-new-tokens needs --own"),
    (("--hidden",), "--hidden needs --score-only"),
    (("--k-format", "q8_0"), "--k-format needs --score-only"),
    (("--score-only", "--stride", "2"), "--stride and --score-only exclude each other"),
    (("--own", "--prompt-tokens", "0", *SMALL), "--prompt-tokens 0 is not valid"),
    (("--temperature", "0.5", "--logit-bias", "5", *SMALL), "--logit-bias '5' is not valid: write token ids"),
    (("--shadow", "9", *SMALL), "--shadow 9 is not valid: it must be an integer from 0 to 8"),
    (("--overlap", "0.5,x", *SMALL), "--overlap '0.5,x' is not valid: write numbers as 0.7,1"),
    (("--overlap", "0", *SMALL), "--overlap 0.0 is not valid: it must be a number above 0"),
    (("--own", "--prompt-tokens", "60", *SMALL), "fewer than --prompt-tokens 60"),
]


@pytest.mark.parametrize(("argv", "says"), REPLAY)
def test_replay_refuses_in_a_sentence_and_leaves_nothing(refused, tmp_path, argv, says):
    assert says in refused("replay", "--out", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()


def test_replay_needs_a_head_and_a_directory(refused, tmp_path, tiny_checkpoint, ids):
    model, corpus = tiny_checkpoint(mtp=False), ids(LONG)
    assert "has no mtp.* weights" in refused("replay", "--model", model, "--corpus", corpus, "--out", tmp_path / "out")
    assert "is a file: give a directory" in refused("replay", "--corpus", corpus, "--out", corpus)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["extract", "replay"])
def test_bad_documents_are_named(refused, tmp_path, tiny_checkpoint, ids, verb):
    model = tiny_checkpoint()
    out = ("--model", model, "--out", tmp_path / "out")
    small = ("--top-k", "8") if verb == "extract" else ()
    assert "holds token id 83 at position 2" in refused(verb, *out, *small, "--corpus", ids([1, 2, 83, *LONG]))
    assert "tokens must be a list of token ids, integers from 0 on" in refused(
        verb, *out, *small, "--corpus", ids([-1, *LONG])
    )
    (tmp_path / "folder").mkdir()
    assert "holds no document" in refused(verb, *out, *small, "--corpus", tmp_path / "folder")
    (tmp_path / "broken.jsonl").write_text("{\n", "utf-8")
    assert "line 1 is not valid JSON" in refused(verb, *out, *small, "--corpus", tmp_path / "broken.jsonl")
    assert not (tmp_path / "out").exists()


def test_bad_checkpoints_are_sentences(refused, tmp_path, tiny_checkpoint, ids):
    corpus, out = ids(LONG), ("--out", tmp_path / "out", "--top-k", "8")
    wild = tiny_checkpoint("wild", spoil=lambda model: model.norm.data.fill_(float("inf")))
    assert "hold NaN or infinity" in refused("extract", "--model", wild, "--corpus", corpus, *out)
    loud = tiny_checkpoint("loud", tied=False, spoil=lambda model: model.head.data.fill_(3e38))
    assert "the logits of position" in refused("extract", "--model", loud, "--corpus", corpus, *out)
    cut = tiny_checkpoint("cut")
    weights = next(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "safetensors" in refused("info", "--model", cut)
    shapes = tiny_checkpoint("shapes")
    config = json.loads((shapes / "config.json").read_text("utf-8"))
    inner = config.get("text_config", config)
    inner["intermediate_size"] += 2
    (shapes / "config.json").write_text(json.dumps(config), "utf-8")
    assert "shape" in refused("info", "--model", shapes)
    assert not (tmp_path / "out").exists()
