"""Shards made elsewhere, without a cluster: options, models and errors that travel, what the asking process takes."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import pickle
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError, CheckpointError, NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.datasets import extract, extract_sequences
from workbench.datasets.engine import EngineOptions, driver, job, ship, worker
from workbench.datasets.engine import options as options_module
from workbench.datasets.engine.errors import packed, unpacked
from workbench.datasets.engine.ship import ShippedModel, check_same
from workbench.model.fingerprint import fingerprint
from workbench.replay import replay

SMALL = dict(gamma=3, top_k=8, chunk=16, shard_rows=8)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize("function", [extract, extract_sequences, replay])
def test_defaults_are_the_options(function):
    signature = inspect.signature(function)
    for name, value in vars(EngineOptions()).items():
        assert signature.parameters[name].default == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(engine="spark"), "engine='spark' is not valid: choose one of 'local', 'ray'"),
        (dict(workers=2), "workers=2 goes with engine='ray'"),
        (dict(ray_address="auto"), "ray_address='auto' goes with engine='ray'"),
        (dict(num_gpus=1), "num_gpus=1 goes with engine='ray'"),
        (dict(engine="ray", workers=0), "workers=0"),
        (dict(engine="ray", num_gpus=2), "num_gpus=2"),
        (dict(engine="ray", num_gpus=-0.5), "num_gpus=-0.5"),
        (dict(engine="ray", ray_address=" "), "ray_address=' '"),
        (dict(engine="ray", ray_address="ray://head:10001"), "ray_address='ray://head:10001' is not valid: give auto"),
        (dict(engine="ray", ray_address=6379), "ray_address=6379"),
    ],
)
def test_bad_options_are_sentences_and_nothing_is_made(model, kills, tmp_path, given, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        extract(model, kills.documents(1), out=tmp_path / "x", **SMALL, **given)
    assert not list(tmp_path.iterdir())


def test_a_missing_ray_is_a_sentence(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(options_module, "version", missing)
    with pytest.raises(CapabilityError, match=r"specdec-workbench\[ray\]"):
        EngineOptions("ray")
    EngineOptions("local")


def test_workers_of_a_model_on_a_gpu_ask_for_one(monkeypatch):
    monkeypatch.setattr(options_module, "version", lambda name: "9")
    assert EngineOptions("ray").gpus("cuda") == 1 and EngineOptions("ray").gpus("cpu") == 0
    assert EngineOptions("ray", num_gpus=0.25).gpus("cuda") == 0.25
    with pytest.raises(UserError, match="num_gpus=0 is not valid here"):
        EngineOptions("ray", num_gpus=0).gpus("cuda")


# ---------------------------------------------------------------- what travels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shipped_model_is_the_same_model(tiny, dtype):
    model = tiny(tied=False, exact=False).to(dtype)
    model.trim_draft_vocab([3, 5, 80])
    sent = pickle.loads(pickle.dumps(ShippedModel.of(model)))
    made = sent.build()
    assert fingerprint(made) == fingerprint(model) and made.exact is False and made.dtype is dtype
    assert made.draft_head.key == model.draft_head.key
    assert sent.nbytes == sum(p.numel() * p.itemsize for p in model.parameters())
    assert not any(p.requires_grad for p in made.parameters()) and not made.training


def test_other_weights_another_machine_and_other_libraries_are_refused(model, monkeypatch):
    sent = ShippedModel.of(model)
    with pytest.raises(AssertionError, match="not those that were sent"):
        replace(sent, fingerprint="0" * 16).build()
    with pytest.raises(UserError, match=r"another kind of machine .*cpu"):
        replace(sent, place={**sent.place, "cpu": "an older one"}).build()
    with pytest.raises(UserError, match=r"other libraries \(torch is '.*' there and '1\.0' here"):
        replace(sent, versions={**sent.versions, "torch": "1.0"}).build()
    check_same({"a": 1}, {"a": 1}, what="differs")


def test_a_worker_takes_the_thread_count(model, threads):
    with threads(1):
        sent = ShippedModel.of(model)
    with threads(2):
        sent.build()
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "error",
    [UserError("one"), CheckpointError("two"), CapabilityError("three"), NonFiniteError(7, "NaN", phase="draft")],
)
def test_errors_arrive_as_they_were(error):
    home = unpacked(json.loads(json.dumps(packed(error))))
    assert type(home) is type(error) and str(home) == str(error) and vars(home) == vars(error)


# ---------------------------------------------------------------- workers in this process


def done_by(monkeypatch, fill):
    """Let runs be done by another engine."""
    for name in ("workbench.datasets.extract", "workbench.datasets.sequence_store", "workbench.replay.table"):
        # by name, for the package has a function that is called extract
        monkeypatch.setattr(importlib.import_module(name), "fill", fill)


class Captured(BaseException):
    """Ends a run once its job is known."""


def captured(monkeypatch, run):
    """What a run would send to workers: its job and its directory's plan."""
    found = []

    def instead(directory, what, model, engine):
        found.append((what, list(directory.plan)))
        raise Captured

    with monkeypatch.context() as patch, pytest.raises(Captured):
        done_by(patch, instead)
        run()
    return found[0]


