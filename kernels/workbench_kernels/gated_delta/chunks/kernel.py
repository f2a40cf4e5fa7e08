"""Triton chunks of the gated delta rule by its WY form.

Per chunk: G = cumsum(g); A_ij = beta_i e^(G_i - G_j) k_i . k_j below the diagonal; U = (I + A)^-1 (beta v) and
W = (I + A)^-1 (beta e^G k). Then chunk after chunk: v' = U - W S; o = (e^G q) S + ((q k^T) e^(G_i - G_j)) v';
S <- e^(G_last) S + (e^(G_last - G) k)^T v'. The inverse is found
row by row within blocks of 16, which no powers of A can blow up, and only then across blocks.

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
    q_ptr, k_ptr, v_ptr, beta_ptr, log_ptr, u_ptr, w_ptr, sum_ptr, score_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr, PRECISION: tl.constexpr,
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
    tl.store(sum_ptr + row * H + h, cum, mask=live)
    at_k = (row[:, None] * (H // R) + h // R) * K + i[None, :]
    live_k = live[:, None] & (i < K)[None, :]
    k = tl.load(k_ptr + at_k, mask=live_k, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + at_k, mask=live_k, other=0.0).to(tl.float32)
    zero = tl.zeros((CH, CH), tl.float32)
    r = c[:, None]
    s = c[None, :]
    grown = tl.exp(tl.where(r >= s, cum[:, None] - cum[None, :], 0.0))
    score = tl.where(r >= s, dot(q, tl.trans(k), zero, PRECISION) * grown, 0.0)
    tl.store(score_ptr + ((head * tl.num_programs(0) + chunk) * CH + r) * CH + s, score)
    a = tl.where(r > s, dot(k, tl.trans(k), zero, PRECISION) * grown * beta[:, None], 0.0)
    # blocks of 16 on the diagonal are inverted row by row, all at once
    near = r // 16 == s // 16
    one = tl.where(r == s, 1.0, 0.0)
    inner = tl.where(near, a, 0.0)
    x = one
    for m in range(1, 16):
        line = tl.sum(tl.where(r % 16 == m, inner, 0.0), 0)
        fresh = tl.sum(line[:, None] * x, 0)
        x = tl.where((r % 16 == m) & near, x - fresh[None, :], x)
    # (I + N)^-1 = (I - N)(I + N^2) for what is left, whose fourth power is zero
    n = dot(x, a - inner, zero, PRECISION)
    inverse = dot(dot(one - n, one + dot(n, n, zero, PRECISION), zero, PRECISION), x, zero, PRECISION)
    j = tl.arange(0, BV)
    at_v = (row[:, None] * H + h) * V + j[None, :]
    live_v = live[:, None] & (j < V)[None, :]
    v = tl.load(v_ptr + at_v, mask=live_v, other=0.0).to(tl.float32)
    u = dot(inverse, v * beta[:, None], tl.zeros((CH, BV), tl.float32), PRECISION)
    tl.store(u_ptr + at_v, u, mask=live_v)
    w = dot(inverse, k * (beta * tl.exp(cum))[:, None], tl.zeros((CH, BK), tl.float32), PRECISION)
    tl.store(w_ptr + (row[:, None] * H + h) * K + i[None, :], w, mask=live_k)


@triton.jit
def carry_kernel(
    k_ptr, u_ptr, w_ptr, sum_ptr, state_ptr, states_ptr, fresh_ptr, after_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    c = tl.arange(0, CH)
    i = tl.arange(0, BK)
    j = tl.program_id(0) * BV + tl.arange(0, BV)
    live_s = (i < K)[:, None] & (j < V)[None, :]
    cell = i[:, None] * V + j[None, :]
    s = tl.load(state_ptr + head * K * V + cell, mask=live_s, other=0.0)
    chunks = tl.cdiv(T, CH)
    for chunk in range(0, chunks):
        tl.store(states_ptr + (head * chunks + chunk) * K * V + cell, s, mask=live_s)
        t = chunk * CH + c
        live = t < T
        row = b * T + t
        live_k = live[:, None] & (i < K)[None, :]
        live_v = live[:, None] & (j < V)[None, :]
        at_v = (row[:, None] * H + h) * V + j[None, :]
        last = tl.minimum(T - chunk * CH, CH) - 1
        cum = tl.load(sum_ptr + row * H + h, mask=live, other=0.0)
        end = tl.load(sum_ptr + (b * T + chunk * CH + last) * H + h)
        k = tl.load(k_ptr + (row[:, None] * (H // R) + h // R) * K + i[None, :], mask=live_k, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + (row[:, None] * H + h) * K + i[None, :], mask=live_k, other=0.0)
        u = tl.load(u_ptr + at_v, mask=live_v, other=0.0)
        fresh = u - dot(w, s, tl.zeros((CH, BV), tl.float32), PRECISION)
        tl.store(fresh_ptr + at_v, fresh, mask=live_v)
        tail = fresh * tl.exp(tl.where(live, end - cum, 0.0))[:, None]
        s = dot(tl.trans(k), tail, s * tl.exp(end), PRECISION)
    tl.store(after_ptr + head * K * V + cell, s, mask=live_s)


@triton.jit
def output_kernel(
    q_ptr, fresh_ptr, sum_ptr, score_ptr, states_ptr, out_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr, PRECISION: tl.constexpr,
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
    j = tl.program_id(2) * BV + tl.arange(0, BV)
    piece = head * tl.num_programs(0) + chunk
    at_k = (row[:, None] * (H // R) + h // R) * K + i[None, :]
    q = tl.load(q_ptr + at_k, mask=live[:, None] & (i < K)[None, :], other=0.0).to(tl.float32)
    cum = tl.load(sum_ptr + row * H + h, mask=live, other=0.0)
    live_s = (i < K)[:, None] & (j < V)[None, :]
    s = tl.load(states_ptr + piece * K * V + i[:, None] * V + j[None, :], mask=live_s, other=0.0)
    out = dot(q * tl.exp(cum)[:, None], s, tl.zeros((CH, BV), tl.float32), PRECISION)
    score = tl.load(score_ptr + (piece * CH + c[:, None]) * CH + c[None, :])
    at_v = (row[:, None] * H + h) * V + j[None, :]
    live_v = live[:, None] & (j < V)[None, :]
    fresh = tl.load(fresh_ptr + at_v, mask=live_v, other=0.0)
    tl.store(out_ptr + at_v, dot(score, fresh, out, PRECISION), mask=live_v)


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
    chunks = -(-t // CHUNK)
    scores = torch.empty(b * h, chunks, CHUNK, CHUNK, **wide)
    states, fresh = torch.empty(b * h, chunks, dk, dv, **wide), torch.empty_like(u)
    shape = dict(R=r, K=dk, V=dv, BK=bk, CH=CHUNK, PRECISION=PRECISION)
    launch(
        solve_kernel, (chunks, b * h), q_BTNK, k_BTNK, v_BTHV, beta_BTH, log_decay_BTH, u, w, cum, scores, t, h,
        BV=bv, num_warps=4, num_stages=1, **shape,
    )  # fmt: skip
    part = min(bv, 16)
    launch(
        carry_kernel, (-(-dv // part), b * h), k_BTNK, u, w, cum, state_BHKV, states, fresh, after, t, h, BV=part,
        num_warps=4, num_stages=2, **shape,
    )  # fmt: skip
    part = min(bv, 64)
    launch(
        output_kernel, (chunks, b * h, -(-dv // part)), q_BTNK, fresh, cum, scores, states, out, t, h, BV=part,
        num_warps=4, num_stages=1, **shape,
    )  # fmt: skip
    return out, after
