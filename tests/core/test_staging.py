"""A staged directory is whole or absent, and what keeps it from being written is a sentence."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from workbench.core.errors import UserError
from workbench.core.staging import directory_bytes, staged


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
