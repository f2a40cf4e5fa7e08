"""Runs on a Ray cluster of this machine: the bytes of one process, whatever the workers and whatever dies.

The heavier crosses share one cluster; the quick ones start their own, as a user's first run does.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core.errors import NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.progress import quiet
from workbench.datasets import extract, extract_sequences
from workbench.replay import replay

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'specdec-workbench[ray]'")
pytest.importorskip("ray.data", reason="Ray's data library is not installed: pip install 'specdec-workbench[ray]'")

extraction = importlib.import_module("workbench.datasets.extract")  # the package has a function of that name
SLOW = dict(gamma=3, top_k=8, chunk=1, shard_rows=8)  # two documents a shard, a token a forward: time to be killed in
STORED = dict(taps=[1, 4], top_k=4, chunk=1, shard_tokens=200)  # likewise two documents a shard
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "anchors": (extract, SLOW),
    "sequence": (extract_sequences, STORED),
}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tiny):
    return tiny()


@pytest.fixture(scope="module")
def wholes(model, kills, tmp_path_factory) -> Callable[[str], dict[str, bytes]]:
    """The bytes of a run of one process, by what it writes."""
    made: dict[str, dict[str, bytes]] = {}

    def inner(kind: str) -> dict[str, bytes]:
        if kind not in made:
            out = tmp_path_factory.mktemp("whole") / "x"
            with quiet():
                write(kind, model, kills.documents(12, 100), out)
            made[kind] = kills.contents(out)
            assert sum(name.endswith(".arrow") for name in made[kind]) == 6
        return made[kind]

    return inner


@pytest.fixture(scope="module")
def whole(wholes) -> dict[str, bytes]:
    """The bytes of anchor records."""
    return wholes("anchors")


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    """A cluster that this process has joined, for two workers."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def orphans() -> Iterator[dict[int, str]]:
    """Processes, by id, that killed ones had started; Ray ends them within minutes, and their files go after them."""
    found: dict[int, str] = {}
    yield found
    over = time.time() + 180
    while alive := [pid for pid in found if _running(pid)]:
        assert time.time() < over, f"processes outlive the one that started them: {[found[pid] for pid in alive]}"
        time.sleep(1)
    for folder in {folder for name in found.values() for folder in re.findall(r"--temp-dir=(\S*wb-ray-\w+)", name)}:
        shutil.rmtree(folder)


@contextmanager
def killer(act: Callable[[], bool]) -> Iterator[list[float]]:
    """A thread that tries to kill until it has; the list holds when it did."""
    done: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if act():
                done.append(time.time())
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def write(kind: str, model, tapes, out: Path, **place: Any) -> None:
    """Anchor records or a sequence store, slowly."""
    function, options = WAYS[kind]
    function(model, tapes, out=out, **options, **place)


def identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def listed(out: Path) -> dict[str, tuple[int, int]]:
    """Finished shards, and which file each is."""
    if not (out / "manifest.json").is_file():
        return {}
    return {s["file"]: identity(out / s["file"]) for s in Manifest.read(out).shards if (out / s["file"]).is_file()}


# ---------------------------------------------------------------- quick


def test_a_killed_worker_loses_nothing_and_what_is_left_out_comes_home(tiny, kills, tmp_path):
    """Documents that hold one id have rows that are not finite, and are left out."""
    broken, out, kept = tiny(tied=False), tmp_path / "x", {}
    broken.embed.data[7] = float("nan")
    extract(broken, kills.documents(12, 100), out=tmp_path / "local", on_bad="quarantine", **SLOW)
    whole = kills.contents(tmp_path / "local")
    assert 0 < whole["quarantine.jsonl"].count(b"\n") < 12 and sum(name.endswith(".arrow") for name in whole) == 6

    def act() -> bool:
        if len(found := listed(out)) < 1 or not any(out.glob(".parts-*/*/*.tmp")):
            return False
        if kills.kill_worker(lambda pids: pids[0]) is None:
            return False
        kept.update(found)
        return True

    with killer(act) as killed:
        extract(broken, kills.documents(12, 100), out=out, engine="ray", workers=2, on_bad="quarantine", **SLOW)
    assert killed, "no worker was killed while it wrote"
    assert kills.contents(out) == whole
    assert kept and {name: identity(out / name) for name in kept} == kept, "finished shards are not written again"
    assert not ray.is_initialized() and not [n for n in kills.descendants(os.getpid()).values() if "ray" in n]


