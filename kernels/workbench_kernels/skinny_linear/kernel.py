"""Triton form of the product of few rows: 16 rows by BN outputs by BK inputs, K cut into a fixed number of parts.

With more than one part every program writes its float32 sums; the one that comes last for its outputs adds them in the
order of the parts and finishes. Which one is last does not change a bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import INTERPRETED, dot, launch, narrow, starts_early
from workbench_kernels.rmsnorm.kernel import rmsnorm

ROWS = 16


class Tile(NamedTuple):
    """Shape of the work: outputs and inputs per tile, parts of K, warps, stages of the pipeline."""

    bn: int
    bk: int
    parts: int
    warps: int
    stages: int


@triton.jit
def _weights(w_ptr, scale_ptr, n, live_n, kk, K, S, G, QUANT: tl.constexpr, EVEN: tl.constexpr):
    """A tile of the weight [BK, BN], and the scale of its outputs in this group."""
    at = n.to(tl.int64)[None, :] * K + kk[:, None]
    mask = live_n[None, :]
    if not EVEN:
        mask = mask & (kk < K)[:, None]
    w = tl.load(w_ptr + at, mask=mask, other=0.0, eviction_policy="evict_first")
    if QUANT:
        group = tl.min(kk, 0) // G
        scale = tl.load(scale_ptr + n * S + group, mask=live_n, other=0.0)
    else:
        scale = tl.zeros_like(n).to(tl.float32)
    return w, scale


@triton.jit
def _ask(w_ptr, n, N, K, first, LINES: tl.constexpr):
    """Bring the first lines of every row of a tile into the second-level cache."""
    PER: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    column = first + tl.arange(0, LINES) * PER
    at = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(column, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, part_ptr, count_ptr, M, N, K, S, G, STEPS,
    BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, SWIGLU: tl.constexpr,
    QUANT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    RELEASE: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    block = tl.program_id(2)
    rows = block * 16 + tl.arange(0, 16)
    live_m = rows < M
    n = tile * BN + tl.arange(0, BN)
    live_n = n < N
    if RELEASE == 1:
        tl.extra.cuda.gdc_launch_dependents()
    if EARLY:
        if AHEAD > 0:  # the weight does not depend on what runs before
            _ask(w_ptr, n, N, K, part * STEPS * BK, AHEAD)
            if SWIGLU:
                _ask(w_ptr + N.to(tl.int64) * K, n, N, K, part * STEPS * BK, AHEAD)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((16, BN), tl.float32)
    up = tl.zeros((16, BN), tl.float32)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * K
    for step in range(0, STEPS):
        kk = (part * STEPS + step) * BK + tl.arange(0, BK)
        mask = live_m[:, None]
        if not EVEN:
            mask = mask & (kk < K)[None, :]
        x = tl.load(x_at + kk[None, :], mask=mask, other=0.0)
        w, scale = _weights(w_ptr, scale_ptr, n, live_n, kk, K, S, G, QUANT, EVEN)
        if SWIGLU:
            w2, scale2 = _weights(w_ptr, scale_ptr, n + N, live_n, kk, K, S, G, QUANT, EVEN)
        if INTERPRETED:
            x = x.to(tl.float32)
        if QUANT:
            zero = tl.zeros((16, BN), tl.float32)
            acc += dot(x, w.to(tl.float32).to(x.dtype), zero, PRECISION) * scale[None, :]
            if SWIGLU:
                up += dot(x, w2.to(tl.float32).to(x.dtype), zero, PRECISION) * scale2[None, :]
        else:
            acc = dot(x, w, acc, PRECISION)
            if SWIGLU:
                up = dot(x, w2, up, PRECISION)
    if RELEASE == 2:
        tl.extra.cuda.gdc_launch_dependents()
    at = rows[:, None] * N + n[None, :]
    live = live_m[:, None] & live_n[None, :]
    last = True
    if PARTS > 1:
        WIDTH: tl.constexpr = 2 if SWIGLU else 1
        size = M * N
        base = part_ptr + part.to(tl.int64) * (WIDTH * size)
        tl.store(base + at, acc, mask=live)
        if SWIGLU:
            tl.store(base + size + at, up, mask=live)
        tl.debug_barrier()
        ticket = tl.atomic_add(count_ptr + block * tl.num_programs(0) + tile, 1, sem="acq_rel")
        last = ticket == PARTS - 1
        if last:
            tl.debug_barrier()
            acc = tl.zeros((16, BN), tl.float32)
            up = tl.zeros((16, BN), tl.float32)
            for p in tl.static_range(PARTS):
                base = part_ptr + p * (WIDTH * size).to(tl.int64)
                acc += tl.load(base + at, mask=live, other=0.0, cache_modifier=".cg")
                if SWIGLU:
                    up += tl.load(base + size + at, mask=live, other=0.0, cache_modifier=".cg")
            tl.atomic_xchg(count_ptr + block * tl.num_programs(0) + tile, 0)
    if last:
        if SWIGLU:
            acc = acc * tl.sigmoid(acc) * up
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + n[None, :], narrow(acc, TYPE), mask=live)


# 2-byte weights [outputs, inputs] whose best tile on an H200, 4 rows, is not the rule's: 15.8 us for 16.7, 9.4 for
# 9.8, 5.9 for 6.3; about 4.3 us of each are start, first loads and the sum of the parts
MEASURED = {
    (2560, 9216, False): Tile(32, 128, 3, 4, 5),
    (2560, 4096, False): Tile(32, 128, 8, 4, 3),
    (1024, 3584, False): Tile(64, 128, 7, 4, 4),
}


EARLY, RELEASE = False, 1
AHEAD = 2  # lines of 128 bytes of every weight row that a program asks for before the rows are there


@lru_cache(maxsize=4096)
def tile_of(n: int, k: int, bytes_each: int, swiglu: bool, group: int) -> Tile:
    """The shape of the work for a weight: a function of the weight alone, so that rows keep their bits.

    Args:
        n: Outputs that tiles cover; with a gated activation, those of one half.
        k: Inputs.
        bytes_each: Bytes of a weight value.
        swiglu: Two weight tiles per output tile.
        group: Inputs per scale.

    Returns:
        The tile.
    """
    if bytes_each == 2 and (n, k, swiglu) in MEASURED:
        return MEASURED[n, k, swiglu]
    # H200, bf16, 4 rows, medians: gate and up of 4B 3.69 TB/s, head 4.46, down 2.92 with 8 parts
    if bytes_each == 4:
        bn, bk, stages = 32, 64, 3
    elif n >= 65536:
        bn, bk, stages = 64, 128, 3
    elif bytes_each == 1:
        bn, bk, stages = 32, 256, 4
    elif swiglu:
        bn, bk, stages = 32, 128, 3 if n > 8192 else 5
    else:
        bn, bk, stages = 32, 128, 5
    bk = min(bk, triton.next_power_of_2(k))
    while group < k and group % bk:
        bk //= 2
    bk = max(bk, 32 if bytes_each == 1 else 16)
    tiles, steps = -(-n // bn), -(-k // bk)
    parts = 1
    while tiles * parts < (112 if swiglu else 264) and steps >= 4 * parts and parts < 8:
        parts *= 2
    return Tile(bn, bk, parts, 4, stages)


_counters: dict[tuple[str, int, int], Tensor] = {}


def counters(device: torch.device, n: int) -> Tensor:
    """At least n counters at zero, of the current stream of a device; kernels leave them at zero."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device.type, device.index or 0, stream)
    if key not in _counters or len(_counters[key]) < n:
        _counters[key] = torch.zeros(max(n, 16384), dtype=torch.int32, device=device)
    return _counters[key]


