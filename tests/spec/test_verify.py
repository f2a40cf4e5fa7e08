"""The verify forward against its row-by-row oracle, and the bisect that names the first layer that differs."""

from __future__ import annotations

import pytest
import torch

from workbench.cache.hybrid import same_bits
from workbench.core.errors import UserError
from workbench.model.hybrid import HybridModel
from workbench.spec.verify import bisect_rows, verify

LAYERS = 5


@pytest.fixture
def state(lively):
    cache = lively.model.new_cache()
    lively.model.forward(torch.tensor([lively.truth[:30]]), cache)
    return cache


def block(lively, n: int) -> torch.Tensor:
    return torch.tensor([lively.truth[30 : 30 + n]])


@pytest.mark.parametrize("n", range(1, 10))
def test_the_oracle_feeds_one_row_at_a_time_and_agrees_in_exact_mode(lively, state, n):
    twin = state.fork()
    a, b = verify(lively.model, state, block(lively, n)), verify(lively.model, twin, block(lively, n), rowwise=True)
    for name in ("trunk_BTH", "normed_BTH", "logits_BTV"):
        assert same_bits(getattr(a, name), getattr(b, name))
    assert state.first_difference(twin) is None


@pytest.mark.parametrize("n", range(1, 10))
def test_in_exact_mode_no_row_differs(lively, state, n):
    before = state.fork()
    assert bisect_rows(lively.model, state, block(lively, n)) is None
    assert state.first_difference(before) is None, "the cache is left as it is"


def nudge(patch: pytest.MonkeyPatch, module: torch.nn.Module, by: float, row: int = 0) -> None:
    """Make a module's rows from ``row`` on depend on how many rows come together."""
    forward = module.forward

    def wrong(x: torch.Tensor, *args):
        out = forward(x, *args).clone()
        if x.shape[1] > 1:
            out[:, row:] += by
        return out

    patch.setattr(module, "forward", wrong)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_first_perturbed_layer_is_named_first(lively, state, layer, monkeypatch):
    model = lively.model
    for late in range(layer, LAYERS):
        nudge(monkeypatch, model.layers[late].ffn, 1e-2, row=2)
    found = bisect_rows(model, state, block(lively, 4))
    assert found is not None and (found.layer, found.row) == (layer, 2)
    assert 5e-3 < found.largest < 2e-2 and found.logits > 0


def test_in_the_fast_class_a_wide_verify_differs_by_rounding_and_says_where(demo, monkeypatch):
    monkeypatch.setattr(demo, "exact", False)
    text = torch.randint(1, demo.config.vocab_size, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = demo.new_cache()
    demo.forward(text[:, :48], cache, logits="none")
    found = bisect_rows(demo, cache, text[:, 48:57])
    assert found is not None and 0 <= found.layer < demo.config.num_layers and 0 <= found.row < 9
    assert found.largest < 1e-3 and found.logits < 1e-2
    monkeypatch.setattr(demo, "exact", True)
    cache = demo.new_cache()
    demo.forward(text[:, :48], cache, logits="none")
    assert bisect_rows(demo, cache, text[:, 48:57]) is None


def test_a_difference_of_the_head_alone_is_named_after_the_last_layer(lively, state, monkeypatch):
    logits = HybridModel._logits
    monkeypatch.setattr(
        HybridModel, "_logits", lambda self, h, rows: logits(self, h, rows) + (1e-3 if rows > 1 else 0.0)
    )
    found = bisect_rows(lively.model, state, block(lively, 3))
    assert found is not None and (found.layer, found.row) == (LAYERS, 0)
    assert found.largest == found.logits == pytest.approx(1e-3, rel=1e-2) and found.margin is None


def test_a_changed_pick_comes_with_the_margin_of_the_oracle(lively, state, monkeypatch):
    tokens = block(lively, 3)
    best = verify(lively.model, state.fork(), tokens).logits_BTV[0, 1].topk(2)
    logits = HybridModel._logits

    def wrong(self: HybridModel, h: torch.Tensor, rows: int) -> torch.Tensor:
        out = logits(self, h, rows).clone()
        if rows > 1:
            out[0, 1, best.indices[1]] += 2 * (best.values[0] - best.values[1])
        return out

    monkeypatch.setattr(HybridModel, "_logits", wrong)
    found = bisect_rows(lively.model, state, tokens)
    assert found is not None and (found.layer, found.row) == (LAYERS, 1)
    assert found.margin == pytest.approx(float(best.values[0] - best.values[1]))


def test_the_sign_of_a_zero_is_a_difference(lively, state, monkeypatch):
    logits = HybridModel._logits

    def wrong(self: HybridModel, h: torch.Tensor, rows: int) -> torch.Tensor:
        out = logits(self, h, rows).clone()
        out[0, :, 7] = 0.0
        if rows > 1:
            out[0, 2, 7] = -0.0
        return out

    monkeypatch.setattr(HybridModel, "_logits", wrong)
    found = bisect_rows(lively.model, state, block(lively, 3))
    assert found is not None and (found.layer, found.row, found.largest) == (LAYERS, 2, 0.0)


def test_a_cache_in_a_transaction_is_refused(lively, state):
    state.checkpoint()
    with pytest.raises(UserError, match="open checkpoint cannot be forked: commit it or roll it back first"):
        bisect_rows(lively.model, state, block(lively, 2))
