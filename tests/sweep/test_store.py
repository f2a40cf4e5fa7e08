"""The store of a sweep: killed and resumed it gives the same frame, a changed grid reuses, other data are refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.manifest import Manifest
from workbench.replay.cost import CostModel
from workbench.replay.synthetic import synthetic_table
from workbench.spec.policies.naming import label_of
from workbench.sweep import runner

ROOT = Path(__file__).resolve().parents[2]
GRID: dict[str, Any] = dict(k=[1, 2, 3], p_min=[0, 0.4], statistic="top", draws=100, seed=3)


class Killed(BaseException):
    """A process ends here."""


@pytest.fixture
def walks(monkeypatch) -> list[str]:
    """Labels of the policies walked; parts hold two cells."""
    seen: list[str] = []
    plain = runner.walk_all

    def noting(table, walked, policies, cost):
        for counts in plain(table, walked, policies, cost):
            seen.append(label_of(counts.policy))
            yield counts

    monkeypatch.setattr(runner, "walk_all", noting)
    monkeypatch.setattr(runner, "PART", 2)
    return seen


def parts(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("part-*"))


def refuse(says: str, call: Callable[[], Any]) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_store_changes_nothing_and_is_opened_again(table, warm, cost, walks, tmp_path):
    given: dict[str, Any] = dict(cost=cost, **GRID)
    frame = wb.sweep([table, warm], **given)
    out = tmp_path / "a" / "store"
    assert wb.sweep([table, warm], out=out, **given).equals(frame)
    assert wb.load_sweep(out).equals(frame) and len(walks) == 2 * 2 * 6
    assert parts(out) == [f"part-{i:05d}.arrow" for i in range(6)]
    manifest = Manifest.read(out)
    assert manifest.complete and manifest.kind == "sweep" and manifest.counts == {"cells": 12, "tables": 2}
    assert manifest.parameters["setting"]["cost"] == cost.key() and "numpy" in manifest.versions
    assert manifest.extra["bootstrap"] == {"draws": 100, "seed": 3, "level": 0.95}
    assert CostModel.load(out / "cost.json").key() == cost.key()
    assert sorted({*manifest.files, *(shard["file"] for shard in manifest.shards)}) == sorted(
        path.name for path in out.iterdir() if path.name != "manifest.json"
    )


def test_a_changed_grid_reuses_what_is_finished(table, walks, tmp_path):
    wb.sweep(table, out=tmp_path, **GRID)
    assert len(walks) == 6
    wider = {**GRID, "k": [2, 3, 4], "floor": [None, 2]}
    frame = wb.sweep(table, out=tmp_path, **wider)
    assert len(walks) == len(frame) // 3 + 2 == 14 and not {*walks[6:]} & {*walks[:6]}
    assert frame.equals(wb.sweep(table, **wider))
    both = wb.load_sweep(tmp_path)
    assert both["cell"].n_unique() == 14 and {*frame["cell"]} < {*both["cell"]}


def test_the_bootstrap_may_change_from_run_to_run(table, walks, tmp_path):
    first = wb.sweep(table, out=tmp_path, **GRID)
    other = {**GRID, "seed": 4, "draws": 150}
    second = wb.sweep(table, out=tmp_path, **other)
    assert len(walks) == 6 and not second.equals(first) and second.equals(wb.sweep(table, **other))
    assert wb.load_sweep(tmp_path).equals(second)
    assert wb.load_sweep(tmp_path, seed=3, draws=100).equals(first)


def test_tables_may_be_added(table, warm, walks, tmp_path):
    wb.sweep(table, out=tmp_path, **GRID)
    frame = wb.sweep([table, warm], out=tmp_path, **GRID)
    assert len(walks) == 12 and frame.equals(wb.sweep([table, warm], **GRID))
    assert wb.sweep(warm, out=tmp_path, **GRID).equals(frame.filter(table="warm"))


def test_stopped_anywhere_and_resumed_it_gives_the_same_frame(table, walks, tmp_path, monkeypatch):
    given: dict[str, Any] = dict(k=[1, 2, 3], draws=50)
    expected = wb.sweep(table, **given)
    sync, calls, last = os.fsync, [0], 0
    for stop in range(1, 100):
        out = tmp_path / f"s{stop}"
        calls[0] = 0

        def dying(handle: int, stop: int = stop) -> None:
            calls[0] += 1
            if calls[0] >= stop:
                raise Killed
            sync(handle)

        monkeypatch.setattr(os, "fsync", dying)
        try:
            wb.sweep(table, out=out, **given)
        except Killed:
            last = stop
        monkeypatch.setattr(os, "fsync", sync)
        if last < stop:
            break
        if not (out / "manifest.json").exists():
            refuse("has no manifest.json", lambda out=out: wb.load_sweep(out))
        elif not Manifest.read(out).complete:
            refuse("is incomplete", lambda out=out: wb.load_sweep(out))
        before = len(walks)
        assert wb.sweep(table, out=out, **given).equals(expected) and len(walks) - before <= 3
        assert wb.load_sweep(out).equals(expected) and not list(out.glob("*.tmp"))
    assert 9 < last < 99


def test_an_interruption_keeps_what_is_walked(table, walks, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "PART", 100)
    noting = runner.walk_all

    def interrupted(*args: Any):
        for i, counts in enumerate(noting(*args)):
            if i == 4:
                raise KeyboardInterrupt
            yield counts

    monkeypatch.setattr(runner, "walk_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wb.sweep(table, out=tmp_path, **GRID)
    refuse("is incomplete (4 cells are done)", lambda: wb.load_sweep(tmp_path))
    monkeypatch.setattr(runner, "walk_all", noting)
    del walks[:]
    assert wb.sweep(table, out=tmp_path, **GRID).equals(wb.sweep(table, **GRID)) and len(walks) == 2 + 6


CHILD = """
import sys, time
import workbench as wb
from workbench.sweep import runner
wb.quiet()
plain = runner.walk_all
def slow(*args):
    for counts in plain(*args):
        time.sleep(0.2)
        yield counts
