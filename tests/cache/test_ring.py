"""Sliding windows in a ring: the same as full attention under the window's mask, laps later; lapped rewinds refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import workbench as wb
from workbench.cache.formats import FORMATS
from workbench.cache.hybrid import STRATEGIES, HybridCache, same_bits
from workbench.cache.kv import BLOCK, AttentionPlane
from workbench.cache.ring import RingPlane
from workbench.core.errors import UserError
from workbench.model.attention import attend_exact, attend_fast, merge_blocks
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.model.ops import Numerics

LAYERS = (LINEAR, FULL, LINEAR, FULL)
W, WIDEST = 8, 16
N, G, D = 2, 3, 32
CPU = torch.device("cpu")
EXACT, FAST = Numerics(exact=True), Numerics(exact=False)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2, layer_types=LAYERS, head_dim=32, tied=False, vocab_size=211, seed=2)


def draw(model: HybridModel, rows: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, rows), generator=torch.Generator().manual_seed(seed))


def widths(total: int, most: int, seed: int) -> list[int]:
    """Random widths from 1 to ``most`` that add up."""
    rng, out = random.Random(seed), []
    while total:
        out.append(min(total, rng.randint(1, most)))
        total -= out[-1]
    return out


def feed(model: HybridModel, cache: HybridCache, ids: Tensor, cuts: list[int]) -> Tensor:
    out, at = [torch.empty(1, 0, model.config.vocab_size)], 0
    for n in cuts:
        logits = model.forward(ids[:, at : at + n], cache).logits_BTV
        assert logits is not None
        out.append(logits)
        at += n
    return torch.cat(out, 1)


def masked(model: HybridModel, window: int, **formats: str) -> HybridCache:
    """A cache that keeps every row and masks all but the window."""
    cache = model.new_cache(**formats)
    for plane in cache.planes:
        if isinstance(plane, AttentionPlane):
            plane.window = window
    return cache


def ring(window: int = W, widest: int = WIDEST, kind: str = "dense", batch: int = 1) -> RingPlane:
    form = FORMATS[kind]
    shape = dict(window=window, widest=widest, capacity=10_000, dtype=torch.float32, device=CPU)
    return RingPlane(batch, N, D, k_format=form, v_format=form, **shape)


def rows(total: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 1, total, N, D, generator=generator)
    return torch.randn(total, N, G, D, generator=generator), k, v


def softmax64(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Full attention in float64 under the window's mask."""
    t = len(q)
    scores = torch.einsum("tngd,snd->ngts", q.double(), k[0].double()) * D**-0.5
    at = torch.arange(t)
    unseen = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
    weight = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("ngts,snd->tngd", weight, v[0].double()).reshape(t, -1)


def all_blocks(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Exact attention of each row by itself, over every key block from position 0 on, under the window's mask."""
    out = []
    for p in range(len(q)):
        blocks = p // BLOCK + 1
        full = torch.zeros(2, N, blocks * BLOCK, D)
        full[0, :, : p + 1], full[1, :, : p + 1] = k[0, : p + 1].transpose(0, 1), v[0, : p + 1].transpose(0, 1)
        row = (q[p] * D**-0.5).repeat(1, 4, 1).view(N, 1, 4 * G, D)
        keys, values = full.view(2, N * blocks, BLOCK, D)
        out.append(merge_blocks(row, keys, values, p, G, EXACT, window)[:1])
    return torch.cat(out)


def through(plane: RingPlane, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], attend, num) -> Tensor:
    out, at = [], 0
    for n in cuts:
        plane.append(k[:, at : at + n], v[:, at : at + n], [at], [n])
        out.append(attend(q[at : at + n], plane, 0, at, num))
        at += n
    return torch.cat(out)


# --------------------------------------------------------------------------------- equal to the mask, laps later