def skinny_linear(
    x_MK: Tensor,
    w_NK: Tensor,
    scales_NS: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    swiglu: bool,
    out_MN: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """See ``workbench_kernels.skinny_linear.skinny_linear``; ``tile`` replaces the shape of the work."""
    # H200, gate and up of 4B: 28 us; in one launch, with the scale in the loop and the inverse norm on the sums, 47 at
    # best, and with a walk over the rows first in every program 32
    if norm_K is not None:
        x_MK = rmsnorm(x_MK, norm_K, eps)
    m, k = x_MK.shape
    n = w_NK.shape[0] // (2 if swiglu else 1)
    groups = 1 if scales_NS is None else scales_NS.shape[1]
    t = tile or tile_of(n, k, w_NK.element_size(), swiglu, k // groups)
    steps = triton.cdiv(triton.cdiv(k, t.bk), t.parts)
    tiles, blocks = -(-n // t.bn), -(-m // ROWS)
    parts = out_MN
    if t.parts > 1:
        each = (2 if swiglu else 1) * m * n
        parts = torch.empty(t.parts * each, dtype=torch.float32, device=x_MK.device)
    launch(
        skinny_kernel, (tiles, t.parts, blocks), x_MK, w_NK,
        w_NK if scales_NS is None else scales_NS, out_MN, parts, counters(x_MK.device, tiles * blocks), m, n, k, groups,
        k // groups, steps,
        BN=t.bn, BK=t.bk, PARTS=t.parts, SWIGLU=swiglu, QUANT=scales_NS is not None,
        EVEN=k % (t.bk * t.parts) == 0, PRECISION="ieee" if x_MK.dtype == torch.float32 else "tf32",
        AHEAD=AHEAD if t.bk * (w_NK.element_size()) >= 128 else 0, num_warps=t.warps, num_stages=t.stages, early=EARLY,
        RELEASE=RELEASE if starts_early(x_MK.device) else 0, **({} if EARLY else {"EARLY": False}),
    )  # fmt: skip
    return out_MN
