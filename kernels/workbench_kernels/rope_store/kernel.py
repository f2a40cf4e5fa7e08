"""Triton form: one program per row and head; heads 0 .. H - 1 are queries, the N after them a key and its value.

Sums and products are never fused by the compiler, so that packed bytes are the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import begin, launch, narrow, power


@triton.jit
def _turned(x_ptr, scale_ptr, cos_ptr, sin_ptr, d, D: tl.constexpr, R: tl.constexpr, eps, TYPE: tl.constexpr):
    """One head's row, normed and turned, rounded after each; float32."""
    live = d < D
    x = tl.load(x_ptr + d, mask=live, other=0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.reshape(x * x, (d.shape[0] * d.shape[1],)), 0) / D + eps)
    y = narrow(x * inverse * tl.load(scale_ptr + d, mask=live, other=0.0), TYPE).to(tl.float32)
    other = tl.where(d < R // 2, d + R // 2, d - R // 2)
    turns = d < R
    z = tl.load(x_ptr + other, mask=turns, other=0).to(tl.float32)
    z = narrow(z * inverse * tl.load(scale_ptr + other, mask=turns, other=0.0), TYPE).to(tl.float32)
    cos = tl.load(cos_ptr + d, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + d, mask=turns, other=0.0)
    return narrow(tl.where(turns, tl.fma(z, sin, y * cos), y), TYPE).to(tl.float32)


@triton.jit
def _inverse(d):
    inverse = tl.div_rn(tl.full(d.shape, 1.0, tl.float32), d)
    return tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)


@triton.jit
def _half(ptr, x, live):
    """Two bytes of a half-precision number."""
    bits = x.to(tl.float16).to(tl.uint16, bitcast=True)
    tl.store(ptr, (bits & 255).to(tl.uint8), mask=live)
    tl.store(ptr + 1, (bits >> 8).to(tl.uint8), mask=live)


@triton.jit
def _keep(ptr, x, d, D: tl.constexpr, BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Write a row [BLOCKS, 32] in its format."""
    if FORMAT == 0:
        tl.store(ptr + d, narrow(x, ptr.dtype.element_ty), mask=d < D)
    else:
        block = tl.arange(0, BLOCKS)
        live = block < D // 32
        lane = tl.arange(0, 32)
        if FORMAT == 1:
            top = tl.max(tl.abs(x), 1)
            scale = tl.div_rn(top, tl.full((BLOCKS,), 127.0, tl.float32))
            scaled = x * _inverse(scale)[:, None]
            size = tl.abs(scaled)
            whole = tl.floor(size)
            q = tl.where(size - whole >= 0.5, whole + 1.0, whole)
            q = tl.where(scaled < 0, -q, q).to(tl.int32)
            _half(ptr + block * 34, scale, live)
            tl.store(ptr + block[:, None] * 34 + 2 + lane[None, :], (q & 255).to(tl.uint8), mask=live[:, None])
        else:
            least = tl.min(x, 1)
            scale = tl.div_rn(tl.max(x, 1) - least, tl.full((BLOCKS,), 31.0, tl.float32))
            q = (x - least[:, None]) * _inverse(scale)[:, None] + 0.5
            q = tl.minimum(tl.maximum(q, 0.0), 31.0).to(tl.int32)
            half = tl.arange(0, 2)[None, :, None]
            nibble = tl.sum(tl.reshape(q & 15, (BLOCKS, 2, 16)) << (half * 4), 1)
            bit = tl.arange(0, 8)[None, None, :]
            high = tl.sum(tl.reshape(q >> 4, (BLOCKS, 4, 8)) << bit, 2)
            base = ptr + block * 24
            _half(base, scale, live)
            _half(base + 2, least, live)
            tl.store(base[:, None] + 4 + tl.arange(0, 4)[None, :], high.to(tl.uint8), mask=live[:, None])
            tl.store(base[:, None] + 8 + tl.arange(0, 16)[None, :], nibble.to(tl.uint8), mask=live[:, None])


@triton.jit
def rope_kernel(
    x_ptr, k_ptr, v_ptr, length_ptr, cos_ptr, sin_ptr, q_scale, k_scale, count_ptr, q_ptr, gate_ptr, T, S, eps,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCKS: tl.constexpr, K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, RING: tl.constexpr, COUNTED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    b = row // T
    t = row % T
    position = tl.load(length_ptr + b) + t
    d = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    base = x_ptr + row * (2 * H + 2 * N) * D
    cos = cos_ptr + position * R
    sin = sin_ptr + position * R
    if head < H:
        x = _turned(base + head * 2 * D, q_scale, cos, sin, d, D, R, eps, TYPE)
        tl.store(q_ptr + (row * H + head) * D + d, narrow(x, TYPE), mask=d < D)
        gate = tl.load(base + head * 2 * D + D + d, mask=d < D, other=0)
        tl.store(gate_ptr + (row * H + head) * D + d, gate, mask=d < D)
    else:
        n = head - H
        rows = T
        if COUNTED:
            rows = tl.load(count_ptr + b)
        if t < rows:
            slot = position % S if RING else position
            x = _turned(base + (2 * H + n) * D, k_scale, cos, sin, d, D, R, eps, TYPE)
            _keep(k_ptr + ((b * N + n) * S + slot) * K_BYTES, x, d, D, BLOCKS, K_FORMAT)
            v = tl.load(base + (2 * H + N + n) * D + d, mask=d < D, other=0).to(tl.float32)
            _keep(v_ptr + ((b * N + n) * S + slot) * V_BYTES, v, d, D, BLOCKS, V_FORMAT)


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
    """See ``workbench_kernels.rope_store.rope_store``."""
    b, t, _ = packed_BTW.shape
    n, s, d = k_BNSX.shape[1], k_BNSX.shape[2], len(q_scale_D)
    q = torch.empty(b, t, heads, d, dtype=packed_BTW.dtype, device=packed_BTW.device)
    gate = torch.empty(b, t, heads * d, dtype=packed_BTW.dtype, device=packed_BTW.device)
    kinds = {"dense": 0, "q8_0": 1, "q5_1": 2}
    launch(
        rope_kernel, (b * t, heads + n), packed_BTW, k_BNSX, v_BNSX, lengths_B, cos_LR, sin_LR, q_scale_D, k_scale_D,
        lengths_B if counts_B is None else counts_B, q, gate, t, s, eps, H=heads, N=n, D=d, R=cos_LR.shape[1],
        BLOCKS=power(-(-d // 32)), K_BYTES=k_BNSX.shape[3], V_BYTES=v_BNSX.shape[3], K_FORMAT=kinds[k_format],
        V_FORMAT=kinds[v_format], RING=ring, COUNTED=counts_B is not None, num_warps=1, enable_fp_fusion=False,
        early=True,
    )  # fmt: skip
    return q, gate, k_BNSX, v_BNSX
