"""Triton form: sums and maxima of groups of 64 ids, then the groups that can hold one of the k largest."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import INTERPRETED, begin, dot, key_value, kth_between, launch, order_key, power
from workbench_kernels.sparse_topk.ref import Sparse

GROUP = 64


class Plan(NamedTuple):
    """Shape of the work: groups of ids per program of the first pass and its warps, warps of the second pass."""

    groups: int
    warps: int
    select_warps: int


# H200, 512 bfloat16 rows of 248,320, k 64: 192 us; 8 warps of the second pass 211, and 33 for 46 on 8 rows
PLAN = Plan(groups=64, warps=4, select_warps=4)


@triton.jit
def pair_key(x, place):
    """An int64 that orders by (value descending, place ascending) when sorted descending."""
    return (order_key(x).to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))


@triton.jit
def place_of(key):
    """The place within a pair key."""
    return (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def largest(key, K: tl.constexpr):
    """The K largest of distinct int64 keys, descending; one by one under the interpreter, whose sorts are slow."""
    if INTERPRETED:
        i = tl.arange(0, K)
        out = tl.zeros((K,), tl.int64)
        for n in range(K):
            best = tl.max(key, 0)
            out = tl.where(i == n, best, out)
            key = tl.where(key == best, -0x8000000000000000, key)
        return out
    else:
        return tl.topk(key, K)


@triton.jit
def rank_key(x, live):
    """Int32 keys in the order of values; NaN above all, and what is not live below all."""
    return tl.where(live, tl.where(x != x, 2147483647, order_key(x)), -2147483648)


@triton.jit
def kth_key(key, k):
    """A number that the k largest of int32 keys reach, and others only where keys are equal."""
    least = tl.min(tl.where(key > -2147483648, key, 2147483647), 0)
    return kth_between(key, least, tl.max(key, 0), k)


@triton.jit
def choose(key, k):
    """True for the k largest of int32 keys, the earlier of equal ones."""
    least = kth_key(key, k)
    more = key > least
    equal = (key == least).to(tl.int32)
    room = k - tl.sum(more.to(tl.int32), 0)
    return more | ((equal > 0) & (tl.cumsum(equal, 0) <= room))


@triton.jit
def groups_kernel(
    x_ptr, max_ptr, one_ptr, hot_ptr, V, G, inverse_t, HOT: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    x = tl.load(x_ptr + row * V + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 1)
    shifted = x - tl.maximum(top, -3.0e38)[:, None]
    live = group < G
    tl.store(max_ptr + row * G + group, top, mask=live)
    tl.store(one_ptr + row * G + group, tl.sum(tl.exp(shifted), 1), mask=live)
    if HOT:
        tl.store(hot_ptr + row * G + group, tl.sum(tl.exp(shifted * inverse_t), 1), mask=live)


@triton.jit
def _normaliser(top_G, sum_G, live_G, peak, inverse_t):
    """Sum over groups of their sums, relative to the peak; and each group's share, float64."""
    share = tl.where(live_G, sum_G * tl.exp((tl.maximum(top_G, -3.0e38) - peak) * inverse_t), 0.0).to(tl.float64)
    return tl.sum(share, 0), share


