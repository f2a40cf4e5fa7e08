"""Checkpoints that are kept whole or rolled back, forgetting rows, and a commit that fails half-way."""

from __future__ import annotations

import pytest
import torch

from workbench.cache.hybrid import STRATEGIES
from workbench.core.errors import UserError


@pytest.fixture(scope="module")
def model(tiny):
    return tiny(ratio=2)


def ids(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 83, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_uncut_checkpoint_records_nothing_and_is_kept_whole_or_rolled_back(model, strategy):
    cache = model.new_cache(strategy=strategy)
    model.forward(ids(5), cache)
    before = cache.fork()
    ckpt = cache.checkpoint(cut=False)
    model.forward(ids(70, 1), cache)
    assert not ckpt.fed and all(plane.tape is None for plane in cache.recurrent)
    with pytest.raises(
        UserError, match="keep=3 is not valid: a checkpoint with cut=False is kept whole or rolled back"
    ):
        cache.commit(ckpt, keep=3)
    cache.rollback(ckpt)
    assert cache.first_difference(before) is None
    ckpt = cache.checkpoint(cut=False)
    model.forward(ids(4, 2), cache)
    cache.commit(ckpt, keep=4)
    model.forward(ids(4, 2), before)
    assert cache.first_difference(before) is None
    ckpt = cache.checkpoint()  # the next one cuts again
    model.forward(ids(6, 3), cache)
    cache.commit(ckpt, keep=2)
    model.forward(ids(6, 3)[:, :2], before)
    assert cache.first_difference(before) is None


def test_a_snapshot_whose_second_feeding_fails_is_where_it_was(model, monkeypatch):
    cache = model.new_cache(strategy="snapshot")
    model.forward(ids(5), cache)
    before = cache.fork()
    ckpt = cache.checkpoint()
    model.forward(ids(6, 1), cache)
    feed = model.layers[2].ffn.forward
    monkeypatch.setattr(model.layers[2].ffn, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.commit(ckpt, keep=3)
    assert cache.first_difference(before) is None and not ckpt.open
    monkeypatch.setattr(model.layers[2].ffn, "forward", feed)
    model.forward(ids(3, 2), cache)
    model.forward(ids(3, 2), before)
    assert cache.first_difference(before) is None


def test_rows_of_keys_and_values_can_be_forgotten(model, monkeypatch):
    cache, carriers = model.new_draft_cache(), torch.randn(1, 9, 30, generator=torch.Generator().manual_seed(0))
    model.draft(ids(9)[:, :4], carriers[:, :4], cache)
    before = cache.fork()
    with monkeypatch.context() as patch:
        patch.setattr(model.mtp.ffn, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.draft(ids(9)[:, 4:], carriers[:, 4:], cache)
    cache.truncate(4)  # an interrupted forward is forgotten too
    assert cache.first_difference(before) is None
    model.draft(ids(9)[:, 4:], carriers[:, 4:], cache)
    cache.truncate(4)
    assert cache.first_difference(before) is None and cache.lengths == [4]
    with pytest.raises(AssertionError):
        cache.truncate(5)
    with pytest.raises(AssertionError):
        model.new_cache().truncate(0)
