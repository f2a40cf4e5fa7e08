"""A staged directory is whole or absent; what a killed run left is removed, and what is not ours is not touched."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from workbench.core.errors import UserError
from workbench.core.staging import FILLED, MARK, check_new, directory_bytes, staged


def test_a_directory_takes_its_name_when_it_is_whole(tmp_path: Path):
    with staged(tmp_path / "deep" / "out") as stage:
        (stage / "a").write_bytes(b"123")
        assert not (tmp_path / "deep" / "out").exists()
    assert directory_bytes(tmp_path / "deep" / "out") == 3 and len(list((tmp_path / "deep").iterdir())) == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), FileNotFoundError(2, "gone", "source.txt")])
def test_what_fails_leaves_nothing_and_says_itself(tmp_path: Path, error: BaseException):
    with pytest.raises(type(error)) as seen, staged(tmp_path / "deep" / "out") as stage:
        (stage / "a").write_bytes(b"123")
        raise error
    assert seen.value is error and not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_more_is_a_sentence(tmp_path: Path, code: int):
    with pytest.raises(UserError, match=r"could not be written .* nothing of it is kept"), staged(tmp_path / "out"):
        raise OSError(code, "the disk")
    assert not list(tmp_path.iterdir())


def test_a_taken_name_is_refused_and_stays(tmp_path: Path):
    (tmp_path / "out").mkdir()
    with staged(tmp_path / "out") as stage:
        (stage / "a").touch()
    for taken, said in ((tmp_path / "out", "holds files already"), (tmp_path / "out" / "a", "is a file already")):
        with pytest.raises(UserError, match=said), staged(taken):
            raise AssertionError("the block must not run")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


@pytest.fixture
def abandoned(tmp_path) -> Path:
    """What a killed run leaves."""
    stage = tmp_path / ".out.partial"
    (stage / FILLED / "below").mkdir(parents=True)
    (stage / FILLED / "below" / "half").write_bytes(b"half")
    (stage / MARK).touch()
    return stage


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_what_was_left_is_removed_and_said(abandoned, tmp_path, capsys):
    with staged(tmp_path / "out") as filled:
        assert not any(filled.iterdir()) and filled.parent == abandoned
        (filled / "a").write_text("a")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]
    assert capsys.readouterr().err == f"{abandoned}: removed what a run that was killed had left there\n"
    with staged(tmp_path / "other"):
        pass
    assert capsys.readouterr().err == ""


def test_what_was_left_goes_also_where_the_name_is_taken(abandoned, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    with pytest.raises(UserError, match="holds files already"), staged(tmp_path / "out"):
        raise AssertionError("it must not begin")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["a"]


@pytest.mark.parametrize("foreign", ["files", "no mark", "more", "a file", "a link", "a link inside"])
def test_what_is_not_ours_is_refused_and_stays(tmp_path, foreign):
    stage, elsewhere = tmp_path / ".out.partial", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    if foreign == "a file":
        stage.write_text("kept")
    elif foreign == "a link":
        (elsewhere / MARK).touch()
        stage.symlink_to(elsewhere)
    else:
        stage.mkdir()
        if foreign in ("files", "more"):
            (stage / "kept").write_text("kept")
        if foreign in ("more", "a link inside"):
            (stage / MARK).touch()
        if foreign == "a link inside":
            (stage / FILLED).symlink_to(elsewhere)
        if foreign in ("no mark", "more"):
            (stage / FILLED).mkdir()

    def everything() -> dict[str, bytes]:
        return {str(p): p.read_bytes() if p.is_file() else b"" for p in tmp_path.rglob("*")}

    before = everything()
    with pytest.raises(UserError, match="nothing that the workbench left there"), staged(tmp_path / "out"):
        raise AssertionError("it must not begin")
    assert everything() == before


def test_a_stage_that_is_being_filled_is_refused_and_stays(abandoned, tmp_path):
    held = os.open(abandoned, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="is being written by another process"), staged(tmp_path / "out"):
            raise AssertionError("it must not begin")
        assert (abandoned / FILLED / "below" / "half").read_bytes() == b"half"
    finally:
        os.close(held)
    with staged(tmp_path / "out"):
        pass
    assert names(tmp_path) == ["out"]


def test_a_stage_that_another_run_made_meanwhile_is_refused_and_stays(tmp_path, monkeypatch):
    stage, lock = tmp_path / ".out.partial", fcntl.flock

    def between(fd: int, how: int) -> None:
        """The owner removes its stage, and another run makes and fills one of the same name."""
        stage.rmdir()
        (stage / FILLED).mkdir(parents=True)
        (stage / FILLED / "theirs").touch()
        (stage / MARK).touch()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", between)
    stage.mkdir()
    kept = os.open(stage, os.O_RDONLY)  # so that its place in the file system is not taken by the new one
    try:
        with pytest.raises(UserError, match="is being written by another process"), staged(tmp_path / "out"):
            raise AssertionError("it must not begin")
    finally:
        os.close(kept)
    assert names(stage / FILLED) == ["theirs"] and names(tmp_path) == [".out.partial"]


def test_a_link_stays_a_link_and_its_target_is_filled(tmp_path: Path):
    (tmp_path / "there").mkdir()
    for target, name in (("there", "link"), ("gone", "dangling")):
        (tmp_path / name).symlink_to(target)
        with staged(tmp_path / name) as filled:
            (filled / "a").write_text("a")
        assert (tmp_path / name).is_symlink() and names(tmp_path / target) == ["a"]
    assert names(tmp_path) == ["dangling", "gone", "link", "there"]


@pytest.mark.parametrize("out, says", [(".", "this process works in"), ("/", "holds files"), ("x" * 250, "too long")])
def test_a_name_that_cannot_be_taken_is_a_sentence(tmp_path: Path, monkeypatch, out: str, says: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says), staged(out):
        raise AssertionError("it must not begin")
    assert not list(tmp_path.iterdir())


def test_the_working_directory_is_refused_before_work_is_done(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="this process works in"):
        check_new(tmp_path)
    assert check_new("new") == Path("new")
