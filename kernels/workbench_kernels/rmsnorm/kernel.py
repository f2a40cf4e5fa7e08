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
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    live = at < D
    scale = tl.load(scale_ptr + at, mask=live, other=0).to(tl.float32)
    begin(EARLY)
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row + at, mask=live, other=0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=live, other=0).to(tl.float32)
        rounded = narrow(x, TYPE)
        tl.store(sum_ptr + row + at, rounded, mask=live)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    y = x * inverse * scale
    tl.store(out_ptr + row + at, narrow(y, TYPE), mask=live)


@triton.jit
def embed_rmsnorm_kernel(
    id_ptr, table_ptr, scale_ptr, row_ptr, out_ptr, V, D, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    r = tl.program_id(0)
    row = r.to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    live = at < D
    scale = tl.load(scale_ptr + at, mask=live, other=0).to(tl.float32)
    begin(EARLY)
    place = tl.load(id_ptr + r).to(tl.int64)
    known = live & (place >= 0) & (place < V)
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    x = tl.load(table_ptr + place * D + at, mask=known, other=float("nan")).to(tl.float32)
    tl.store(row_ptr + row + at, narrow(x, TYPE), mask=live)
    x = tl.where(live, x, 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(out_ptr + row + at, narrow(x * inverse * scale, TYPE), mask=live)


@triton.jit
def gated_rmsnorm_kernel(
    o_ptr, z_ptr, weight_ptr, out_ptr, R, D, heads, z_row, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight_ptr + col, mask=col < D, other=0).to(tl.float32)
    begin(EARLY)
    live = (rows < R) & (col < D)
    at = rows * D + col
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    o = tl.load(o_ptr + at, mask=live, other=0).to(tl.float32)
    z = tl.load(z_ptr + rows // heads * z_row + rows % heads * D + col, mask=live, other=0).to(tl.float32)
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


def embed_rmsnorm(ids_R: Tensor, table_VD: Tensor, scale_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rmsnorm.embed_rmsnorm``."""
    v, d = table_VD.shape
    rows = torch.empty(len(ids_R), d, dtype=table_VD.dtype, device=ids_R.device)
    out, block = torch.empty_like(rows), power(d, 16)
    launch(
        embed_rmsnorm_kernel, (len(ids_R),), ids_R, table_VD, scale_D, rows, out, v, d, eps,
        BLOCK=block, num_warps=_warps(block), early=True,
    )  # fmt: skip
    return rows, out


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
