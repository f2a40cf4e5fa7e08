"""Disks that are full or closed: a sentence, nothing finished is lost, and the run goes on when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from workbench.core.errors import UserError
from workbench.core.manifest import Manifest
from workbench.datasets import estimate, shards
from workbench.datasets.shards import ShardDirectory, load_shards

BIG = dict(rows=(2000,) * 12, shard_rows=4000)  # six shards of about 190 kB


@pytest.fixture
def runs(kill_server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runs of kill_server.py, in one state of the checkout."""
    monkeypatch.setattr(shards, "git_state", lambda: {"commit": "c", "dirty": False})
    return kill_server


def mounted(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 700 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)):
        pytest.skip("a tmpfs cannot be mounted here; the full disk is also tried by writes that fail")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def marks(path: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.glob("data-*.arrow")}


def failing(code: int) -> Callable[..., None]:
    def act(part: Callable[[], Any]) -> None:
        part()
        raise OSError(code, os.strerror(code))

    return act


# ---------------------------------------------------------------- full


def test_a_disk_that_fills_up_loses_nothing(runs, small_disk, tmp_path):
    runs.plain(tmp_path / "whole", **BIG)
    out = small_disk / "x"
    with pytest.raises(
        UserError, match=r"could not be written \(the disk is full: No space left on device\): finished"
    ):
        runs.plain(out, expected=None, **BIG)
    left, manifest = marks(out), Manifest.read(out)
    assert 1 <= len(left) < 6 and [shard["file"] for shard in manifest.shards] == sorted(left) and not manifest.complete
    assert not list(out.glob("*.tmp"))
    assert mounted("-o", "remount,size=8m", str(small_disk))
    runs.plain(out, **BIG)
    assert contents(out) == contents(tmp_path / "whole")
    assert {name: mark for name, mark in marks(out).items() if name in left} == left
    assert load_shards(out, kind="plain").num_rows == 24_000


def test_a_full_disk_at_any_step_is_a_sentence_and_loses_nothing(runs, tmp_path):
    runs.plain(tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    sentences = set()
    for step in range(1, 200):
        out = tmp_path / f"step-{step}"
        with pytest.MonkeyPatch.context() as patch:
            steps = runs.Steps(step, failing(errno.ENOSPC), ops=("write", "fsync"), on=True)
            steps.install(patch.setattr)
            try:
                runs.plain(out)
                break
            except UserError as error:
                assert "No space left on device" in str(error)
                sentences.add("could not be written" if "could not be" in str(error) else "cannot be written to")
        left = marks(out) if out.exists() else {}
        assert not list(tmp_path.rglob("*.tmp"))
        assert out.exists() == bool(left), "what holds no shard is not left"
        runs.plain(out)
        assert contents(out) == whole
        assert {name: mark for name, mark in marks(out).items() if name in left} == left
    assert 30 < step < 199 and len(sentences) == 2


def test_too_little_room_is_refused_before_anything_is_written(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "deep" / "x"
    free = [600_000]
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(UserError, match=r"going to need about 1\.1 MB more and its disk has 600\.0 kB left: make"):
        runs.plain(out, **BIG)
    assert not (tmp_path / "deep").exists()
    free[0] = 1_300_000
    runs.plain(out, **BIG)
    assert "about 1.1 MB to write in 6 shards; 1.3 MB are free" in capsys.readouterr().err
    (out / "data-00003-of-00006.arrow").unlink()
    free[0] = 400_000
    runs.plain(out, **BIG)  # one shard fits
    assert "to write in 1 shard; 5 of 6 shards are there already; 400.0 kB are free" in capsys.readouterr().err
    free[0] = 10**12
    (out / "data-00003-of-00006.arrow").unlink()
    runs.plain(out, **BIG)
    assert "are free" not in capsys.readouterr().err


# ---------------------------------------------------------------- closed


def test_a_read_only_disk_is_a_sentence_and_what_is_whole_is_opened(runs, small_disk):
    out = small_disk / "x"
    runs.plain(out)
    before = contents(out)
    half = small_disk / "half"
    runs.plain(half)
    (half / "state.json").unlink()
    assert mounted("-o", "remount,ro", str(small_disk))
    runs.plain(out)
    assert contents(out) == before and load_shards(out, kind="plain").num_rows == 39
    for other in (half, small_disk / "new"):
        with pytest.raises(
            UserError, match=r"cannot be written to \(.*Read-only file system.*choose another directory"
        ):
            runs.plain(other)
    assert sorted(contents(half)) == sorted(before.keys() - {"state.json"}) and not (small_disk / "new").exists()


def test_a_directory_that_closes_meanwhile_is_a_sentence(runs, tmp_path, monkeypatch):
    runs.plain(tmp_path / "whole")
    place, out = ShardDirectory.place, tmp_path / "x"

    def closed(self: ShardDirectory, entry: dict[str, Any]) -> None:
        if self.manifest.shards:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        place(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(ShardDirectory, "place", closed)
        with pytest.raises(
            UserError, match=r"Read-only file system.*finished shards are kept; make the directory writ"
        ):
            runs.plain(out)
    assert len(marks(out)) == 1 and not list(out.glob("*.tmp"))
    runs.plain(out)
    assert contents(out) == contents(tmp_path / "whole")
