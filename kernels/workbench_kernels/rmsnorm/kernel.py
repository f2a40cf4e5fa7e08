"""Triton norms: one program per row, the whole row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.checks import check_columns
from workbench_kernels.device.kernel import begin, launch, narrow, power


@triton.jit
def add_rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    scale_ptr,
    sum_ptr,
    out_ptr,
    D,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    live = at < D
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + at, mask=live, other=0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=live, other=0).to(tl.float32)
        rounded = narrow(x, TYPE)
        tl.store(sum_ptr + row + at, rounded, mask=live)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    y = x * inverse * tl.load(scale_ptr + at, mask=live, other=0).to(tl.float32)
    tl.store(out_ptr + row + at, narrow(y, TYPE), mask=live)


@triton.jit
def gated_rmsnorm_kernel(
    o_ptr, z_ptr, weight_ptr, out_ptr, R, D, heads, z_row, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = (rows < R) & (col < D)
    at = rows * D + col
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    o = tl.load(o_ptr + at, mask=live, other=0).to(tl.float32)
    z = tl.load(z_ptr + rows // heads * z_row + rows % heads * D + col, mask=live, other=0).to(tl.float32)
    w = tl.load(weight_ptr + col, mask=col < D, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(o * o, 1) / D + eps)
    normed = narrow(o * inverse[:, None], TYPE).to(tl.float32)
    weighted = narrow(w * normed, TYPE).to(tl.float32)
    tl.store(out_ptr + at, narrow(weighted * (z * tl.sigmoid(z)), TYPE), mask=live)


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))


def rmsnorm(x_RD: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    """See ``workbench_kernels.rmsnorm.rmsnorm``."""
    out = torch.empty_like(x_RD)
    rows, d = x_RD.shape
    block = power(d, 16)
    launch(
        add_rmsnorm_kernel, (rows,), x_RD, x_RD, scale_D, out, out, d, eps,
        ADD=False, BLOCK=block, num_warps=_warps(block), early=True,
    )  # fmt: skip
    return out


def add_rmsnorm(x_RD: Tensor, residual_RD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rmsnorm.add_rmsnorm``."""
    total, out = torch.empty_like(x_RD), torch.empty_like(x_RD)
    rows, d = x_RD.shape
    block = power(d, 16)
    launch(
        add_rmsnorm_kernel, (rows,), x_RD, residual_RD, scale_D, total, out, d, eps,
        ADD=True, BLOCK=block, num_warps=_warps(block), early=True,
    )  # fmt: skip
    return total, out


def gated_rmsnorm(o_RD: Tensor, z_RD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See ``workbench_kernels.rmsnorm.gated_rmsnorm``."""
    rows, d = o_RD.shape
    out = torch.empty(rows, d, dtype=z_RD.dtype, device=o_RD.device)
    z_row = check_columns("gated_rmsnorm", "z", z_RD)
    heads = max(1, z_RD.shape[1] // max(1, d))
    block = power(d, 16)
    each = max(1, 512 // block)
    grid = (-(-rows // each),)
    launch(
        gated_rmsnorm_kernel, grid, o_RD, z_RD, weight_D, out, rows, d, heads, z_row, eps,
        ROWS=each, BLOCK=block, num_warps=1, early=True,
    )  # fmt: skip
    return out
