"""Triton chunks of the gated delta rule by its WY form, in three passes, and the norms and gates before them.

Legend: T rows of which a sequence may have fewer (its count), H value heads, R of them per key head, K and V widths,
CH rows per chunk, BK and PV the widths padded to powers of two, BD key columns and BV value columns at a time,
HALVES whether a program carries its state in two halves of the key rows.

1. Every chunk of every head: G = cumsum(g); A_ij = beta_i e^(G_i - G_j) k_i . k_j below the diagonal;
   U = (I + A)^-1 (beta v) and W = (I + A)^-1 (beta e^G k).
2. Chunk after chunk, heads and value columns side by side, the state in registers: v' = U - W S, then
   S <- e^(G_last) S + k^T (e^(G_last - G) v'); v' and the state before each chunk are kept.
3. Every chunk of every head: o = e^G (q S) + ((q k^T) e^(G_i - G_j)) v'.

What passes from one to the next lies head after head in whole padded chunks, so that the second pass reads tiles
without gaps. Operands of products have the type of q, k and v; sums, decays and the carried state are float32. Rows
past a count have beta 0, keys 0 and no decay, which leaves the state as it is.

Source: Yang et al. 2024 (arXiv 2412.06464), section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import as_operand, dot, launch, narrow, power
from workbench_kernels.gated_delta.kernel import softplus

CHUNK = 64
PRECISION = "tf32x3"  # float32 products in three passes of the matrix units: errors near 1e-6, not 1e-3
ROWS = 16  # rows of one head that a program of ``inputs_kernel`` norms
TILES = {  # by the type of q, k and v: columns of keys and of values at a time, and how each pass is launched
    torch.bfloat16: {
        # H200, 2,048 rows of 32 heads: 48, 42 and 35 us
        "solve": dict(BD=128, BV=128, num_warps=4, num_stages=1, maxnreg=168),  # three programs fit on a processor
        "carry": dict(BV=32, HALVES=False, num_warps=4, num_stages=4),
        "output": dict(BD=64, BV=128, num_warps=4, num_stages=1, maxnreg=168),
    },
    torch.float32: {
        "solve": dict(BD=32, BV=32, num_warps=4, num_stages=1),
        "carry": dict(BV=32, HALVES=True, num_warps=4, num_stages=2),
        "output": dict(BD=32, BV=64, num_warps=4, num_stages=1),
    },
}


@triton.jit(do_not_specialize=["rows"])
def inputs_kernel(
    mixed_ptr, gates_ptr, a_log_ptr, bias_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, log_ptr, rows, C, scale,
    N: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    head = tl.program_id(1)
    if head < 2 * N:
        i = tl.arange(0, BK)
        live_k = live[:, None] & (i < K)[None, :]
        x = tl.load(mixed_ptr + row[:, None] * C + head * K + i[None, :], mask=live_k, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 1) + 1e-6)
        if head < N:
            x = x * (inverse * scale)[:, None]
            tl.store(q_ptr + (row * N + head)[:, None] * K + i[None, :], narrow(x, TYPE), mask=live_k)
        else:
            x = x * inverse[:, None]
            tl.store(k_ptr + (row * N + head - N)[:, None] * K + i[None, :], narrow(x, TYPE), mask=live_k)
    else:
        h = head - 2 * N
        j = tl.arange(0, BV)
        live_v = live[:, None] & (j < V)[None, :]
        at = row[:, None] * C + 2 * N * K + h * V + j[None, :]
        v = tl.load(mixed_ptr + at, mask=live_v, other=0.0).to(tl.float32)
        tl.store(v_ptr + (row * H + h)[:, None] * V + j[None, :], narrow(v, TYPE), mask=live_v)
        beta = tl.load(gates_ptr + row * 2 * H + h, mask=live, other=0.0).to(tl.float32)
        a = tl.load(gates_ptr + row * 2 * H + H + h, mask=live, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + h).to(tl.float32)
        log = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32)) * softplus(a)
        tl.store(beta_ptr + row * H + h, tl.sigmoid(beta), mask=live)
        tl.store(decay_ptr + row * H + h, tl.exp(log), mask=live)
        tl.store(log_ptr + row * H + h, log, mask=live)


@triton.jit
def valid_rows(count_ptr, b, T, COUNTED: tl.constexpr):
    """Rows of a sequence that count."""
    rows = T
    if COUNTED:
        rows = tl.load(count_ptr + b)
    return rows


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k_ptr, v_ptr, beta_ptr, log_ptr, count_ptr, u_ptr, w_ptr, sum_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr,
    COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = k_ptr.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = head // H
    h = head % H
    rows = valid_rows(count_ptr, b, T, COUNTED)
    if chunk * CH >= rows:
        return
    c = tl.arange(0, CH)
    i = tl.arange(0, BD)
    j = tl.arange(0, BV)
    live = chunk * CH + c < rows
    first = b * T + chunk * CH
    piece = head * tl.cdiv(T, CH) + chunk
    g = tl.load(log_ptr + first * H + h + c * H, mask=live, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + first * H + h + c * H, mask=live, other=0.0).to(tl.float32)
    cum = tl.cumsum(g, 0)
    tl.store(sum_ptr + piece * CH + c, cum)
    r = c[:, None]
    s = c[None, :]
    zero = tl.zeros((CH, CH), tl.float32)
    from_k = k_ptr + (first * (H // R) + h // R) * K
    from_v = v_ptr + (first * H + h) * V
    a = zero
    for d in range(0, BK, BD):
        live_k = live[:, None] & (d + i < K)[None, :]
        k = tl.load(from_k + d + r * (H // R * K) + i[None, :], mask=live_k, other=0.0)
        a = dot(k, tl.trans(k), a, PRECISION)
    a = tl.where(r > s, a * tl.exp(tl.where(r > s, cum[:, None] - cum[None, :], 0.0)) * beta[:, None], 0.0)
    # two neighbouring diagonal blocks X, Y of the inverse, with A's block B below X, make the next: [X 0; -Y B X, Y].
    # From blocks of one row on, this takes no powers of A, which can grow like binomials
    x = tl.where(r == s, 1.0, 0.0)
    for level in range(6):
        below = as_operand(tl.where((r ^ s) >> level == 1, a, 0.0), TYPE)
        held = as_operand(x, TYPE)
        x = dot(as_operand(-dot(held, below, zero, PRECISION), TYPE), held, x, PRECISION)
    solved = as_operand(x * beta[None, :], TYPE)
    for d in range(0, PV, BV):
        live_v = live[:, None] & (d + j < V)[None, :]
        v = tl.load(from_v + d + r * (H * V) + j[None, :], mask=live_v, other=0.0)
        u = dot(solved, v, tl.zeros((CH, BV), tl.float32), PRECISION)
        tl.store(u_ptr + piece * CH * PV + d + r * PV + j[None, :], narrow(u, TYPE))
    solved = as_operand(x * (beta * tl.exp(cum))[None, :], TYPE)
    for d in range(0, BK, BD):
        live_k = live[:, None] & (d + i < K)[None, :]
        k = tl.load(from_k + d + r * (H // R * K) + i[None, :], mask=live_k, other=0.0)
        w = dot(solved, k, tl.zeros((CH, BD), tl.float32), PRECISION)
        tl.store(w_ptr + piece * CH * BK + d + r * BK + i[None, :], narrow(w, TYPE))


@triton.jit(do_not_specialize=["T"])
def carry_kernel(
    k_ptr, u_ptr, w_ptr, sum_ptr, count_ptr, state_ptr, states_ptr, fresh_ptr, after_ptr, T, H, R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr,
    HALVES: tl.constexpr, COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = k_ptr.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    HALF: tl.constexpr = BK // 2 if HALVES else BK
    head = (tl.program_id(0) // PARTS).to(tl.int64)
    b = head // H
    h = head % H
    rows = valid_rows(count_ptr, b, T, COUNTED)
    c = tl.arange(0, CH)
    i = tl.arange(0, HALF)
    j = tl.program_id(0) % PARTS * BV + tl.arange(0, BV)
    low_s = (i < K)[:, None] & (j < V)[None, :]
    at_s = i[:, None] * V + j[None, :]
    at_k = c[:, None] * (H // R * K) + i[None, :]
    at_w = c[:, None] * BK + i[None, :]
    at_u = c[:, None] * PV + j[None, :]
    low = tl.load(state_ptr + head * K * V + at_s, mask=low_s, other=0.0).to(tl.float32)
    if HALVES:  # of the state's rows: three-pass products of all of them do not fit into registers
        high_s = (HALF + i < K)[:, None] & (j < V)[None, :]
        high = tl.load(state_ptr + (head * K + HALF) * V + at_s, mask=high_s, other=0.0).to(tl.float32)
    for chunk in range(0, tl.cdiv(rows, CH)):
        piece = head * tl.cdiv(T, CH) + chunk
        at = states_ptr + piece * BK * PV + i[:, None] * PV + j[None, :]
        tl.store(at, narrow(low, TYPE))
        w = tl.load(w_ptr + piece * CH * BK + at_w)
        u = tl.load(u_ptr + piece * CH * PV + at_u).to(tl.float32)
        cum = tl.load(sum_ptr + piece * CH + c)
        end = tl.load(sum_ptr + piece * CH + CH - 1)
        live = (chunk * CH + c < rows)[:, None]
        from_k = k_ptr + ((b * T + chunk * CH) * (H // R) + h // R) * K
        k = tl.load(from_k + at_k, mask=live & (i < K)[None, :], other=0.0)
        read = dot(w, as_operand(low, TYPE), tl.zeros((CH, BV), tl.float32), PRECISION)
        if HALVES:
            tl.store(at + HALF * PV, narrow(high, TYPE))
            w_high = tl.load(w_ptr + piece * CH * BK + HALF + at_w)
            k_high = tl.load(from_k + HALF + at_k, mask=live & (HALF + i < K)[None, :], other=0.0)
            read = dot(w_high, as_operand(high, TYPE), read, PRECISION)
        fresh = u - read
        tl.store(fresh_ptr + piece * CH * PV + at_u, narrow(fresh, TYPE))
        tail = as_operand(fresh * tl.exp(end - cum)[:, None], TYPE)
        low = dot(tl.trans(k), tail, low * tl.exp(end), PRECISION)
        if HALVES:
            high = dot(tl.trans(k_high), tail, high * tl.exp(end), PRECISION)
    tl.store(after_ptr + head * K * V + at_s, low, mask=low_s)
    if HALVES:
        tl.store(after_ptr + (head * K + HALF) * V + at_s, high, mask=high_s)


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    q_ptr, k_ptr, fresh_ptr, sum_ptr, count_ptr, states_ptr, out_ptr, T, H, R: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, PV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, CH: tl.constexpr,
    COUNTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    PARTS: tl.constexpr = (V + BV - 1) // BV
    head = (tl.program_id(0) // PARTS).to(tl.int64)
    chunk = tl.program_id(1)
    b = head // H
    h = head % H
    rows = valid_rows(count_ptr, b, T, COUNTED)
    if chunk * CH >= rows:
        return
    c = tl.arange(0, CH)
    i = tl.arange(0, BD)
    j = tl.program_id(0) % PARTS * BV + tl.arange(0, BV)
    live = chunk * CH + c < rows
    first = b * T + chunk * CH
    piece = head * tl.cdiv(T, CH) + chunk
    from_k = (first * (H // R) + h // R) * K
    at_k = c[:, None] * (H // R * K) + i[None, :]
    at_s = piece * BK * PV + i[:, None] * PV + j[None, :]
    out = tl.zeros((CH, BV), tl.float32)
    score = tl.zeros((CH, CH), tl.float32)
    for d in range(0, BK, BD):
        live_k = live[:, None] & (d + i < K)[None, :]
        q = tl.load(q_ptr + from_k + d + at_k, mask=live_k, other=0.0)
        k = tl.load(k_ptr + from_k + d + at_k, mask=live_k, other=0.0)
        s = tl.load(states_ptr + d * PV + at_s)
        out = dot(q, s, out, PRECISION)
        score = dot(q, tl.trans(k), score, PRECISION)
    fresh = tl.load(fresh_ptr + piece * CH * PV + c[:, None] * PV + j[None, :])
    cum = tl.load(sum_ptr + piece * CH + c)
    below = c[:, None] >= c[None, :]
    score = tl.where(below, score * tl.exp(tl.where(below, cum[:, None] - cum[None, :], 0.0)), 0.0)
    out = dot(as_operand(score, TYPE), fresh, out * tl.exp(cum)[:, None], PRECISION)
    at_v = c[:, None] * (H * V) + j[None, :]
    live_v = live[:, None] & (j < V)[None, :]
    tl.store(out_ptr + (first * H + h) * V + at_v, narrow(out, TYPE), mask=live_v)


def inputs(
    mixed_BTC: Tensor,
    gates_BTM: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    key_heads: int,
    key_width: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """See ``workbench_kernels.gated_delta.delta_inputs``."""
    b, t, c = mixed_BTC.shape
    n, h, dk = key_heads, len(a_log_H), key_width
    dv = (c - 2 * n * dk) // h
    device = mixed_BTC.device
    q, k = (torch.empty(b, t, n, dk, dtype=dtype, device=device) for _ in range(2))
    v = torch.empty(b, t, h, dv, dtype=dtype, device=device)
    beta, decay, log = (torch.empty(b, t, h, dtype=torch.float32, device=device) for _ in range(3))
    launch(
        inputs_kernel, (-(-b * t // ROWS), 2 * n + h), mixed_BTC, gates_BTM, a_log_H, dt_bias_H, q, k, v, beta, decay,
        log, b * t, c, dk**-0.5, N=n, H=h, K=dk, V=dv, BK=power(dk), BV=power(dv), ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    return q, k, v, beta, decay, log


def chunk(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor,
    counts_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.gated_delta.gated_delta_chunk``."""
    b, t, n, dk = q_BTNK.shape
    h, dv = v_BTHV.shape[2:]
    out, after = torch.empty_like(v_BTHV), torch.empty_like(state_BHKV)
    if t == 0:
        return out, after.copy_(state_BHKV)
    chunks, bk, pv = -(-t // CHUNK), power(dk, 32), power(dv, 64)  # tiles of fewer columns give other values on a GPU
    narrowed = dict(dtype=q_BTNK.dtype, device=v_BTHV.device)
    u, fresh = (torch.empty(b * h, chunks, CHUNK, pv, **narrowed) for _ in range(2))
    w = torch.empty(b * h, chunks, CHUNK, bk, **narrowed)
    states = torch.empty(b * h, chunks, bk, pv, **narrowed)
    cum = torch.empty(b * h, chunks, CHUNK, dtype=torch.float32, device=v_BTHV.device)
    counts = state_BHKV if counts_B is None else counts_B
    shape = dict(
        R=h // max(n, 1), K=dk, V=dv, BK=bk, PV=pv, CH=CHUNK, COUNTED=counts_B is not None, PRECISION=PRECISION
    )
    most = dict(BD=bk, BV=pv)
    tiles = {
        name: {key: min(value, most.get(key, value)) for key, value in tile.items()}
        for name, tile in TILES[q_BTNK.dtype].items()
    }
    launch(
        solve_kernel, (b * h, chunks), k_BTNK, v_BTHV, beta_BTH, log_decay_BTH, counts, u, w, cum, t, h,
        **shape, **tiles["solve"],
    )  # fmt: skip
    launch(
        carry_kernel, (b * h * -(-dv // tiles["carry"]["BV"]),), k_BTNK, u, w, cum, counts, state_BHKV, states, fresh,
        after, t, h, **shape, **tiles["carry"],
    )  # fmt: skip
    launch(
        output_kernel, (b * h * -(-dv // tiles["output"]["BV"]), chunks), q_BTNK, k_BTNK, fresh, cum, counts, states,
        out, t, h, **shape, **tiles["output"],
    )  # fmt: skip
    return out, after
