"""Triton form of the filters: the least logit that a row keeps, ties included, without sorting the row.

The k largest ids lie in the groups of 64 whose largest come first, and the few of those that can be among them are
compared in pairs. A nucleus of the whole row is found in passes over all chunks: each cuts the interval that holds its
edge into ``steps`` equal ones by the float64 mass above them, the last collects the ids of the interval that is left.
Sums run in a fixed order. Where ids crowd past the room for them, one program searches the row instead.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import bits, key_value, kth_between, launch, order_key, power, real

GROUP = 64
LOWEST = tl.constexpr(-2139095040)  # order key of the least finite float32


class Plan(NamedTuple):
    """Shape of the work: groups of ids per chunk; passes, steps of each, ids collected of a chunk; warps."""

    groups: int
    levels: int
    steps: int
    slots: int
    warps: int
    cut_warps: int


PLAN = Plan(groups=32, levels=2, steps=32, slots=32, warps=4, cut_warps=8)


class Cut(NamedTuple):
    """Largest logit of each group, and of each row its least kept logit and its largest."""

    groups_RG: Tensor
    cut_R: Tensor
    peak_R: Tensor


@triton.jit(do_not_specialize=["heat"])
def group_kernel(
    x_ptr, max_ptr, top_ptr, low_ptr, mass_ptr, V, G, heat, MASS: tl.constexpr, GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    x = tl.load(x_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
    best = tl.max(x, 1)
    bad = tl.sum((x != x).to(tl.int32), 1) > 0
    tl.store(max_ptr + row * G + group, tl.where(bad, float("nan"), best), mask=group < G)
    if MASS:
        at = row * tl.num_programs(0) + tl.program_id(0)
        top = tl.max(best, 0)
        base = tl.where(top == -float("inf"), 0.0, top).to(tl.float64)
        tl.store(top_ptr + at, top)
        tl.store(low_ptr + at, tl.min(tl.min(tl.where(x > -float("inf"), x, float("inf")), 1), 0))
        tl.store(mass_ptr + at, tl.sum(tl.sum(tl.exp((x.to(tl.float64) - base) / real(heat)), 1), 0))


# ------------------------------------------------------------------------------------------ a nucleus of the whole row


@triton.jit
def _levels(high, low, STEPS: tl.constexpr):
    """The upper ends of equal parts of an interval, falling."""
    return high - (high - low) * (tl.arange(0, STEPS).to(tl.float32) * (1 / STEPS))


@triton.jit
def _interval(
    top_ptr, low_ptr, mass_ptr, part_ptr, row, R, CHUNKS, heat, top_p, reach, LEVEL: tl.constexpr, STEPS: tl.constexpr,
    CP: tl.constexpr,
):  # fmt: skip
    """After LEVEL passes: the peak, an interval whose upper end has less mass above it than the goal and whose lower
    end has the goal or more, the mass above the upper end, and the goal."""
    c = tl.arange(0, CP)
    top = tl.load(top_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=-float("inf"))
    least = tl.load(low_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=float("inf"))
    mass = tl.load(mass_ptr + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    peak = tl.max(top, 0)
    share = tl.exp((top.to(tl.float64) - peak.to(tl.float64)) / heat) * mass
    goal = tl.sum(tl.where(c < CHUNKS, share, 0.0), 0) * top_p
    high = peak
    # two keys down is below, whatever the sign of a zero
    low = key_value(order_key(tl.maximum(peak - reach, tl.min(least, 0))) - 2)
    above = goal * 0.0
    at = c[:, None] * STEPS + tl.arange(0, STEPS)[None, :]
    for level in tl.static_range(LEVEL):
        part = tl.load(part_ptr + (level * R + row) * CHUNKS * STEPS + at, mask=(c < CHUNKS)[:, None], other=0.0)
        held = tl.sum(part, 0)
        edge = _levels(high, low, STEPS)
        inside = held < goal
        above = tl.max(tl.where(inside, held, 0.0), 0)
        high = tl.min(tl.where(inside, edge, high), 0)
        low = tl.max(tl.where(inside, low, edge), 0)
    return peak, high, low, above, goal


@triton.jit(do_not_specialize=["heat", "top_p"])
def narrow_kernel(
    x_ptr, top_ptr, low_ptr, mass_ptr, part_ptr, V, CHUNKS, heat, top_p, reach, LEVEL: tl.constexpr,
    STEPS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    peak, high, low, above, goal = _interval(
        top_ptr, low_ptr, mass_ptr, part_ptr, row, rows, CHUNKS, real(heat), real(top_p), reach, LEVEL, STEPS, CP
    )
    i = tl.arange(0, STEPS)
    held = tl.zeros((STEPS,), tl.float64)
    if tl.load(top_ptr + row * CHUNKS + chunk) > low:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
        weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / real(heat))
        for n in tl.static_range(STEPS):
            edge = high - (high - low) * (n / STEPS)
            held = tl.where(i == n, tl.sum(tl.where(x > edge, weight, 0.0), 0), held)
    tl.store(part_ptr + ((LEVEL * rows + row) * CHUNKS + chunk) * STEPS + i, held)


@triton.jit(do_not_specialize=["heat", "top_p"])
def collect_kernel(
    x_ptr, top_ptr, low_ptr, mass_ptr, part_ptr, slot_ptr, count_ptr, first_ptr, last_ptr, V, CHUNKS, heat, top_p,
    reach, LEVELS: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    peak, high, low, above, goal = _interval(
        top_ptr, low_ptr, mass_ptr, part_ptr, row, tl.num_programs(1), CHUNKS, real(heat), real(top_p), reach, LEVELS,
        STEPS, CP,
    )  # fmt: skip
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * V + ids, mask=ids < V, other=-float("inf"))
    take = (x > low) & (x <= high)
    place = tl.cumsum(take.to(tl.int32), 0) - 1
    at = row * CHUNKS + chunk
    tl.store(slot_ptr + at * SLOTS + place, x, mask=take & (place < SLOTS))
    tl.store(count_ptr + at, tl.sum(take.to(tl.int32), 0))
    tl.store(first_ptr + at, tl.min(tl.where(take, x, float("inf")), 0))
    tl.store(last_ptr + at, tl.max(tl.where(take, x, -float("inf")), 0))


@triton.jit
def _collected(
    top_ptr, low_ptr, mass_ptr, part_ptr, slot_ptr, count_ptr, first_ptr, last_ptr, row, R, CHUNKS, heat, top_p, reach,
    LEVELS: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    """The nucleus's least key among the ids collected, whether they show it, and the goal."""
    peak, high, low, above, goal = _interval(
        top_ptr, low_ptr, mass_ptr, part_ptr, row, R, CHUNKS, heat, top_p, reach, LEVELS, STEPS, CP
    )
    hot = peak.to(tl.float64)
    c = tl.arange(0, CP)
    at = row * CHUNKS
    counts = tl.load(count_ptr + at + c, mask=c < CHUNKS, other=0)
    first = tl.min(tl.load(first_ptr + at + c, mask=c < CHUNKS, other=float("inf")), 0)
    last = tl.max(tl.load(last_ptr + at + c, mask=c < CHUNKS, other=-float("inf")), 0)
    cut = order_key(last)
    if first == last:  # equal ids need no room
        one = tl.exp((last.to(tl.float64) - hot) / heat)
        shown = (above < goal) & (above + one * tl.sum(counts, 0).to(tl.float64) >= goal)
    else:
        s = tl.arange(0, CP * SLOTS)
        count = tl.load(count_ptr + at + s // SLOTS, mask=s < CHUNKS * SLOTS, other=0)
        live = s % SLOTS < count
        x = tl.load(slot_ptr + at * SLOTS + s, mask=live, other=-float("inf"))
        weight = tl.where(live, tl.exp((x.to(tl.float64) - hot) / heat), 0.0)
        shown = (tl.max(counts, 0) <= SLOTS) & (above < goal) & (above + tl.sum(weight, 0) >= goal)
        if shown:
            key = order_key(x)
            low_key = order_key(first).to(tl.int64)
            high_key = cut.to(tl.int64)
            while low_key < high_key:
                middle = (low_key + high_key) >> 1
                held = above + tl.sum(tl.where(key > middle.to(tl.int32), weight, 0.0), 0)
                if held < goal:
                    high_key = middle
                else:
                    low_key = middle + 1
            cut = low_key.to(tl.int32)
    return cut, shown, goal


# ------------------------------------------------------------------------------------------ by one program, from a list


@triton.jit
def _list(list_ptr, key, g, least):
    """Write the groups whose largest key is at least ``least``; how many they are."""
    chosen = (key >= least).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    tl.debug_barrier()
    tl.store(list_ptr + place, g, mask=chosen > 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def _tile(x_ptr, list_ptr, first, n, V, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Logits of a tile of listed groups, minus infinity past their end."""
    i = first + tl.arange(0, TILE)
    group = tl.load(list_ptr + i, mask=i < n, other=0)
    ids = group[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    x = tl.load(x_ptr + ids, mask=(i < n)[:, None] & (ids < V), other=-float("inf"))
    return tl.reshape(x, (TILE * WIDE,))


@triton.jit
def _mass_above(x_ptr, list_ptr, n, V, above, peak, heat, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Mass of the listed ids whose key is larger than ``above``, float64."""
    total = tl.zeros((TILE * WIDE,), tl.float64)
    for first in range(0, n, TILE):
        x = _tile(x_ptr, list_ptr, first, n, V, TILE, WIDE)
        weight = tl.exp((x.to(tl.float64) - peak) / heat)
        total += tl.where(order_key(x) > above, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _kth_listed(x_ptr, list_ptr, n, V, least, most, k, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The largest key that at least k of the listed ids reach, from ``least`` to ``most``."""
    low = least.to(tl.int64)
    high = most.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.zeros((TILE * WIDE,), tl.int32)
        for first in range(0, n, TILE):
            x = _tile(x_ptr, list_ptr, first, n, V, TILE, WIDE)
            count += (order_key(x) >= middle.to(tl.int32)).to(tl.int32)
        if tl.sum(count, 0) >= k:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def _nucleus_listed(x_ptr, list_ptr, n, V, least, most, goal, peak, heat, TILE: tl.constexpr, WIDE: tl.constexpr):
    """The least key, from ``least`` to ``most``, above which the listed ids have less mass than the goal."""
    low = least.to(tl.int64)
    high = most.to(tl.int64)
    while low < high:
        middle = (low + high) >> 1
        if _mass_above(x_ptr, list_ptr, n, V, middle.to(tl.int32), peak, heat, TILE, WIDE) < goal:
            high = middle
        else:
            low = middle + 1
    return low.to(tl.int32)


@triton.jit
def _few(
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


@triton.jit(do_not_specialize=["top_k", "top_p", "min_p", "heat"])
def cut_kernel(
    x_ptr, max_ptr, top_ptr, low_ptr, mass_ptr, part_ptr, slot_ptr, count_ptr, first_ptr, last_ptr, list_ptr, pack_ptr,
    cut_ptr, peak_ptr, V, G, CHUNKS, top_k, top_p, min_p, heat, reach,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, CHAIN: tl.constexpr, GREEDY: tl.constexpr,
    GP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr, LEVELS: tl.constexpr,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_p = real(top_p)
    min_p = real(min_p)
    heat = real(heat)
    x_ptr += row * V
    list_ptr += row * G
    pack_ptr += row * ROOM
    g = tl.arange(0, GP)
    top = tl.load(max_ptr + row * G + g, mask=g < G, other=-float("inf"))
    peak = tl.max(top, 0)
    bad = (tl.sum((top != top).to(tl.int32), 0) > 0) | (peak == float("inf")) | (peak == -float("inf"))
    key = tl.where(g < G, order_key(top), -2147483648)
    most = order_key(peak)
    cut = most
    hot = peak.to(tl.float64)
    if bad:
        tl.store(cut_ptr + row, float("nan"))
        tl.store(peak_ptr + row, float("nan"))
    else:
        if not GREEDY:
            lowest = tl.minimum(most, LOWEST)
            cut = lowest
            n = tl.zeros((), tl.int32)
            if TOP_K:
                # groups whose largest is among the k largest of groups hold all k largest ids, and their ties
                least = tl.maximum(tl.min(tl.where(g < G, key, most), 0), lowest)
                least = kth_between(key, tl.where(top_k > G, lowest, least), most, top_k)
                n = _list(list_ptr, key, g, least)
                held = tl.zeros((), tl.int32)
                for first in range(0, n, TILE):
                    x = _tile(x_ptr, list_ptr, first, n, V, TILE, WIDE)
                    take = (order_key(x) >= least).to(tl.int32)
                    place = held + tl.cumsum(take, 0) - 1
                    tl.store(pack_ptr + place, x, mask=(take > 0) & (place < ROOM))
                    held += tl.sum(take, 0)
                tl.debug_barrier()
                if held <= ROOM:
                    cut = _few(pack_ptr, held, most, top_k, top_p, hot, heat, TOP_P and CHAIN, ROOM)
                else:
                    cut = _kth_listed(x_ptr, list_ptr, n, V, least, most, top_k, TILE, WIDE)
                    if TOP_P and CHAIN:
                        goal = _mass_above(x_ptr, list_ptr, n, V, cut - 1, hot, heat, TILE, WIDE) * top_p
                        cut = _nucleus_listed(x_ptr, list_ptr, n, V, cut, most, goal, hot, heat, TILE, WIDE)
            if TOP_P and not (TOP_K and CHAIN):
                nucleus, shown, goal = _collected(
                    top_ptr, low_ptr, mass_ptr, part_ptr, slot_ptr, count_ptr, first_ptr, last_ptr, row,
                    tl.num_programs(0), CHUNKS, heat, top_p, reach, LEVELS, STEPS, SLOTS, CP,
                )  # fmt: skip
                if not shown:
                    # more groups until the ids above the last one listed hold the mass asked for
                    wanted = 64
                    floor = lowest
                    settled = False
                    while not settled:
                        if wanted < G:
                            floor = kth_between(key, lowest, most, wanted)
                        else:
                            floor = lowest
                        n = _list(list_ptr, key, g, floor)
                        reached = _mass_above(x_ptr, list_ptr, n, V, floor, hot, heat, TILE, WIDE)
                        settled = (reached >= goal) | (wanted >= G)
                        wanted = wanted * 16
                    nucleus = _nucleus_listed(x_ptr, list_ptr, n, V, floor, most, goal, hot, heat, TILE, WIDE)
                cut = tl.maximum(cut, nucleus)
            if MIN_P:
                low = cut.to(tl.int64)
                high = most.to(tl.int64)
                while low < high:
                    middle = (low + high) >> 1
                    value = key_value(middle.to(tl.int32)).to(tl.float64)
                    if tl.exp((value - hot) / heat) >= min_p:
                        high = middle
                    else:
                        low = middle + 1
                cut = tl.maximum(cut, low.to(tl.int32))
        tl.store(cut_ptr + row, key_value(cut))
        tl.store(peak_ptr + row, peak)


def cut(logits_RV: Tensor, heat: float, top_k: int, top_p: float, min_p: float, *, chain: bool, greedy: bool) -> Cut:
    """The least logit that the filters keep of every row, or the largest logit for ``greedy``.

    Args:
        logits_RV: Float32 rows.
        heat: Temperature that the filters judge at.
        top_k: See ``shape_draw``; 0 for none.
        top_p: See ``shape_draw``.
        min_p: See ``shape_draw``.
        chain: The nucleus is taken of what ``top_k`` keeps.
        greedy: No filter.

    Returns:
        NaN for a row that holds NaN or plus infinity or nothing finite. Between the least logit kept and the cut lies
        no logit of the row.
    """
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    plan = PLAN
    groups = -(-vocab // GROUP)
    each = min(plan.groups, power(groups))
    chunks, chunk = -(-groups // each), each * GROUP
    whole = top_p < 1 and not greedy and not (top_k and chain)
    wide, double = dict(dtype=torch.float32, device=device), dict(dtype=torch.float64, device=device)
    whole_int = dict(dtype=torch.int32, device=device)
    best, cut_R, peak_R = torch.empty(rows, groups, **wide), torch.empty(rows, **wide), torch.empty(rows, **wide)
    # what stands for an argument that a launch without a nucleus of the whole row does not read
    top = low = first = last = slots = cut_R
    counts = listed = torch.empty(rows, groups, **whole_int)
    mass = parts = torch.empty(0, **double)
    if whole:
        top, low, first, last = (torch.empty(rows, chunks, **wide) for _ in range(4))
        mass, parts = torch.empty(rows, chunks, **double), torch.empty(plan.levels, rows, chunks, plan.steps, **double)
        slots, counts = torch.empty(rows, chunks, plan.slots, **wide), torch.empty(rows, chunks, **whole_int)
    launch(
        group_kernel, (chunks, rows), logits_RV, best, top, low, mass, vocab, groups, bits(heat), MASS=whole,
        GROUPS=each, WIDE=GROUP, num_warps=plan.warps,
    )  # fmt: skip
    # less than 1 - top_p of the mass, which is at least 1, is left further below the peak than this
    reach = min(heat * (log(vocab) - log(1 - top_p) + 1), 1e38) if whole else 0.0
    cp = power(chunks)
    # every program must find the same ends of intervals: no fused multiplications, whose choice is the compiler's
    shared = dict(STEPS=plan.steps, CP=cp, enable_fp_fusion=False)
    law = (bits(heat), bits(top_p), reach)
    if whole:
        for level in range(plan.levels):
            launch(
                narrow_kernel, (chunks, rows), logits_RV, top, low, mass, parts, vocab, chunks, *law, LEVEL=level,
                CHUNK=chunk, num_warps=plan.warps, **shared,
            )  # fmt: skip
        launch(
            collect_kernel, (chunks, rows), logits_RV, top, low, mass, parts, slots, counts, first, last, vocab,
            chunks, *law, LEVELS=plan.levels, SLOTS=plan.slots, CHUNK=chunk, num_warps=plan.warps, **shared,
        )  # fmt: skip
    room = 64 if top_k <= 40 else 128
    pack = torch.empty(rows, room, **wide)
    launch(
        cut_kernel, (rows,), logits_RV, best, top, low, mass, parts, slots, counts, first, last, listed, pack, cut_R,
        peak_R, vocab, groups, chunks, top_k, bits(top_p), bits(min_p), bits(heat), reach,
        TOP_K=top_k > 0, TOP_P=top_p < 1, MIN_P=min_p > 0, CHAIN=chain, GREEDY=greedy, GP=power(groups), TILE=32,
        WIDE=GROUP, ROOM=room, LEVELS=plan.levels, SLOTS=plan.slots, num_warps=plan.cut_warps, **shared,
    )  # fmt: skip
    return Cut(best, cut_R, peak_R)
