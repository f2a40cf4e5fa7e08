"""Packed K/V planes: quantise then attend, so that neither chunking nor a rollback changes bits; bytes foreseen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import workbench as wb
from workbench.cache.formats import FORMATS
from workbench.cache.hybrid import STRATEGIES, HybridCache, same_bits
from workbench.cache.kv import AttentionPlane, KVPlane
from workbench.cache.quantised import PackedPlane
from workbench.core.errors import UserError
from workbench.model.attention import attend_exact, attend_fast
from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.hybrid import HybridModel
from workbench.model.memory import CacheShape
from workbench.model.ops import Numerics

LAYERS = (LINEAR, FULL, LINEAR, FULL)
PAIRS = [("q8_0", "q5_1"), ("fp8", "fp8"), ("q5_1", "dense"), ("dense", "q8_0")]
IDS = ["/".join(pair) for pair in PAIRS]


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2, layer_types=LAYERS, head_dim=32)


@pytest.fixture(scope="module")
def lively(tiny) -> HybridModel:
    """Its greedy text does not loop."""
    return tiny(ratio=2, layer_types=LAYERS, head_dim=32, tied=False, vocab_size=211, seed=2)


def draw(model: HybridModel, rows: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, rows), generator=torch.Generator().manual_seed(seed))


def cache_of(model: HybridModel, pair: tuple[str, str], **more: object) -> HybridCache:
    return model.new_cache(k_format=pair[0], v_format=pair[1], **more)


def feed(model: HybridModel, cache: HybridCache, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of all rows, fed in forwards of these widths, the last as often as it takes."""
    out, at = [], 0
    while at < ids.shape[1]:
        n = cuts.pop(0) if len(cuts) > 1 else cuts[0]
        out.append(model.forward(ids[:, at : at + n], cache).logits_BTV)
        at += n
    return torch.cat(out, 1)


# ----------------------------------------------------------------------------------------------------- chunking


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_chunking_does_not_change_bits(model, pair):
    ids = draw(model, 100)
    whole = cache_of(model, pair)
    expected = feed(model, whole, ids, [100])
    for cuts in ([1], [2], [3], [4], [5], [6], [7], [8], [9], [64], [63, 2, 35], [17, 1, 82], [1, 99]):
        cache = cache_of(model, pair)
        assert same_bits(feed(model, cache, ids, list(cuts)), expected), cuts
        assert cache.first_difference(whole) is None, cuts
    assert not torch.equal(expected, feed(model, model.new_cache(), ids, [100]))  # and the format shows


def test_a_row_that_attends_to_its_own_values_before_packing_would_be_caught(model, monkeypatch):
    """Fresh rows read as they came, older ones unpacked: attend, then quantise."""

    class Late(PackedPlane):
        def append(self, k_BTND, v_BTND, lengths, counts):
            super().append(k_BTND, v_BTND, lengths, counts)
            self.fresh = (lengths[0], k_BTND[0, : counts[0]].transpose(0, 1), v_BTND[0, : counts[0]].transpose(0, 1))

        def read(self, b, start, stop):
            at, *raw = self.fresh
            both = super().read(b, start, stop)
            for x, new in zip(both, raw):
                x[:, at - start : at - start + new.shape[1]] = new
            return both

    monkeypatch.setattr("workbench.model.memory.PackedPlane", Late)
    with pytest.raises(AssertionError):
        test_chunking_does_not_change_bits(model, PAIRS[0])


