"""Whether files hold the bytes that were written: every hash, at once or on threads beside the work that goes on.

A size is looked at first, since it costs nothing, and proves nothing: only the hash of every byte does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from workbench.core.errors import CheckpointError
from workbench.core.manifest import Manifest, sha256_file

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))  # half of the machine is left to whoever makes rows


def verify(path: Path, manifest: Manifest, *, hashes: bool = True) -> None:
    """Check every listed file of a dataset directory.

    Args:
        path: The directory.
        manifest: Its manifest.
        hashes: Compare the hash of every byte; False looks only whether files are there and of their size.

    Raises:
        CheckpointError: A file is missing or its bytes are not those that were written.
    """
    listed = {shard["file"]: shard["sha256"] for shard in manifest.shards} | manifest.files
    sizes = {shard["file"]: shard["bytes"] for shard in manifest.shards}
    for name in listed:
        file = path / name
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks {name}, which its manifest lists: restore it, or run again into the directory"
            )
        if file.stat().st_size != sizes.get(name, file.stat().st_size):
            raise _changed(file)
    proof = Proof(path, listed if hashes else {})
    if broken := proof.broken():
        raise _changed(path / broken[0])


def _changed(file: Path) -> CheckpointError:
    return CheckpointError(
        f"{file} does not match the hash in its manifest, so it was damaged or changed after it was written: "
        "restore it, or run again into the directory to make it anew"
    )


class Proof:
    """Hashes of files, taken on threads from the moment it is made.

    Args:
        path: The directory.
        expected: sha256 by file name.
    """

    def __init__(self, path: Path, expected: Mapping[str, str]) -> None:
        self._path, self._expected = path, dict(expected)
        self._left = iter(list(self._expected.items()))
        self._broken: list[str] = []
        self._error: BaseException | None = None
        self._stop = Event()
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(min(THREADS, len(self._expected)))]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        try:
            for name, digest in self._left:  # the threads share one iterator, whose next() is atomic
                if self._stop.is_set():
                    return
                if not matches(self._path / name, digest):
                    self._broken.append(name)
        except BaseException as error:
            self._error = error

    def broken(self) -> Sequence[str]:
        """Wait for the last hash.

        Returns:
            Names of files whose bytes are not those expected, in order.
        """
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return sorted(self._broken)

    def stop(self) -> None:
        """Give up what is not hashed yet."""
        self._stop.set()


def matches(file: Path, digest: str) -> bool:
    """True for a file that can be read and has this hash."""
    try:
        return sha256_file(file) == digest
    except OSError:
        return False


def unharmed(path: Path, manifest: Manifest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What a manifest lists and the directory holds: shards by their size, the small files beside them by their hash.

    A shard that is listed and still has its temporary name takes its own: the run that wrote it was killed between.

    Args:
        path: The directory.
        manifest: Its manifest.

    Returns:
        Entries of shards, and of files.
    """
    with os.scandir(path) as found:
        sizes = {entry.name: entry.stat().st_size for entry in found if entry.is_file()}
    shards = []
    for shard in manifest.shards:
        name, size = shard["file"], shard["bytes"]
        if name not in sizes and sizes.get(name + ".tmp") == size:
            os.replace(path / (name + ".tmp"), path / name)
            sizes[name] = size
        if sizes.get(name) == size:
            shards.append(shard)
    return shards, {name: digest for name, digest in manifest.files.items() if matches(path / name, digest)}