@triton.jit
def select_kernel(
    x_ptr, max_ptr, one_ptr, hot_ptr, list_ptr, key_ptr, id_ptr, logit_ptr, prob_ptr, tail_ptr, lse_ptr, lse_t_ptr,
    V, G, inverse_t, k,
    HOT: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    live = g < G
    top = tl.load(max_ptr + row * G + g, mask=live, other=-float("inf"))
    taken = choose(rank_key(top, live), tl.minimum(KP, G)) & live
    list_ptr += row * KP
    tl.store(list_ptr + tl.cumsum(taken.to(tl.int32), 0) - 1, g, mask=taken)
    tl.debug_barrier()
    peak = tl.max(top, 0)
    one = tl.load(one_ptr + row * G + g, mask=live, other=0.0)
    hot = one
    if HOT:
        hot = tl.load(hot_ptr + row * G + g, mask=live, other=0.0)
    total_one, _ = _normaliser(top, one, live, peak, 1.0)
    total, share = _normaliser(top, hot, live, peak, inverse_t)
    outside = tl.sum(tl.where(taken, 0.0, share), 0)
    lane = tl.arange(0, WIDE)
    i = tl.arange(0, KP)
    chosen = tl.load(list_ptr + i, mask=i < G, other=0)
    # groups are listed in order, so that the earlier of equal logits has the lower id
    ids = tl.reshape(chosen[:, None] * WIDE + lane[None, :], (KP * WIDE,))
    known = tl.reshape((i < G)[:, None] & (lane < WIDE)[None, :], (KP * WIDE,)) & (ids < V)
    x = tl.load(x_ptr + row * V + ids, mask=known, other=-float("inf")).to(tl.float32)
    best = choose(rank_key(x, known), k) & known
    key_ptr += row * KP
    tl.store(key_ptr + tl.cumsum(best.to(tl.int32), 0) - 1, pair_key(x, ids), mask=best)
    tl.debug_barrier()
    kept = i < k
    first = largest(tl.load(key_ptr + i, mask=kept, other=-0x8000000000000000), KP)
    weight = tl.exp((x - peak) * inverse_t).to(tl.float64)
    rest = tl.sum(tl.where(known & (best == 0), weight, 0.0), 0)
    value = key_value((first >> 32).to(tl.int32))
    tl.store(id_ptr + row * k + i, place_of(first), mask=kept)
    tl.store(logit_ptr + row * k + i, value, mask=kept)
    prob = tl.exp((value - peak) * inverse_t).to(tl.float64) / total
    tl.store(prob_ptr + row * k + i, prob.to(tl.float32), mask=kept)
    tl.store(tail_ptr + row, ((outside + rest) / total).to(tl.float32))
    tl.store(lse_ptr + row, (peak + tl.log(total_one)).to(tl.float32))
    tl.store(lse_t_ptr + row, (peak * inverse_t + tl.log(total)).to(tl.float32))


@triton.jit
def head_kernel(
    x_ptr, w_ptr, value_ptr, id_ptr, bound_ptr, one_ptr, hot_ptr, M, V, K, TILES, inverse_t, HOT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # row blocks are neighbours, so that they share a tile of the weight in the cache
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * K + kk[None, :],
            mask=(rows < M)[:, None] & (kk < K)[None, :],
            other=0.0,
        )
        w = tl.load(
            w_ptr + n.to(tl.int64)[None, :] * K + kk[:, None], mask=(n < V)[None, :] & (kk < K)[:, None], other=0.0
        )
        if x_ptr.dtype.element_ty == tl.bfloat16:
            acc = dot(x, w, acc, "tf32")
        else:
            acc = dot(x, w, acc, PRECISION)
    acc = tl.where((n < V)[None, :], acc, -float("inf"))
    live = rows < M
    at = rows.to(tl.int64) * TILES + tile
    top = tl.max(acc, 1)
    left = acc
    for i in tl.static_range(KEEP):
        best = tl.max(left, 1)
        hit = tl.min(tl.where(left == best[:, None], n[None, :], 0x7FFFFFFF), 1)
        hit = tl.where(best == -float("inf"), 0x7FFFFFFF, hit)
        tl.store(value_ptr + at * KEEP + i, best, mask=live)
        tl.store(id_ptr + at * KEEP + i, hit, mask=live)
        left = tl.where(n[None, :] == hit[:, None], -float("inf"), left)
    tl.store(bound_ptr + at, tl.max(left, 1), mask=live)
    shifted = left - tl.maximum(top, -3.0e38)[:, None]
    tl.store(one_ptr + at, tl.sum(tl.exp(shifted), 1), mask=live)
    if HOT:
        tl.store(hot_ptr + at, tl.sum(tl.exp(shifted * inverse_t), 1), mask=live)


@triton.jit
def merge_kernel(
    value_ptr, id_ptr, bound_ptr, one_ptr, hot_ptr, key_ptr, out_id, out_logit, out_prob, tail_ptr, lse_ptr, lse_t_ptr,
    flag_ptr, TILES, inverse_t, k, HOT: tl.constexpr, TP: tl.constexpr, KEEP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, TP * KEEP)
    held = c < TILES * KEEP
    x = tl.load(value_ptr + row * TILES * KEEP + c, mask=held, other=-float("inf"))
    ids = tl.load(id_ptr + row * TILES * KEEP + c, mask=held, other=0x7FFFFFFF)
    known = held & (ids < 0x7FFFFFFF)
    best = choose(rank_key(x, known), k) & known
    key_ptr += row * KP
    tl.store(key_ptr + tl.cumsum(best.to(tl.int32), 0) - 1, pair_key(x, ids), mask=best)
    tl.debug_barrier()
    i = tl.arange(0, KP)
    kept = i < k
    first = largest(tl.load(key_ptr + i, mask=kept, other=-0x8000000000000000), KP)
    value = key_value((first >> 32).to(tl.int32))
    peak = tl.max(tl.where(known, x, -float("inf")), 0)
    t = tl.arange(0, TP)
    live = t < TILES
    top = tl.load(value_ptr + (row * TILES + t) * KEEP, mask=live, other=-float("inf"))
    one = tl.load(one_ptr + row * TILES + t, mask=live, other=0.0)
    hot = one
    if HOT:
        hot = tl.load(hot_ptr + row * TILES + t, mask=live, other=0.0)
    outside_one, _ = _normaliser(top, one, live, peak, 1.0)
    outside, _ = _normaliser(top, hot, live, peak, inverse_t)
    inside_one = tl.sum(tl.where(known, tl.exp(x - peak), 0.0).to(tl.float64), 0)
    weight = tl.where(known, tl.exp((x - peak) * inverse_t), 0.0).to(tl.float64)
    total = outside + tl.sum(weight, 0)
    rest = tl.sum(tl.where(best, 0.0, weight), 0)
    least = tl.min(tl.where(kept, first, 0x7FFFFFFFFFFFFFFF), 0)
    tl.store(out_id + row * k + i, place_of(first), mask=kept)
    tl.store(out_logit + row * k + i, value, mask=kept)
    prob = tl.exp((value - peak) * inverse_t).to(tl.float64) / total
    tl.store(out_prob + row * k + i, prob.to(tl.float32), mask=kept)
    tl.store(tail_ptr + row, ((outside + rest) / total).to(tl.float32))
    tl.store(lse_ptr + row, (peak + tl.log(outside_one + inside_one)).to(tl.float32))
    tl.store(lse_t_ptr + row, (peak * inverse_t + tl.log(total)).to(tl.float32))
    bound = tl.max(tl.load(bound_ptr + row * TILES + t, mask=live, other=-float("inf")), 0)
    tl.store(flag_ptr + row, (bound >= key_value((least >> 32).to(tl.int32))).to(tl.int32))


@triton.jit
def best_kernel(
    x_ptr, max_ptr, one_ptr, hot_ptr, id_ptr, logit_ptr, prob_ptr, tail_ptr, lse_ptr, lse_t_ptr, V, G, inverse_t,
    HOT: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    live = g < G
    top = tl.load(max_ptr + row * G + g, mask=live, other=-float("inf"))
    rank = rank_key(top, live)
    group = tl.min(tl.where(rank == tl.max(rank, 0), g, GP), 0)
    peak = tl.max(top, 0)
    one = tl.load(one_ptr + row * G + g, mask=live, other=0.0)
    hot = one
    if HOT:
        hot = tl.load(hot_ptr + row * G + g, mask=live, other=0.0)
    outside = live & (g != group)
    rest_one, _ = _normaliser(top, one, outside, peak, 1.0)
    rest, _ = _normaliser(top, hot, outside, peak, inverse_t)
    ids = group * WIDE + tl.arange(0, WIDE)
    known = ids < V
    x = tl.load(x_ptr + row * V + ids, mask=known, other=-float("inf")).to(tl.float32)
    own = rank_key(x, known)
    place = tl.min(tl.where(own == tl.max(own, 0), ids, 0x7FFFFFFF), 0)
    value = tl.sum(tl.where(ids == place, x, 0.0), 0)
    inside_one = tl.sum(tl.where(known, tl.exp(x - peak), 0.0).to(tl.float64), 0)
    weight = tl.where(known, tl.exp((x - peak) * inverse_t), 0.0).to(tl.float64)
    total = rest + tl.sum(weight, 0)
    tl.store(id_ptr + row, place)
    tl.store(logit_ptr + row, value)
    tl.store(prob_ptr + row, (tl.exp((value - peak) * inverse_t).to(tl.float64) / total).to(tl.float32))
    tl.store(tail_ptr + row, ((rest + tl.sum(tl.where(ids == place, 0.0, weight), 0)) / total).to(tl.float32))
    tl.store(lse_ptr + row, (peak + tl.log(rest_one + inside_one)).to(tl.float32))
    tl.store(lse_t_ptr + row, (peak * inverse_t + tl.log(total)).to(tl.float32))


def _empty(rows: int, k: int, device: torch.device) -> Sparse:
    wide = dict(dtype=torch.float32, device=device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=device)
    logits, probs = torch.empty(rows, k, **wide), torch.empty(rows, k, **wide)
    return Sparse(ids, logits, probs, *(torch.empty(rows, **wide) for _ in range(3)))


def sparse_topk(logits_RV: Tensor, k: int, temperature: float) -> Sparse:
    """See ``workbench_kernels.sparse_topk.sparse_topk``."""
    rows, vocab = logits_RV.shape
    groups = -(-vocab // GROUP)
    top, one = (torch.empty(rows, groups, dtype=torch.float32, device=logits_RV.device) for _ in range(2))
    hot = one if temperature == 1 else torch.empty_like(one)
    out = _empty(rows, k, logits_RV.device)
    each, hotter = min(PLAN.groups, power(groups)), temperature != 1
    launch(
        groups_kernel, (-(-groups // each), rows), logits_RV, top, one, hot, vocab, groups, 1 / temperature,
        HOT=hotter, GROUPS=each, WIDE=GROUP, num_warps=PLAN.warps, early=True,
    )  # fmt: skip
    if k == 1:
        launch(
            best_kernel, (rows,), logits_RV, top, one, hot, *out, vocab, groups, 1 / temperature,
            HOT=hotter, GP=power(groups), WIDE=GROUP, num_warps=8, early=True,
        )  # fmt: skip
        return out
    wide = power(k, 8)
    listed = torch.empty(rows, wide, dtype=torch.int32, device=logits_RV.device)
    keys = torch.empty(rows, wide, dtype=torch.int64, device=logits_RV.device)
    launch(
        select_kernel, (rows,), logits_RV, top, one, hot, listed, keys, *out, vocab, groups, 1 / temperature, k,
        HOT=hotter, GP=power(groups, wide), KP=wide, WIDE=GROUP, num_warps=PLAN.select_warps, early=True,
    )  # fmt: skip
    return out


BN, KEEP = 128, 4


def head_topk(x_RK: Tensor, w_VK: Tensor, k: int, temperature: float) -> tuple[Sparse, Tensor]:
    """See ``workbench_kernels.sparse_topk.head_topk``; with the rows that must be computed again, int32 [R]."""
    rows, width = x_RK.shape
    vocab = w_VK.shape[0]
    tiles = -(-vocab // BN)
    wide = dict(dtype=torch.float32, device=x_RK.device)
    values, bound = torch.empty(rows, tiles, KEEP, **wide), torch.empty(rows, tiles, **wide)
    ids = torch.empty(rows, tiles, KEEP, dtype=torch.int32, device=x_RK.device)
    one = torch.empty(rows, tiles, **wide)
    hotter = temperature != 1
    hot = torch.empty(rows, tiles, **wide) if hotter else one
    out, flag = _empty(rows, k, x_RK.device), torch.empty(rows, dtype=torch.int32, device=x_RK.device)
    bm = 16 if rows <= 16 else 128
    narrow_type = x_RK.dtype != torch.float32
    launch(
        head_kernel, (-(-rows // bm), tiles), x_RK, w_VK, values, ids, bound, one, hot, rows, vocab, width, tiles,
        1 / temperature, HOT=hotter, BM=bm, BN=BN, BK=(128 if bm == 16 else 64) if narrow_type else 32, KEEP=KEEP,
        PRECISION="ieee", num_warps=4 if bm == 16 else 8, num_stages=4 if narrow_type else 2,
    )  # fmt: skip
    kp = power(k, 8)
    keys = torch.empty(rows, kp, dtype=torch.int64, device=x_RK.device)
    launch(
        merge_kernel, (rows,), values, ids, bound, one, hot, keys, *out, flag, tiles, 1 / temperature, k,
        HOT=hotter, TP=power(tiles, -(-kp // KEEP)), KEEP=KEEP, KP=kp, num_warps=8,
    )  # fmt: skip
    return out, flag
