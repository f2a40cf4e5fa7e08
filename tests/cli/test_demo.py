"""``workbench demo``: the whole job in a small size, its page, its manifest, and nothing left on failure."""

from __future__ import annotations

import json
import re

import pytest

from workbench.cli.common import workplace
from workbench.core.manifest import sha256_file

SMALL = ("--quick", "--prompts", "2", "--max-new-tokens", "8", "--documents", "2", "--max-tokens", "32", "--k-max", "3")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One small demo for all tests of its files."""
    from workbench.cli.demo import read, run

    out = tmp_path_factory.mktemp("demo") / "deep" / "out"
    args = read([*SMALL, "--out", str(out), "--quiet"])
    with workplace(args):
        return out, run(args)


def test_it_decodes_extracts_replays_and_sweeps(made):
    out, outcome = made
    data = outcome.data
    assert data["same_text"] == [2, 2] and data["exact"] is True
    assert data["walk_equals_live"][0] == data["walk_equals_live"][1] == data["live"]["rounds"] > 0
    assert len(data["sweep"]) == 3 * 4 and data["rows"] == 2 * 31 and data["records"] == 8
    assert set(data["speeds"]) == {"plain, exact", "plain, fast", "speculative k=3, exact"}
    assert str(out) in outcome.text and "index.html" in outcome.text
    json.dumps(data)


def test_its_files_open_and_match_the_manifest(made):
    import datasets
    import polars as pl

    from workbench.corpus import corpus
    from workbench.datasets import load_anchors
    from workbench.replay import load_table

    out, outcome = made
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))
    assert manifest["complete"] and manifest["parameters"]["max_tokens"] == 32
    assert all(sha256_file(out / name) == digest for name, digest in manifest["files"].items())
    assert len(load_anchors(out / "anchors")) == len(datasets.load_from_disk(str(out / "anchors"))) == 8
    assert load_table(out / "table").k_max == 3 and len(corpus(out / "own.jsonl")) == 2
    assert len(pl.read_parquet(out / "sweep.parquet")) == 12
    assert len(list((out / "figures").glob("*.png"))) == 6
    assert not list(out.parent.glob(".*")), "the directory it was made in is gone"


def test_the_page_stands_alone_and_says_what_it_shows(made):
    out, _ = made
    text = (out / "index.html").read_text("utf-8")
    assert len(re.findall(r'src="data:image/png;base64,', text)) == 6
    assert not re.search(r'(src|href)="(?!data:)', text) and "http://" not in text and "https://" not in text
    assert text.count("<figcaption>") == 6 and "accepted draft" in text and "manifest.json" in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text).lower().split()


@pytest.mark.full
def test_the_manifest_repeats_the_run(made, run, tmp_path):
    out, _ = made
    command = json.loads((out / "manifest.json").read_text("utf-8"))["extra"]["command"].split()
    again = tmp_path / "again"
    ran = run(*command[1:], "--out", again, "--json")
    assert ran.code == 0 and ran.out.count("\n") == 1 and "[6/6]" in ran.err
    assert (again / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()


def test_an_interrupt_leaves_nothing(run, tmp_path, monkeypatch):
    from workbench.cli.demo_run import Demo

    def interrupted(job):
        assert (job.out / "anchors" / "manifest.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Demo, "replay", interrupted)
    out = tmp_path / "deep" / "out"
    ran = run("demo", *SMALL, "--prompts", "1", "--fast", "--out", out, "--quiet")
    assert ran.code == 130 and "nothing was kept" in ran.err
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--prompts", "0"), "--prompts 0 is not valid"),
        (("--k", "9"), "--k 9 is not valid: it must be an integer from 1 to 8"),
        (("--max-tokens", "6"), "--max-tokens 6 is not valid"),
        (("--max-new-tokens", "9000"), "leaves no room for a prompt"),
    ],
)
def test_bad_sizes_are_sentences(refused, tmp_path, argv, says):
    assert says in refused("demo", *argv, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_taken_directory_and_a_model_without_tokenizer_are_refused(refused, tmp_path, tiny_checkpoint):
    model = tiny_checkpoint()
    assert "has no tokenizer" in refused("demo", "--model", model, "--out", tmp_path / "out")
    assert "holds files already" in refused("demo", "--out", tmp_path)


def test_runs_go_beside_the_checkpoint_by_default():
    from workbench.cli.demo import _runs

    assert _runs().parts[-2:] == ("data", "runs")