def test_a_store_that_workers_write_is_the_one_of_this_process(model, kills, tmp_path):
    options: dict[str, Any] = dict(taps=[0, 3], top_k=4, chunk=16, shard_tokens=80)
    extract_sequences(model, kills.documents(6), out=tmp_path / "local", **options)
    extract_sequences(model, kills.documents(6), out=tmp_path / "ray", engine="ray", workers=2, **options)
    found = kills.contents(tmp_path / "ray")
    assert found == kills.contents(tmp_path / "local") and sum(name.endswith(".arrow") for name in found) == 3


# ---------------------------------------------------------------- full


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bytes_do_not_depend_on_the_workers(model, kills, wholes, shared, tmp_path, workers):
    for kind in WAYS:
        write(kind, model, kills.documents(12, 100), tmp_path / kind, engine="ray", workers=workers)
        assert kills.contents(tmp_path / kind) == wholes(kind)
    options: dict[str, Any] = dict(k_max=3, chunk=16, shard_rows=150)
    for i, more in enumerate(({}, {"ranks": True, "forced": True}, {"temperature": 0.7, "seed": 5})):
        tables = [tmp_path / f"{place}{i}" for place in ("local", "ray")]
        replay(model, kills.documents(6), out=tables[0], **options, **more)
        replay(model, kills.documents(6), out=tables[1], engine="ray", workers=workers, **options, **more)
        assert kills.contents(tables[0]) == kills.contents(tables[1])


@pytest.mark.full
@pytest.mark.parametrize("kind", WAYS)
def test_a_run_goes_on_where_another_engine_stopped(model, kills, wholes, shared, tmp_path, monkeypatch, kind):
    class Stopped(BaseException):
        pass

    left, forward = [450], type(model).forward

    def counted(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise Stopped
        return forward(self, *args, **kwargs)

    out = tmp_path / "x"
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(type(model), "forward", counted)
        write(kind, model, kills.documents(12, 100), out)
    done = listed(out)
    assert 0 < len(done) < 6
    write(kind, model, kills.documents(12, 100), out, engine="ray", workers=2)
    assert kills.contents(out) == wholes(kind) and {name: identity(out / name) for name in done} == done


@pytest.mark.full
def test_what_workers_say_is_a_sentence_here(tiny, kills, shared, tmp_path):
    broken = tiny()
    broken.norm.data[3] = float("nan")
    with pytest.raises(NonFiniteError, match="document 'd0': the logits of position"):
        extract(broken, kills.documents(2), out=tmp_path / "x", engine="ray", workers=1, **SLOW)
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_workers_that_cannot_start_are_a_sentence(model, kills, shared, tmp_path, monkeypatch):
    module = ModuleType("not_installed_there")
    module.Gone = type("Gone", (extraction.Extraction,), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(extraction, "Extraction", module.Gone)
    with pytest.raises(UserError, match=r"a worker could not start.*No module named 'not_installed_there'"):
        extract(model, kills.documents(2), out=tmp_path / "x", engine="ray", workers=1, **SLOW)
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(workers=4), "workers=4 is too many for this Ray cluster of 4 CPUs.*workers=3"),
        (dict(workers=1, num_gpus=1), "1 workers of 1 GPUs are too many"),
        (dict(ray_address="auto"), "this process has joined a Ray cluster already"),
    ],
)
def test_a_cluster_without_room_is_a_sentence(model, kills, shared, tmp_path, given, says):
    with pytest.raises(UserError, match=says):
        extract(model, kills.documents(12), out=tmp_path / "x", engine="ray", **SLOW, **given)
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "seed"), [*(("anchors", seed) for seed in range(24)), *(("sequence", seed) for seed in range(12))]
)
def test_workers_killed_at_any_time(model, kills, wholes, shared, tmp_path, kind, seed):
    rng, out, kept = random.Random(seed), tmp_path / "x", {}
    state = {"wait": None, "left": rng.choice([1, 1, 2])}

    def act() -> bool:
        if state["wait"] is None:
            if not any("ShardWriter" in name for name in kills.descendants(os.getpid()).values()):
                return False
            state["wait"] = time.time() + rng.uniform(0, 5)
        if time.time() < state["wait"]:
            return False
        found = listed(out)
        if kills.kill_worker(rng.choice) is None:
            return False
        kept.update(found)
        state["left"] -= 1
        state["wait"] = time.time() + rng.uniform(0, 2)
        return state["left"] == 0

    with killer(act) as killed:
        write(kind, model, kills.documents(12, 100), out, engine="ray", workers=2)
    assert killed, "nothing was killed"
    assert kills.contents(out) == wholes(kind)
    assert {name: identity(out / name) for name in kept} == kept


