"""JSON files that prove themselves: whole ones that end with their own hash, and logs whose lines begin with theirs.

A flipped byte anywhere, or a cut, is seen when the file is read. A log is written line by line, each synced, so that
a killed writer loses at most the line it was writing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_END = b',\n "sha256": "%s"\n}\n'


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def seal(value: Mapping[str, Any]) -> bytes:
    """A mapping as indented JSON whose last member, "sha256", is the hash of every byte before it.

    Args:
        value: At least one member, none of that name; NaN is refused.

    Returns:
        The file's bytes.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    body = text.removesuffix("\n}").encode()
    return body + _END % _digest(body)


def unseal(data: bytes) -> dict[str, Any]:
    """The mapping of a sealed file.

    Args:
        data: The file's bytes.

    Returns:
        The mapping, without its hash.

    Raises:
        ValueError: A byte was changed, or the file was cut or added to.
    """
    body = data[: -len(_END % _digest(b""))]
    if data != body + _END % _digest(body):
        raise ValueError("its bytes do not match the hash at its end")
    value: dict[str, Any] = json.loads(data)
    del value["sha256"]
    return value


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add a line to a log and sync it; a line that cannot be written whole leaves the log as it was.

    Args:
        path: The log, made if needed.
        value: What the line holds.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    line = memoryview(_digest(text) + b" " + text + b"\n")
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        before = os.fstat(handle).st_size
        try:
            while line:
                line = line[os.write(handle, line) :]
            os.fsync(handle)
        except BaseException:
            os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)
    if not before:
        sync_directory(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What the unharmed lines of a log hold, in order; nothing where there is no log.

    Args:
        path: The log.

    Returns:
        A mapping per line; lines that were cut or changed are left out.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        digest, _, text = line.partition(b" ")
        if text and digest == _digest(text):
            found.append(json.loads(text))
    return found


def sync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
