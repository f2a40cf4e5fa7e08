"""A directory that is filled beside its final name and takes that name when it is whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.core.errors import UserError
from workbench.core.progress import say
from workbench.core.sealed import sync_directory

MARK, FILLED = ".workbench-partial", "directory"  # all that a stage ever holds
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # the disk takes no more


def check_new(out: str | Path) -> Path:
    """Refuse a directory that holds anything, before work is done for it.

    Args:
        out: The final name; absent, or an empty directory.

    Returns:
        The path.

    Raises:
        UserError: The name is taken, or is that of the working directory.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds files" if out.is_dir() else "is a file"
        raise UserError(f"out={str(out)!r} {what} already: choose another directory, or delete it")
    if os.path.realpath(out) == os.path.realpath("."):
        raise UserError(f"out={str(out)!r} is the directory that this process works in: choose another")
    return out


@contextmanager
def staged(out: str | Path) -> Iterator[Path]:
    """A directory to fill, which takes its name when the block ends well and is removed when it does not.

    It lies in a stage beside the final name, which is locked while it is filled. What a process that was killed has
    left there is removed by the next one with the same target, which says so; a directory of that name that is not
    such a stage is refused and left as it is.

    Args:
        out: The final name; absent, or an empty directory.

    Yields:
        The directory to write into, beside the final one.

    Raises:
        UserError: The name is taken or being written, nothing can be written there, or the disk takes no more.
    """
    final = Path(os.path.realpath(out))  # a link to an empty directory stays a link
    stage = final.parent / f".{final.name}.partial"
    made: list[Path] = []
    lock = -1
    try:
        try:
            if not stage.exists():
                check_new(out)
            for path in reversed(final.parents):
                if not path.exists():
                    path.mkdir()
                    made.append(path)
            lock = _locked(stage, out)
            _empty(stage)
            check_new(out)
            (stage / FILLED).mkdir()
        except OSError as error:
            raise UserError(f"out={str(out)!r} cannot be written to ({error.strerror}): choose another") from None
        yield stage / FILLED
        os.replace(stage / FILLED, final)
        sync_directory(final.parent)
    except BaseException as error:
        if lock >= 0:
            _remove(stage)
        for path in reversed(made):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if isinstance(error, OSError) and error.errno in DISK:
            raise UserError(
                f"out={str(out)!r} could not be written ({error.strerror or error}), and nothing of it is kept: make "
                "room there, or choose another directory"
            ) from error
        raise
    else:
        _remove(stage)
    finally:
        if lock >= 0:
            os.close(lock)


def _locked(stage: Path, out: str | Path) -> int:
    """Make the stage, or take over an abandoned one; the lock on it, which ends with the process."""
    with suppress(FileExistsError):
        stage.mkdir()
    if not _ours(stage):
        raise UserError(
            f"{stage} is in the way and is nothing that the workbench left there: move it, or choose another out"
        )
    lock = os.open(stage, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), os.stat(stage)):  # removed by its owner, and made by another, meanwhile
            raise BlockingIOError
    except OSError as error:
        os.close(lock)
        if isinstance(error, (BlockingIOError, FileNotFoundError)):
            raise UserError(f"out={str(out)!r} is being written by another process: wait, or choose another") from None
        raise
    return lock


def _ours(stage: Path) -> bool:
    """True for a stage, whole or half removed, and for an empty directory."""
    if stage.is_symlink() or not stage.is_dir():
        return False
    held = {path.name for path in stage.iterdir()}
    return not held or (MARK in held and held <= {MARK, FILLED} and not (stage / FILLED).is_symlink())


def _empty(stage: Path) -> None:
    if (stage / MARK).exists():
        if (stage / FILLED).exists():
            shutil.rmtree(stage / FILLED)
        say(f"{stage}: removed what a run that was killed had left there")
    (stage / MARK).touch()


def _remove(stage: Path) -> None:
    """The mark goes last: what is left half removed is still known."""
    shutil.rmtree(stage / FILLED, ignore_errors=True)
    with suppress(OSError):
        (stage / MARK).unlink(missing_ok=True)
        stage.rmdir()


def directory_bytes(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
