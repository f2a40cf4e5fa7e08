"""Triton recurrence: one program per head and block of value columns, the state in registers from row to row.

Products and sums are never fused by the compiler, so that steps, commits and scans, which are this kernel with parts
left out, give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.checks import check_columns
from workbench_kernels.device.kernel import begin, counted, launch, narrow, power
from workbench_kernels.gated_delta.ref import Step, Tape


@triton.jit
def softplus(x):
    """log(1 + e^x); x itself above 20, and accurate far below 0."""
    y = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + y
    low = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, low)


@triton.jit
def _row(
    x_ptr, window_ptr, taps_ptr, b, t, T, stride, col, live, C, W: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Some columns of a row; with a window, of the convolution of the rows up to it, as ``causal_conv`` makes it."""
    if W == 0:
        return tl.load(x_ptr + (b * T + t) * stride + col, mask=live, other=0.0).to(tl.float32)
    else:
        acc = tl.zeros(col.shape, tl.float32)
        for i in tl.static_range(W + 1):
            place = t + i
            old = tl.load(window_ptr + (b * W + place) * C + col, mask=live & (place < W), other=0)
            new = tl.load(x_ptr + (b * T + place - W) * stride + col, mask=live & (place >= W), other=0)
            tap = tl.load(taps_ptr + i * C + col, mask=live, other=0).to(tl.float32)
            acc += tl.where(place < W, old.to(tl.float32), new.to(tl.float32)) * tap
        return narrow(acc * tl.sigmoid(acc), TYPE).to(tl.float32)


