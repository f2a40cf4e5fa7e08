"""Plain PyTorch forms of the gated delta rule.

Legend for shape suffixes: B sequences, T rows, H value heads, K key width, V value width.

The recurrence per head, with state S of shape [K, V]:
    S <- decay_t * S;  d = beta_t (v_t - S^T k_t);  S <- S + k_t d^T;  o_t = S^T q_t.

Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), with the conventions of transformers' Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from workbench_kernels.causal_conv.ref import causal_conv
from workbench_kernels.rmsnorm.ref import wide


def state_rows(x_N1K: Tensor, s_NKV: Tensor) -> Tensor:
    """x^T S of every head, [N, 1, V], in bits that depend on that head alone.

    A single row times a matrix whose rows do not start on 64-byte boundaries takes another summation order with the
    matrix's place in memory, so it changes with the head's place in the batch; four equal rows do not.
    """
    if s_NKV.shape[-1] % 16 == 0:
        return torch.bmm(x_N1K, s_NKV)
    return torch.bmm(x_N1K.expand(-1, 4, -1), s_NKV)[:, :1]


def _walk(k_BTHK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, state_BHKV: Tensor) -> Iterator[Tensor]:
    """The state [B*H, K, V] after every row; each a tensor of its own."""
    b, t, h, dk = k_BTHK.shape
    dv = v_BTHV.shape[-1]
    s_NKV = state_BHKV.reshape(b * h, dk, dv)
    steps = zip(
        by_row(k_BTHK, (1, dk)),
        by_row(k_BTHK, (dk, 1)),
        by_row(v_BTHV, (1, dv)),
        by_row(beta_BTH, (1, 1)),
        by_row(decay_BTH, (1, 1)),
        strict=True,
    )
    for k_N1K, k_NK1, v_N1V, beta_N11, decay_N11 in steps:
        # S^T k of the decayed state is the decay times that of the state before
        d_N1V = torch.addcmul(v_N1V, decay_N11, state_rows(k_N1K, s_NKV), value=-1).mul_(beta_N11)
        s_NKV = (s_NKV * decay_N11).addcmul_(k_NK1, d_N1V)
        yield s_NKV


def by_row(x_BTHX: Tensor, shape: tuple[int, int]) -> tuple[Tensor, ...]:
    """Row after row as [B*H, *shape]."""
    b, t, h = x_BTHX.shape[:3]
    if t == 1:
        return (x_BTHX.reshape(b * h, *shape),)
    rows = x_BTHX if b == 1 else x_BTHX.transpose(0, 1)
    return rows.reshape(t, b * h, *shape).unbind(0)


def scan_states(
    k_BTHK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, state_BHKV: Tensor
) -> list[Tensor]:
    """Run the recurrence and return the state after every row, oldest first.

    Args:
        k_BTHK: Normalised keys, float32.
        v_BTHV: Values, float32.
        beta_BTH: Write strengths in (0, 1).
        decay_BTH: Decays exp(g) in (0, 1].
        state_BHKV: State before the first row; not modified.

    Returns:
        T states of shape [B, H, K, V]; each a tensor of its own.
    """
    return [s.view_as(state_BHKV) for s in _walk(k_BTHK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)]


def scan(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    decay_BTH: Tensor,
    state_BHKV: Tensor,
    *,
    every: bool = True,
) -> tuple[Tensor, list[Tensor]]:
    """Run the recurrence row by row: outputs and the state after every row.

    Args:
        q_BTHK: Normalised and scaled queries, float32.
        k_BTHK: Normalised keys, float32.
        v_BTHV: Values, float32.
        beta_BTH: Write strengths in (0, 1).
        decay_BTH: Decays exp(g) in (0, 1].
        state_BHKV: State before the first row; not modified.
        every: Return every state; False returns the last alone, so that memory does not grow with T.

    Returns:
        Outputs [B, T, H, V] and the T states, or the last.
    """
    b, t, h, dk = q_BTHK.shape
    out, states = [], []
    queries = by_row(q_BTHK, (1, dk))
    for i, s_NKV in enumerate(_walk(k_BTHK, v_BTHV, beta_BTH, decay_BTH, state_BHKV)):
        out.append(state_rows(queries[i], s_NKV))
        if every or i == t - 1:
            states.append(s_NKV.view_as(state_BHKV))
    if t == 1:
        return out[0].view(b, 1, h, -1), states
    return torch.cat(out, 1).view(b, h, t, -1).transpose(1, 2), states


def chunk(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor | None,
    *,
    size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in chunks by its WY form; differentiable, equal to the scan up to rounding.

    Args:
        q_BTHK: Normalised and scaled queries, float32.
        k_BTHK: Normalised keys, float32.
        v_BTHV: Values, float32.
        beta_BTH: Write strengths in (0, 1).
        log_decay_BTH: Log decays g <= 0.
        state_BHKV: State before the first row; None for zeros.
        size: Rows per chunk.

    Returns:
        Outputs [B, T, H, V] and the state after the last row.

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.3; (I + A) is inverted by a triangular solve.
    """
    b, t, h, dk = q_BTHK.shape
    dv = v_BTHV.shape[-1]
    pad = -t % size
    n = (t + pad) // size

    def split(x: Tensor) -> Tensor:  # [B, T, H, D] -> [N, B, H, C, D]
        if pad:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad))
        return x.view(b, n, size, h, x.shape[-1]).permute(1, 0, 3, 2, 4)

    q, k, v = split(q_BTHK), split(k_BTHK), split(v_BTHV)
    beta, g = split(beta_BTH.unsqueeze(-1)), split(log_decay_BTH.unsqueeze(-1)).squeeze(-1)
    cum = g.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decay = (cum.unsqueeze(-1) - cum.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    k_beta, grown = k * beta, cum.exp().unsqueeze(-1)
    a = k_beta @ k.transpose(-1, -2) * decay  # the solve reads what lies under the diagonal alone
    rhs = torch.cat([v * beta, k_beta * grown], dim=-1)
    solved = torch.linalg.solve_triangular(a, rhs, upper=False, unitriangular=True)
    u, w = solved[..., :dv], solved[..., dv:]
    scores = q @ k.transpose(-1, -2) * decay
    q_grown = q * grown
    last = cum[..., -1:]
    k_tail = (k * (last - cum).exp().unsqueeze(-1)).transpose(-1, -2)
    shrink = last.exp().unsqueeze(-1)
    state = q.new_zeros(b, h, dk, dv) if state_BHKV is None else state_BHKV
    old, fresh, state = _carry(u, torch.cat([w, q_grown], -2), shrink, k_tail, state)
    out = old + scores @ fresh
    y = out.permute(1, 0, 3, 2, 4).reshape(b, t + pad, h, dv)
    return y[:, :t], state


def carry_eagerly() -> None:
    """Keep the loop over chunks out of compiled graphs, which would unroll it; call before ``torch.compile``.

    A function and not a decorator, since it loads the compiler, and an import must not.
    """
    global _carry
    _carry = torch.compiler.disable(_carry)


def _carry(u: Tensor, w_and_q: Tensor, shrink: Tensor, k_tail: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pass the state from chunk to chunk: what queries read of the state before theirs, new values, the last state.

    What can be done for all chunks at once is left to the caller; the loop's products are few and small.
    """
    c, old, fresh = u.shape[-2], [], []
    for i in range(u.shape[0]):
        read = w_and_q[i] @ state
        old.append(read[..., c:, :])
        fresh.append(u[i] - read[..., :c, :])
        state = state * shrink[i] + k_tail[i] @ fresh[-1]
    return torch.stack(old), torch.stack(fresh), state


class Tape(NamedTuple):
    """What a verify fed to the rule, float32: enough to run any first part of it again.

    Args:
        k_BTNK: Normalised keys of N key heads.
        v_BTHV: Values.
        beta_BTH: Write strengths.
        decay_BTH: Decays.
    """

    k_BTNK: Tensor
    v_BTHV: Tensor
    beta_BTH: Tensor
    decay_BTH: Tensor


class Step(NamedTuple):
    """What a step gives.

    Args:
        out_BTHV: Outputs, float32.
        state_BHKV: State after the valid rows; None when it was not to be written.
        tape: Inputs of the rule; None when not asked for.
        states_BTHKV: State after every row; None when not asked for.
    """

    out_BTHV: Tensor
    state_BHKV: Tensor | None
    tape: Tape | None
    states_BTHKV: Tensor | None


def inputs(
    mixed_BTC: Tensor,
    gates_BTM: Tensor,
    a_log_H: Tensor,
    dt_bias_H: Tensor,
    key_heads: int,
    key_width: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """See ``workbench_kernels.gated_delta.delta_inputs``; float64 inputs stay float64 whatever ``dtype`` is."""
    b, t, _ = mixed_BTC.shape
    h, n, dk = len(a_log_H), key_heads, key_width
    mixed, gates = wide(mixed_BTC), wide(gates_BTM)
    q, k = (mixed[..., at : at + n * dk].unflatten(-1, (n, dk)).contiguous() for at in (0, n * dk))
    v = mixed[..., 2 * n * dk :].unflatten(-1, (h, -1)).contiguous()
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dk**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    beta = torch.sigmoid(gates[..., :h])
    log_decay = -wide(a_log_H).exp() * torch.nn.functional.softplus(gates[..., h:] + wide(dt_bias_H))
    if dtype != torch.float32 and q.dtype != torch.float64:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v, beta, log_decay.exp(), log_decay


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
) -> Step:
    """See ``workbench_kernels.gated_delta.gated_delta_step``."""
    if conv is not None:
        mixed_BTC = causal_conv(mixed_BTC, *conv, None, False)[0]
    q, k, v, beta, decay, _ = inputs(mixed_BTC, gates_BTM, a_log_H, dt_bias_H, key_heads, state_BHKV.shape[2])
    b, t, h, _ = v.shape
    out, states = torch.zeros_like(v), list[Tensor]()
    if t and b:
        r = h // key_heads
        out, states = scan(q.repeat_interleave(r, 2), k.repeat_interleave(r, 2), v, beta, decay, state_BHKV.to(v.dtype))
    made = Tape(k, v, beta, decay)
    if isinstance(tape, Tape):
        made = Tape(*(kept.copy_(x) for kept, x in zip(tape, made)))
    kept = torch.stack(states, 1) if states else state_BHKV.new_zeros(b, t, *state_BHKV.shape[1:])
    after = None
    if write != "none":
        counts = torch.full((b,), t, dtype=torch.int32, device=v.device) if counts_B is None else counts_B
        after = commit(made, state_BHKV, counts, state_BHKV if write == "in place" else torch.empty_like(state_BHKV))
    return Step(out, after, made if tape else None, kept if columns else None)


def commit(tape: Tape, state_BHKV: Tensor, keep_B: Tensor, out_BHKV: Tensor) -> Tensor:
    """See ``workbench_kernels.gated_delta.gated_delta_commit``."""
    r = state_BHKV.shape[1] // max(1, tape.k_BTNK.shape[2])
    k = tape.k_BTNK.repeat_interleave(r, 2)
    for b, n in enumerate(keep_B.expand(len(state_BHKV)).tolist()):
        one = slice(b, b + 1)
        after = state_BHKV[one].clone()
        if n:
            rows = (k[one, :n], tape.v_BTHV[one, :n], tape.beta_BTH[one, :n], tape.decay_BTH[one, :n])
            after = scan_states(*rows, after.to(k.dtype))[-1]
        out_BHKV[one] = after
    return out_BHKV


def scan_heads(
    q_BTNK: Tensor, k_BTNK: Tensor, v_BTHV: Tensor, beta_BTH: Tensor, decay_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.gated_delta.gated_delta_scan``."""
    if v_BTHV.numel() == 0:
        return wide(v_BTHV), state_BHKV.clone()
    r = v_BTHV.shape[2] // q_BTNK.shape[2]
    q, k, v = (wide(x) for x in (q_BTNK.repeat_interleave(r, 2), k_BTNK.repeat_interleave(r, 2), v_BTHV))
    out, states = scan(q, k, v, wide(beta_BTH), wide(decay_BTH), wide(state_BHKV), every=False)
    return out.contiguous(), states[-1].to(state_BHKV.dtype)


def chunk_heads(
    q_BTNK: Tensor,
    k_BTNK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay_BTH: Tensor,
    state_BHKV: Tensor,
    counts_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.gated_delta.gated_delta_chunk``; outputs past a count are zero."""
    if v_BTHV.numel() == 0:
        return torch.zeros_like(v_BTHV), state_BHKV.clone()
    r = v_BTHV.shape[2] // q_BTNK.shape[2]
    q, k, v = (wide(x) for x in (q_BTNK.repeat_interleave(r, 2), k_BTNK.repeat_interleave(r, 2), v_BTHV))
    beta, log_decay = wide(beta_BTH), wide(log_decay_BTH)
    if counts_B is not None:  # rows that write nothing, keep the state whole and hold no NaN
        past_BT = torch.arange(v.shape[1], device=v.device) >= counts_B[:, None]
        q, k, v = (x.masked_fill(past_BT[..., None, None], 0.0) for x in (q, k, v))
        beta, log_decay = (x.masked_fill(past_BT[..., None], 0.0) for x in (beta, log_decay))
    out, state = chunk(q, k, v, beta, log_decay, wide(state_BHKV))
    return out.to(v_BTHV.dtype).contiguous(), state.to(state_BHKV.dtype)
