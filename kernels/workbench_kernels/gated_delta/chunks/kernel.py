"""Triton chunks of the gated delta rule by its WY form.

Per chunk: G = cumsum(g); A_ij = beta_i e^(G_i - G_j) k_i . k_j below the diagonal; U = (I + A)^-1 (beta v) and
W = (I + A)^-1 (beta e^G k). Then chunk after chunk: v' = U - W S; o = (e^G q) S + ((q k^T) e^(G_i - G_j)) v';
S <- e^(G_last) S + (e^(G_last - G) k)^T v'. The inverse is found row by row, which no powers of A can blow up.

Source: Yang et al. 2024 (arXiv 2412.06464), section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import dot, launch, power
from workbench_kernels.gated_delta.kernel import softplus

CHUNK = 64
PRECISION = "tf32x3"  # float32 products in three passes of the matrix units: errors near 1e-6, not 1e-3


@triton.jit
def inputs_kernel(
    mixed_ptr, gates_ptr, a_log_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, log_ptr, C, scale,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, BK)
    if head < 2 * N:
        x = tl.load(mixed_ptr + row * C + head * K + i, mask=i < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) + 1e-6)
        if head < N:
            tl.store(q_ptr + (row * N + head) * K + i, x * (inverse * scale), mask=i < K)
        else:
            tl.store(k_ptr + (row * N + head - N) * K + i, x * inverse, mask=i < K)
    else:
        h = head - 2 * N
        j = tl.arange(0, BV)
        v = tl.load(mixed_ptr + row * C + 2 * N * K + h * V + j, mask=j < V, other=0.0).to(tl.float32)
        tl.store(v_ptr + (row * H + h) * V + j, v, mask=j < V)
        beta = tl.load(gates_ptr + row * 2 * H + h).to(tl.float32)
        a = tl.load(gates_ptr + row * 2 * H + H + h).to(tl.float32) + tl.load(bias_ptr + h).to(tl.float32)
        log = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32)) * softplus(a)
        tl.store(beta_ptr + row * H + h, tl.sigmoid(beta))
        tl.store(decay_ptr + row * H + h, tl.exp(log))
        tl.store(log_ptr + row * H + h, log)


@triton.jit
def solve_kernel(
    k_ptr, v_ptr, beta_ptr, log_ptr, u_ptr, w_ptr, sum_ptr, T, H, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    c = tl.arange(0, CH)
    t = chunk * CH + c
    live = t < T
    row = b * T + t
    i = tl.arange(0, BK)
    g = tl.load(log_ptr + row * H + h, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + row * H + h, mask=live, other=0.0).to(tl.float32)
    cum = tl.cumsum(g, 0)
    at_k = (row[:, None] * (H // R) + h // R) * K + i[None, :]
    k = tl.load(k_ptr + at_k, mask=live[:, None] & (i < K)[None, :], other=0.0).to(tl.float32)
    grown = tl.exp(tl.where(c[:, None] > c[None, :], cum[:, None] - cum[None, :], 0.0))
    a = dot(k, tl.trans(k), tl.zeros((CH, CH), tl.float32), PRECISION)
    a = tl.where(c[:, None] > c[None, :], a * grown * beta[:, None], 0.0)
    inverse = tl.where(c[:, None] == c[None, :], 1.0, 0.0)
    for m in range(1, CH):
        line = tl.sum(tl.where(c[:, None] == m, a, 0.0), 0)
        fresh = tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(c[:, None] == m, inverse - fresh[None, :], inverse)
    j = tl.arange(0, BV)
    at_v = (row[:, None] * H + h) * V + j[None, :]
    live_v = live[:, None] & (j < V)[None, :]
    v = tl.load(v_ptr + at_v, mask=live_v, other=0.0).to(tl.float32)
    u = dot(inverse, v * beta[:, None], tl.zeros((CH, BV), tl.float32), PRECISION)
    tl.store(u_ptr + at_v, u, mask=live_v)
    w = dot(inverse, k * (beta * tl.exp(cum))[:, None], tl.zeros((CH, BK), tl.float32), PRECISION)
    tl.store(w_ptr + (row[:, None] * H + h) * K + i[None, :], w, mask=live[:, None] & (i < K)[None, :])
    tl.store(sum_ptr + row * H + h, cum, mask=live)


@triton.jit
def carry_kernel(
    q_ptr, k_ptr, u_ptr, w_ptr, sum_ptr, state_ptr, out_ptr, after_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    c = tl.arange(0, CH)
    i = tl.arange(0, BK)
    j = block * BV + tl.arange(0, BV)
    live_s = (i < K)[:, None] & (j < V)[None, :]
    cell = head * K * V + i[:, None] * V + j[None, :]
    s = tl.load(state_ptr + cell, mask=live_s, other=0.0)
    for chunk in range(0, tl.cdiv(T, CH)):
        t = chunk * CH + c
        live = t < T
        row = b * T + t
        live_k = live[:, None] & (i < K)[None, :]
        live_v = live[:, None] & (j < V)[None, :]
        at_k = (row[:, None] * (H // R) + h // R) * K + i[None, :]
        at_v = (row[:, None] * H + h) * V + j[None, :]
        last = tl.minimum(T - chunk * CH, CH) - 1
        cum = tl.load(sum_ptr + row * H + h, mask=live, other=0.0)
        end = tl.load(sum_ptr + (b * T + chunk * CH + last) * H + h)
        q = tl.load(q_ptr + at_k, mask=live_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + at_k, mask=live_k, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + (row[:, None] * H + h) * K + i[None, :], mask=live_k, other=0.0)
        fresh = tl.load(u_ptr + at_v, mask=live_v, other=0.0)
        fresh -= dot(w, s, tl.zeros((CH, BV), tl.float32), PRECISION)
        sees = (c[:, None] >= c[None, :]) & live[None, :]
        grown = tl.exp(tl.where(sees, cum[:, None] - cum[None, :], 0.0))
        score = tl.where(sees, dot(q, tl.trans(k), tl.zeros((CH, CH), tl.float32), PRECISION) * grown, 0.0)
        out = dot(q * tl.exp(cum)[:, None], s, tl.zeros((CH, BV), tl.float32), PRECISION)
        out = dot(score, fresh, out, PRECISION)
        tl.store(out_ptr + at_v, out, mask=live_v)
        tail = k * tl.exp(tl.where(live, end - cum, 0.0))[:, None]
        s = dot(tl.trans(tail), fresh, s * tl.exp(end), PRECISION)
    tl.store(after_ptr + cell, s, mask=live_s)


def inputs(
    mixed_BTC: Tensor, gates_BTM: Tensor, a_log_H: Tensor, dt_bias_H: Tensor, key_heads: int, key_width: int
) -> tuple[Tensor, ...]:
    """See ``workbench_kernels.gated_delta.delta_inputs``."""
    b, t, c = mixed_BTC.shape
    n, h, dk = key_heads, len(a_log_H), key_width
    dv = (c - 2 * n * dk) // h
    wide = dict(dtype=torch.float32, device=mixed_BTC.device)
    q, k = torch.empty(b, t, n, dk, **wide), torch.empty(b, t, n, dk, **wide)
    v = torch.empty(b, t, h, dv, **wide)
    beta, decay, log = (torch.empty(b, t, h, **wide) for _ in range(3))
    launch(
        inputs_kernel, (b * t, 2 * n + h), mixed_BTC, gates_BTM, a_log_H, dt_bias_H, q, k, v, beta, decay, log, c,
        dk**-0.5, N=n, H=h, K=dk, V=dv, BK=power(dk), BV=power(dv),
        num_warps=1,
    )  # fmt: skip
    return q, k, v, beta, decay, log


def chunk(
    q_BTNK: Tensor, k_BTNK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, log_decay_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.gated_delta.gated_delta_chunk``."""
    b, t, n, dk = q_BTNK.shape
    h, dv = v_BTHV.shape[2:]
    r = h // max(n, 1)
    wide = dict(dtype=torch.float32, device=v_BTHV.device)
    u, w = torch.empty(b, t, h, dv, **wide), torch.empty(b, t, h, dk, **wide)
    cum, out = torch.empty(b, t, h, **wide), torch.empty(b, t, h, dv, **wide)
    after = torch.empty_like(state_BHKV)
    if t == 0:
        return out, after.copy_(state_BHKV)
    bk, bv = power(dk, 16), power(dv, 16)
    launch(
        solve_kernel, (-(-t // CHUNK), b * h), k_BTNK, v_BTHV, beta_BTH, log_decay_BTH, u, w, cum, t, h,
        R=r, K=dk, V=dv, BK=bk, BV=bv, CH=CHUNK, PRECISION=PRECISION, num_warps=4, num_stages=1,
    )  # fmt: skip
    part = min(bv, 32)
    launch(
        carry_kernel, (-(-dv // part), b * h), q_BTNK, k_BTNK, u, w, cum, state_BHKV, out, after, t, h,
        R=r, K=dk, V=dv, BK=bk, BV=part, CH=CHUNK, PRECISION=PRECISION, num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, after
