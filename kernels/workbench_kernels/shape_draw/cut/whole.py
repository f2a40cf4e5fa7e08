"""Triton form of the search for a nucleus of whole rows: passes over all chunks, then the ids that are left.

An interval of logits holds the nucleus's edge: less mass than the goal lies above its upper end, the goal or more above
its lower. Each pass cuts it by the float64 mass above equal steps; sums run in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench_kernels.device.kernel import key_value, order_key, real


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
def collected(
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