@pytest.mark.parametrize("window, widest", [(1, 9), (8, 1), (8, 16), (64, 16), (65, 7), (150, 40)])
def test_attention_is_full_attention_under_the_mask(window, widest):
    q, k, v = rows(300)
    truth, blocks = softmax64(q, k, v, window), all_blocks(q, k, v, window)
    assert torch.allclose(blocks.double(), truth, atol=2e-6)
    for seed in range(3):
        cuts = widths(300, widest, seed) if seed else [widest] * (300 // widest) + [300 % widest] * (300 % widest > 0)
        plane = ring(window, widest)
        assert same_bits(through(plane, q, k, v, cuts, attend_exact, EXACT), blocks)
        assert plane.held == plane.size == window - 1 + widest
        found = through(ring(window, widest), q, k, v, cuts, attend_fast, FAST)
        assert torch.allclose(found.double(), truth, atol=2e-6)


def test_a_wide_forward_of_the_fast_kind():
    q, k, v = rows(300)
    for window in (1, 8, 100, 400):
        found = through(ring(window, 200), q, k, v, [100, 200], attend_fast, FAST)
        assert torch.allclose(found.double(), softmax64(q, k, v, window), atol=2e-6)


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "fp8"])
def test_a_packed_ring_is_full_attention_over_the_unpacked_rows(kind):
    q, k, v = rows(200)
    kept = [FORMATS[kind].decode(FORMATS[kind].encode(x), torch.float32) for x in (k, v)]
    blocks = all_blocks(q, *kept, W)
    for seed in (1, 2):
        assert same_bits(through(ring(kind=kind), q, k, v, widths(200, WIDEST, seed), attend_exact, EXACT), blocks)


def test_zeros_of_either_sign_change_nothing():
    q, k, v = rows(150)
    v[..., ::2] = -0.0
    for window in (1, W, 64):
        blocks = all_blocks(q, k, v, window)
        assert same_bits(through(ring(window), q, k, v, widths(150, WIDEST, 1), attend_exact, EXACT), blocks)


def test_a_ring_that_reads_lapped_slots_would_be_caught():
    q, k, v = rows(300)
    blocks = all_blocks(q, k, v, W)
    for harm in (1, 4):
        short = ring()
        short.size -= harm  # fewer slots than window and forward need
        assert not torch.equal(through(short, q, k, v, [WIDEST] * 18 + [12], attend_exact, EXACT), blocks)
    late = ring(W + 1)  # a window one too long
    assert not torch.equal(through(late, q, k, v, [WIDEST] * 18 + [12], attend_exact, EXACT), blocks)


def test_bfloat16_as_well(tiny):
    half = tiny(ratio=2, layer_types=LAYERS, head_dim=32).to(torch.bfloat16)
    ids = draw(half, 100)
    for formats in ({}, dict(k_format="q8_0", v_format="q5_1"), dict(k_format="fp8", v_format="fp8")):
        expected = feed(half, masked(half, W, **formats), ids, [100])
        cache = half.new_cache(window=W, widest=WIDEST, **formats)
        assert same_bits(feed(half, cache, ids, widths(100, WIDEST, 3)), expected)


@pytest.mark.parametrize("kind", ["dense", "q8_0"])
def test_the_model_with_a_ring_is_the_model_with_a_mask(model, kind):
    ids = draw(model, 200)
    formats = dict(k_format=kind, v_format=kind)
    whole = masked(model, W, **formats)
    expected = feed(model, whole, ids, [200])
    for most, seed in [(1, 0), (9, 2), (16, 3)]:
        cache = model.new_cache(window=W, widest=WIDEST, **formats)
        assert same_bits(feed(model, cache, ids, widths(200, most, seed)), expected)
        assert cache.lengths == [200] and all(plane.size == W - 1 + WIDEST for plane in cache.rings)
        assert cache.first_difference(whole) is None
    full = feed(model, model.new_cache(**formats), ids, [200])
    assert same_bits(full[:, :W], expected[:, :W]) and not torch.allclose(full[:, W:], expected[:, W:], atol=1e-3)


def test_a_window_as_long_as_the_text_is_no_window(model):
    ids = draw(model, 100)
    expected = feed(model, model.new_cache(), ids, [100])
    cache = model.new_cache(window=300, capacity=120)
    assert same_bits(feed(model, cache, ids, [60, 40]), expected) and cache.rings[0].size == 120


