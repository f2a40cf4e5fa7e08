"""Extraction and replay on a GPU: columns that land, records of ragged batches, and tables, against the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.schemas import SEQUENCE_DTYPES
from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract, extract_sequences, to_arrays
from workbench.datasets.rows import stored_columns
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies, upload
from workbench.replay import ReplayOptions, replay
from workbench.replay.run import Passed, run_group

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ragged(prompts: list[list[int]]) -> Corpus:
    """32 documents of 20 to 350 tokens."""
    stream = np.array(list(chain.from_iterable(prompts)) * 8, np.int32)
    lengths = np.random.default_rng(2).permutation(np.linspace(20, 350, 32).astype(int))
    tapes = [Tape(f"d{i}", stream[17 * i : 17 * i + n], prompt_len=8) for i, n in enumerate(lengths)]
    return Corpus(tapes, name="ragged")


def test_columns_land_as_they_were_sent(device: torch.device) -> None:
    """Sources are freed and written over at once, and as many landings are open as a queue holds."""
    copies = HostCopies(device)
    waiting = []
    for i in range(60):
        x = torch.full((1 << 18,), i, device=device, dtype=torch.int32)
        y = torch.arange(i, i + 1000, device=device)
        waiting.append((i, copies.send({"x": x, "y": y, "z": torch.tensor([i])})))
        del x, y
        torch.full((1 << 18,), -1, device=device, dtype=torch.int32)
        if len(waiting) > 3:
            j, landing = waiting.pop(0)
            found = landing.arrays()
            assert (found["x"] == j).all() and found["z"].tolist() == [j]
            assert np.array_equal(found["y"], np.arange(j, j + 1000))
    assert upload(np.arange(9), device).tolist() == upload(list(range(9)), device).tolist() == list(range(9))


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Make every read-back and every copy that the host waits for an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_forwards_of_tapes_wait_for_nothing(on_device: HybridModel, device: torch.device, ragged: Corpus) -> None:
    if device.type != "cuda":
        pytest.skip("waiting for a device needs one")
    tapes, options = list(ragged)[:4], ReplayOptions(k_max=3, chunk=64)
    assert not on_device.exact

    def issued() -> list[Passed]:
        return list(run_group(on_device, tapes, options, HostCopies(device), documents=range(4)))

    columns = [[x for passed in issued() for x in passed.chunks()]]  # compiles what there is to compile
    with refusing_to_wait():
        passed = issued()
        ids = torch.zeros(1, 4, dtype=torch.int64, device=device)
        with pytest.raises(RuntimeError, match="synchroniz"):
            on_device.forward(ids, on_device.new_cache(capacity=64))  # whose ids are read back, to be checked
    columns.append([x for one in passed for x in one.chunks()])
    for (i, a, _), (j, b, _) in zip(*columns, strict=True):
        assert i == j and np.array_equal(a.target_id, b.target_id) and np.allclose(a.nll, b.nll, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 5, None])
def test_records_of_a_ragged_batch_are_the_cpus(
    on_device: HybridModel, on_cpu: HybridModel, ragged: Corpus, tmp_path: Path, record: Callable[..., None], batch
) -> None:
    pytest.importorskip("datasets", reason="shards are opened by datasets, which is not installed here")
    options = dict(anchors=4, top_k=32, chunk=64, exact=False, hidden_dtype="float32")
    ours = to_arrays(extract(on_device, ragged, out=tmp_path / "there", batch=batch, **options))
    theirs = to_arrays(extract(on_cpu, ragged, out=tmp_path / "here", **options))
    for name in ("doc_id", "position", "tokens"):
        assert np.array_equal(ours[name], theirs[name])
    gaps = {name: float(np.abs(ours[name] - theirs[name]).max()) for name in ("top_logits", "tail_probs", "logsumexp")}
    record("records against the CPU, float32", batch=batch, **gaps)
    assert gaps["top_logits"] < 1e-3 and gaps["tail_probs"] < 1e-4 and gaps["logsumexp"] < 1e-3
    assert np.mean(ours["top_ids"] == theirs["top_ids"]) > 0.99
    shifted = np.abs(ours["logsumexp"][1:] - theirs["logsumexp"][:-1]).max()
    assert shifted > 0.1, "control: a record off by one would be seen"


@pytest.mark.parametrize("batch", [1, 5, None])
def test_tables_of_a_ragged_batch_are_the_cpus(
    on_device: HybridModel, on_cpu: HybridModel, ragged: Corpus, tmp_path: Path, record: Callable[..., None], batch
) -> None:
    pytest.importorskip("polars", reason="tables are read by polars, which is not installed here")
    options = dict(k_max=5, chunk=64, exact=False, forced=True, target=True)
    some = ragged[:12]
    ours = replay(on_device, some, out=tmp_path / "there", batch=batch, **options).frame
    theirs = replay(on_cpu, some, out=tmp_path / "here", **options).frame
    assert ours.select("doc_id", "position", "length").equals(theirs.select("doc_id", "position", "length"))
    nll = np.abs(ours["nll"].to_numpy() - theirs["nll"].to_numpy()).max()
    sure = theirs["target_margin"].to_numpy() > 1e-2
    first = [frame["draft_ids"].arr.first().to_numpy() for frame in (ours, theirs)]
    led = np.nan_to_num(theirs["draft_margin"].arr.first().to_numpy()) > 1e-2
    same = float(np.mean(first[0][led] == first[1][led]))
    record("draft table against the CPU, float32", batch=batch, nll=float(nll), first_drafts=same)
    assert nll < 1e-3 and same == 1.0
    assert np.array_equal(ours["target_id"].to_numpy()[sure], theirs["target_id"].to_numpy()[sure])
    top = [np.nan_to_num(frame["draft_top1"].to_numpy()[led]) for frame in (ours, theirs)]
    assert np.mean(np.abs(top[0] - top[1]) < 1e-3) > 0.99, "chains part only where a draft was a tie"


def test_rows_of_a_store_are_the_cpus_bits(device: torch.device) -> None:
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 4, 300)[:, None]
    x[0] = 0.0
    for dtype in SEQUENCE_DTYPES:
        there, here = stored_columns("h", x.to(device), dtype), stored_columns("h", x, dtype)
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name].cpu(), here[name]) for name in here), dtype
        other = stored_columns("h", -x.to(device), dtype)
        assert not torch.equal(other["h"].cpu(), here["h"]), "control: other rows"


def test_a_store_of_ragged_batches_is_that_of_batches_of_one(
    on_device: HybridModel, ragged: Corpus, tmp_path: Path
) -> None:
    options = dict(taps=[0, 2], hidden_dtype="fp8", top_k=8, exact=True, shard_tokens=2000)
    for batch in (1, 8):
        extract_sequences(on_device, ragged, out=tmp_path / str(batch), batch=batch, **options)
    alone, together = (
        [file.read_bytes() for file in sorted((tmp_path / str(batch)).glob("*.arrow"))] for batch in (1, 8)
    )
    assert len(alone) > 1 and alone == together