@pytest.mark.parametrize("pair", PAIRS, ids=IDS)
def test_attention_reads_what_was_kept_and_stays_within_the_formats_bound(pair):
    """Attention over a packed plane equals attention over a dense plane of the unpacked rows, bit for bit.

    Scores move by at most |q| · bound(k) / sqrt(D), values by bound(v): the output stays within both.
    """
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, 90, 2, 32, generator=generator)
    q = torch.randn(90, 2, 3, 32, generator=generator)
    forms = [FORMATS[name] for name in pair]
    make = dict(dtype=torch.float32, device=torch.device("cpu"))
    packed = PackedPlane(1, 2, 32, k_format=forms[0], v_format=forms[1], **make)
    dense, unpacked = KVPlane(1, 2, 32, **make), KVPlane(1, 2, 32, **make)
    packed.append(k, v, [0], [90])
    dense.append(k, v, [0], [90])
    unpacked.append(*(f.decode(f.encode(x), torch.float32) for f, x in zip(forms, (k, v))), [0], [90])
    for attend, num in ((attend_exact, Numerics(exact=True)), (attend_fast, Numerics(exact=False))):
        a, b, c = (attend(q, plane, 0, 0, num) for plane in (packed, unpacked, dense))
        assert torch.equal(a, b)
        shift = torch.einsum("tngd,snd->tngs", q.abs(), forms[0].bound(k[0])).amax(-1) * 32**-0.5
        blur = shift.clamp(max=20).mul(2).expm1()  # weights change by at most this factor less one
        reach = v.abs().amax((0, 1))[:, None]
        bound = (blur[..., None] * reach[None] + forms[1].bound(v[0]).amax(0)[:, None]).reshape(90, -1) + 1e-5
        assert bool(((a - c).abs() <= bound).all())
        assert float((a - c).abs().max()) > 1e-4


@pytest.mark.parametrize("name, part", [("q8_0", "v"), ("q5_1", "v"), ("fp8", "v"), ("q8_0", "k")])
def test_a_format_that_unpacks_to_wrong_values_would_be_caught(monkeypatch, name, part):
    kind = type(FORMATS[name])
    decode, factor = kind.decode, 1.25 if part == "v" else 8.0  # keys only move a row's weights
    monkeypatch.setattr(kind, "decode", lambda self, packed, dtype: factor * decode(self, packed, dtype))
    with pytest.raises(AssertionError):
        test_attention_reads_what_was_kept_and_stays_within_the_formats_bound(
            ("dense", name) if part == "v" else (name, "dense")
        )


@pytest.mark.parametrize("pair", PAIRS[:2], ids=IDS[:2])
def test_fast_mode_is_equal_up_to_rounding(tiny, pair):
    """A change of one rounding may move a packed value by a whole step, which is what the tolerance allows for."""
    fast = tiny(ratio=2, layer_types=LAYERS, head_dim=32, exact=False)
    ids = draw(fast, 90)
    whole = feed(fast, cache_of(fast, pair), ids, [90])
    for cuts in ([1], [7], [30, 60]):
        assert torch.allclose(feed(fast, cache_of(fast, pair), ids, cuts), whole, atol=0.05)


# ------------------------------------------------------------------------------------------------- transactions


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("pair", PAIRS[:2], ids=IDS[:2])
def test_every_keep_of_every_width(model, pair, strategy):
    ids = draw(model, 80)
    start = cache_of(model, pair, strategy=strategy)
    feed(model, start, ids[:, :60], [60])
    for t in (1, 3, 6, 9):
        for keep in range(t + 1):
            cache, expected = start.fork(), start.fork()
            ckpt = cache.checkpoint()
            feed(model, cache, ids[:, 60 : 60 + t], [t])
            cache.commit(ckpt, keep=keep)
            if keep:
                feed(model, expected, ids[:, 60 : 60 + keep], [1])
            assert cache.first_difference(expected) is None, (t, keep)
            after = [feed(model, c, ids[:, -3:], [3]) for c in (cache, expected)]
            assert same_bits(*after), (t, keep)


def test_rollback_fork_and_ragged_batches(model):
    pair = PAIRS[0]
    ids = draw(model, 90, batch=2)
    cache = cache_of(model, pair, batch=2)
    model.forward(ids[:, :20], cache, counts=[20, 7])
    before = cache.fork()
    ckpt = cache.checkpoint()
    model.forward(ids[:, :70], cache, counts=[70, 3])
    cache.rollback(ckpt)
    assert cache.first_difference(before) is None
    ckpt = cache.checkpoint()
    model.forward(ids[:, 20:25], cache, counts=[5, 4])
    cache.commit(ckpt, keep=[2, 3])
    alone = cache_of(model, pair)
    model.forward(ids[1:, :7], alone)
    model.forward(ids[1:, 20:23], alone)
    for a, b in zip(cache.planes, alone.planes):
        if isinstance(a, AttentionPlane):
            assert all(torch.equal(x, y) for x, y in zip(a.stored(1, 10), b.stored(0, 10)))
    twin, untouched = cache.fork(), cache.fork()
    model.forward(ids[:, :9], twin)
    assert cache.lengths == [22, 10] and twin.lengths == [31, 19]
    assert cache.first_difference(untouched) is None and cache.nbytes == twin.nbytes


