"""What resuming finds and does: any damage is seen and made good, nothing else is touched, runs are not mixed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import LOG, Manifest
from workbench.core.sealed import append_line, seal, unseal
from workbench.core.tape import Corpus, Tape
from workbench.corpus import corpus
from workbench.datasets import estimate, extract, proof, shards
from workbench.datasets.shards import ShardDirectory, load_shards
from workbench.model.weights.load import load_model

SHARDS = [f"data-{i:05d}-of-00003.arrow" for i in range(3)]


@pytest.fixture
def runs(kill_server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runs of kill_server.py, in one state of the checkout."""
    monkeypatch.setattr(shards, "git_state", lambda: {"commit": "c", "dirty": False})
    return kill_server


@pytest.fixture
def made(runs: ModuleType, tmp_path: Path) -> Path:
    """A finished dataset."""
    runs.plain(tmp_path / "made")
    return tmp_path / "made"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def mark(file: Path) -> tuple[int, int]:
    return file.stat().st_ino, file.stat().st_mtime_ns


def opened(path: Path) -> int:
    return load_shards(path, kind="plain").num_rows


# ---------------------------------------------------------------- damage is seen


def test_every_flipped_byte_and_every_cut_is_seen_on_load(made):
    """Each byte of each file, one of its bits."""
    seen = 0
    for name, good in contents(made).items():
        for at in range(len(good)):
            changed = bytearray(good)
            changed[at] ^= 1 << at % 8
            (made / name).write_bytes(bytes(changed))
            with pytest.raises(CheckpointError):
                opened(made)
            seen += 1
        for end in {0, 1, len(good) // 2, len(good) - 1}:
            (made / name).write_bytes(good[:end])
            with pytest.raises(CheckpointError):
                load_shards(made, kind="plain", check_hashes=name != SHARDS[0])  # a size shows without hashes
        (made / name).write_bytes(good)
    assert opened(made) == 39 and seen > 5000
    changed = bytearray((made / SHARDS[1]).read_bytes())
    changed[-100] ^= 1
    (made / SHARDS[1]).write_bytes(bytes(changed))
    assert load_shards(made, kind="plain", check_hashes=False).num_rows == 39, "control: only the hash shows it"


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone", "empty"])
@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[2], "notes.txt", "state.json", "dataset_info.json"])
def test_only_what_is_broken_is_made_again(runs, made, name, harm, capsys):
    before, kept = contents(made), {other: mark(made / other) for other in SHARDS if other != name}
    data = before[name]
    harmed = {"flipped": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], "cut": data[:-3], "empty": b""}
    (made / name).unlink() if harm == "gone" else (made / name).write_bytes(harmed[harm])
    with pytest.raises(CheckpointError):
        opened(made)
    runs.plain(made)
    assert contents(made) == before and opened(made) == 39
    assert {other: mark(made / other) for other in kept} == kept
    told = name.endswith("arrow") and harm == "flipped"
    assert (f"made again, since their bytes are not those that were written: {name}" in capsys.readouterr().err) == told


def test_a_finished_dataset_is_opened_and_not_touched(runs, made, monkeypatch):
    before = {name: mark(made / name) for name in contents(made)}
    monkeypatch.setattr(runs.np.random, "default_rng", None)  # making a row would fail
    runs.plain(made)
    assert {name: mark(made / name) for name in contents(made)} == before


def test_hashes_are_taken_beside_the_run(runs, made, monkeypatch):
    """A run begins before the first hash is done, and does not end before the last."""
    (made / SHARDS[2]).unlink()
    order: list[str] = []
    began = Event()
    matches, write = proof.matches, ShardDirectory.write

    def slow(file: Path, digest: str) -> bool:
        if file.suffix == ".arrow":
            began.wait(30)
            order.append("hash")
        return matches(file, digest)

    def writing(self: ShardDirectory, index: int, batches: Any) -> None:
        order.append("write")
        began.set()
        write(self, index, batches)

    monkeypatch.setattr(proof, "matches", slow)
    monkeypatch.setattr(ShardDirectory, "write", writing)
    runs.plain(made)
    assert order[0] == "write" and sorted(order) == ["hash", "hash", "write"] and opened(made) == 39


