"""Manifests say what made a dataset, are whole or absent, and tell two runs apart."""

from __future__ import annotations

import hashlib
import subprocess

import pytest

from workbench.core import manifest as module
from workbench.core.errors import CheckpointError
from workbench.core.manifest import Manifest, git_state, library_versions, machine, sha256_file, write_atomic


def make(**changes) -> Manifest:
    return Manifest(**{"kind": "anchors", "parameters": {"gamma": 5, "positions": (1, 2)}, "tokenizer": "t", **changes})


def test_it_reads_back_and_leaves_no_temporary(tmp_path):
    made = make(complete=True, files={"b": "2", "a": "1"})
    made.write(tmp_path)
    again = Manifest.read(tmp_path)
    assert again.to_dict() == made.to_dict() and list(again.files) == ["a", "b"]
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]


def test_differences_name_what_keeps_two_runs_apart():
    base = make()
    assert base.differences(make(complete=True, counts={"records": 4}, git=[{"commit": "c", "dirty": False}])) == []
    assert base.differences(make(parameters={"gamma": 4, "positions": [1, 2]})) == [
        "parameters.gamma is 5 there and 4 now"
    ]
    assert base.differences(make(parameters={"gamma": 5})) == ["parameters.positions is [1, 2] there and None now"]
    assert base.differences(make(tokenizer="u", machine={"threads": 2})) == [
        "tokenizer is 't' there and 'u' now",
        "machine.threads is None there and 2 now",
    ]


def test_a_number_that_json_lacks_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError):
        make(parameters={"temperature": float("nan")}).write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    write_atomic(file, b"old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert sha256_file(file) == hashlib.sha256(b"old").hexdigest()


def test_missing_is_a_sentence(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        Manifest.read(tmp_path / "nowhere")


def test_the_checkout_is_named_with_its_state(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false", "commit", "--no-verify", "-m", "m")
    clean = git_state(tmp_path)
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "b").write_text("untracked files are the reader's own")
    assert git_state(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**clean, "dirty": True}


def test_versions_and_machine():
    versions = library_versions(["numpy", "no-such-library"])
    assert set(versions) == {"python", "numpy"}
    here = machine(device="cuda", device_name="a GPU", threads=2)
    assert here["device_name"] == "a GPU" and here["threads"] == 2 and here["cpu"]
    assert machine()["device_name"] == machine()["cpu"]
