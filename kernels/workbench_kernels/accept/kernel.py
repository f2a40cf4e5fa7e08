"""Triton forms: one program per sequence, one lane per place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import bits, launch, power, real
from workbench_kernels.shape_draw.ref import Draws
from workbench_kernels.shape_draw.residual.kernel import law_at, lone_uniform


@triton.jit
def _close(out_ptr, b, ok, draft, bonus_at, j, k, stop_ptr, S, BONUS: tl.constexpr, SP: tl.constexpr):
    """Accepted drafts, the bonus and whether a stop came first, from which drafts would stand."""
    n = tl.min(tl.where(ok, k, j), 0)
    n = tl.minimum(n, k)
    s = tl.arange(0, SP)
    stop = tl.load(stop_ptr + s, mask=s < S, other=-9)
    is_stop = tl.sum((draft[:, None] == stop[None, :]).to(tl.int32), 1) > 0
    first = tl.min(tl.where(is_stop & (j < n), j, 0x7FFFFFFF), 0)
    stopped = first < n
    n = tl.where(stopped, first + 1, n)
    tl.store(out_ptr + b * 3, n.to(tl.int64))
    bonus = tl.sum(tl.where(j == n, bonus_at, 0), 0) if BONUS else -1
    tl.store(out_ptr + b * 3 + 1, tl.where(stopped, -1, bonus).to(tl.int64))
    tl.store(out_ptr + b * 3 + 2, stopped.to(tl.int64))


@triton.jit(do_not_specialize=["T"])
def greedy_kernel(
    pick_ptr, verify_ptr, count_ptr, last_ptr, stop_ptr, out_ptr, T, S, LAST: tl.constexpr, BT: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    k = tl.load(count_ptr + b * 2)
    base = tl.load(count_ptr + b * 2 + 1)
    j = tl.arange(0, BT)
    draft = tl.load(verify_ptr + b * T + base + j, mask=j < k, other=-7)
    own = tl.load(pick_ptr + b * T + base + j - 1, mask=(base + j >= 1) & (base + j <= T) & (j <= k), other=-1)
    if LAST:
        own = tl.where(base + j == 0, tl.load(last_ptr + b), own)
    _close(out_ptr, b, (draft == own) & (j < k), draft, own, j, k, stop_ptr, S, True, SP)


@triton.jit(do_not_specialize=["T", "k0", "k1", "temperature"])
def ratio_kernel(
    p_ptr, p_cut, p_peak, p_mass, q_ptr, q_cut, q_peak, q_mass, draft_ptr, count_ptr, start_ptr, stop_ptr, out_ptr,
    T, V, S, k0, k1, temperature, DENSE: tl.constexpr, BT: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    k = tl.load(count_ptr + b)
    j = tl.arange(0, BT)
    live = j < k
    draft = tl.load(draft_ptr + b * (T - 1) + j, mask=live, other=-7)
    row = b * T + j
    held = live & (draft >= 0) & (draft < V)
    heat = real(temperature)
    x = tl.load(p_ptr + row * V + draft, mask=held, other=-float("inf"))
    cut = tl.load(p_cut + row, mask=live, other=0.0)
    p = law_at(x, cut, tl.load(p_peak + row, mask=live, other=0.0), tl.load(p_mass + row, mask=live, other=1.0), heat)
    q = tl.full((BT,), 1.0, tl.float64)
    if DENSE:
        at = b * (T - 1) + j
        y = tl.load(q_ptr + at * V + draft, mask=held, other=-float("inf"))
        low = tl.load(q_cut + at, mask=live, other=0.0)
        q = law_at(y, low, tl.load(q_peak + at, mask=live, other=0.0), tl.load(q_mass + at, mask=live, other=1.0), heat)
    start = tl.load(start_ptr + b)
    u = lone_uniform(start + 1 + j, 2, start, k0, k1)
    _close(out_ptr, b, (u * q < p) & held, draft, draft, j, k, stop_ptr, S, False, SP)


def greedy(
    picks_BT: Tensor, verify_BT: Tensor, counts_B2: Tensor, last_B: Tensor | None, stops_S: Tensor | None
) -> Tensor:
    """See ``workbench_kernels.accept.accept_greedy``."""
    b, t = verify_BT.shape
    out = torch.empty(b, 3, dtype=torch.int64, device=picks_BT.device)
    stops = 0 if stops_S is None else len(stops_S)
    launch(
        greedy_kernel, (b,), picks_BT, verify_BT, counts_B2, picks_BT if last_B is None else last_B,
        picks_BT if stops_S is None else stops_S, out, t, stops, LAST=last_B is not None, BT=power(t + 1, 2),
        SP=power(stops), num_warps=1,
    )  # fmt: skip
    return out


def ratio(
    p_logits_BTV: Tensor,
    p_BT: Draws,
    q_logits_BTV: Tensor | None,
    q_BT: Draws | None,
    drafts_BT: Tensor,
    counts_B: Tensor,
    starts_B: Tensor,
    key: tuple[int, int],
    temperature: float,
    stops_S: Tensor | None,
) -> Tensor:
    """See ``workbench_kernels.accept.accept_ratio``."""
    b, t, vocab = p_logits_BTV.shape
    out = torch.empty(b, 3, dtype=torch.int64, device=p_logits_BTV.device)
    dense = q_logits_BTV is not None and q_BT is not None
    laws = (p_logits_BTV, *p_BT[1:], *((q_logits_BTV, *q_BT[1:]) if dense else (p_logits_BTV, *p_BT[1:])))
    stops = 0 if stops_S is None else len(stops_S)
    launch(
        ratio_kernel, (b,), *laws, drafts_BT, counts_B, starts_B, drafts_BT if stops_S is None else stops_S, out, t,
        vocab, stops, key[0], key[1], bits(temperature), DENSE=dense, BT=power(t, 2), SP=power(stops), num_warps=1,
    )  # fmt: skip
    return out