def in_turn(order, *, mistake=lambda shipped: None):
    """An engine of workers in this process, which make shards in any order."""

    def fill(directory, what, model, engine):
        sent = pickle.loads(pickle.dumps((ShippedModel.of(model), what)))
        mistake(sent[0])
        with job._swept(directory.out):
            stage = directory.out / f"{job.STAGE}test"
            stage.mkdir()
            writer = worker.ShardWriter(*sent, directory.plan, str(stage), 1)
            for index in order(directory.pending):
                said = json.loads(str(writer({"shard": np.array([index])})["said"][0]))
                if "error" in said:
                    raise unpacked(said["error"])
                driver.admit(directory, stage / said["file"], said["entry"])

    return fill


def lose_a_bit(shipped):
    """Change one weight of the final norm by a few per cent, as a worker would get it."""
    data = shipped.weights["norm"][2]
    data.flags.writeable = True
    data[2] ^= 8


RUNS = {
    "extract": lambda model, tapes, out: extract(model, tapes, out=out, **SMALL),
    "sequence": lambda model, tapes, out: extract_sequences(
        model, tapes, out=out, taps=[0, 3], top_k=4, chunk=16, shard_tokens=80
    ),
    "replay": lambda model, tapes, out: replay(model, tapes, out=out, k_max=3, chunk=16, shard_rows=60, ranks=True),
    "draws": lambda model, tapes, out: replay(model, tapes, out=out, k_max=2, shard_rows=60, temperature=0.8, seed=4),
}


@pytest.fixture
def here(monkeypatch):
    """Workers of this process: what they are sent is the thing itself. The thread count is put back."""
    before = torch.get_num_threads()
    monkeypatch.setattr(worker, "_got", lambda given: given)
    monkeypatch.setattr(worker, "quiet", lambda: None)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("run", RUNS)
def test_workers_write_the_bytes_of_one_process_in_any_order_and_twice(model, kills, tmp_path, monkeypatch, here, run):
    tapes = kills.documents(6)
    RUNS[run](model, tapes, tmp_path / "local")
    whole = kills.contents(tmp_path / "local")
    assert sum(name.endswith(".arrow") for name in whole) == 3
    for name, order in [("back", lambda p: p[::-1]), ("twice", lambda p: [p[1], p[0], p[1], p[2], p[0]])]:
        done_by(monkeypatch, in_turn(order))
        RUNS[run](model, tapes, tmp_path / name)
        assert kills.contents(tmp_path / name) == whole
    # the control: a bit of one weight is lost on the way
    done_by(monkeypatch, in_turn(lambda p: p, mistake=lose_a_bit))
    with pytest.raises(AssertionError, match="not those that were sent"):
        RUNS[run](model, tapes, tmp_path / "wrong")
    monkeypatch.setattr(ship, "fingerprint", lambda model: "unchecked")
    RUNS[run](model, tapes, tmp_path / "wrong")
    differ = {name for name, data in kills.contents(tmp_path / "wrong").items() if data != whole[name]}
    assert {name for name in whole if name.endswith(".arrow")} <= differ


def test_workers_leave_out_what_one_process_does(tiny, kills, tmp_path, monkeypatch, here):
    broken, tapes = tiny(tied=False), kills.documents(12)
    broken.embed.data[7] = float("nan")
    extract(broken, tapes, out=tmp_path / "local", on_bad="quarantine", **SMALL)
    whole = kills.contents(tmp_path / "local")
    assert 0 < whole["quarantine.jsonl"].count(b"\n") < 12
    done_by(monkeypatch, in_turn(lambda p: p[::-1]))
    extract(broken, tapes, out=tmp_path / "back", on_bad="quarantine", **SMALL)
    assert kills.contents(tmp_path / "back") == whole
    # the control: reasons that do not come home are missed
    admit = driver.admit

    def forgets(directory, made, entry):
        return admit(directory, made, {name: value for name, value in entry.items() if name != "quarantined"})

    monkeypatch.setattr(driver, "admit", forgets)
    with pytest.raises(AssertionError, match="rows and its documents make"):
        extract(broken, tapes, out=tmp_path / "wrong", on_bad="quarantine", **SMALL)


