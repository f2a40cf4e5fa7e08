"""kill -9 at every step and at random moments: the resumed dataset has the bytes of an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from workbench.core.errors import CheckpointError
from workbench.core.manifest import Manifest
from workbench.datasets.shards import load_shards

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"plain": "plain", "extract": "anchors", "answers": "corpus", "quarantine": "anchors"}


class Server:
    """The process of kill_server.py."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kill_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def start(self, **order: Any) -> int:
        """Begin a run; its process id."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._number()

    def end(self) -> int:
        """Wait for the run; its exit code."""
        return self._number()

    def run(self, **order: Any) -> int:
        self.start(**order)
        return self.end()

    def _number(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    assert made.process.stdin is not None and made.process.stdout is not None
    made.process.stdin.close()
    made.process.wait(60)
    made.process.stdout.close()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def marks(path: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every shard that has its name."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.glob("data-*.arrow")}


def faults(server: Server, engine: str, out: Path, whole: dict[str, bytes], **order: Any) -> list[str]:
    """Go on with what a kill left, and say what is not as it should be."""
    before = marks(out) if out.exists() else {}
    found = []
    if (out / "manifest.json").exists() and not Manifest.read(out).complete:
        with pytest.raises(CheckpointError, match="is incomplete"):
            load_shards(out, kind=KINDS[engine])
    assert server.run(engine=engine, out=str(out), **order) == 0
    after = marks(out)
    found += [f"{name} was written again" for name, mark in before.items() if after.get(name) != mark]
    there = contents(out)
    found += [f"{name} differs" for name in sorted({*whole, *there}) if whole.get(name) != there.get(name)]
    return found


def killed_at(
    server: Server, engine: str, tmp_path: Path, step: int, whole: dict[str, bytes], **order: Any
) -> list[str]:
    out = tmp_path / f"{engine}-{step}"
    code = server.run(engine=engine, out=str(out), steps=str(tmp_path / "steps"), at=step, **order)
    assert code == -signal.SIGKILL, f"step {step} ended with {code}"
    return faults(server, engine, out, whole, **order)


def whole_run(server: Server, engine: str, tmp_path: Path) -> tuple[dict[str, bytes], int, float]:
    """Bytes, steps and seconds of an uninterrupted run."""
    out, steps = tmp_path / "whole", tmp_path / "steps"
    server.start(engine=engine, out=str(out), steps=str(steps))
    began = time.monotonic()
    assert server.end() == 0
    return contents(out), int(steps.read_text()), time.monotonic() - began


def test_killed_at_any_step_it_ends_with_the_same_bytes(server, tmp_path):
    whole, steps, _ = whole_run(server, "plain", tmp_path)
    assert steps > 40 and len([name for name in whole if name.endswith(".arrow")]) == 3
    for step in range(1, steps + 1):
        assert killed_at(server, "plain", tmp_path, step, whole) == [], f"step {step} of {steps}"


def test_mistakes_are_found(server, tmp_path):
    whole, steps, _ = whole_run(server, "plain", tmp_path)
    mistaken = (
        killed_at(server, "plain", tmp_path / "a", step, whole, mistake="named first") for step in range(1, steps)
    )
    assert next(filter(None, mistaken)) == ["data-00000-of-00003.arrow was written again"]
    states = killed_at(server, "plain", tmp_path / "b", steps // 2, whole, mistake="a state of its own")
    assert states == ["manifest.json differs"]


def test_killed_where_documents_are_left_out_it_ends_with_the_same_bytes(server, tmp_path):
    whole, steps, _ = whole_run(server, "quarantine", tmp_path)
    left_out = whole["quarantine.jsonl"].count(b"\n")
    records = load_shards(tmp_path / "whole", kind="anchors")
    assert 1 < left_out < 23 and len(records) == 4 * (24 - left_out)
    for step in (steps // 3, 2 * steps // 3, steps - 4, steps - 1):
        assert killed_at(server, "quarantine", tmp_path, step, whole) == [], f"step {step} of {steps}"


def kills(server: Server, tmp_path: Path, count: int, seed: int) -> None:
    whole, _, seconds = whole_run(server, "extract", tmp_path)
    draw, left = random.Random(seed), []
    for i in range(count):
        out = tmp_path / f"killed-{i}"
        pid = server.start(engine="extract", out=str(out))
        time.sleep(draw.uniform(0, seconds))
        with suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)
        server.end()
        left.append(len(marks(out)) if out.exists() else 0)
        assert faults(server, "extract", out, whole) == [], f"kill {i} of seed {seed}"
    assert any(0 < n < 12 for n in left), left


def test_killed_at_random_moments_it_ends_with_the_same_bytes(server, tmp_path):
    kills(server, tmp_path, 8, seed=0)


def test_sampled_answers_that_were_killed_end_with_the_same_bytes(server, tmp_path):
    whole, steps, _ = whole_run(server, "answers", tmp_path)
    assert len([name for name in whole if name.endswith(".arrow")]) == 4
    for step in (steps // 3, steps // 2, steps - 8):
        assert killed_at(server, "answers", tmp_path, step, whole) == [], f"step {step} of {steps}"


@pytest.mark.full
def test_killed_at_forty_more_random_moments(server, tmp_path):
    kills(server, tmp_path, 44, seed=1)