@triton.jit
def _inputs(
    q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, window_ptr, taps_ptr, b, t, rows, T, q_row, k_row, v_row, gate_row,
    k_col, v_col, q_col, h, live_k, live_v, C, OUT: tl.constexpr, W: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """What one row brings: key, value, query, strength and decay; zeros past the last row."""
    more = t < rows
    k = _row(k_ptr, window_ptr, taps_ptr, b, t, T, k_row, k_col, live_k & more, C, W, TYPE)
    v = _row(v_ptr, window_ptr, taps_ptr, b, t, T, v_row, v_col, live_v & more, C, W, TYPE)
    q = k
    if OUT:
        q = _row(q_ptr, window_ptr, taps_ptr, b, t, T, q_row, q_col, live_k & more, C, W, TYPE)
    at = (b * T + t) * gate_row + h
    beta = tl.load(beta_ptr + at, mask=more, other=0.0).to(tl.float32)
    decay = tl.load(decay_ptr + at, mask=more, other=0.0).to(tl.float32)
    return k, v, q, beta, decay


@triton.jit(do_not_specialize=["T"])
def delta_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, a_log_ptr, bias_ptr, state_ptr, count_ptr, out_ptr, after_ptr,
    k_tape, v_tape, beta_tape, decay_tape, columns_ptr, window_ptr, taps_ptr, T, q_row, k_row, v_row, gate_row, scale,
    H, C, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, RAW: tl.constexpr,
    OUT: tl.constexpr, WRITE: tl.constexpr, TAPE: tl.constexpr, COLUMNS: tl.constexpr, COUNTED: tl.constexpr,
    W: tl.constexpr, STEADY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = head // H
    h = head % H
    n = h // R
    keys = 0
    if W > 0:  # queries, keys and values are columns of one row
        keys = H // R * K
    i = tl.arange(0, BK)
    j = block * BV + tl.arange(0, BV)
    live_k = i < K
    live_v = j < V
    live = live_k[:, None] & live_v[None, :]
    cell = i[:, None] * V + j[None, :]
    if RAW:
        rate = -tl.exp(tl.load(a_log_ptr + h).to(tl.float32))
        bias = tl.load(bias_ptr + h).to(tl.float32)
    if STEADY:  # nothing that may still run writes the state
        s = tl.load(state_ptr + head * K * V + cell, mask=live, other=0.0)
    begin(EARLY)
    if not STEADY:
        s = tl.load(state_ptr + head * K * V + cell, mask=live, other=0.0)
    rows = T
    if COUNTED > 0:
        rows = tl.load(count_ptr + (b if COUNTED == 1 else 0))
    # a row's inputs are read while the row before is worked on
    k_next, v_next, q_next, beta_next, decay_next = _inputs(
        q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, window_ptr, taps_ptr, b, 0, rows, T, q_row, k_row, v_row, gate_row,
        keys + n * K + i, 2 * keys + h * V + j, n * K + i, h, live_k, live_v, C, OUT, W, TYPE,
    )  # fmt: skip
    for t in range(0, rows):
        row = b * T + t
        k = k_next
        v = v_next
        q = q_next
        beta = beta_next
        decay = decay_next
        k_next, v_next, q_next, beta_next, decay_next = _inputs(
            q_ptr, k_ptr, v_ptr, beta_ptr, decay_ptr, window_ptr, taps_ptr, b, t + 1, rows, T, q_row, k_row, v_row,
            gate_row, keys + n * K + i, 2 * keys + h * V + j, n * K + i, h, live_k, live_v, C, OUT, W, TYPE,
        )  # fmt: skip
        if RAW:
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            beta = tl.sigmoid(beta)
            decay = tl.exp(rate * softplus(decay + bias))
        if TAPE:
            tl.store(v_tape + (row * H + h) * V + j, v, mask=live_v)
            if block == 0:
                tl.store(beta_tape + row * H + h, beta)
                tl.store(decay_tape + row * H + h, decay)
                if h % R == 0:
                    tl.store(k_tape + (row * (H // R) + n) * K + i, k, mask=live_k)
        d = beta * (v - decay * tl.sum(k[:, None] * s, 0))
        s = tl.fma(k[:, None], d[None, :], decay * s)
        if OUT:
            if RAW:
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
            tl.store(out_ptr + (row * H + h) * V + j, tl.sum(q[:, None] * s, 0), mask=live_v)
        if COLUMNS:
            tl.store(columns_ptr + (row * H + h) * K * V + cell, s, mask=live)
    if WRITE:
        tl.store(after_ptr + head * K * V + cell, s, mask=live)


# H200, 32 heads of 128: B = 256 278 us, 32 41 us, 1 4.4 us; 4 warps 319, 44, 4.6. One shape for every B: it is the
# order of sums
BLOCK_V, WARPS = 32, 1


def _run(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, raw: tuple[Tensor, Tensor] | None, state: Tensor,
    counts: Tensor | None, out: Tensor | None, after: Tensor | None, tape: Tape | None, columns: Tensor | None,
    rows: int, strides: tuple[int, int, int, int], r: int, conv: tuple[Tensor, Tensor] | None = None,
    steady: bool = False,
) -> None:  # fmt: skip
    b, h, dk, dv = state.shape
    window, taps = conv or (state, state)
    w, c = (0, 0) if conv is None else window.shape[1:]
    bk, bv = power(dk, 16), min(BLOCK_V, power(dv, 8))
    none = state
    held = tape or Tape(none, none, none, none)
    launch(
        delta_kernel, (-(-dv // bv), b * h), q, k, v, beta, decay, *(raw or (none, none)), state,
        none if counts is None else counts, none if out is None else out, none if after is None else after, *held,
        none if columns is None else columns, window, taps, rows, *strides, dk**-0.5, h, c, R=r, K=dk, V=dv, BK=bk,
        BV=bv, RAW=raw is not None, OUT=out is not None, WRITE=after is not None, TAPE=tape is not None,
        COLUMNS=columns is not None, COUNTED=counted(counts, b), W=w, STEADY=steady,
        num_warps=WARPS, num_stages=1,
        enable_fp_fusion=False, early=True,
    )  # fmt: skip


def step(
    mixed_BTC: Tensor,
    gates_BTM: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    state_BHKV: Tensor,
    key_heads: int,
    write: str,
    tape: bool | Tape,
    columns: bool,
    counts_B: Tensor | None,
    conv: tuple[Tensor, Tensor] | None,
    steady: bool,
) -> Step:
    """See ``workbench_kernels.gated_delta.gated_delta_step``."""
    b, t, _ = mixed_BTC.shape
    _, h, dk, dv = state_BHKV.shape
    n = key_heads
    wide = dict(dtype=torch.float32, device=mixed_BTC.device)
    out = torch.empty(b, t, h, dv, **wide)
    after = None if write == "none" else state_BHKV if write == "in place" else torch.empty_like(state_BHKV)
    held = tape if isinstance(tape, Tape) else None
    if tape is True:
        held = Tape(
            torch.empty(b, t, n, dk, **wide), torch.empty(b, t, h, dv, **wide),
            torch.empty(b, t, h, **wide), torch.empty(b, t, h, **wide),
        )  # fmt: skip
    states = torch.empty(b, t, h, dk, dv, **wide) if columns else None
    row = check_columns("gated_delta_step", "gates", gates_BTM)
    c = check_columns("gated_delta_step", "mixed", mixed_BTC)
    parts = (0, 0, 0) if conv is not None else (0, n * dk, 2 * n * dk)
    _run(
        *(mixed_BTC[..., at:] for at in parts), gates_BTM, gates_BTM[..., h:],
        (a_log_H, dt_bias_H), state_BHKV, counts_B, out, after, held, states, t, (c, c, c, row), h // n, conv, steady,
    )  # fmt: skip
    return Step(out, after, held, states)


def commit(tape: Tape, state_BHKV: Tensor, keep_B: Tensor, out_BHKV: Tensor) -> Tensor:
    """See ``workbench_kernels.gated_delta.gated_delta_commit``."""
    _, t, n, dk = tape.k_BTNK.shape
    h, dv = tape.v_BTHV.shape[2:]
    _run(
        tape.k_BTNK, tape.k_BTNK, tape.v_BTHV, tape.beta_BTH, tape.decay_BTH, None, state_BHKV, keep_B, None,
        out_BHKV, None, None, t, (n * dk, n * dk, h * dv, h), h // max(n, 1),
    )  # fmt: skip
    return out_BHKV


def scan(
    q_BTNK: Tensor, k_BTNK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.gated_delta.gated_delta_scan``."""
    b, t, n, dk = q_BTNK.shape
    h, dv = v_BTHV.shape[2:]
    out = torch.empty(b, t, h, dv, dtype=torch.float32, device=v_BTHV.device)
    after = torch.empty_like(state_BHKV)
    _run(
        q_BTNK, k_BTNK, v_BTHV, beta_BTH, decay_BTH, None, state_BHKV, None, out, after, None, None, t,
        (n * dk, n * dk, h * dv, h), h // max(n, 1),
    )  # fmt: skip
    return out, after
