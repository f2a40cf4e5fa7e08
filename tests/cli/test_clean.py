"""``workbench clean``: what it writes, says and refuses."""

from __future__ import annotations

import json

import numpy as np
import polars as pl

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 200, 80).tolist() for _ in range(6)]
NEAR = [*TEXTS[1][:40], 1, *TEXTS[1][41:]]


def test_clean_writes_tapes_reasons_and_figures(run, ids, tmp_path):
    source = ids(*TEXTS, TEXTS[0], NEAR, [1, 2])
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"tokens": [7, *TEXTS[4][20:50]], "doc_id": "e"}) + "\n")
    out = tmp_path / "clean"
    argv = ("clean", "--corpus", source, "--evaluation", held, "--out", out, "--heldout", "0.5", "--seed", "3")
    ran = run(*argv, "--json", "--quiet")
    assert ran.code == 0, ran.err
    data = ran.data
    assert data["documents"] == {"given": 9, "kept": 5, "dropped": 4}
    assert [row["documents_dropped"] for row in data["steps"]] == [1, 1, 1, 1]
    assert sum(data["splits"].values()) == 5 and set(data["splits"]) <= {"train", "heldout"}
    assert data["parameters"]["near"]["seed"] == 3 and data["figures"] == ["duplicates.png", "overlap.png"]
    found = sorted(path.name for path in out.iterdir())
    listed = [f"{name}.jsonl" for name in ("tapes", "dropped", "unread", "pairs", "clusters", "overlap")]
    assert found == sorted([*listed, "report.json", "duplicates.png", "overlap.png"])
    assert pl.read_ndjson(out / "dropped.jsonl")["step"].to_list() == ["quarantine", "exact", "near", "overlap"]
    go_on = run("clean", "--corpus", out / "tapes.jsonl", "--out", tmp_path / "again")
    assert go_on.code == 0 and "5 documents = 5 kept + 0 dropped" in go_on.out


def test_rows_that_are_no_tapes_are_refused_or_listed(run, refused, ids, tmp_path):
    source = ids(*TEXTS)
    with source.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"tokens": TEXTS[0], "prompt_len": 99, "doc_id": "wrong"}) + "\n")
    argv = ("clean", "--corpus", source, "--out", tmp_path / "x")
    assert "prompt_len=99" in refused(*argv) and not (tmp_path / "x").exists()
    ran = run(*argv, "--skip-bad")
    assert ran.code == 0 and "1 more could not be read as tapes; reasons are in" in ran.out, ran
    ((doc_id, reason),) = pl.read_ndjson(tmp_path / "x" / "unread.jsonl").rows()
    assert doc_id == "wrong" and "prompt_len=99" in reason
    report = json.loads((tmp_path / "x" / "report.json").read_text())
    assert report["documents"] == {"given": 6, "kept": 6, "dropped": 0, "unread": 1}
    again = run(*argv[:-1], tmp_path / "y", "--skip-bad", "--json").data
    assert again["unread"] == [{"doc_id": "wrong", "reason": reason}]


def test_clean_refuses_in_the_words_of_the_command(refused, ids, tmp_path):
    source = ids(*TEXTS)
    assert "--near 1.5 is not valid" in refused("clean", "--corpus", source, "--out", tmp_path / "a", "--near", "1.5")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    assert "holds files already" in refused("clean", "--corpus", source, "--out", tmp_path / "b")
    assert "would drop all 1 tapes" in refused("clean", "--corpus", ids([1, 2]), "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists(), "nothing is left behind"