def test_what_is_done_stays_and_the_rest_is_made(model, kills, tmp_path, monkeypatch, here):
    tapes, out = kills.documents(6), tmp_path / "x"
    extract(model, tapes, out=tmp_path / "local", **SMALL)

    def stopped(pending):
        yield pending[2]
        raise KeyboardInterrupt

    done_by(monkeypatch, in_turn(stopped))
    with pytest.raises(KeyboardInterrupt):
        extract(model, tapes, out=out, **SMALL)
    assert len(Manifest.read(out).shards) == 1 and not list(out.glob(".parts-*"))
    before = (out / "data-00002-of-00003.arrow").stat()
    (out / ".parts-old" / "a").mkdir(parents=True)
    (out / ".parts-old" / "a" / "data-00001-of-00003.arrow.tmp").write_bytes(b"what kill -9 leaves")
    monkeypatch.undo()
    extract(model, tapes, out=out, **SMALL)
    after = (out / "data-00002-of-00003.arrow").stat()
    assert kills.contents(out) == kills.contents(tmp_path / "local")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_shard_that_does_not_read_back_is_not_taken(model, kills, tmp_path, monkeypatch, here):
    write = worker.ShardWriter.write

    def damaged(self, index):
        said = write(self, index)
        file = self.stage / said["file"]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        return said

    monkeypatch.setattr(worker.ShardWriter, "write", damaged)
    done_by(monkeypatch, in_turn(lambda p: p))
    with pytest.raises(UserError, match="does not read back as a worker wrote it"):
        extract(model, kills.documents(6), out=tmp_path / "x", **SMALL)
    assert not (tmp_path / "x").exists()


def test_sentences_of_workers_are_those_of_one_process(tiny, kills, tmp_path, monkeypatch, here):
    broken = tiny()
    broken.norm.data[3] = float("nan")
    with pytest.raises(NonFiniteError) as local:
        extract(broken, kills.documents(2), out=tmp_path / "x", **SMALL)
    done_by(monkeypatch, in_turn(lambda p: p))
    with pytest.raises(NonFiniteError) as remote:
        extract(broken, kills.documents(2), out=tmp_path / "x", **SMALL)
    assert str(remote.value) == str(local.value) and remote.value.position == local.value.position
    assert not (tmp_path / "x").exists()


def test_a_worker_without_the_directory_says_so(model, kills, tmp_path, monkeypatch, here):
    what, plan = captured(monkeypatch, lambda: extract(model, kills.documents(2), out=tmp_path / "x", **SMALL))
    writer = worker.ShardWriter(ShippedModel.of(model), what, plan, str(tmp_path / "elsewhere" / ".parts-1"), 1)
    said = json.loads(str(writer({"shard": np.array([0])})["said"][0]))
    with pytest.raises(UserError, match="not the same directory on a worker's machine"):
        raise unpacked(said["error"])


def test_a_full_disk_is_a_sentence(model, kills, tmp_path, monkeypatch, here):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    done_by(monkeypatch, in_turn(lambda p: p))
    monkeypatch.setattr("workbench.datasets.shards.write_shard_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*finished shards are kept"):
        extract(model, kills.documents(2), out=tmp_path / "x", **SMALL)


@pytest.mark.parametrize(("name", "says"), [("0", "made shard 0"), ("start", "started")])
def test_workers_that_keep_dying_are_given_up(model, kills, tmp_path, monkeypatch, here, name, says):
    what, plan = captured(monkeypatch, lambda: extract(model, kills.documents(2), out=tmp_path / "x", **SMALL))
    sent = ShippedModel.of(model)

    def after(dead: int) -> dict:
        stage = tmp_path / f"{dead}"
        for i in range(dead):
            (stage / f"{name}-{i}").mkdir(parents=True)
        writer = worker.ShardWriter(sent, what, plan, str(stage), 1)
        return json.loads(str(writer({"shard": np.array([0])})["said"][0]))

    assert after(worker.TRIES - 1)["entry"]["rows"] == 8
    with pytest.raises(UserError, match=f"{worker.TRIES} workers died while they {says}"):
        raise unpacked(after(worker.TRIES)["error"])
