"""Exact mode: the bits of every row and plane are a function of the token sequence alone.

Not of how it was cut into forwards, of capacity, of neighbours in the batch, of a row's place in its block, or of which
logits were asked for. Each control takes one of the means away and shows that the same check then fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.cache.hybrid import HybridCache, same_bits
from workbench.cache.recurrent import RecurrentPlane
from workbench.core.errors import CapabilityError
from workbench.model import attention, delta, ffn, hybrid, mtp
from workbench.model.hybrid import HybridModel
from workbench.model.ops import Numerics
from workbench_kernels.gated_delta import ref

ROWS = 140  # into the third key block
VARIANTS = {
    "one head": dict(ratio=1),
    "two per key": dict(ratio=2, tied=False),
    "three per key": dict(ratio=3),
    "odd widths": dict(
        ratio=1, hidden_size=31, intermediate_size=53, vocab_size=89, linear_key_head_dim=17, linear_value_head_dim=33
    ),
    "wide state": dict(ratio=2, linear_key_head_dim=32, linear_value_head_dim=48, head_dim=40, hidden_size=64),
}


@pytest.fixture(scope="module")
def models(tiny) -> Callable[[str], HybridModel]:
    return cache(lambda name: tiny(exact=True, max_position_embeddings=512, **VARIANTS[name]))


def ids_of(model: HybridModel, rows: int = ROWS, seed: int = 3) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (1, rows), generator=torch.Generator().manual_seed(seed))


def feed(model: HybridModel, ids_BT: Tensor, sizes: Sequence[int], capacity: int = 512) -> tuple[Tensor, HybridCache]:
    """Trunk rows, normed rows and logits side by side [B, T, 2H + V], fed in pieces of these sizes; and the cache."""
    state = model.new_cache(batch=len(ids_BT), capacity=capacity)
    out = []
    for end, n in zip(accumulate(sizes), sizes):
        rows = model.forward(ids_BT[:, end - n : end], state)
        out.append(torch.cat([rows.trunk_BTH, rows.normed_BTH, rows.logits_BTV], -1))
    return torch.cat(out, 1), state


def feed_drafts(model: HybridModel, ids: Tensor, normed: Tensor, sizes: Sequence[int]) -> tuple[Tensor, HybridCache]:
    """The head's carriers and their logits over pairs fed in pieces; and the draft cache."""
    state, out = model.new_draft_cache(), []
    for end, n in zip(accumulate(sizes), sizes):
        carriers = model.draft(ids[:, end - n + 1 : end + 1], normed[:, end - n : end], state)
        out.append(torch.cat([carriers, model.unembed(carriers)], -1))
    return torch.cat(out, 1), state


def difference(model: HybridModel, ids: Tensor, sizes: Sequence[int], capacity: int = 512) -> str | None:
    """Where feeding in pieces first differs from one forward, or None: rows, planes, drafts and draft planes."""
    rows, state = feed(model, ids, [ids.shape[1]])
    again, end = feed(model, ids, sizes, capacity)
    if not same_bits(rows, again):
        return f"row {int((rows != again).any(-1)[0].nonzero()[0])}"
    if found := state.first_difference(end):
        return found
    h = model.config.hidden_size
    normed = rows[..., h : 2 * h]
    pairs = ids.shape[1] - 1
    drafts, state = feed_drafts(model, ids, normed, [pairs])
    cut = [n for n in (*sizes[:-1], sizes[-1] - 1) if n]
    again, end = feed_drafts(model, ids, normed, cut)
    return "drafts" if not same_bits(drafts, again) else state.first_difference(end)


def sizes_of(cuts: Sequence[int], total: int = ROWS) -> list[int]:
    edges = [0, *sorted(set(cuts)), total]
    return [b - a for a, b in pairwise(edges)]


def plane_of(state: HybridCache, b: int) -> list[Tensor]:
    """Every plane's content for one sequence."""
    out: list[Tensor] = []
    for plane in state.planes:
        if isinstance(plane, RecurrentPlane):
            out += [plane.conv_BWC[b], plane.state_BHKV[b]]
        else:
            out += plane.rows(b, state.lengths[b])
    return out


@settings(max_examples=20)
@given(
    name=st.sampled_from(list(VARIANTS)),
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=12),
    capacity=st.sampled_from([ROWS, ROWS + 1, 512]),
    seed=st.integers(0, 2),
)
def test_bits_do_not_depend_on_chunking_or_capacity(models, name, cuts, capacity, seed):
    model = models(name)
    assert difference(model, ids_of(model, seed=seed), sizes_of(cuts), capacity) is None


