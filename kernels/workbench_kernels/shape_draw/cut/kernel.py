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
from workbench_kernels.shape_draw.cut.listed import (
    cut_of_few,
    cut_of_some,
    kth_listed,
    list_groups,
    mass_above,
    nucleus_listed,
    tile_of_groups,
)
from workbench_kernels.shape_draw.cut.whole import collect_kernel, collected, narrow_kernel

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


# H200, 8 rows of 248,320, nucleus of the whole: 130 us; 3 passes 144, 32 steps 147, 64 steps 260
PLAN = Plan(groups=32, levels=2, steps=16, slots=64, warps=4, cut_warps=8)
PACK = 1024  # ids that one program searches in registers


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


@triton.jit(do_not_specialize=["top_k", "top_p", "min_p", "heat"])
def cut_kernel(
    x_ptr, max_ptr, top_ptr, low_ptr, mass_ptr, part_ptr, slot_ptr, count_ptr, first_ptr, last_ptr, list_ptr, pack_ptr,
    cut_ptr, peak_ptr, V, G, CHUNKS, top_k, top_p, min_p, heat, reach,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, CHAIN: tl.constexpr, GREEDY: tl.constexpr,
    GP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, ROOM: tl.constexpr, PACK: tl.constexpr,
    LEVELS: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr, CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top_p = real(top_p)
    min_p = real(min_p)
    heat = real(heat)
    x_ptr += row * V
    list_ptr += row * G
    pack_ptr += row * PACK
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
                n = list_groups(list_ptr, key, g, least)
                held = tl.zeros((), tl.int32)
                for first in range(0, n, TILE):
                    x = tile_of_groups(x_ptr, list_ptr, first, n, V, TILE, WIDE)
                    take = (order_key(x) >= least).to(tl.int32)
                    place = held + tl.cumsum(take, 0) - 1
                    tl.store(pack_ptr + place, x, mask=(take > 0) & (place < PACK))
                    held += tl.sum(take, 0)
                tl.debug_barrier()
                if held <= ROOM:
                    cut = cut_of_few(pack_ptr, held, most, top_k, top_p, hot, heat, TOP_P and CHAIN, ROOM)
                elif held <= PACK:
                    cut = cut_of_some(pack_ptr, held, least, most, top_k, top_p, hot, heat, TOP_P and CHAIN, PACK)
                else:
                    cut = kth_listed(x_ptr, list_ptr, n, V, least, most, top_k, TILE, WIDE)
                    if TOP_P and CHAIN:
                        goal = mass_above(x_ptr, list_ptr, n, V, cut - 1, hot, heat, TILE, WIDE) * top_p
                        cut = nucleus_listed(x_ptr, list_ptr, n, V, cut, most, goal, hot, heat, TILE, WIDE)
            if TOP_P and not (TOP_K and CHAIN):
                nucleus, shown, goal = collected(
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
                        n = list_groups(list_ptr, key, g, floor)
                        reached = mass_above(x_ptr, list_ptr, n, V, floor, hot, heat, TILE, WIDE)
                        settled = (reached >= goal) | (wanted >= G)
                        wanted = wanted * 16
                    nucleus = nucleus_listed(x_ptr, list_ptr, n, V, floor, most, goal, hot, heat, TILE, WIDE)
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
    pack = torch.empty(rows, PACK, **wide)
    launch(
        cut_kernel, (rows,), logits_RV, best, top, low, mass, parts, slots, counts, first, last, listed, pack, cut_R,
        peak_R, vocab, groups, chunks, top_k, bits(top_p), bits(min_p), bits(heat), reach,
        TOP_K=top_k > 0, TOP_P=top_p < 1, MIN_P=min_p > 0, CHAIN=chain, GREEDY=greedy, GP=power(groups), TILE=32,
        WIDE=GROUP, ROOM=room, PACK=PACK, LEVELS=plan.levels, SLOTS=plan.slots, num_warps=plan.cut_warps, **shared,
    )  # fmt: skip
    return Cut(best, cut_R, peak_R)
