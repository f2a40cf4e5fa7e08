"""Documents of ragged length that run together: the records, their order, and the writer behind them."""

from __future__ import annotations

import sys
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract, passes, to_arrays
from workbench.datasets.groups import WINDOW, chunk_counts, plan_groups
from workbench.datasets.shardfile import HashingFile
from workbench.datasets.topk import kept_columns
from workbench.model.hybrid import HybridModel
from workbench_kernels.sparse_topk import sparse_topk

SMALL = dict(gamma=3, top_k=8, chunk=16)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny()


def ragged(count: int = 9) -> Corpus:
    rng = np.random.default_rng(5)
    lengths = rng.permutation(np.linspace(6, 70, count).astype(int))
    tapes = [Tape(f"d{i}", rng.integers(0, 83, n), prompt_len=int(n) // 3) for i, n in enumerate(lengths)]
    return Corpus(tapes, name="ragged")


def shards(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.glob("*.arrow"))]


# ---------------------------------------------------------------- groups


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(1, 9))
def test_every_document_is_in_one_group_of_its_window(rows, batch):
    groups = plan_groups(rows, lambda longest: batch)
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    for group in groups:
        assert len(group) <= batch and len({i // (WINDOW * batch) for i in group}) == 1
        assert [rows[i] for i in group] == sorted((rows[i] for i in group), reverse=True)
    if batch == 1:
        assert groups == [[i] for i in range(len(rows))]


def test_groups_are_smaller_where_documents_are_longer():
    rows = [100, 10, 10, 100, 10, 10]
    assert plan_groups(rows, lambda longest: 1 if longest > 50 else 4) == [[0], [1, 2, 4, 5], [3]]


def test_counts_of_a_chunk():
    assert chunk_counts([5, 12, 20], 8, 8) == [0, 4, 8]


# ---------------------------------------------------------------- records


@pytest.mark.parametrize("anchors", [3, "all"])
def test_a_batch_gives_the_bytes_of_batches_of_one(model, tmp_path, anchors):
    options = dict(anchors=anchors, shard_rows=20, **SMALL)
    for batch in (1, 4, 9):
        extract(model, ragged(), out=tmp_path / str(batch), batch=batch, **options)
    assert len(shards(tmp_path / "1")) > 1
    assert shards(tmp_path / "4") == shards(tmp_path / "1") == shards(tmp_path / "9")


def test_a_fast_batch_agrees_within_rounding(model, tmp_path):
    alone, together = (
        to_arrays(extract(model, ragged(), out=tmp_path / str(batch), batch=batch, exact=False, **SMALL))
        for batch in (1, 5)
    )
    assert np.array_equal(alone["position"], together["position"])
    assert np.array_equal(alone["doc_id"], together["doc_id"])
    np.testing.assert_allclose(together["top_logits"], alone["top_logits"], atol=1e-4)
    np.testing.assert_allclose(together["tail_probs"], alone["tail_probs"], atol=1e-5)


def test_32_ragged_documents_come_out_in_their_order(model, tmp_path):
    tapes = ragged(32)
    a = to_arrays(extract(model, tapes, out=tmp_path / "x", anchors=2, batch=6, shard_rows=10, **SMALL))
    order = [doc for i, doc in enumerate(a["doc_id"]) if i == 0 or a["doc_id"][i - 1] != doc]
    assert order == [tape.doc_id for tape in tapes]
    by = {tape.doc_id: tape for tape in tapes}
    for doc, position, tokens in zip(a["doc_id"], a["position"], a["tokens"], strict=True):
        assert np.array_equal(tokens, by[doc].tokens[position : position + 4])


def test_control_counts_that_drop_a_row_change_records(model, tmp_path, monkeypatch):
    extract(model, ragged(), out=tmp_path / "right", batch=4, **SMALL)
    forward = HybridModel.forward

    def short(self, tokens, cache, *, counts, **more):
        return forward(self, tokens, cache, counts=[max(n - 1, 0) for n in counts], **more)

    monkeypatch.setattr(HybridModel, "forward", short)
    extract(model, ragged(), out=tmp_path / "wrong", batch=4, **SMALL)
    assert shards(tmp_path / "wrong") != shards(tmp_path / "right")


def test_control_documents_taken_for_each_other_change_records(model, tmp_path, monkeypatch):
    extract(model, ragged(), out=tmp_path / "right", batch=4, **SMALL)
    monkeypatch.setattr(passes, "flat_places", lambda places, width: np.concatenate(places))
    extract(model, ragged(), out=tmp_path / "wrong", batch=4, **SMALL)
    assert shards(tmp_path / "wrong") != shards(tmp_path / "right")


# ---------------------------------------------------------------- the writer


def test_a_slow_writer_changes_nothing(model, tmp_path, monkeypatch):
    extract(model, ragged(), out=tmp_path / "a", batch=2, **SMALL)
    records = passes.filled_records

    def slow(*given, **more):
        sleep(0.01)
        yield from records(*given, **more)

    monkeypatch.setattr(sys.modules["workbench.datasets.extract"], "filled_records", slow)
    extract(model, ragged(), out=tmp_path / "b", batch=2, **SMALL)
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


@pytest.mark.parametrize("batch", [1, 4])
def test_a_full_disk_is_a_sentence_and_the_run_goes_on(model, tmp_path, monkeypatch, batch):
    options = dict(shard_rows=6, batch=batch, exact=False, **SMALL)
    extract(model, ragged(), out=tmp_path / "whole", **options)
    out, write = tmp_path / "x", HashingFile.write
    left = [sum(map(len, shards(tmp_path / "whole"))) // 2]

    def full(self, data):
        left[0] -= memoryview(data).nbytes
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(HashingFile, "write", full)
    with pytest.raises(UserError, match=r"could not be written.*disk is full.*No space left.*run again"):
        extract(model, ragged(), out=out, **options)
    monkeypatch.undo()
    done = Manifest.read(out)
    assert done.shards and not done.complete and not list(out.glob("*.tmp"))
    extract(model, ragged(), out=out, **options)
    assert shards(out) == shards(tmp_path / "whole"), "also in the fast class"


def test_an_interrupt_leaves_finished_shards(model, tmp_path, monkeypatch):
    options = dict(shard_rows=6, batch=2, **SMALL)
    extract(model, ragged(), out=tmp_path / "whole", **options)
    forward, left = HybridModel.forward, [9]

    def interrupted(self, *given, **more):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return forward(self, *given, **more)

    monkeypatch.setattr(HybridModel, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(model, ragged(), out=tmp_path / "x", **options)
    monkeypatch.undo()
    manifest = Manifest.read(tmp_path / "x")
    assert manifest.shards and not manifest.complete and not list((tmp_path / "x").glob("*.tmp"))
    extract(model, ragged(), out=tmp_path / "x", **options)
    assert shards(tmp_path / "x") == shards(tmp_path / "whole")


def test_a_bad_row_in_a_batch_names_its_document(tiny, tmp_path):
    model = tiny(tied=False)
    model.head.data[7] = float("nan")
    with pytest.raises(NonFiniteError, match=r"document 'd\d': the logits of position \d+ hold NaN"):
        extract(model, ragged(), out=tmp_path / "x", batch=4, **SMALL)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the op of a GPU beside the CPU's


@settings(max_examples=25)
@given(st.integers(0, 1 << 16), st.sampled_from([1.0, 0.7, 2.5]), st.integers(1, 20), st.booleans())
def test_the_op_keeps_what_stock_operations_keep(seed, temperature, k, ties):
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if ties else logits
    here = kept_columns(logits, top_k=k, temperature=temperature)
    there = sparse_topk(logits, k=k, temperature=temperature, impl="ref")
    assert torch.equal(here.ids_Rk, there.ids_Rk) and torch.equal(here.logits_Rk, there.logits_Rk)
    for a, b in zip(here[2:], there[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    if k > 1 and not ties:
        wrong = sparse_topk(logits, k=k, temperature=temperature * 1.01, impl="ref")
        assert not torch.allclose(here.probs_Rk, wrong.probs_Rk, rtol=2e-5, atol=2e-6), "control: another temperature"