@pytest.mark.parametrize("name", VARIANTS)
def test_every_number_of_rows_per_forward(models, name):
    model = models(name)
    for n in (1, 2, 3, 5, 9, 17, 65):
        rows = 70 if n > 3 else 20
        assert difference(model, ids_of(model, rows), [n] * (rows // n) + [rows % n] * bool(rows % n)) is None, n


@settings(max_examples=15)
@given(data=st.data())
def test_bits_do_not_depend_on_neighbours_or_raggedness(models, data):
    model = models(data.draw(st.sampled_from(list(VARIANTS)), "variant"))
    batch = data.draw(st.integers(2, 3), "batch")
    total = 70
    ids = torch.cat([ids_of(model, total, seed=10 + b) for b in range(batch)])
    state = model.new_cache(batch=batch)
    heard: list[list[Tensor]] = [[] for _ in range(batch)]
    for _ in range(data.draw(st.integers(1, 5), "forwards")):
        counts = [min(data.draw(st.integers(0, 30)), total - at) for at in state.lengths]
        width = max(1, *counts)
        fed = torch.zeros(batch, width, dtype=torch.long)
        for b, (n, at) in enumerate(zip(counts, state.lengths)):
            fed[b, :n] = ids[b, at : at + n]
        rows = model.forward(fed, state, counts=counts)
        packed = torch.cat([rows.trunk_BTH, rows.normed_BTH, rows.logits_BTV], -1)
        for b, n in enumerate(counts):
            heard[b].append(packed[b, :n])
    for b, n in enumerate(state.lengths):
        if n:
            alone, end = feed(model, ids[b : b + 1, :n], [n])
            assert same_bits(torch.cat(heard[b]), alone[0]), f"rows of sequence {b}"
            for got, expected in zip(plane_of(state, b), plane_of(end, 0)):
                assert same_bits(got, expected), f"planes of sequence {b}"


@pytest.mark.parametrize("name", ["one head", "odd widths"])
def test_drafts_do_not_depend_on_neighbours(models, name):
    model = models(name)
    ids = torch.cat([ids_of(model, 80, seed) for seed in range(3)])
    normed = torch.cat([model.forward(row[None], model.new_cache(), logits="none").normed_BTH for row in ids])
    alone, end = feed_drafts(model, ids[1:2], normed[1:2], [79])
    state, out = model.new_draft_cache(batch=3), []
    for counts in ([70, 60, 3], [0, 5, 2], [1, 1, 1], [2, 13, 30]):
        tokens, carriers = torch.zeros(3, max(counts), dtype=torch.long), torch.ones(3, max(counts), normed.shape[-1])
        for b, (n, at) in enumerate(zip(counts, state.lengths)):
            tokens[b, :n], carriers[b, :n] = ids[b, at + 1 : at + n + 1], normed[b, at : at + n]
        drafted = model.draft(tokens, carriers, state, counts=counts)
        out.append(torch.cat([drafted, model.unembed(drafted)], -1)[1, : counts[1]])
    assert same_bits(torch.cat(out), alone[0])
    assert all(same_bits(a, b) for a, b in zip(plane_of(state, 1), plane_of(end, 0)))


def check_two_threads(model: HybridModel, rows: int, sizes: Sequence[int]) -> None:
    ids = ids_of(model, rows)
    assert difference(model, ids, sizes) is None
    alone, end = feed(model, ids, [rows])
    both, ends = feed(model, torch.cat([ids.flip(1), ids, ids]), [1, rows - 1])
    assert same_bits(both[1:2], alone) and same_bits(both[2:], alone)
    assert all(same_bits(a, b) for a, b in zip(plane_of(ends, 1), plane_of(end, 0)))


def test_the_same_on_two_threads(models, threads):
    with threads(2):  # short: threads that wait for each other on a busy machine are slow
        check_two_threads(models("wide state"), 6, [1, 5])


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_on_two_threads_at_length(models, threads, name):
    with threads(2):
        check_two_threads(models(name), ROWS, [1, 2, 5, 33, 4, 24, 1, 64, 6])


@pytest.mark.full
@settings(max_examples=300)
@given(name=st.sampled_from(list(VARIANTS)), cuts=st.lists(st.integers(1, ROWS - 1), max_size=60))
def test_bits_do_not_depend_on_chunking_in_many_draws(models, name, cuts):
    assert difference(models(name), ids_of(models(name)), sizes_of(cuts)) is None


def test_a_large_batch_on_two_threads(models, threads):
    """Past the size from which elementwise work is split over threads (32,768 elements)."""
    model = models("wide state")
    ids = ids_of(model, 3)
    with threads(2):
        alone, _ = feed(model, ids, [3])
        many, _ = feed(model, torch.cat([ids.flip(1)] * 8 + [ids]), [3])
    assert same_bits(many[8:], alone)


def test_requested_logits_have_the_bits_of_all_of_them(models):
    model = models("odd widths")
    ids = ids_of(model, 20)
    full = model.forward(ids, model.new_cache()).logits_BTV
    for rows in ([0], [7, 3, 19], list(range(20)), [-1]):
        assert same_bits(model.forward(ids, model.new_cache(), logits=rows).logits_BTV, full[:, rows])
    assert same_bits(model.forward(ids, model.new_cache(), logits="last").logits_BTV, full[:, -1:])
    headless = model.forward(ids, model.new_cache(), logits="none")
    assert headless.logits_BTV is None
    assert same_bits(model.unembed(headless.normed_BTH), full)
    two = model.forward(torch.cat([ids, ids]), model.new_cache(batch=2), counts=[20, 8], logits="last").logits_BTV
    assert same_bits(two[0, 0], full[0, 19]) and same_bits(two[1, 0], full[0, 7])


def test_the_mode_is_an_attribute_of_the_model(tiny):
    model = tiny(exact=False)
    assert model.numerics == Numerics(exact=False)
    model.exact = True
    assert model.numerics == Numerics(exact=True, row_block=4)
    assert Numerics.of(True, torch.device("cuda")).exact  # through the kernels
    with pytest.raises(CapabilityError, match="exact=True runs on a CPU or a CUDA GPU"):
        Numerics.of(True, torch.device("meta"))


# ------------------------------------------------------------------------------------------------- controls


def fast_mode(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    patch.setattr(model, "exact", False)


def stock_products(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for module in (attention, delta, ffn, hybrid, mtp):
        patch.setattr(module, "linear", lambda x, w, num: torch.nn.functional.linear(x, w))


def plain_maps(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    for module in (attention, delta, ffn):
        patch.setattr(module, "mapped", lambda fn, x, num: fn(x))


def stock_attention(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    patch.setattr(attention, "attend_exact", attention.attend_fast)


def attention_without_row_blocks(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    exact = attention.attend_exact
    patch.setattr(attention, "attend_exact", lambda q, p, b, at, num: exact(q, p, b, at, Numerics(True, len(q))))


def chunked_rule(patch: pytest.MonkeyPatch, model: HybridModel) -> None:
    def chunked(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor, every: bool = True
    ) -> tuple:
        out, end = ref.chunk(q, k, v, beta, decay.log(), state)
        return out, [end]

    patch.setattr(delta, "scan", chunked)


@pytest.mark.parametrize(
    "mistake",
    [fast_mode, stock_products, plain_maps, stock_attention, attention_without_row_blocks, chunked_rule],
    ids=lambda f: f.__name__,
)
def test_the_check_catches(models, monkeypatch, mistake):
    found = []
    for name in VARIANTS:
        model = models(name)
        ids = ids_of(model, 70)
        assert difference(model, ids, [1, 2, 5, 33, 4, 24, 1]) is None
        with monkeypatch.context() as patch:
            mistake(patch, model)
            found.append(difference(model, ids, [1, 2, 5, 33, 4, 24, 1]))
    assert any(found), "every bit was equal without this means: either it is not needed or the check has no teeth"


DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


@pytest.mark.full
@pytest.mark.skipif(not (DEMO / "config.json").exists(), reason="the demo checkpoint is not in data/demo")
@pytest.mark.parametrize("n", [1, 2])
def test_the_demo_checkpoint_on_real_text(threads, n):
    from workbench.model.weights.load import load_model

    model = load_model(DEMO, exact=True)
    prompts = (DEMO.parent / "prompts" / "demo.jsonl").read_text("utf-8").splitlines()[:6]
    texts = [model.tokenizer.encode(json.loads(line)["text"])[:130] for line in prompts]
    with threads(n):
        for ids in texts:
            sizes = [1, 2, 3, 5, 8, 13, 21, 34]
            assert difference(model, torch.tensor([ids]), [*sizes, len(ids) - sum(sizes)]) is None
