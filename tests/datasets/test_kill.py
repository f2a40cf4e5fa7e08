"""kill -9 at every step and at random moments: what is made after it has the bytes of an uninterrupted run."""

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
from workbench.core.staging import FILLED, MARK, staged
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


# ---------------------------------------------------------------- exports

FORMATS = ("deepspec", "specforge-dspark")


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory; an empty directory below it is a fault, and so are hidden names."""
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    assert all(any(p.iterdir()) for p in path.rglob("*") if p.is_dir())
    return found


@pytest.fixture(scope="module")
def store(server, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("store") / "data"
    assert server.run(engine="sequence", out=str(out)) == 0
    return out


def exported(server: Server, store: Path, to: str, tmp_path: Path) -> tuple[dict[str, bytes], int, float]:
    """Bytes, steps and seconds of an uninterrupted export, alone in its directory."""
    out, steps = tmp_path / "whole" / "out", tmp_path / "steps"
    given = {"data": str(store), "to": to}
    server.start(engine="export", out=str(out), steps=str(steps), given=given)
    began = time.monotonic()
    assert server.end() == 0
    seconds = time.monotonic() - began
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    return tree(out), int(steps.read_text()), seconds


def test_an_export_killed_at_some_steps_is_made_anew_and_leaves_nothing(server, store, tmp_path):
    export_kills(server, store, tmp_path, "specforge-dspark", every=3, moments=4)


@pytest.mark.full
@pytest.mark.parametrize("to", FORMATS)
def test_an_export_killed_at_any_step_is_made_anew_and_leaves_nothing(server, store, tmp_path, to):
    export_kills(server, store, tmp_path, to, every=1, moments=30)


def export_kills(server: Server, store: Path, tmp_path: Path, to: str, *, every: int, moments: int) -> None:
    """Kill an export at its steps and at random moments, and make it again each time."""
    whole, steps, seconds = exported(server, store, to, tmp_path)
    given, draw, left = {"data": str(store), "to": to}, random.Random(4), list[bool]()
    for kill in [*range(1, steps + 1, every), *range(steps + 1, steps + 1 + moments)]:
        out = tmp_path / f"{kill}" / "out"
        if kill <= steps:
            order = dict(steps=str(tmp_path / "steps"), at=kill)
            assert server.run(engine="export", out=str(out), given=given, **order) == -signal.SIGKILL
        else:
            pid = server.start(engine="export", out=str(out), given=given)
            time.sleep(draw.uniform(0, seconds))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            server.end()
        stage = out.with_name(".out.partial")
        left.append((stage / FILLED).is_dir() and any((stage / FILLED).iterdir()))
        there = out.exists()  # the kill came after the export had its name
        assert not there or tree(out) == whole
        code = server.run(engine="export", out=str(out), given=given)
        assert code == (1 if there else 0), f"kill {kill} of {steps} steps"
        assert tree(out) == whole and [path.name for path in out.parent.iterdir()] == ["out"], f"kill {kill}"
    assert sum(left) > moments / 4 and steps > 15, (left, steps)


def test_control_a_stage_that_is_not_emptied_is_found(server, store, tmp_path, monkeypatch):
    whole, _, _ = exported(server, store, "deepspec", tmp_path)
    stage = tmp_path / "again" / ".out.partial"
    (stage / FILLED).mkdir(parents=True)
    (stage / FILLED / "left.bin").write_bytes(b"x")
    (stage / MARK).touch()
    monkeypatch.setattr("workbench.core.staging._empty", lambda stage: (stage / MARK).touch())
    monkeypatch.setattr(Path, "mkdir", lambda self, *args, plain=Path.mkdir, **given: plain(self, exist_ok=True))
    with staged(tmp_path / "again" / "out") as filled:
        for name, data in whole.items():
            (filled / name).write_bytes(data)
    assert tree(tmp_path / "again" / "out").keys() - whole.keys() == {"left.bin"}


def test_an_interrupted_export_leaves_nothing_at_once(server, store, tmp_path):
    given = {"data": str(store), "to": "specforge-dspark"}
    for attempt in range(40):
        out = tmp_path / f"{attempt}" / "out"
        filled = out.with_name(".out.partial") / FILLED
        pid = server.start(engine="export", out=str(out), given=given)
        while not filled.exists() and not out.exists():
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        if server.end() == 1:
            assert not out.parent.exists(), list(out.parent.iterdir())
            return
    raise AssertionError("no export was interrupted")
