"""A store never exceeds its budgets, never serves what it should not, and loses nothing between processes."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.cache.hybrid import same_bits
from workbench.core.errors import CheckpointError, UserError
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import PrefixEntry, Terms, capture
from workbench.spec.session import Session
from workbench.spec.store import PrefixStore, entry_bytes, load_entry

TERMS = Terms("a" * 16, True, "float32", "K/V 1x4 float32", "a loom", "")


def entry(tokens: tuple[int, ...], *, model: str = "a" * 16, width: int = 4, seed: int = 0) -> PrefixEntry:
    """An entry of random tensors that no session made."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {"layer.0.k": (1, len(tokens), width), "layer.0.v": (1, len(tokens), width), "boundary.logits": (7,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in drawn.items()}
    tensors["drafter.0.k"] = torch.zeros(1, 0, width)  # a plane of no rows
    tensors["drafter.tail"] = torch.randn(1, 3, generator=generator).to(torch.bfloat16)
    return PrefixEntry(
        Terms(model, *[getattr(TERMS, n) for n in TERMS.__dataclass_fields__][1:]), tokens, tensors, (1, 0, 0)
    )


def equal(a: PrefixEntry, b: PrefixEntry) -> bool:
    tensors = a.tensors.keys() == b.tensors.keys() and all(same_bits(x, b.tensors[n]) for n, x in a.tensors.items())
    return tensors and (a.terms, a.tokens, a.drafter) == (b.terms, b.tokens, b.drafter)


def test_a_thousand_random_entries_stay_within_the_budget() -> None:
    rng = random.Random(0)
    budget = 6000
    store, truth = PrefixStore(budget), OrderedDict[tuple[str, tuple[int, ...]], PrefixEntry]()
    models = ["a" * 16, "b" * 16]

    def take(key: tuple[str, tuple[int, ...]], held: PrefixEntry) -> None:
        truth.pop(key, None)
        if held.nbytes <= budget:
            while sum(e.nbytes for e in truth.values()) + held.nbytes > budget:
                truth.popitem(last=False)
            truth[key] = held

    served = 0
    for i in range(1000):
        tokens = tuple(rng.randrange(2) for _ in range(rng.choice([1, 2, 3, 4, 5, 6, 90])))
        made = entry(tokens, model=rng.choice(models), width=rng.choice([1, 4, 16]), seed=i)
        store.put(made)
        take((made.terms.model, tokens), made)
        assert store.nbytes == sum(e.nbytes for e in truth.values()) <= budget
        text, model = tuple(rng.randrange(2) for _ in range(8)), rng.choice([*models, "c" * 16])
        found = store.find(text, model)
        fits = [key for key in truth if key[0] == model and text[: len(key[1])] == key[1]]
        if not fits:
            assert found is None
            continue
        key = max(fits, key=lambda fit: len(fit[1]))
        assert found is truth[key]
        truth.move_to_end(key)
        served += 1
    found_stats = store.stats
    assert served > 100 and found_stats.evicted > 100 and found_stats.hits == served
    assert found_stats.entries == len(store) == len(truth) and found_stats.hits + found_stats.misses == 1000


@pytest.mark.parametrize("fault", ["nothing is dropped", "the most recent goes", "any model will do"])
def test_negative_control_a_faulty_store_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "nothing is dropped":
        real = PrefixStore._hold

        def hold(self: PrefixStore, made: PrefixEntry) -> None:
            self.byte_budget, kept = 1 << 40, self.byte_budget
            real(self, made)
            self.byte_budget = kept

        monkeypatch.setattr(PrefixStore, "_hold", hold)
    elif fault == "the most recent goes":

        class Last(OrderedDict):  # type: ignore[type-arg]
            def popitem(self, last: bool = True) -> Any:
                return super().popitem(last=True)

        monkeypatch.setattr("workbench.spec.store.OrderedDict", Last)
    else:
        real_find = PrefixStore.find

        def find(self: PrefixStore, tokens: Any, fingerprint: str) -> PrefixEntry | None:
            return real_find(self, tokens, "a" * 16)

        monkeypatch.setattr(PrefixStore, "find", find)
    with pytest.raises(AssertionError):
        test_a_thousand_random_entries_stay_within_the_budget()


