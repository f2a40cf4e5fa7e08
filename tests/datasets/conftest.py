"""Documents and runs for tests that stop processes, and who is a child of whom."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from workbench.core.tape import Corpus, Tape


def random_documents(count: int = 6, length: int = 40, vocab: int = 83) -> Corpus:
    """Documents of drawn tokens, no two of one length."""
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, vocab, length + 3 * i) for i in range(count)]
    return Corpus([Tape(f"d{i}", t, prompt_len=i, source="s", split="heldout") for i, t in enumerate(rows)], name="c")


def directory_bytes(path: Path) -> dict[str, bytes]:
    """Every file of a directory; what is no file is an error."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def descendants(pid: int) -> dict[int, str]:
    """Process ids below one, with what each calls itself; threads and dead ones are not among them."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            name = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.name)] = (parent, name)
    found: dict[int, str] = {}
    grew = True
    while grew:
        below = {
            p: name for p, (parent, name) in parents.items() if p not in found and (parent == pid or parent in found)
        }
        found |= below
        grew = bool(below)
    return found


def kill_worker(choose: Callable[[list[int]], int]) -> int | None:
    """Send SIGKILL to one worker of a cluster that this process started; None while there is no worker."""
    below = descendants(os.getpid())
    workers = sorted(pid for pid, name in below.items() if "ShardWriter" in name)
    if not workers:
        return None
    pid = choose(workers)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    return pid


@pytest.fixture(scope="session")
def kills() -> SimpleNamespace:
    """``documents``, ``contents``, ``descendants`` and ``kill_worker`` of this file."""
    return SimpleNamespace(
        documents=random_documents, contents=directory_bytes, descendants=descendants, kill_worker=kill_worker
    )