def test_ragged_batches_lap_on_their_own(model):
    ids = draw(model, 90, batch=2)
    cache = model.new_cache(window=W, widest=WIDEST, batch=2)
    at, rng = [0, 0], random.Random(0)
    while min(at) < 70:
        counts = [min(rng.randint(0, 9), 90 - n) for n in at]
        width = max(1, *counts)
        tokens = torch.stack([torch.nn.functional.pad(ids[b, n : n + c], (0, width - c)) for b, (n, c) in
                              enumerate(zip(at, counts))])  # fmt: skip
        model.forward(tokens, cache, counts=counts)
        at = [n + c for n, c in zip(at, counts)]
    for b in range(2):
        alone = model.new_cache(window=W, widest=WIDEST)
        feed(model, alone, ids[b : b + 1, : at[b]], [1] * at[b])
        for x, y in zip(cache.rings, alone.rings):
            assert all(torch.equal(p, q) for p, q in zip(x.stored(b, at[b]), y.stored(0, at[b])))


# ------------------------------------------------------------------------------------------------- transactions


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefix", [3, 140])
def test_every_keep_of_every_width(model, prefix, strategy):
    ids = draw(model, prefix + 12)
    start = model.new_cache(window=W, widest=9, strategy=strategy)
    feed(model, start, ids[:, :prefix], widths(prefix, 9, 1))
    for t in (1, 4, 9):
        for keep in range(t + 1):
            cache, expected = start.fork(), start.fork()
            ckpt = cache.checkpoint()
            feed(model, cache, ids[:, prefix : prefix + t], [t] if keep % 2 else [1] * t)
            cache.commit(ckpt, keep=keep)
            if keep:
                feed(model, expected, ids[:, prefix : prefix + keep], [1] * keep)
            assert cache.first_difference(expected) is None, (t, keep)
            assert same_bits(*(feed(model, c, ids[:, -9:], [9]) for c in (cache, expected))), (t, keep)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rollback_after_any_number_of_laps_brings_the_rows_back(model, strategy):
    ids = draw(model, 150)
    for prefix in (0, 5, 50):
        cache = model.new_cache(window=W, widest=9, strategy=strategy)
        feed(model, cache, ids[:, :prefix], widths(prefix, 9, 0))
        before, taken = cache.fork(), cache.nbytes
        for end, cut in ((prefix + 9, True), (prefix + 20, False), (150, True)):
            ckpt = cache.checkpoint(cut=cut)
            feed(model, cache, ids[:, prefix:end], widths(end - prefix, 9, 2))
            cache.rollback(ckpt)
            assert cache.first_difference(before) is None
        twin = before.fork()
        assert same_bits(*(feed(model, c, ids[:, prefix : prefix + 30], [7, 9, 9, 5]) for c in (cache, twin)))
        assert cache.first_difference(twin) is None
        assert prefix < 50 or cache.nbytes == taken  # what was set aside is given back


def test_rows_set_aside_are_counted_while_they_are_held(model):
    cache = model.new_cache(window=W, widest=9)
    feed(model, cache, draw(model, 40), [8] * 5)
    taken = cache.nbytes
    ckpt = cache.checkpoint(cut=False)
    feed(model, cache, draw(model, 18), [9])
    assert cache.nbytes == taken
    feed(model, cache, draw(model, 18), [9])
    assert cache.nbytes == taken + 2 * (W - 1) * 2 * N * D * 4  # layers, rows, K and V, heads, width, float32
    cache.commit(ckpt, keep=18)
    assert cache.nbytes == taken


@pytest.mark.parametrize("strategy", ["tape", "columns"])
def test_a_commit_that_needs_lapped_rows_is_refused_and_changes_nothing(model, strategy):
    ids = draw(model, 80)
    cache = model.new_cache(window=W, widest=9, strategy=strategy)
    feed(model, cache, ids[:, :30], [6] * 5)
    before = cache.fork()
    ckpt = cache.checkpoint()
    feed(model, cache, ids[:, 30:60], [6] * 5)
    fed = [plane.packed_BNSP[0].clone() for plane in cache.rings]
    with pytest.raises(UserError, match=(
        "cannot go back to 50 rows: with window=8 that needs the rows from 43 on, and those before 44 have been "
        "lapped; go back to 51 rows or more, make the cache with a larger widest than 9"
    )):  # fmt: skip
        cache.commit(ckpt, keep=20)
    assert ckpt.open and all(torch.equal(a, plane.packed_BNSP[0]) for a, plane in zip(fed, cache.rings))
    expected = before.fork()
    cache.commit(ckpt, keep=21)
    feed(model, expected, ids[:, 30:51], [7] * 3)
    assert cache.first_difference(expected) is None
    assert same_bits(*(feed(model, c, ids[:, 60:69], [9]) for c in (cache, expected)))


