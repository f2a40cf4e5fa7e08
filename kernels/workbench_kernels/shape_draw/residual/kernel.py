"""Triton form of the draw in place of a rejected draft: sums of chunks, then the id at a share of the whole."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import bits, launch, philox4, power, real, uniform_of
from workbench_kernels.shape_draw.ref import Draws

CHUNK = 2048


@triton.jit
def law_at(x, cut, peak, mass, temperature):
    """Probability of logits under a law, float64."""
    p = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature) / mass
    return tl.where(x >= cut, p, 0.0)


@triton.jit
def lone_uniform(position, purpose, start, k0, k1):
    """The uniform number of a position that belongs to no id."""
    at = position.to(tl.int64)
    tag = (at * 0 + 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox4(
        k0.to(tl.uint32), k1.to(tl.uint32), tag, at.to(tl.uint32), (at * 0 + purpose).to(tl.uint32),
        (at * 0 + start).to(tl.uint32),
    )  # fmt: skip
    return uniform_of(w0)


@triton.jit
def _rest(
    p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, b, n, T, V, ids, temperature,
    DENSE: tl.constexpr,
):  # fmt: skip
    """p and max(p - q, 0) of ids in the row where the first draft was rejected, float64."""
    row = b * T + n
    live = ids < V
    x = tl.load(p_ptr + row * V + ids, mask=live, other=-float("inf"))
    p = law_at(x, tl.load(p_cut + row), tl.load(p_peak + row), tl.load(p_mass + row), temperature)
    p = tl.where(live, p, 0.0)
    if DENSE:
        at = b * (T - 1) + n
        y = tl.load(q_ptr + at * V + ids, mask=live, other=-float("inf"))
        q = law_at(y, tl.load(q_cut + at), tl.load(q_peak + at), tl.load(q_mass + at), temperature)
    else:
        q = tl.where(ids == tl.load(draft_ptr + b * (T - 1) + n), 1.0, 0.0).to(tl.float64)
    return p, tl.where(p > q, p - q, 0.0)


@triton.jit(do_not_specialize=["temperature", "T"])
def sum_kernel(
    p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, accepted_ptr, count_ptr, p_sum, rest_sum,
    T, V, CHUNKS, temperature, DENSE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    n = tl.load(accepted_ptr + b * 3)
    if (n < tl.load(count_ptr + b)) & (tl.load(accepted_ptr + b * 3 + 2) == 0):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        p, rest = _rest(
            p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, b, n, T, V, ids, real(temperature),
            DENSE,
        )  # fmt: skip
        tl.store(p_sum + b * CHUNKS + chunk, tl.sum(p, 0))
        tl.store(rest_sum + b * CHUNKS + chunk, tl.sum(rest, 0))


@triton.jit(do_not_specialize=["temperature", "k0", "k1", "T"])
def find_kernel(
    p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, accepted_ptr, count_ptr, p_sum, rest_sum,
    token_ptr, start_ptr, T, V, CHUNKS, k0, k1, temperature, DENSE: tl.constexpr, CHUNK: tl.constexpr,
    CP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    n = tl.load(accepted_ptr + b * 3)
    if tl.load(accepted_ptr + b * 3 + 2) != 0:
        tl.store(accepted_ptr + b * 3 + 1, -1)
    elif n >= tl.load(count_ptr + b):
        tl.store(accepted_ptr + b * 3 + 1, tl.load(token_ptr + b * T + n))
    else:
        c = tl.arange(0, CP)
        part = tl.load(rest_sum + b * CHUNKS + c, mask=c < CHUNKS, other=0.0)
        vanished = tl.sum(part, 0) < 1e-12
        if vanished:
            part = tl.load(p_sum + b * CHUNKS + c, mask=c < CHUNKS, other=0.0)
        start = tl.load(start_ptr + b)
        goal = lone_uniform(start + 1 + n, 3, start, k0, k1) * tl.sum(part, 0)
        upto = tl.cumsum(part, 0)
        # the first chunk whose running sum passes the goal; if rounding lets none, the last that holds anything
        last = tl.max(tl.where(part > 0, c, 0), 0)
        chunk = tl.minimum(tl.min(tl.where(upto > goal, c, CP), 0), last)
        before = tl.sum(tl.where(c < chunk, part, 0.0), 0)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        p, rest = _rest(
            p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, b, n, T, V, ids, real(temperature),
            DENSE,
        )  # fmt: skip
        weight = tl.where(vanished, p, rest)
        passed = (tl.cumsum(weight, 0) + before > goal) & (weight > 0)
        final = tl.max(tl.where(weight > 0, ids, -1), 0)
        token = tl.minimum(tl.min(tl.where(passed, ids, 0x7FFFFFFF), 0), final)
        tl.store(accepted_ptr + b * 3 + 1, token.to(tl.int64))


def residual_draw(
    p_logits_BTV: Tensor,
    p_BT: Draws,
    q_logits_BTV: Tensor | None,
    q_BT: Draws | None,
    drafts_BT: Tensor,
    accepted_B3: Tensor,
    counts_B: Tensor,
    starts_B: Tensor,
    key: tuple[int, int],
    temperature: float,
) -> Tensor:
    """See ``workbench_kernels.shape_draw.residual_draw``."""
    b, t, vocab = p_logits_BTV.shape
    chunks = -(-vocab // CHUNK)
    double = dict(dtype=torch.float64, device=p_logits_BTV.device)
    p_sum, rest_sum = torch.empty(b, chunks, **double), torch.empty(b, chunks, **double)
    dense = q_logits_BTV is not None and q_BT is not None
    laws = (p_logits_BTV, *p_BT[1:], *((q_logits_BTV, *q_BT[1:]) if dense else (p_logits_BTV, *p_BT[1:])))
    shared = (*laws, drafts_BT, accepted_B3, counts_B, p_sum, rest_sum)
    launch(sum_kernel, (chunks, b), *shared, t, vocab, chunks, bits(temperature), DENSE=dense, CHUNK=CHUNK, num_warps=4)
    launch(
        find_kernel, (b,), *shared, p_BT.tokens_R, starts_B, t, vocab, chunks, key[0], key[1], bits(temperature),
        DENSE=dense, CHUNK=CHUNK, CP=power(chunks), num_warps=4,
    )  # fmt: skip
    return accepted_B3
