"""A directory in the making: what a killed run left is removed and said, and what is somebody else's is not touched."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from workbench.core.errors import UserError
from workbench.core.staging import FILLED, MARK, staged


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left on device")])
def test_what_fails_leaves_nothing(tmp_path, error):
    with (
        pytest.raises(UserError if isinstance(error, OSError) else error),
        staged(tmp_path / "new" / "out") as filled,
    ):
        (filled / "a").write_text("a")
        raise error
    assert not any(tmp_path.iterdir())