def test_a_snapshot_feeds_again_what_fits_one_forward(model):
    ids = draw(model, 80)
    cache = model.new_cache(window=W, widest=9, strategy="snapshot")
    feed(model, cache, ids[:, :30], [6] * 5)
    expected = cache.fork()
    ckpt = cache.checkpoint()
    feed(model, cache, ids[:, 30:60], [6] * 5)
    with pytest.raises(UserError, match="20 rows in one forward are not valid for a cache with window=8 and widest=9"):
        cache.commit(ckpt, keep=20)
    assert ckpt.open
    cache.commit(ckpt, keep=4)
    feed(model, expected, ids[:, 30:34], [4])
    assert cache.first_difference(expected) is None


def test_a_truncation_to_lapped_rows_is_refused_and_any_other_is_right(model):
    table = torch.randn(211, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = draw(model, 80)
    whole = model.new_draft_cache(window=W, widest=9)
    for p in range(0, 63, 7):
        model.draft(ids[:, p : p + 7], table[ids[:, p : p + 7]], whole)
    for to in range(55, 64):  # 63 - 16 slots = 47 is the first row left; 54 rows need it, and so do they
        cache = whole.fork()
        cache.truncate(to)
        fresh = model.new_draft_cache(window=W, widest=1)
        for p in range(to):
            model.draft(ids[:, p : p + 1], table[ids[:, p : p + 1]], fresh)
        assert cache.first_difference(fresh) is None, to
        for c in (cache, fresh):
            for p in range(70, 79):
                model.draft(ids[:, p : p + 1], table[ids[:, p : p + 1]], c)
        assert cache.first_difference(fresh) is None, to
    whole.fork().truncate(54)
    for to in (53, 20, 1):
        cache = whole.fork()
        with pytest.raises(UserError, match=f"cannot go back to {to} rows: .* before 47 have been lapped"):
            cache.truncate(to)
        assert cache.lengths == [63] and cache.first_difference(whole) is None
    cache = whole.fork()
    cache.truncate(56)
    model.draft(ids[:, 56:57], table[ids[:, 56:57]], cache)
    with pytest.raises(UserError, match="before 47 have been lapped"):  # going back does not bring rows back
        cache.truncate(50)
    short = model.new_draft_cache(window=W, widest=9)
    model.draft(ids[:, :9], table[ids[:, :9]], short)
    short.truncate(0)  # nothing was lapped


def test_an_interrupted_forward_is_rolled_back(model, monkeypatch):
    ids = draw(model, 80)
    cache = model.new_cache(window=W, widest=9)
    feed(model, cache, ids[:, :54], [9] * 6)
    before = cache.fork()
    for calls in (1, 2, 5, 8):
        ckpt, count, append = cache.checkpoint(), iter(range(99)), RingPlane.append

        def wrong(self, *args, append=append, count=count, calls=calls):
            if next(count) == calls:
                raise KeyboardInterrupt
            append(self, *args)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RingPlane, "append", wrong)
            feed(model, cache, ids[:, :80], [8] * 10)
        cache.rollback(ckpt)
        assert cache.first_difference(before) is None
    assert same_bits(*(feed(model, c, ids[:, 54:63], [9]) for c in (cache, before)))


# ----------------------------------------------------------------------------------------- speculation, refusals


@pytest.mark.parametrize("formats", [("dense", "dense"), ("q8_0", "q5_1"), ("fp8", "fp8")], ids="/".join)
def test_greedy_speculation_is_plain_decoding_under_the_window(model, formats):
    given = dict(max_new_tokens=25, ignore_eos=True, window=W, chunk=16, k_format=formats[0], v_format=formats[1])
    prompt = draw(model, 90, seed=4)[0].tolist()
    plain = wb.generate(model, prompt, k=0, **given).tokens
    cache, own = model.new_cache(window=W, widest=90, k_format=formats[0], v_format=formats[1]), []
    step = [prompt]
    for _ in range(25):
        own.append(int(model.forward(torch.tensor(step), cache, logits="last").logits_BTV[0, 0].argmax()))
        step = [[own[-1]]]
    assert list(plain) == own and len(set(own)) > 12
    for more in (dict(k=3), dict(k=7, strategy="tape"), dict(k=2, strategy="snapshot")):
        assert wb.generate(model, prompt, **given, **more).tokens == plain, more
    if formats == ("dense", "dense"):
        assert wb.generate(model, prompt, k=0, **{**given, "window": None}).tokens != plain


