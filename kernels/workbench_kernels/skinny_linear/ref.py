"""Plain PyTorch form of the product: the specification. Float64 rows are computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.rmsnorm.ref import rmsnorm, wide


def dequantised(w_NK: Tensor, scales_NS: Tensor | None) -> Tensor:
    """The weight as numbers, float64 or float32."""
    if scales_NS is None:
        return wide(w_NK)
    n, k = w_NK.shape
    scales = wide(scales_NS)
    return (w_NK.to(scales.dtype).view(n, scales.shape[1], -1) * scales.unsqueeze(-1)).view(n, k)


def skinny_linear(
    x_MK: Tensor, w_NK: Tensor, scales_NS: Tensor | None, norm_K: Tensor | None, eps: float, swiglu: bool
) -> Tensor:
    """See ``workbench_kernels.skinny_linear.skinny_linear``; the result is not rounded."""
    x = wide(x_MK)
    if norm_K is not None:
        x = wide(rmsnorm(x_MK, norm_K, eps=eps))
    out = x @ dequantised(w_NK, scales_NS).to(x.dtype).t()
    if swiglu:
        gate, up = out.chunk(2, 1)
        out = torch.nn.functional.silu(gate) * up
    return out


def quantise_weight(w_NK: Tensor, *, kind: str = "int8", group: int | None = None) -> tuple[Tensor, Tensor]:
    """A weight in one byte per value, and its scales.

    Args:
        w_NK: The weight.
        kind: "int8" (largest value 127) or "fp8" (e4m3, largest 448); default "int8".
        group: Inputs per scale; default None, one scale per output.

    Returns:
        The bytes [N, K] and float32 scales [N, K / group]; a group of zeros has scale 1.
    """
    top = {"int8": 127.0, "fp8": 448.0}[kind]
    n, k = w_NK.shape
    parts = w_NK.float().view(n, -1, group or k)
    scales = parts.abs().amax(-1) / top
    scales = torch.where(scales == 0, 1.0, scales)
    scaled = (parts / scales.unsqueeze(-1)).view(n, k)
    if kind == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.clamp(-top, top).to(torch.float8_e4m3fn), scales