def test_a_shard_that_was_listed_and_not_named_takes_its_name(runs, made):
    before = contents(made)
    manifest = Manifest.read(made)
    (last,) = manifest.shards[2:]
    manifest.shards, manifest.complete = manifest.shards[:2], False
    manifest.write(made)
    append_line(made / LOG, last)
    (made / SHARDS[2]).rename(made / f"{SHARDS[2]}.tmp")
    there = mark(made / f"{SHARDS[2]}.tmp")
    runs.plain(made)
    assert contents(made) == before and mark(made / SHARDS[2]) == there
    manifest.write(made)
    append_line(made / LOG, last)
    (made / SHARDS[2]).rename(made / f"{SHARDS[2]}.tmp")
    (made / f"{SHARDS[2]}.tmp").write_bytes(before[SHARDS[2]][:-8] + b"12345678")
    runs.plain(made)
    assert contents(made) == before, "one of its size and other bytes is made again"


def test_a_damaged_manifest_is_a_sentence_and_nothing_is_touched(runs, made):
    file = made / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b"plain", b"plaim"))
    before = contents(made)
    with pytest.raises(
        CheckpointError, match=r"do not match the hash at its end.*restore it, or make the dataset again"
    ):
        runs.plain(made)
    assert contents(made) == before


def test_a_lost_file_that_this_run_cannot_make_is_a_sentence(runs, made):
    value = unseal((made / "manifest.json").read_bytes())
    value["files"]["other.txt"] = "0" * 64
    (made / "manifest.json").write_bytes(seal(value))
    before = contents(made)
    with pytest.raises(CheckpointError, match=r"has lost other\.txt, or it was damaged"):
        runs.plain(made)
    assert contents(made) == before


# ---------------------------------------------------------------- runs are not mixed


def of_versions(made: Path, **versions: str) -> None:
    """As if another version of a library had begun it."""
    manifest = Manifest.read(made)
    manifest.versions = versions
    manifest.complete, manifest.shards = False, manifest.shards[:1]
    manifest.write(made)


def test_another_major_version_is_refused_and_a_minor_one_is_noted(runs, made):
    whole = contents(made)
    for there in ("3.0.0", "1.9"):
        of_versions(made, numpy=there)
        with pytest.raises(UserError, match=f"versions.numpy is '{there}' there and '2.1.0' now. Repeat"):
            runs.plain(made)
    of_versions(made, numpy="2.0.5")
    runs.plain(made)
    manifest = Manifest.read(made)
    assert manifest.complete and manifest.versions == {"numpy": "2.0.5"}
    assert manifest.later_versions == [{"numpy": "2.1.0"}]
    del whole["manifest.json"]
    assert {name: (made / name).read_bytes() for name in whole} == whole


@pytest.mark.parametrize(
    ("field", "other", "says"),
    [
        ("parameters", {"rows": [1]}, r"parameters\.rows is \[1\] there"),
        ("model", {"fingerprint": "f"}, r"model\.fingerprint is 'f' there and None now"),
        ("tokenizer", "t", "tokenizer is 't' there and '' now"),
        ("template", "t", "template is 't' there and '' now"),
        ("corpus", {"fingerprint": "f"}, r"corpus\.fingerprint is 'f' there"),
        ("machine", {"threads": 3}, r"machine\.threads is 3 there"),
        ("kind", "other", "kind is 'other' there and 'plain' now"),
    ],
)
def test_another_run_is_refused(runs, made, field, other, says):
    manifest = Manifest.read(made)
    setattr(manifest, field, other)
    manifest.write(made)
    before = contents(made)
    with pytest.raises(UserError, match=says):
        runs.plain(made)
    assert contents(made) == before


# ---------------------------------------------------------------- Ctrl-C


