"""Plain PyTorch norms: the specification. Float64 inputs are computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Float64 as it is, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def rmsnorm(x_RD: Tensor, scale_D: Tensor, *, eps: float) -> Tensor:
    """See ``workbench_kernels.rmsnorm.rmsnorm``."""
    y = wide(x_RD)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * wide(scale_D)).to(x_RD.dtype)


def embed_rmsnorm(ids_R: Tensor, table_VD: Tensor, scale_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rmsnorm.embed_rmsnorm``."""
    known = (ids_R >= 0) & (ids_R < len(table_VD))
    rows = torch.where(known[:, None], table_VD[torch.where(known, ids_R, 0).long()], torch.nan)
    return rows, rmsnorm(rows, scale_D, eps=eps)


def add_rmsnorm(x_RD: Tensor, residual_RD: Tensor, scale_D: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rmsnorm.add_rmsnorm``."""
    total = x_RD + residual_RD
    return total, rmsnorm(total, scale_D, eps=eps)


def gated_rmsnorm(o_RD: Tensor, z_RD: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """See ``workbench_kernels.rmsnorm.gated_rmsnorm``."""
    o, z_RD = wide(o_RD), z_RD.reshape(o_RD.shape)
    normed = (o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)).to(z_RD.dtype)
    weighted = (wide(weight_D) * wide(normed)).to(z_RD.dtype)
    return (wide(weighted) * torch.nn.functional.silu(wide(z_RD))).to(z_RD.dtype)
