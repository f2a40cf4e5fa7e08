"""Ragged documents through the kernels' forward: records and tables of the stock one, ids checked on the host alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets import extract, to_arrays
from workbench.model import hybrid, kernel_forward
from workbench.replay import replay
from workbench.replay.options import ReplayOptions
from workbench.replay.run import chain_tape
from workbench_kernels.dispatch import use

LENGTHS = (70, 12, 41, 9, 26)  # several chunks, in which documents end at once, midway, or before


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(ratio=2, tied=False, exact=False, seed=2)


@pytest.fixture(scope="module")
def ragged() -> Corpus:
    rng = np.random.default_rng(3)
    return Corpus([Tape(f"d{i}", rng.integers(0, 83, n), prompt_len=3) for i, n in enumerate(LENGTHS)], name="ragged")


def differences(model, ragged, folder) -> dict[str, float]:
    """Largest differences between what the kernels' forward and the stock one give."""
    found = {}
    for name in ("stock", "kernels"):
        with use("ref") if name == "kernels" else torch.no_grad():
            records = to_arrays(
                extract(model, ragged, out=folder / name / "x", gamma=3, top_k=8, chunk=20, batch=5, anchors="all")
            )
            frame = replay(model, ragged, out=folder / name / "y", k_max=3, chunk=20, batch=5).frame
        first = np.nan_to_num(frame["draft_top1"].arr.first().to_numpy())
        found[name] = {"logsumexp": records["logsumexp"], "nll": frame["nll"].to_numpy(), "top1": first}
    return {key: float(np.abs(found["stock"][key] - found["kernels"][key]).max()) for key in found["stock"]}


def test_ragged_documents_give_what_the_stock_forward_gives(model, ragged, tmp_path):
    assert max(differences(model, ragged, tmp_path).values()) < 2e-4


@pytest.fixture
def spoil(monkeypatch):
    """Change every batch of the kernels' forward after it is made."""
    begin = kernel_forward.Batch.__init__

    def apply(change):
        def changed(self, *args):
            begin(self, *args)
            change(self)

        monkeypatch.setattr(kernel_forward.Batch, "__init__", changed)

    return apply


def test_control_rows_at_a_wrong_place_are_seen(model, ragged, tmp_path, spoil):
    spoil(lambda batch: setattr(batch, "lengths_B", batch.lengths_B * 0))
    assert min(differences(model, ragged, tmp_path).values()) > 1e-3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("t", [6, 30])
def test_a_document_without_rows_stays_as_it_was(model, spoil, monkeypatch, exact, t):
    monkeypatch.setattr(model, "exact", exact)
    ids = torch.randint(0, 83, (2, t), generator=torch.Generator().manual_seed(0))

    def after(fed: list[list[int]]) -> torch.Tensor:
        cache = model.new_cache(batch=2)
        for counts in fed:
            rows = model.forward(ids, cache, counts=counts, logits="last")
        return rows.logits_BTV[1]

    with use("ref"):
        never = after([[t, t]])
        torch.testing.assert_close(after([[t, 0], [0, t]]), never, atol=1e-5, rtol=1e-5)
        spoil(lambda batch: setattr(batch, "counts_B", None))
        assert not torch.allclose(after([[t, 0], [0, t]]), never, atol=1e-3), "control: padding that is taken in"


def test_ids_of_tapes_are_checked_on_the_host_and_others_by_every_forward(model, ragged, tmp_path, monkeypatch):
    calls = []
    check = hybrid.check_ids
    monkeypatch.setattr(hybrid, "check_ids", lambda *args: calls.append(args) or check(*args))
    bad = Tape("bad", np.array([3, 83, 5]), prompt_len=1)
    options = ReplayOptions(k_max=2, chunk=20)
    with use("ref"):
        extract(model, ragged, out=tmp_path / "x", gamma=3, top_k=8, chunk=20)
        replay(model, ragged, out=tmp_path / "y", k_max=2, chunk=20)
        assert list(chain_tape(model, ragged[0], options)) and not calls
        with pytest.raises(UserError, match="holds token id 83 at position 1"):
            replay(model, [bad], out=tmp_path / "z", k_max=2)
        with pytest.raises(UserError, match="token id 83 is out of range"):
            list(chain_tape(model, bad, options))
        ids = torch.tensor([[3, 83, 5]])
        with pytest.raises(UserError, match="token id 83 is out of range"):
            model.forward(ids, model.new_cache())
        with pytest.raises(UserError, match="token id 83 is out of range"):
            model.draft(ids, torch.zeros(1, 3, model.config.hidden_size), model.new_draft_cache())
    assert len(calls) == 2
