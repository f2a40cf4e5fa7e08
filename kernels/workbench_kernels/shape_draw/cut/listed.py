"""Triton form of filters by one program: over listed groups of ids, or over the few ids that can be kept."""

from __future__ import annotations

import triton
import triton.language as tl

from workbench_kernels.device.kernel import kth_between, order_key


@triton.jit
def list_groups(list_ptr, key, g, least):
    """Write the groups whose largest key is at least ``least``; how many they are."""
    chosen = (key >= least).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    tl.debug_barrier()
    tl.store(list_ptr + place, g, mask=chosen > 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def tile_of_groups(x_ptr, list_ptr, first, n, V, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Logits of a tile of listed groups, minus infinity past their end."""
    i = first + tl.arange(0, TILE)
    group = tl.load(list_ptr + i, mask=i < n, other=0)
    ids = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    x = tl.load(x_ptr + ids, mask=(i < n)[:, None] & (ids < V), other=-float("inf"))
    return tl.reshape(x, (TILE * WIDE,))


@triton.jit
def mass_above(x_ptr, list_ptr, n, V, above, peak, heat, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Mass of the listed ids whose key is larger than ``above``, float64."""
    total = tl.zeros((TILE * WIDE,), tl.float64)
    for first in range(0, n, TILE):
        x = tile_of_groups(x_ptr, list_ptr, first, n, V, TILE, WIDE)
        weight = tl.exp((x.to(tl.float64) - peak) / heat)
        total += tl.where(order_key(x) > above, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def kth_listed(x_ptr, list_ptr, n, V, least, most, k, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The largest key that at least k of the listed ids reach, from ``least`` to ``most``."""
    low = least.to(tl.int64)
    high = most.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.zeros((TILE * WIDE,), tl.int32)
        for first in range(0, n, TILE):
            x = tile_of_groups(x_ptr, list_ptr, first, n, V, TILE, WIDE)
            count += (order_key(x) >= middle.to(tl.int32)).to(tl.int32)
        if tl.sum(count, 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def nucleus_listed(x_ptr, list_ptr, n, V, least, most, goal, peak, heat, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The least key, from ``least`` to ``most``, above which the listed ids have less mass than the goal."""
    low = least.to(tl.int64)
    high = most.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if mass_above(x_ptr, list_ptr, n, V, middle.to(tl.int32), peak, heat, TILE, WIDE) < goal:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def cut_of_few(
    pack_ptr, held, most, top_k, top_p, peak, heat, NUCLEUS: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """The least key kept of up to ROOM ids, each compared with each."""
    i = tl.arange(0, ROOM)
    x = tl.load(pack_ptr + i, mask=i < held, other=-float("inf"))
    key = order_key(x)
    larger = key[None, :] > key[:, None]
    kept = (i < held) & (tl.sum(larger.to(tl.int32), 1) < top_k)
    if NUCLEUS:
        weight = tl.where(kept, tl.exp((x.to(tl.float64) - peak) / heat), 0.0)
        goal = tl.sum(weight, 0) * top_p
        kept = kept & (tl.sum(tl.where(larger, weight[None, :], 0.0), 1) < goal)
    return tl.min(tl.where(kept, key, most), 0)


@triton.jit
def cut_of_some(
    pack_ptr, held, least, most, top_k, top_p, peak, heat, NUCLEUS: tl.constexpr, PACK: tl.constexpr
):  # fmt: skip
    """The least key kept of up to PACK ids, found by bisection."""
    i = tl.arange(0, PACK)
    x = tl.load(pack_ptr + i, mask=i < held, other=-float("inf"))
    key = tl.where(i < held, order_key(x), -2147483648)
    cut = kth_between(key, least, most, top_k)
    if NUCLEUS:
        weight = tl.where(key >= cut, tl.exp((x.to(tl.float64) - peak) / heat), 0.0)
        goal = tl.sum(weight, 0) * top_p
        low = cut.to(tl.int64)
        high = most.to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if tl.sum(tl.where(key > middle.to(tl.int32), weight, 0.0), 0) < goal:
                high = middle
            else:
                low = middle + 1
        cut = low.to(tl.int32)
    return cut