def test_a_prompt_that_fails_leaves_the_session_as_it_was(model, monkeypatch):
    options = wb.GenerateOptions(k=3, ignore_eos=True, window=W, chunk=16, k_format="q8_0")
    session, twin = (wb.Session(model, options=options) for _ in range(2))
    text = draw(model, 200, seed=6)[0].tolist()
    for one in (session, twin):
        one.feed(text[:20])
        one.burst(5)
    forward, count = HybridModel.forward, iter(range(99))

    def wrong(self, *args, **more):
        if next(count) == 11:  # the ring of 135 slots has lapped by then
            raise KeyboardInterrupt
        return forward(self, *args, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HybridModel, "forward", wrong)
        session.feed(text[:180])
    assert session.tokens == twin.tokens
    assert session.state.cache.first_difference(twin.state.cache) is None
    for one in (session, twin):
        one.feed(text[:180])
        one.burst(20)
    assert session.tokens == twin.tokens and session.state.cache.first_difference(twin.state.cache) is None


def test_refusals(model):
    cache = model.new_cache(window=W, widest=9)
    with pytest.raises(UserError, match=(
        "10 rows in one forward are not valid for a cache with window=8 and widest=9: feed at most 9 at a time, or "
        "make the cache with widest=10"
    )):  # fmt: skip
        model.forward(draw(model, 10), cache)
    assert cache.lengths == [0]
    model.forward(draw(model, 9), cache)
    for ask in (model.new_cache, lambda **f: wb.generate(model, [1, 2], **f)):
        for window in (0, -1, 2.5, True):
            with pytest.raises(UserError, match=r"window=.* is not valid: it must be an integer of at least 1"):
                ask(window=window)
    with pytest.raises(UserError, match="widest=0 is not valid"):
        model.new_cache(window=4, widest=0)


def test_planes_grow_with_a_capacity_and_move_by_their_bytes(model):
    ids = draw(model, 120)
    for formats in ({}, dict(k_format="q8_0", v_format="q5_1"), dict(window=W, widest=30), dict(window=60, widest=30)):
        small = model.new_cache(capacity=30, **formats)
        feed(model, small, ids[:, :25], [25])
        held = [plane.nbytes for plane in small.planes]
        large = model.new_cache(capacity=512, **formats)
        large.planes = [p.enlarged(512) if isinstance(p, AttentionPlane) else p.fork() for p in small.planes]
        large.rings = [p for p in large.planes if isinstance(p, RingPlane)]
        large.lengths = [25]
        assert [plane.nbytes for plane in small.planes] == held
        moved, fresh = model.new_cache(**formats), model.new_cache(**formats)
        feed(model, fresh, ids[:, :25], [25])
        for a, b in zip(fresh.planes, moved.planes):
            if isinstance(a, AttentionPlane):
                b.load(0, 25, *a.stored(0, 25))
            else:
                b.conv_BWC, b.state_BHKV = a.conv_BWC, a.state_BHKV
        moved.lengths = [25]
        assert moved.first_difference(fresh) is None
        expected = feed(model, fresh, ids[:, 25:], [19] * 5)
        for cache in (large, moved):
            assert same_bits(feed(model, cache, ids[:, 25:], [19] * 5), expected)
            assert cache.first_difference(fresh) is None


def test_bytes_do_not_grow_with_the_text(model):
    cache = model.new_cache(window=W, widest=9, k_format="q8_0", v_format="q5_1")
    sizes = []
    for n in (9, 9, 9, 9, 9):
        feed(model, cache, draw(model, n), [n])
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1
    recurrent = sum(plane.nbytes for plane in cache.recurrent)
    assert sizes[0] - recurrent == 2 * 16 * N * (34 + 24)  # layers, slots, heads, bytes of 32 keys and 32 values