runner.walk_all, runner.PART = slow, 1
wb.sweep(wb.load_table(sys.argv[1]), out=sys.argv[2], k=[1, 2, 3], p_min=[0, 0.4], statistic="top", draws=100, seed=3)
"""


def kill_and_resume(table, out: Path, wait: Callable[[], bool]) -> int:
    """A sweep in a process of its own, killed when ``wait()`` is over, then resumed; how many parts were left."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(table.path), str(out)], env={**os.environ, "PYTHONPATH": path}
    )
    while not wait():
        assert child.poll() is None, "the sweep ended before it was killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = len(parts(out))
    assert wb.sweep(table, out=out, **GRID).equals(wb.sweep(table, **GRID))
    return left


def test_killed_and_resumed_it_gives_the_same_frame(table, tmp_path):
    out = tmp_path / "s"
    assert 2 <= kill_and_resume(table, out, lambda: len(parts(out)) >= 2) < 6


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_it_gives_the_same_frame(table, tmp_path, seed):
    out, moment = tmp_path / "s", random.Random(seed).uniform(0, 1.1)
    began: list[float] = []

    def wait() -> bool:
        if not began and (out / "manifest.json").exists():
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] > moment

    kill_and_resume(table, out, wait)


# ---------------------------------------------------------------- refusals


def test_another_table_setting_or_version_is_refused(table, warm, cost, tmp_path, monkeypatch):
    out = tmp_path / "s"
    wb.sweep({"t": warm}, out=out, cost=cost, **GRID)
    given: dict[str, Any] = dict(out=out, cost=cost, **GRID)
    refuse("belongs to another run: tables.t.", lambda: wb.sweep({"t": table}, **given))
    other = CostModel.from_ratios({1: 1.0, 5: 2.0}, name="other")
    refuse("cost.name is 'a machine' there and 'other' now", lambda: wb.sweep({"t": warm}, **given | {"cost": other}))
    refuse("there and None now", lambda: wb.sweep({"t": warm}, **given | {"cost": None}))
    refuse("tables.t.estimator is", lambda: wb.sweep({"t": warm}, estimator="ratio", **given))
    refuse("resume=False was given", lambda: wb.sweep({"t": warm}, resume=False, **given))
    from workbench.sweep import store

    versions = store.library_versions

    def changed(**libraries: str) -> None:
        monkeypatch.setattr(store, "library_versions", lambda names: versions(names) | libraries)

    changed(numpy="99.0")
    refuse("versions.numpy is", lambda: wb.sweep({"t": warm}, **given))
    changed(**{"specdec-workbench": "0.99.0"})
    refuse("versions.specdec-workbench is", lambda: wb.sweep({"t": warm}, **given))
    major = versions(["numpy"])["numpy"].split(".")[0]
    changed(numpy=f"{major}.999")
    assert len(wb.sweep({"t": warm}, **given)) == 18


