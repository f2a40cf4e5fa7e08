"""Triton form: a program holds its outputs' weights in registers before it waits for the rows.

Two bfloat16 values travel as one int32: the even one is the low half. A row alone is summed by the same steps as each
of four that are taken together.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import launch, narrow
from workbench_kernels.direct_linear import LONGEST


class Shape(NamedTuple):
    """Shape of the work: outputs of a program, pairs of inputs per load, and warps."""

    bn: int
    chunk: int
    warps: int


@triton.jit
def _even(pair):
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _odd(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _slab(w_ptr, at, live, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Weights of some outputs, chunk by chunk."""
    slab = ()
    for i in tl.static_range(CHUNKS):
        slab = slab + (tl.load(w_ptr + at + i * CHUNK, mask=live, other=0, eviction_policy="evict_first"),)
    return slab


@triton.jit
def _rows(x_ptr, first, M, K2, c, ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Pairs of some rows, row by row and chunk by chunk; zeros past the last."""
    rows = ()
    for r in tl.static_range(ROWS):
        live = (c >= 0) & (first + r < M)
        for i in tl.static_range(CHUNKS):
            rows = rows + (tl.load(x_ptr + (first + r) * K2 + i * CHUNK + c, mask=live, other=0),)
    return rows


@triton.jit
def _products(slab, rows, ROWS: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Every output's sum over each row: along the row in each lane, then across lanes."""
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BN, CHUNK), tl.float32),)
    for i in tl.static_range(CHUNKS):
        even = _even(slab[i])
        odd = _odd(slab[i])
        fresh = ()
        for r in tl.static_range(ROWS):
            x = rows[r * CHUNKS + i]
            total = sums[r] + even * _even(x)[None, :]
            fresh = fresh + (total + odd * _odd(x)[None, :],)
        sums = fresh
    made = ()
    for r in tl.static_range(ROWS):
        made = made + (tl.sum(sums[r], 1),)
    return made


@triton.jit(do_not_specialize=["M"])
def direct_kernel(
    x_ptr, w_ptr, out_ptr, M, N, K2: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, SWIGLU: tl.constexpr, SOON: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live = n < N
    c = tl.arange(0, CHUNK)
    at = n.to(tl.int64)[:, None] * K2 + c[None, :]
    slab = _slab(w_ptr, at, live[:, None], CHUNK, CHUNKS)
    if SWIGLU:
        upper = _slab(w_ptr + N * K2, at, live[:, None], CHUNK, CHUNKS)
    if EARLY:
        if SOON:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for first in range(0, M, ROWS):
        rows = _rows(x_ptr, first, M, K2, c, ROWS, CHUNK, CHUNKS)
        made = _products(slab, rows, ROWS, BN, CHUNK, CHUNKS)
        if SWIGLU:
            ups = _products(upper, rows, ROWS, BN, CHUNK, CHUNKS)
        if EARLY and not SOON:
            tl.extra.cuda.gdc_launch_dependents()
        for r in tl.static_range(ROWS):
            y = made[r]
            if SWIGLU:
                y = y * tl.sigmoid(y) * ups[r]
            kept = live & (first + r < M)
            tl.store(out_ptr + (first + r) * N + n, narrow(y, out_ptr.dtype.element_ty), mask=kept)


ROWS = 4  # taken together, where there is more than one
SOON = 9 << 20  # up to this many values of a weight, the next kernel may start while this one runs

# H200, best of 12 to 20 shapes for one row
MEASURED = {
    (1024, 3584, False): Shape(8, 128, 8),
    (1024, 2048, False): Shape(4, 512, 4),
    (3584, 1024, True): Shape(8, 128, 4),
    (8224, 1024, False): Shape(8, 512, 4),
    (5120, 1024, False): Shape(8, 512, 4),
    (2560, 4096, False): Shape(2, 512, 4),
    (2560, 9216, False): Shape(2, 512, 4),
}


@lru_cache(maxsize=4096)
def shape_of(n: int, k: int, swiglu: bool) -> Shape:
    """The shape of the work for a weight, whatever the rows.

    Args:
        n: Outputs; with a gated activation, those of one half.
        k: Inputs.
        swiglu: Two weights per output.

    Returns:
        The shape.
    """
    if (n, k, swiglu) in MEASURED:
        return MEASURED[n, k, swiglu]
    pairs, bn = k // 2, 1
    while bn < 8 and 4 * bn * k * (2 if swiglu else 1) <= 32768:
        bn *= 2
    return Shape(bn, min(pairs & -pairs, LONGEST // 2), 4)


def direct_linear(x_MK: Tensor, w_NK: Tensor, swiglu: bool, out_MN: Tensor, shape: Shape | None = None) -> None:
    """See ``workbench_kernels.direct_linear.direct_linear``; ``shape`` replaces the shape of the work."""
    n, k = w_NK.shape
    n //= 2 if swiglu else 1
    s, pairs = shape or shape_of(n, k, swiglu), torch.int32
    launch(
        direct_kernel, (-(-n // s.bn) if len(x_MK) else 0,), x_MK.view(pairs), w_NK.view(pairs), out_MN, len(x_MK), n,
        K2=k // 2, BN=s.bn, CHUNK=s.chunk, CHUNKS=k // 2 // s.chunk, ROWS=1 if len(x_MK) == 1 else ROWS,
        SWIGLU=swiglu, SOON=w_NK.numel() <= SOON, num_warps=s.warps, num_stages=1, early=True,
    )  # fmt: skip