DRIVER = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("tests_conftest", {conftest!r})
module = importlib.util.module_from_spec(spec)
sys.modules["tests_conftest"] = module
spec.loader.exec_module(module)
spec = importlib.util.spec_from_file_location("datasets_conftest", {beside!r})
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)
from workbench.datasets import {function}
torch.set_num_threads({threads})
{function}(module.build_tiny(), beside.random_documents(12, 100), out={out!r}, **{options!r})
"""


def environment() -> dict[str, str]:
    """Of a process that imports the same sources; Ray says in ours how its clusters are joined."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}


def driver_code(out: Path, kind: str = "anchors", **place: Any) -> str:
    """A program that makes the same dataset in a process of its own."""
    function, options = WAYS[kind]
    return DRIVER.format(
        conftest=str(ROOT / "tests" / "conftest.py"),
        beside=str(Path(__file__).with_name("conftest.py")),
        threads=torch.get_num_threads(),
        out=str(out),
        function=function.__name__,
        options={**options, **place},
    )


@pytest.mark.full
def test_a_run_joins_the_cluster_at_an_address(kills, whole, shared, tmp_path):
    address = ray.get_runtime_context().gcs_address
    code = driver_code(tmp_path / "x", engine="ray", ray_address=address)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kills.contents(tmp_path / "x") == whole
    assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4, "the cluster stays"


@pytest.mark.full
def test_a_cluster_that_does_not_answer_is_a_sentence(model, kills, tmp_path):
    ray.shutdown()
    with pytest.raises(UserError, match=r"ray_address='127\.0\.0\.1:9' could not be joined"):
        extract(model, kills.documents(2), out=tmp_path / "x", engine="ray", ray_address="127.0.0.1:9", **SLOW)
    assert not (tmp_path / "x").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "seed"), [*(("anchors", seed) for seed in range(20)), *(("sequence", seed) for seed in range(8))]
)
def test_the_asking_process_killed_at_any_time(model, kills, wholes, orphans, tmp_path, kind, seed):
    """Of either engine; either one goes on at once, while what the dead one started may still be there."""
    rng, out = random.Random(seed), tmp_path / "x"
    place: dict[str, Any] = {"engine": "ray", "workers": 2} if seed % 2 else {}
    code = driver_code(out, kind, **place)
    log = tmp_path / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=sink, stderr=sink, env=environment()
        )  # fmt: skip
        while not (out / "manifest.json").is_file():
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 22 if place else 4))
        below = kills.descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    orphans.update(below)
    done = listed(out)
    write(kind, model, kills.documents(12, 100), out, **({"engine": "ray", "workers": 1} if seed % 4 < 2 else {}))
    assert kills.contents(out) == wholes(kind)
    assert {name: identity(out / name) for name in done} == done


def _running(pid: int) -> bool:
    """True while a process is there and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
