"""Documents whose rows are not finite: left out whole, listed with a reason, and no other record changes by it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import workbench as wb
from workbench.core.errors import CheckpointError, NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.datasets import (
    extract,
    extract_sequences,
    load_anchors,
    load_quarantine,
    load_sequences,
    passes,
    record_bytes,
    sequence_passes,
)
from workbench.datasets import shards as shards_module
from workbench.datasets.left_out import LISTED, QUARANTINE_FILE, kept_counts
from workbench.datasets.shards import ShardDirectory
from workbench.model.hybrid import HybridModel

extraction = importlib.import_module("workbench.datasets.extract")  # the package has a function of that name
BAD = 7  # the id whose embedding is not a number
ANCHORS: dict[str, Any] = dict(gamma=3, top_k=8, chunk=8, anchors="all", shard_rows=50)
STORE: dict[str, Any] = dict(chunk=8, shard_tokens=60, taps=[1], top_k=4)
ASIDE: dict[str, Any] = dict(on_bad="quarantine")
RUNS: dict[str, tuple[Callable[..., datasets.Dataset], dict[str, Any], list[int]]] = {
    "anchors": (extract, ANCHORS, [2, 5, 6]),
    "sequence": (extract_sequences, STORE, [2, 5, 6, 9]),
}
LOADS = {"anchors": load_anchors, "sequence": load_sequences}


def made(tiny: Callable[..., HybridModel], bad: float) -> HybridModel:
    model = tiny(tied=False)
    model.embed.data[BAD] = bad
    return model


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return made(tiny, float("nan"))


@pytest.fixture(scope="module")
def sound(tiny) -> HybridModel:
    """The same model, but for the one embedding."""
    return made(tiny, 0.25)


def documents() -> Corpus:
    """Bad at once, after records are whole, at the end of a prompt, and (d9) where only the last row tells."""
    rng = np.random.default_rng(11)
    rows = [rng.integers(BAD + 1, 83, 30 + i) for i in range(12)]
    for document, at in ((2, 0), (5, 20), (6, 9), (9, 38)):
        rows[document][at] = BAD
    return Corpus([Tape(f"d{i}", t, prompt_len=3, source="s", split="train") for i, t in enumerate(rows)], name="c")


def without(tapes: Corpus, bad: list[int]) -> Corpus:
    return Corpus([tape for i, tape in enumerate(tapes) if i not in bad], name="c")


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def shards(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(path).items() if name.endswith(".arrow")}


# ---------------------------------------------------------------- what is stored and what is listed


@pytest.mark.parametrize("kind", RUNS)
def test_what_is_left_out_is_listed_and_changes_nothing_else(model, sound, tmp_path, kind, capsys):
    run, options, bad = RUNS[kind]
    tapes, out = documents(), tmp_path / "x"
    with pytest.raises(UserError, match=r"document 'd2': the (logits|trunk row) of position"):
        run(model, tapes, out=tmp_path / "stopped", **options)
    records = run(model, tapes, out=out, **options, **ASIDE)
    alone = run(model, without(tapes, bad), out=tmp_path / "alone", **options)
    assert records.data.table.equals(alone.data.table) and len(records) == len(alone)
    assert not {f"d{i}" for i in bad} & set(records["doc_id"])
    # shards are cut as if every document were stored, and only those that lack one have other bytes
    run(sound, tapes, out=tmp_path / "sound", **options)
    manifest, whole = Manifest.read(out), shards(tmp_path / "sound")
    lacking = {s["file"] for s in manifest.shards if any(i in bad for i in range(*s["documents"]))}
    assert {name for name, data in shards(out).items() if data != whole[name]} == lacking < set(whole)
    assert {s["file"] for s in manifest.shards if LISTED in s} == lacking
    # the list
    frame = load_quarantine(out)
    assert frame["document"].to_list() == bad and frame["doc_id"].to_list() == [f"d{i}" for i in bad]
    assert frame["tokens"].to_list() == [30 + i for i in bad] and set(frame["source"]) == {"s"}
    for doc_id, reason in frame.select("doc_id", "reason").rows():
        assert reason.startswith(f"document {doc_id!r}: the ") and ("hold NaN" in reason or "not finite" in reason)
    assert [json.loads(line)["document"] for line in (out / QUARANTINE_FILE).read_text().splitlines()] == bad
    counts = manifest.counts
    assert counts["documents"] + counts["quarantined"] == 12 == manifest.corpus["documents"]
    assert counts["records"] == len(records) == sum(s["rows"] for s in manifest.shards)
    assert counts["tokens"] == without(tapes, bad).n_tokens
    # who opens it is told
    told = (
        f"{len(bad)} of 12 documents are left out, each with its reason in {QUARANTINE_FILE}; the first: document 'd2'"
    )
    assert told in records.info.description and told in datasets.load_from_disk(str(out)).info.description
    capsys.readouterr()
    LOADS[kind](out)
    assert f"{out}: {told}" in capsys.readouterr().err
    LOADS[kind](tmp_path / "alone")
    assert "left out" not in capsys.readouterr().err and not len(wb.load_quarantine(tmp_path / "alone"))


@pytest.mark.parametrize("kind", RUNS)
def test_batch_and_chunk_change_no_byte(model, tmp_path, kind):
    run, options, bad = RUNS[kind]
    run(model, documents(), out=tmp_path / "1", batch=1, **options, **ASIDE)
    run(model, documents(), out=tmp_path / "4", batch=4, **options, **ASIDE)
    run(model, documents(), out=tmp_path / "c", **{**options, "chunk": 13}, **ASIDE)
    assert shards(tmp_path / "1") == shards(tmp_path / "4") == shards(tmp_path / "c")
    assert (tmp_path / "1" / QUARANTINE_FILE).read_bytes() == (tmp_path / "4" / QUARANTINE_FILE).read_bytes()
    assert load_quarantine(tmp_path / "c")["document"].to_list() == bad


@pytest.mark.parametrize("kind", RUNS)
def test_a_sound_corpus_gives_the_same_dataset_either_way(model, tmp_path, kind):
    run, options, bad = RUNS[kind]
    for name, more in (("stop", {}), ("quarantine", ASIDE)):
        run(model, without(documents(), bad), out=tmp_path / name, **options, **more)
    assert contents(tmp_path / "stop") == contents(tmp_path / "quarantine")


def test_a_shard_may_be_left_without_a_row(model, tmp_path):
    records = extract(model, documents(), out=tmp_path / "x", **{**ANCHORS, "shard_rows": 1}, **ASIDE)
    manifest = Manifest.read(tmp_path / "x")
    assert [i for i, shard in enumerate(manifest.shards) if not shard["rows"]] == [2, 5, 6]
    assert len(manifest.shards) == 12
    assert len(load_anchors(tmp_path / "x")) == len(records) == manifest.counts["records"]
    assert records[-1]["doc_id"] == "d11" and sorted(set(records["doc_id"])).count("d9") == 1


def test_probabilities_that_do_not_add_up_are_a_reason(sound, tmp_path, monkeypatch):
    check, calls = passes.check_mass, []

    def spoilt(probs, tail, at):
        calls.append(at)
        check(probs, tail + 0.5 * (len(calls) == 3), at)

    monkeypatch.setattr(passes, "check_mass", spoilt)
    tapes = documents()
    extract(sound, tapes, out=tmp_path / "x", **{**ANCHORS, "chunk": 64}, **ASIDE)
    ((document, reason),) = load_quarantine(tmp_path / "x").select("doc_id", "reason").rows()
    assert document == "d2" and "miss 1 by 0.5" in reason


@pytest.mark.parametrize("kind", RUNS)
def test_nothing_stored_leaves_nothing_behind(model, tmp_path, kind):
    run, options, _ = RUNS[kind]
    bad = [documents().tapes[i] for i in (2, 5)]
    with pytest.raises(
        UserError, match="all 2 documents would be left out and nothing stored; the first: document 'd2'"
    ):
        run(model, bad, out=tmp_path / "x", **options, **ASIDE)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="on_bad='skip' is not valid: choose one of 'stop', 'quarantine'"):
        run(model, bad, out=tmp_path / "x", on_bad="skip", **options)


@pytest.mark.parametrize("kind", RUNS)
def test_the_bar_counts_what_is_left_out(model, tmp_path, monkeypatch, kind):
    run, options, bad = RUNS[kind]
    said: list[str] = []

    class Bar:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self, n):
            pass

        def set_postfix_str(self, text):
            said.append(text)

    monkeypatch.setattr(shards_module, "progress", lambda *given, **more: Bar())
    run(model, documents(), out=tmp_path / "x", **options, **ASIDE)
    assert said[0] == "1 left out" and said[-1] == f"{len(bad)} left out"


def test_bytes_per_token_are_those_of_what_is_stored(model, tmp_path):
    for kind, (run, options, _) in RUNS.items():
        run(model, documents(), out=tmp_path / kind, **options, **ASIDE)
    stored = Manifest.read(tmp_path / "sequence").counts["tokens"]
    assert record_bytes(tmp_path / "sequence")["units"][0] == stored == without(documents(), [2, 5, 6, 9]).n_tokens
    with pytest.raises(UserError, match="leave out other documents"):
        record_bytes(tmp_path / "sequence", tmp_path / "anchors")


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_stopped_goes_on_and_one_that_left_out_does_not_go_back(model, tmp_path, kind):
    run, options, _ = RUNS[kind]
    run(model, documents(), out=tmp_path / "whole", **options, **ASIDE)
    with pytest.raises(UserError, match="document 'd2'"):
        run(model, documents(), out=tmp_path / "x", **options)
    first = Manifest.read(tmp_path / "x").shards
    assert len(first) == 1 and LISTED not in first[0]
    run(model, documents(), out=tmp_path / "x", **options, **ASIDE)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    with pytest.raises(UserError, match=r"on_bad is 'quarantine' there, which left out \d, and 'stop' now"):
        run(model, documents(), out=tmp_path / "x", **options)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")


def test_interrupted_between_what_is_left_out_it_ends_with_the_same_bytes(model, tmp_path, monkeypatch):
    extract(model, documents(), out=tmp_path / "whole", **ANCHORS, **ASIDE)
    forward = HybridModel.forward
    for limit in (15, 35):  # forwards, of which there are 4 or 5 a document
        left, out = [limit], tmp_path / f"{limit}"

        def interrupted(self, *given, left=left, **more):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return forward(self, *given, **more)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HybridModel, "forward", interrupted)
            extract(model, documents(), out=out, **ANCHORS, **ASIDE)
        manifest = Manifest.read(out)
        assert 0 < len(manifest.shards) < 6 and not (out / QUARANTINE_FILE).exists()
        extract(model, documents(), out=out, **ANCHORS, **ASIDE)
        assert contents(out) == contents(tmp_path / "whole")


def test_a_flipped_byte_of_the_list_is_seen_and_made_good(model, tmp_path):
    out = tmp_path / "x"
    extract(model, documents(), out=out, **ANCHORS, **ASIDE)
    before, file = contents(out), out / QUARANTINE_FILE
    good = file.read_bytes()
    for harmed in (good[:40] + bytes([good[40] ^ 1]) + good[41:], good[:-1], b"", None):
        file.unlink() if harmed is None else file.write_bytes(harmed)
        with pytest.raises(CheckpointError, match=QUARANTINE_FILE):
            load_anchors(out)
        with pytest.raises(CheckpointError, match=QUARANTINE_FILE):
            load_quarantine(out)
        extract(model, documents(), out=out, **ANCHORS, **ASIDE)
        assert contents(out) == before
    # a list that lacks a line and a manifest that says so: only the shards' own entries tell
    manifest = Manifest.read(out)
    manifest.complete = False
    less = good[: good.index(b"\n") + 1]
    schema = load_anchors(out).data.schema
    with ShardDirectory(out, manifest, plan=[], schema=schema, leaves_out=lambda aside: less) as directory:
        directory.manifest.complete = False
        with pytest.raises(AssertionError, match="every document that is left out is listed"):
            directory.finish(manifest.counts)


# ---------------------------------------------------------------- controls: what is lost or miscounted stops the run


def test_a_reason_that_is_lost_stops_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ShardDirectory, "holds", lambda self, index: {"documents": list(self.plan[index])})
    with pytest.raises(AssertionError, match=r"data-00001.* holds \d+ rows and its documents make \d+"):
        extract(model, documents(), out=tmp_path / "x", **ANCHORS, **ASIDE)


def test_a_document_that_is_dropped_without_a_word_stops_the_run(model, tmp_path, monkeypatch):
    def silent(of):
        def told(*given, **more):
            return (found for found in of(*given, **more) if not isinstance(found[1], str))

        return told

    store = importlib.import_module("workbench.datasets.sequence_store")
    monkeypatch.setattr(extraction, "filled_records", silent(passes.filled_records))
    monkeypatch.setattr(store, "whole_documents", silent(sequence_passes.whole_documents))
    for kind, (run, options, _) in RUNS.items():
        with pytest.raises(AssertionError, match="document 2 did not come to its end"):
            run(model, documents(), out=tmp_path / kind, **options, **ASIDE)


def test_records_that_are_lost_or_left_of_a_bad_document_stop_the_run(model, sound, tmp_path, monkeypatch):
    def loses_one(passed, tapes, **more):
        for i, (document, found, last) in enumerate(passes.filled_records(passed, tapes, **more)):
            if passed.ends[0] != 8 or i:
                yield document, found, last

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "filled_records", loses_one)
        with pytest.raises(AssertionError, match=r"data-00000.* holds \d+ rows and its documents make \d+"):
            extract(sound, documents(), out=tmp_path / "x", **ANCHORS, **ASIDE)
    # records that were whole before the bad row came
    monkeypatch.setattr(extraction, "in_order", lambda parts, documents, whole: parts)
    with pytest.raises(AssertionError, match=r"data-00002.* holds \d+ rows and its documents make \d+"):
        extract(model, documents(), out=tmp_path / "y", **ANCHORS, **ASIDE)


def test_counts_are_checked_against_every_document(model, tmp_path):
    extract(model, documents(), out=tmp_path / "x", **ANCHORS, **ASIDE)
    tapes = documents().tapes
    rows = [len(tape) - 5 for tape in tapes]
    manifest = Manifest.read(tmp_path / "x")
    assert kept_counts(manifest, tapes, rows).items() <= manifest.counts.items()
    manifest.shards[2][LISTED].append([4, "no reason"])
    with pytest.raises(AssertionError, match="rows and its documents make"):
        kept_counts(manifest, tapes, rows)
    del manifest.shards[2]
    with pytest.raises(AssertionError, match="every document is in one shard"):
        kept_counts(manifest, tapes, rows)


def test_without_a_quarantine_the_sentence_is_the_same(model, tmp_path):
    extract(model, documents(), out=tmp_path / "x", **ANCHORS, **ASIDE)
    with pytest.raises(NonFiniteError) as stopped:
        extract(model, documents(), out=tmp_path / "y", **ANCHORS)
    assert load_quarantine(tmp_path / "x")["reason"][0] == str(stopped.value)
