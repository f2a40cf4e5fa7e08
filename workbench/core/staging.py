"""A directory that is filled beside its final name and takes that name when it is whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.core.errors import UserError
from workbench.core.sealed import sync_directory

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)  # the disk takes no more


def check_new(out: str | Path) -> Path:
    """Refuse a directory that holds anything, before work is done for it.

    Args:
        out: The final name; absent, or an empty directory.

    Returns:
        The path.

    Raises:
        UserError: The name is taken.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds files" if out.is_dir() else "is a file"
        raise UserError(f"out={str(out)!r} {what} already: choose another directory, or delete it")
    return out


@contextmanager
def staged(out: str | Path) -> Iterator[Path]:
    """A directory to fill, which takes its name when the block ends well and is removed when it does not.

    Args:
        out: The final name; absent, or an empty directory.

    Yields:
        The directory to write into, beside the final one.

    Raises:
        UserError: The name is taken, nothing can be written there, or the disk takes no more.
    """
    out = check_new(out)
    stage = out.with_name(f".{out.name}.partial-{os.getpid()}")
    made: list[Path] = []
    try:
        try:
            for path in [*reversed(out.parents), stage]:
                if not path.exists():
                    path.mkdir()
                    made.append(path)
        except OSError as error:
            raise UserError(f"out={str(out)!r} cannot be written to ({error.strerror}): choose another") from None
        yield stage
        os.replace(stage, out)
        sync_directory(out.parent)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        for path in reversed(made):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if isinstance(error, OSError) and error.errno in DISK:
            raise UserError(
                f"out={str(out)!r} could not be written ({error.strerror or error}), and nothing of it is kept: make "
                "room there, or choose another directory"
            ) from error
        raise


def directory_bytes(path: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