def test_a_difference_names_layer_plane_and_row(model):
    ids = draw(model, 30)
    a = cache_of(model, PAIRS[0])
    feed(model, a, ids, [30])
    b = a.fork()
    b.planes[3].packed_BNSP[1][0, 1, 17, 5] ^= 1
    assert a.first_difference(b) == "layer 3: v of sequence 0 differs first in row 17"
    c = cache_of(model, PAIRS[1])
    feed(model, c, ids, [30])
    assert "layer 1: cache formats differ: q8_0/q5_1 with window=None and fp8/fp8" in a.first_difference(c)


def test_the_drafters_rows_take_a_format_and_a_truncation(model):
    table = torch.randn(model.config.vocab_size, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = draw(model, 70)
    cache, whole = (model.new_draft_cache(k_format="q8_0", v_format="q5_1") for _ in range(2))
    model.draft(ids[:, :66], table[ids[:, :66]], cache)
    cache.truncate(61)
    for p in range(61, 70):
        model.draft(ids[:, p : p + 1], table[ids[:, p : p + 1]], cache)
    model.draft(ids, table[ids], whole)
    assert cache.first_difference(whole) is None


# -------------------------------------------------------------------------------------------------- speculation


@pytest.mark.parametrize("pair", [*PAIRS, ("dense", "dense")], ids=[*IDS, "dense/dense"])
def test_greedy_speculation_is_plain_decoding_of_that_format(lively, pair):
    given = dict(max_new_tokens=24, ignore_eos=True, k_format=pair[0], v_format=pair[1])
    prompt = draw(lively, 50, seed=4)[0].tolist()
    plain = wb.generate(lively, prompt, k=0, **given)
    cache, own, step = cache_of(lively, pair), [], [prompt]
    for _ in range(24):
        own.append(int(lively.forward(torch.tensor(step), cache, logits="last").logits_BTV[0, 0].argmax()))
        step = [[own[-1]]]
    assert list(plain.tokens) == own
    assert len(set(own)) > 12
    for strategy in STRATEGIES:
        assert wb.generate(lively, prompt, k=3, strategy=strategy, **given).tokens == plain.tokens, strategy


def test_a_session_holds_the_planes_of_plain_decoding(lively):
    options = wb.GenerateOptions(k=3, ignore_eos=True, k_format="q8_0", v_format="q5_1")
    session = wb.Session(lively, options=options)
    session.feed(draw(lively, 40, seed=5)[0].tolist())
    session.burst(25)
    fresh = cache_of(lively, PAIRS[0])
    feed(lively, fresh, torch.tensor([session.tokens[:-1]]), [1])
    assert session.state.cache.first_difference(fresh) is None
    assert session.state.proposer.cache.planes[0].formats == ("q8_0", "q5_1")


# -------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("pair", [*PAIRS, ("dense", "dense")], ids=[*IDS, "dense/dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_foreseen_bytes_are_allocated_bytes(tiny, pair, dtype):
    model = tiny(ratio=2, layer_types=LAYERS, head_dim=32).to(dtype)
    formats = dict(k_format=pair[0], v_format=pair[1])
    for fed in ([], [1], [64], [65], [150], [60, 1, 1, 1, 1, 1], [1, 63, 1, 64, 1], [300]):
        for batch in (1, 3):
            for window in ({}, dict(window=8, widest=300), dict(window=40, widest=100_000, capacity=400)):
                cache = model.new_cache(batch=batch, **formats, **window)
                draft = model.new_draft_cache(batch=batch, **formats, **window)
                lengths = [0] * batch
                for n in fed:
                    kv = torch.zeros(batch, n, 2, 32, dtype=dtype)
                    for plane in (*cache.planes, *draft.planes):
                        if isinstance(plane, AttentionPlane):
                            plane.append(kv, kv, lengths, [n] * batch)
                    lengths = [at + n for at in lengths]
                assert model.cache_bytes(fed, batch=batch, **formats, **window) == cache.nbytes
                assert model.cache_bytes(fed, batch=batch, drafter=True, **formats, **window) == draft.nbytes
    cache = model.new_cache(**formats)  # and after real forwards
    model.forward(draw(model, 130), cache)
    assert model.cache_bytes(130, **formats) == cache.nbytes


def published() -> ModelConfig:
    """A 27B: 64 layers, every fourth of full attention, 4 key/value heads of 256."""
    return ModelConfig(
        vocab_size=1000,
        hidden_size=5120,
        intermediate_size=17408,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 16,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=131_072,
        mtp_num_hidden_layers=1,
    )


def test_the_published_shape():
    shape = CacheShape(published(), torch.bfloat16, batch=1, capacity=131_072, k_format="q8_0", v_format="q5_1")
    assert shape.row_bytes == 1856
    assert 17 * shape.row_bytes == 31_552  # 16 layers and the head's own
    assert 31_552 * 131_072 == 4_135_583_744  # 4.1 GB at full context
    planes = shape.planes(torch.device("meta"))
    for plane in planes:
        if isinstance(plane, AttentionPlane):
            plane.reserve(131_072)
    attention = [plane for plane in planes if isinstance(plane, AttentionPlane)]
    assert len(attention) == 16 and all(plane.nbytes == 1856 * 131_072 for plane in attention)
    assert shape.nbytes([131_072]) == sum(plane.nbytes for plane in planes)
    assert shape.nbytes([131_072], drafter=True) == 1856 * 131_072
    dense = CacheShape(published(), torch.bfloat16, batch=1, capacity=131_072)
    assert dense.row_bytes == 4096


@pytest.mark.parametrize("name", ["27B", "9B"])
@pytest.mark.parametrize("pair", [*PAIRS, ("dense", "dense")], ids=[*IDS, "dense/dense"])
def test_published_shapes_are_foreseen_in_every_format(name, pair):
    """Planes on the meta device, grown as forwards of these many tokens grow them."""
    nine = dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=16, linear_num_value_heads=32)
    config = (
        published() if name == "27B" else replace(published(), layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 8, **nine)
    )
    per_value = {"dense": 64, "q8_0": 34, "q5_1": 24, "fp8": 32.5}  # bytes of 32 bfloat16 values; fp8 adds 4 to 256
    given = dict(batch=1, capacity=40_000, k_format=pair[0], v_format=pair[1])
    for window in ({}, dict(window=4096, widest=512)):
        shape = CacheShape(config, torch.bfloat16, **given, **window)
        assert shape.row_bytes == 4 * 256 // 32 * sum(per_value[f] for f in pair)
        planes, fed = shape.planes(torch.device("meta")), [512] * 40 + [1] * 9
        for plane in planes:
            for end in itertools.accumulate(fed):
                if isinstance(plane, AttentionPlane):
                    plane.reserve(end)
        assert shape.nbytes(fed) == sum(plane.nbytes for plane in planes)
        attention = next(plane for plane in planes if isinstance(plane, AttentionPlane))
        rows = 4096 - 1 + 512 if window else shape.rows(fed)
        assert attention.nbytes == shape.nbytes(fed, drafter=True) == rows * shape.row_bytes


def test_a_count_that_forgets_the_scales_would_be_caught(monkeypatch):
    monkeypatch.setattr(type(FORMATS["q8_0"]), "row_bytes", lambda self, dim, dtype: dim)
    with pytest.raises(AssertionError):
        test_the_published_shape()


# ----------------------------------------------------------------------------------------------------- refusals


def test_refusals(model, tiny):
    narrow = tiny(ratio=2)
    for make in (narrow.new_cache, narrow.new_draft_cache, lambda **f: narrow.cache_bytes(5, **f)):
        with pytest.raises(UserError, match=r"v_format='q5_1' is not valid for heads 24 wide.*'dense', 'fp8'"):
            make(v_format="q5_1")
    with pytest.raises(UserError, match="k_format='q8_0' is not valid for heads 24 wide"):
        wb.generate(narrow, [1, 2], k_format="q8_0")
    for ask in (lambda **f: wb.generate(model, [1, 2], **f), model.new_cache):
        with pytest.raises(UserError, match=r"k_format='int4' is not valid.*'q8_0'"):
            ask(k_format="int4")
    for tokens in (513, [500, 13]):
        with pytest.raises(UserError, match=r"tokens=513 is not valid: the cache has room for 512"):
            model.cache_bytes(tokens)
