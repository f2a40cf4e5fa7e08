"""Documents that run together through the drafter, and the forms that a GPU takes, checked where there is none."""

from __future__ import annotations

import sys
from dataclasses import replace as with_fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError, NonFiniteError, UserError
from workbench.core.tape import Corpus, Tape
from workbench.model import chain
from workbench.model.chain import ChainBatch, DeviceChains, FastChains
from workbench.model.hybrid import HybridModel
from workbench.replay import ReplayOptions, replay, score
from workbench.replay import chains as chains_module
from workbench.replay.chains import drafter_slices, leads, narrow_slices, read_once

K = 4
SMALL = dict(k_max=K, chunk=24)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2, tied=False, seed=2)


def ragged(count: int = 7) -> Corpus:
    rng = np.random.default_rng(6)
    lengths = rng.permutation(np.linspace(2, 150, count).astype(int))
    tapes = [Tape(f"d{i}", rng.integers(0, 83, n), prompt_len=int(n) // 4) for i, n in enumerate(lengths)]
    return Corpus(tapes, name="ragged")


def shards(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.glob("*.arrow"))]


MORE = [{}, dict(forced=True, shadow=2, target=True, overlap=1.0), dict(stride=3), dict(carrier="pre_norm")]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_a_batch_gives_the_bytes_of_batches_of_one(model, tmp_path, more):
    for batch in (1, 3, 7):
        replay(model, ragged(), out=tmp_path / str(batch), batch=batch, shard_rows=100, **SMALL, **more)
    assert len(shards(tmp_path / "1")) > 1
    assert shards(tmp_path / "3") == shards(tmp_path / "1") == shards(tmp_path / "7")


def test_a_fast_batch_agrees_within_rounding(model, tmp_path):
    alone, together = (
        replay(model, ragged(), out=tmp_path / str(batch), batch=batch, exact=False, **SMALL).frame for batch in (1, 4)
    )
    for name in ("doc_id", "position", "length"):
        assert alone[name].equals(together[name])
    for name in ("nll", "target_margin"):
        np.testing.assert_allclose(together[name].to_numpy(), alone[name].to_numpy(), atol=1e-4)
    sure = alone["target_margin"].to_numpy() > 1e-3
    assert sure.any() and np.array_equal(together["target_id"].to_numpy()[sure], alone["target_id"].to_numpy()[sure])


def test_control_chains_over_another_document_change_the_table(model, monkeypatch, tmp_path):
    replay(model, ragged(), out=tmp_path / "right", batch=3, **SMALL)
    make = ChainBatch.__init__

    def first_only(self, model, plane, starts, *, sequences=None):
        make(self, model, plane, starts)

    monkeypatch.setattr(ChainBatch, "__init__", first_only)
    replay(model, ragged(), out=tmp_path / "wrong", batch=3, **SMALL)
    assert shards(tmp_path / "wrong") != shards(tmp_path / "right")


def test_batches_of_scores_are_the_scores(model, tmp_path, monkeypatch):
    score(model, ragged(), out=tmp_path / "1", hidden=True, chunk=24)
    monkeypatch.setattr(sys.modules["workbench.replay.score"], "batch_limit", lambda *given: lambda rows: 3)
    score(model, ragged(), out=tmp_path / "3", hidden=True, chunk=24)
    assert shards(tmp_path / "1") == shards(tmp_path / "3")


@pytest.mark.parametrize("more", [dict(ranks=True), dict(temperature=0.7)])
def test_what_goes_document_by_document_says_so(more):
    with pytest.raises(UserError, match="batch=2 is not valid with draws or ranks"):
        ReplayOptions(batch=2, **more)
    assert ReplayOptions(batch=1, **more).batch == 1
    with pytest.raises(UserError, match="batch=0"):
        ReplayOptions(batch=0)


def test_a_bad_row_in_a_batch_names_its_position(tiny, tmp_path):
    bad = tiny(tied=False)
    bad.head.data[7] = float("nan")
    with pytest.raises(NonFiniteError, match="logits of position 0 hold NaN"):
        replay(bad, ragged(), out=tmp_path / "x", batch=3, **SMALL)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what a GPU runs


@torch.inference_mode()
def carriers(model: HybridModel, starts: list[int], of: list[int], steps: int) -> list[torch.Tensor]:
    ids = torch.randint(0, 83, (2, 150), generator=torch.Generator().manual_seed(1))
    rows = model.forward(ids, model.new_cache(batch=2), logits="none")
    state = model.new_draft_cache(batch=2)
    hidden = model.draft(ids[:, 1:], rows.normed_BTH[:, :-1], state)
    batch = ChainBatch(model, state.planes[0], starts, sequences=of)
    at = hidden[of, torch.tensor(starts) - 1]
    out = []
    for step in range(steps):
        at = batch.step((torch.tensor(starts) * 7 + step) % 83, at)
        out.append(at)
    return out


def test_chains_by_the_op_are_chains_by_stock_operations(tiny, monkeypatch):
    model, starts, of = tiny(ratio=2, exact=False), [1, 40, 64, 149, 2, 63, 100], [0, 0, 0, 0, 1, 1, 1]
    stock = carriers(model, starts, of, 11)
    for kind in (DeviceChains, FastChains):
        monkeypatch.setattr(chain, "chains_for", lambda model, kind=kind: kind)
        for a, b in zip(carriers(model, starts, of, 11), stock, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    attend = DeviceChains.attend

    def forgets(self, q, k, v, step, num, gate=None):
        self.starts = self.starts.clamp(max=60)
        return attend(self, q, k, v, step, num, gate)

    monkeypatch.setattr(DeviceChains, "attend", forgets)
    monkeypatch.setattr(chain, "chains_for", lambda model: DeviceChains)
    wrong = carriers(model, starts, of, 1)[0]
    assert (wrong - stock[0]).abs().max() > 1e-3, "control: true rows out of sight"


def test_chains_of_many_starts_refuse_the_exact_class_on_a_gpu():
    there = SimpleNamespace(device=torch.device("cuda"), exact=True)
    with pytest.raises(CapabilityError, match=r"on a GPU.*exact=False"):
        chain.chains_for(there)
    assert chain.chains_for(SimpleNamespace(device=torch.device("cuda"), exact=False)) is DeviceChains


@pytest.mark.parametrize("vocab", [2, 97, 1000])
def test_a_row_read_once_gives_its_pick_margin_and_normaliser(vocab):
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[3] = logits[3].round()
    for a, b in zip(read_once(logits, impl="ref"), leads(logits), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)
    moved = read_once(logits.roll(1, 1), impl="ref")
    assert not torch.equal(moved.ids, leads(logits).ids), "control: ids are places in the row"
    one = read_once(torch.zeros(2, 1), impl="ref")
    assert one.ids.tolist() == [0, 0] and one.margin.tolist() == [torch.inf] * 2


def test_a_trimmed_head_is_read_by_its_own_ids(tiny, monkeypatch, tmp_path):
    model = tiny(ratio=1, tied=False, exact=False)
    ids = torch.tensor([0, 3, 8, 20, 21, 50, 81])
    head = model.trim_draft_vocab(ids.tolist())
    hidden = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    wide = [leads(logits) for _, logits, none in drafter_slices(model, hidden) if none is None]
    ((_, narrow, map_D),) = narrow_slices(model, hidden, head)
    found = leads(narrow)
    assert torch.equal(map_D[found.ids], wide[0].ids)
    torch.testing.assert_close(found.top1, wide[0].top1)
    torch.testing.assert_close(found.margin, wide[0].margin)
    frame = replay(model, ragged(3), out=tmp_path / "x", **SMALL).frame
    drafted = set(frame["draft_ids"].explode().drop_nulls().to_list())
    assert drafted and drafted <= set(ids.tolist())
    monkeypatch.setattr(chains_module, "drafter_slices", lambda m, c: narrow_slices(m, c, head))
    by_ids = replay(model, ragged(3), out=tmp_path / "y", **SMALL).frame
    assert by_ids["draft_ids"].equals(frame["draft_ids"])
    other = with_fields(head, ids_D=ids + 1)
    monkeypatch.setattr(chains_module, "drafter_slices", lambda m, c: narrow_slices(m, c, other))
    wrong = replay(model, ragged(3), out=tmp_path / "z", **SMALL).frame
    assert not wrong["draft_ids"].equals(frame["draft_ids"]), "control: another map"