def test_an_entry_survives_the_disk_in_every_bit(tmp_path: Path) -> None:
    made = entry((3, 1, 4, 1, 5))
    PrefixStore(1 << 20, tmp_path).put(made)
    (file,) = tmp_path.iterdir()
    assert equal(load_entry(file), made)
    data = file.read_bytes()
    assert len(data) - 8 - struct.unpack("<Q", data[:8])[0] == made.nbytes
    other = PrefixStore(1 << 20, tmp_path)
    found = other.find((3, 1, 4, 1, 5, 9), "a" * 16)
    assert found is not None and equal(found, made) and other.stats.loads == 1 and other.nbytes == made.nbytes
    assert other.find((3, 1, 4, 1, 5, 9), "a" * 16) is found and other.stats.loads == 1
    assert "Prefix store" in other._repr_html_()


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    rng, file = random.Random(0), tmp_path / "one.safetensors"
    data = entry_bytes(entry((3, 1, 4)))
    for at in range(len(data)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="remove it"):
            load_entry(file)
    for size in (0, 4, 8, 200, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="remove it"):
            load_entry(file)
    file.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="remove it"):
        load_entry(file)
    file.write_bytes(data)
    load_entry(file)


@pytest.mark.parametrize("formats", [{}, {"k_format": "q8_0", "v_format": "q5_1", "window": 8}], ids=["dense", "ring"])
def test_a_byte_flipped_anywhere_in_a_session_s_entry_is_refused(tiny: Any, tmp_path: Path, formats: Any) -> None:
    model = tiny(ratio=2, head_dim=32, seed=2).to(torch.bfloat16)
    session = Session(model, options=GenerateOptions(ignore_eos=True, **formats))
    session.feed(list(range(40)))
    rng, file, data = random.Random(1), tmp_path / "one.safetensors", entry_bytes(capture(session))
    file.write_bytes(data)
    assert equal(load_entry(file), capture(session))
    end = 8 + struct.unpack("<Q", data[:8])[0]
    places = [*range(8), *rng.sample(range(8, end), 60), *rng.sample(range(end, len(data)), 100), end, len(data) - 1]
    for at in places:
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="remove it"):
            load_entry(file)


def test_negative_control_without_the_hash_flipped_bytes_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Constant:
        def __init__(self, data: bytes) -> None:
            pass

        def hexdigest(self) -> str:
            return "f" * 64

    monkeypatch.setattr("workbench.spec.store.hashlib.sha256", Constant)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_every_flipped_byte_is_refused(tmp_path)


def test_a_spoilt_file_is_passed_over_with_a_warning_for_the_next_shorter(tmp_path: Path) -> None:
    writer = PrefixStore(0, tmp_path)
    for n in (2, 4):
        writer.put(entry((1,) * n))
    spoilt = next(tmp_path.glob("*-4-*"))
    data = bytearray(spoilt.read_bytes())
    data[len(data) // 2] ^= 4
    spoilt.write_bytes(data)
    with pytest.warns(UserWarning, match="passed over.*not as it was written"):
        found = writer.find((1,) * 6, "a" * 16)
    assert found is not None and len(found) == 2 and writer.stats.refused == 1
    writer.put(entry((1,) * 4))  # written again, whole
    found = writer.find((1,) * 6, "a" * 16)
    assert found is not None and len(found) == 4


def test_a_wrong_model_or_text_is_never_served(tmp_path: Path) -> None:
    store = PrefixStore(0, tmp_path)
    store.put(entry((1, 2, 3)))
    assert store.find((1, 2, 3), "b" * 16) is None and store.find((1, 2, 4), "a" * 16) is None
    assert store.find((1, 2), "a" * 16) is None
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / file.name.replace("a" * 16, "b" * 16))  # a name that lies
    assert store.find((1, 2, 3), "b" * 16) is None
    (tmp_path / "notes.txt").write_text("not an entry")
    (tmp_path / "a-b.safetensors").write_text("not an entry")
    assert store.find((1, 2, 3), "a" * 16) is None


