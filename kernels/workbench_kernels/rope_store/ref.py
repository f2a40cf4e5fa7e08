"""Plain PyTorch form: the specification. Float64 inputs are computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.rmsnorm.ref import rmsnorm, wide


def rope_store(
    packed_BTW: Tensor,
    k_BNSX: Tensor,
    v_BNSX: Tensor,
    lengths_B: Tensor,
    cos_LR: Tensor,
    sin_LR: Tensor,
    q_scale_D: Tensor,
    k_scale_D: Tensor,
    heads: int,
    k_format: str,
    v_format: str,
    ring: bool,
    counts_B: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``workbench_kernels.rope_store.rope_store``: row by row."""
    b, t, _ = packed_BTW.shape
    n, s, d = k_BNSX.shape[1], k_BNSX.shape[2], len(q_scale_D)
    pairs, k, v = packed_BTW.split([2 * heads * d, n * d, n * d], -1)
    query, gate = pairs.reshape(b, t, heads, 2, d).unbind(3)
    q, k = query.clone(), k.reshape(b, t, n, d).clone()
    counts = [t] * b if counts_B is None else counts_B.tolist()
    for i, at in enumerate(lengths_B.tolist()):
        for j in range(t):
            q[i, j] = _turned(rmsnorm(q[i, j], q_scale_D, eps=eps), cos_LR[at + j], sin_LR[at + j])
            k[i, j] = _turned(rmsnorm(k[i, j], k_scale_D, eps=eps), cos_LR[at + j], sin_LR[at + j])
            if j < counts[i]:
                slot = (at + j) % s if ring else at + j
                k_BNSX[i, :, slot] = PACK[k_format](k[i, j])
                v_BNSX[i, :, slot] = PACK[v_format](v.reshape(b, t, n, d)[i, j])
    return q, gate.reshape(b, t, heads * d).contiguous(), k_BNSX, v_BNSX


def _turned(x_HD: Tensor, cos_R: Tensor, sin_R: Tensor) -> Tensor:
    r = len(cos_R)
    head = wide(x_HD[:, :r])
    swapped = torch.cat([head[:, r // 2 :], head[:, : r // 2]], -1)
    return torch.cat([(head * wide(cos_R) + swapped * wide(sin_R)).to(x_HD.dtype), x_HD[:, r:]], -1)


def _over(x: Tensor, n: float) -> Tensor:
    """x / n rounded once, on a GPU too."""
    return x / torch.full_like(x, n)


def _inverse(d: Tensor) -> Tensor:
    inverse = 1 / d
    return torch.where(inverse.isinf(), 0.0, inverse)


def pack_q8_0(x_ND: Tensor) -> Tensor:
    """Blocks of 32: half-precision d = max|x| / 127, then 32 signed bytes x / d, halves away from zero."""
    x = x_ND.float().unflatten(-1, (-1, 32))
    d = _over(x.abs().amax(-1, keepdim=True), 127)
    scaled = x * _inverse(d)
    whole = scaled.abs().floor()
    q = torch.where(scaled.abs() - whole >= 0.5, whole + 1, whole) * scaled.sign()
    return torch.cat([d.half().view(torch.uint8), q.to(torch.int8).view(torch.uint8)], -1).flatten(-2)


def pack_q5_1(x_ND: Tensor) -> Tensor:
    """Blocks of 32: half-precision d = (max - min) / 31 and min, 32 high bits, 32 nibbles."""
    x = x_ND.float().unflatten(-1, (-1, 32))
    m = x.amin(-1, keepdim=True)
    d = _over(x.amax(-1, keepdim=True) - m, 31)
    q = ((x - m) * _inverse(d) + 0.5).clamp(0, 31).to(torch.uint8)
    low = q & 15
    shifts = torch.arange(8, dtype=torch.uint8, device=q.device)
    bits = ((q >> 4).unflatten(-1, (4, 8)) << shifts).sum(-1, dtype=torch.uint8)
    parts = [d.half().view(torch.uint8), m.half().view(torch.uint8), bits, low[..., :16] | low[..., 16:] << 4]
    return torch.cat(parts, -1).flatten(-2)


def unpack(packed_P: Tensor, kind: str) -> Tensor:
    """Float32 values of packed rows."""
    if kind == "dense":
        return packed_P
    blocks = packed_P.unflatten(-1, (-1, 34 if kind == "q8_0" else 24))
    d = blocks[..., :2].contiguous().view(torch.float16).float()
    if kind == "q8_0":
        return (blocks[..., 2:].contiguous().view(torch.int8).float() * d).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_P.device)
    high = (blocks[..., 4:8].unsqueeze(-1) >> shifts & 1).flatten(-2)
    low = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], -1)
    return ((low | high << 4).float() * d + blocks[..., 2:4].contiguous().view(torch.float16).float()).flatten(-2)


PACK = {"dense": lambda x: x, "q8_0": pack_q8_0, "q5_1": pack_q5_1}