def test_an_interrupt_says_how_to_go_on(runs, tmp_path, monkeypatch):
    runs.plain(tmp_path / "whole")
    write = ShardDirectory.write

    def interrupted(at: int) -> Callable[..., None]:
        def run(self: ShardDirectory, index: int, batches: Any) -> None:
            if index == at:
                next(iter(batches))
                raise KeyboardInterrupt
            write(self, index, batches)

        return run

    for at, says in [
        (2, r"2 finished shards in .*run the same again to go on from there"),
        (1, r"1 finished shard in .*run the same again to go on from there"),
        (0, "nothing was kept: run the same again to begin anew"),
    ]:
        out = tmp_path / f"stopped-{at}"
        with monkeypatch.context() as patch:
            patch.setattr(ShardDirectory, "write", interrupted(at))
            with pytest.raises(KeyboardInterrupt) as stop:
                runs.plain(out)
        (note,) = stop.value.__notes__
        assert re.search(says, note), note
        assert out.exists() == bool(at) and not list(tmp_path.rglob("*.tmp"))
        runs.plain(out)
        assert contents(out) == contents(tmp_path / "whole")


# ---------------------------------------------------------------- facts


def test_records_name_their_documents_template_and_norm(tiny_dir, tmp_path):
    model = load_model(tiny_dir)
    (tmp_path / "text.txt").write_text("the other weather is theirs " * 4)
    tapes = corpus(tmp_path / "text.txt", tokenizer=model.tokenizer)
    extract(model, tapes, out=tmp_path / "x", gamma=2, top_k=4)
    manifest = Manifest.read(tmp_path / "x")
    lines = [json.loads(line) for line in (tmp_path / "x" / "documents.jsonl").read_text().splitlines()]
    assert [line["doc_id"] for line in lines] == [tape.doc_id for tape in tapes]
    assert lines[0]["sha256"] == hashlib.sha256(tapes[0].tokens.astype("<i4").tobytes()).hexdigest()
    assert lines[0]["tokens"] == len(tapes[0])
    template = (tiny_dir / "chat_template.jinja").read_text()
    assert manifest.template == hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16]
    norm = manifest.extra["norm"]
    weight = model.norm.detach().float().numpy().tobytes()
    assert norm["fingerprint"] == hashlib.sha256(weight).hexdigest()[:16] and norm["eps"] and norm["kind"]
    assert manifest.extra["pre_norm"] is True and "counted from 0" in manifest.extra["layer_convention"]
    assert manifest.parameters["seed"] == 20260811 and manifest.model["dtype"] == "float32"


def test_listing_costs_a_line_whatever_the_number_of_shards(tmp_path):
    manifest = Manifest(kind="plain", parameters={})
    manifest.shards = [{"file": f"data-{i:05d}", "sha256": "0" * 64, "bytes": 1, "rows": 1} for i in range(500)]
    manifest.write(tmp_path)
    whole = (tmp_path / "manifest.json").stat().st_size
    for i in (700, 600):
        manifest.list_shard(tmp_path, {**manifest.shards[0], "file": f"data-{i:05d}"})
    assert (tmp_path / LOG).stat().st_size < whole / 50 and (tmp_path / "manifest.json").stat().st_size == whole
    again = Manifest.read(tmp_path)
    assert again.shards == manifest.shards and [s["file"] for s in again.shards][-2:] == ["data-00600", "data-00700"]
    manifest.write(tmp_path)
    assert not (tmp_path / LOG).exists() and Manifest.read(tmp_path).shards == manifest.shards


def test_sizes_are_estimated_closely(runs, tiny, tmp_path, monkeypatch, capsys):
    told: list[int] = []
    check = estimate.check_room

    def noted(out: Path, needed: int, **more: Any) -> str:
        told.append(needed)
        return check(out, needed, **more)

    monkeypatch.setattr(shards, "check_room", noted)
    tapes = Corpus([Tape(f"document {i}", np.arange(80) % 83, source="é" * i) for i in range(12)])
    extract(tiny(), tapes, out=tmp_path / "a", gamma=3, top_k=8, anchors="all", shard_rows=400)
    runs.plain(tmp_path / "b", rows=(300,) * 9, shard_rows=900)
    for path, needed in zip((tmp_path / "a", tmp_path / "b"), told, strict=True):
        size = sum(len(data) for name, data in contents(path).items() if name.endswith("arrow"))
        assert 0.98 * size < needed < 1.05 * size + 4000, (size, needed)
    assert "to write in 3 shards" in capsys.readouterr().err
    assert estimate.value_bits(pa.list_(pa.bool_(), 5)) == 5