def test_files_keep_to_their_own_budget(tmp_path: Path) -> None:
    one = len(entry_bytes(entry((1,) * 3)))
    store = PrefixStore(1 << 20, tmp_path, disk_budget=3 * one + 50)
    for i in range(6):
        store.put(entry((i,) * 3, seed=i))
        assert store.stats.file_bytes <= 3 * one + 50
    assert store.stats.files == 3 and store.stats.removed == 3 and store.stats.entries == 6
    store.put(entry((7,) * 300))  # larger than the budget: in memory alone
    assert store.stats.files == 3 and store.find((7,) * 300, "a" * 16) is not None


def test_nothing_unfinished_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrefixStore(1 << 20, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("workbench.spec.store.os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            store.put(entry((1, 2)))
    assert list(tmp_path.iterdir()) == []
    store.put(entry((1, 2)))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("budget", [-1, 1.5, "1 GB"])
def test_budgets_and_paths_are_checked(budget: object, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        PrefixStore(1, tmp_path / "file")
    with pytest.raises(UserError, match="byte_budget"):
        PrefixStore(budget)  # type: ignore[arg-type]


CHILD = """
import sys, time, warnings, importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("kit", sys.argv[1])
kit = importlib.util.module_from_spec(spec)
sys.modules["kit"] = kit
spec.loader.exec_module(kit)
warnings.simplefilter("error")
role, folder, count = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
(folder / role).touch()
while not all((folder / other).exists() for other in ("writer", "reader1", "reader2")):
    time.sleep(0.01)
store = kit.PrefixStore(0, folder / "store")
ended, best, looks = time.monotonic() + 60, 0, 0
while best < count:
    assert time.monotonic() < ended
    if role == "writer":
        best += 1
        if sys.argv[5] == "torn":  # the wrong way: into the file that readers look for, piece by piece
            made = kit.entry((1,) * best, seed=best)
            data = kit.entry_bytes(made)
            with open(folder / "store" / sys.modules["workbench.spec.store"]._name(made), "wb") as file:
                for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                    file.write(piece)
                    file.flush()
                    time.sleep(0.02)
            continue
        store.put(kit.entry((1,) * best, seed=best))
        continue
    looks += 1
    found = store.find((1,) * count, "a" * 16)
    if found is None:
        assert best == 0
        continue
    assert len(found) >= best, (len(found), best)
    assert kit.equal(found, kit.entry((1,) * len(found), seed=len(found)))
    best = len(found)
print(role, looks)
"""


def run_together(folder: Path, count: int, how: str = "whole") -> list[tuple[int, str]]:
    """A writer and two readers at once; exit status and what each wrote to stderr."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, __file__, role, str(folder), str(count), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("writer", "reader1", "reader2")
    ]
    errors = [child.communicate(timeout=120)[1] for child in children]
    return [(child.returncode, error) for child, error in zip(children, errors, strict=True)]


def test_readers_and_a_writer_in_processes_of_their_own_lose_nothing(tmp_path: Path) -> None:
    count = 40
    for status, error in run_together(tmp_path, count):
        assert status == 0, error
    store = PrefixStore(1 << 20, tmp_path / "store")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = list(store.candidates((1,) * count, "a" * 16))
    assert [len(e) for e in found] == list(range(count, 0, -1))
    assert all(equal(e, entry((1,) * len(e), seed=len(e))) for e in found)


@pytest.mark.full
def test_negative_control_readers_see_a_file_that_is_written_in_place(tmp_path: Path) -> None:
    writer, *readers = run_together(tmp_path, 12, "torn")
    assert writer[0] == 0
    assert any(status != 0 and "prefix entry passed over" in error for status, error in readers)