def test_the_same_table_made_again_goes_on_and_another_seed_does_not(tmp_path, walks):
    def made(seed: int) -> Any:
        shutil.rmtree(tmp_path / "t", ignore_errors=True)
        return synthetic_table(tmp_path / "t", documents=4, tokens=(20, 50), k_max=3, seed=seed)

    wb.sweep(made(0), out=tmp_path / "s", **GRID)
    wb.sweep(made(0), out=tmp_path / "s", **GRID)
    assert len(walks) == 6
    refuse("tables.t.content is", lambda: wb.sweep(made(1), out=tmp_path / "s", **GRID))


def test_a_broken_part_is_refused_and_walked_again_as_a_lost_one_is(table, walks, tmp_path):
    frame = wb.sweep(table, out=tmp_path / "s", **GRID)
    for name in (parts(tmp_path / "s")[1], next((tmp_path / "s").glob("documents-*")).name):
        for spoil in (lambda data: data[:-9], lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]):
            out = tmp_path / "broken"
            shutil.copytree(tmp_path / "s", out)
            (out / name).write_bytes(spoil((out / name).read_bytes()))
            refuse(f"{name} does not match the hash", lambda out=out: wb.load_sweep(out))
            for lost in (False, True):
                if lost:
                    gone = name if name.startswith("doc") else parts(out)[1]
                    (out / gone).unlink()
                    refuse(f"lacks {gone}", lambda out=out: wb.load_sweep(out))
                del walks[:]
                assert wb.sweep(table, out=out, **GRID).equals(frame)
                assert len(walks) == (2 if name.startswith("part") else 0)
                assert wb.load_sweep(out).sort("policy", "source").equals(frame.sort("policy", "source"))
                assert len(parts(out)) == 3, "what was broken does not stay"
            shutil.rmtree(out)


def test_directories_of_others_are_refused(table, tmp_path):
    refuse("kind is 'draft-table' there", lambda: wb.sweep(table, out=table.path, **GRID))
    refuse("a sweep's store is needed here", lambda: wb.load_sweep(table.path))
    refuse("has no manifest.json", lambda: wb.load_sweep(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    refuse("the workbench did not write it", lambda: wb.sweep(table, out=tmp_path, **GRID))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    refuse("is a file: give a directory", lambda: wb.sweep(table, out=tmp_path / "notes.txt", **GRID))


def test_policies_that_say_nothing_of_themselves_are_not_kept(table, user_policies, tmp_path):
    bare, described = user_policies
    out = tmp_path / "s"
    refuse("has no spec()", lambda: wb.sweep(table, policies=bare(2), out=out, draws=50))
    assert not out.exists()
    frame = wb.sweep(table, policies=[bare(2), described(2)], draws=50)
    assert frame["tau"][0] == frame["tau"][3] and frame["policy"][0] == "EveryOther"
    first = wb.sweep(table, policies=described(2), out=out, draws=50)
    assert first.drop("cell").equals(frame[3:].drop("cell")) and wb.load_sweep(out).equals(first)

    class Odd(described):
        def spec(self) -> dict[str, Any]:
            return {"n": {1, 2}}

    refuse("spec() of Odd is not a mapping that JSON can hold", lambda: wb.sweep(table, policies=Odd(2), out=out))


def test_stores_of_many_documents_hold_their_names_once(table, tmp_path):
    wb.sweep(table, out=tmp_path, **GRID)
    (file,) = tmp_path.glob("documents-*.json")
    assert len(json.loads(file.read_text())["doc_id"]) == 9
    batch = pl.read_ipc_stream(tmp_path / parts(tmp_path)[0])
    assert len(batch) == 6 and batch["rounds"].list.len().unique().to_list() == [9]
