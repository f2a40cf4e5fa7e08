"""Chains of many starts at once against a live chain, which keeps all its rows in one cache, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.cache.hybrid import HybridCache, same_bits
from workbench.cache.kv import BLOCK
from workbench.model.chain import ChainBatch
from workbench.model.hybrid import HybridModel

N = 200  # into the fourth key block
EDGES = (1, 2, 62, 63, 64, 65, 66, 126, 127, 128, 129, 191, 192, 193, 199)
SHAPES = {
    "one head": dict(ratio=1),
    "two per key": dict(ratio=2, tied=False),
    "three per key": dict(ratio=3),
    "odd widths": dict(ratio=1, hidden_size=31, intermediate_size=53, vocab_size=89),
    "wide heads": dict(ratio=2, head_dim=40, hidden_size=64),
}


@pytest.fixture(scope="module")
def settings_of(tiny):
    """Model, true rows of the head's cache over N tokens, and the carriers of every pair, by shape and class."""
    made: dict[tuple[str, bool], tuple[HybridModel, HybridCache, Tensor]] = {}

    def build(name: str, exact: bool = True) -> tuple[HybridModel, HybridCache, Tensor]:
        if (name, exact) not in made:
            model = tiny(exact=exact, **SHAPES[name])
            ids = drawn(model, N + 1, seed=1)[None]
            rows = model.forward(ids, model.new_cache(), logits="none")
            state = model.new_draft_cache()
            carriers = model.draft(ids[:, 1:], rows.normed_BTH[:, :-1], state)[0]
            made[name, exact] = model, state, carriers
        return made[name, exact]

    return build


def drawn(model: HybridModel, n: int, seed: int) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def plane_bits(state: HybridCache) -> tuple[Tensor, Tensor]:
    plane = state.planes[0]
    return plane.k_BNSD.clone(), plane.v_BNSD.clone()


@torch.inference_mode()
def live(model: HybridModel, state: HybridCache, start: int, carrier: Tensor, tokens: Sequence[int]) -> list[Tensor]:
    """Carriers of one chain from ``start``, fed these tokens one by one as the engine does."""
    cache, out = state.fork(), []
    cache.truncate(start)
    at = carrier[None, None]
    for token in tokens:
        at = model.draft(torch.tensor([[token]]), at, cache)
        out.append(at[0, 0])
    return out


@torch.inference_mode()
def gap(model: HybridModel, state: HybridCache, carriers: Tensor, starts: Sequence[int], steps: int) -> float | None:
    """Largest difference of any step of any chain from its live twin; None where every bit agrees."""
    batch = ChainBatch(model, state.planes[0], starts)
    tokens = drawn(model, steps * len(starts), seed=2).view(steps, len(starts))
    at = carriers[torch.tensor(starts) - 1]
    steps_PH = []
    for row in tokens:
        at = batch.step(row, at)
        steps_PH.append(at)
    worst, same = 0.0, True
    for i, start in enumerate(starts):
        for j, expected in enumerate(live(model, state, start, carriers[start - 1], tokens[:, i].tolist())):
            same &= same_bits(steps_PH[j][i], expected)
            worst = max(worst, float((steps_PH[j][i] - expected).abs().max()))
    return None if same else worst


@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_at_the_edges_of_key_blocks(settings_of, name):
    model, state, carriers = settings_of(name)
    before = plane_bits(state)
    assert gap(model, state, carriers, EDGES, steps=9) is None
    assert all(torch.equal(a, b) for a, b in zip(before, plane_bits(state), strict=True)), "true rows stay as they are"


@settings(max_examples=12)
@given(data=st.data())
def test_every_bit_whatever_starts_come_together(settings_of, data):
    model, state, carriers = settings_of(data.draw(st.sampled_from(list(SHAPES)), "shape"))
    starts = data.draw(st.lists(st.integers(1, N), min_size=1, max_size=9, unique=True), "starts")
    assert gap(model, state, carriers, starts, steps=data.draw(st.integers(1, 5), "steps")) is None


@pytest.mark.parametrize("name", ["two per key", "odd widths"])
def test_chains_of_64_steps_reach_into_a_second_private_block(settings_of, name):
    model, state, carriers = settings_of(name)
    assert gap(model, state, carriers, (1, 63, 64, 127), steps=BLOCK - 1) is None, "64 drafts take 63 steps"


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_every_start_every_bit(settings_of, name):
    model, state, carriers = settings_of(name)
    assert gap(model, state, carriers, range(1, N + 1), steps=8) is None
    assert gap(model, state, carriers, (*range(1, N, 9), N), steps=BLOCK - 1) is None


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 3])
def test_every_bit_with_threads(settings_of, threads, count):
    model, state, carriers = settings_of("wide heads")
    with threads(count):
        assert gap(model, state, carriers, EDGES, steps=9) is None


@pytest.mark.parametrize("name", SHAPES)
def test_fast_chains_are_close(settings_of, name):
    model, state, carriers = settings_of(name, exact=False)
    found = gap(model, state, carriers, EDGES, steps=9)
    assert found is None or found < 2e-5, found


def test_demo_chains_in_both_classes(demo, heldout):
    ids = torch.from_numpy(heldout("pydocs")[0].tokens[:N].astype("int64"))[None]
    for exact in (True, False):
        demo.exact = exact
        try:
            rows = demo.forward(ids, demo.new_cache(capacity=N), logits="none")
            state = demo.new_draft_cache(capacity=2 * N)
            carriers = demo.draft(ids[:, 1:], rows.normed_BTH[:, :-1], state)[0]
            found = gap(demo, state, carriers, (1, 63, 64, 65, 128, N - 1), steps=8)
        finally:
            demo.exact = True
        assert found is None if exact else found is None or found < 1e-4, found


# ---------------------------------------------------------------- the comparison can fail


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_start_off_by_one_is_seen(settings_of, monkeypatch, shift):
    model, state, carriers = settings_of("two per key")
    build = ChainBatch.__init__

    def wrong(self, model, plane, starts):
        build(self, model, plane, [start + shift for start in starts])

    monkeypatch.setattr(ChainBatch, "__init__", wrong)
    assert gap(model, state, carriers, (40, 64, 100), steps=3) > 1e-3
