"""Triton forms: one program per sequence, or per block of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import begin, launch, power


@triton.jit
def assemble_kernel(
    draft_ptr, prob_ptr, pending_ptr, map_ptr, most_ptr, fed_ptr, count_ptr, K, p_min, FIRST: tl.constexpr,
    MAP: tl.constexpr, MOST: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    pending = tl.load(pending_ptr + b)
    base = (pending >= 0).to(tl.int32)
    j = tl.arange(0, BK)
    token = tl.load(draft_ptr + b * K + j, mask=j < K, other=-1)
    prob = tl.load(prob_ptr + b * K + j, mask=j < K, other=0.0)
    low = prob < p_min
    spared = j == 0
    if FIRST:
        spared = (j == 0) & (base == 0)
    ends = (token < 0) | (low & (spared == 0)) | (j >= K) | (prob != prob)
    if MOST:
        ends = ends | (j >= tl.load(most_ptr + b) - 1)
    n = tl.minimum(tl.min(tl.where(ends, j, BK), 0), K)
    stands = j < n
    if MAP:
        token = tl.load(map_ptr + token, mask=stands, other=0)
    # place j of what is fed holds draft j - base: write the drafts, then what they leave
    tl.store(fed_ptr + b * (K + 1) + base + j, token, mask=stands)
    tl.store(fed_ptr + b * (K + 1) + j, tl.zeros((BK,), tl.int64), mask=(j >= base + n) & (j <= K))
    if base > 0:
        tl.store(fed_ptr + b * (K + 1), pending)
    tl.store(count_ptr + b * 2, n)
    tl.store(count_ptr + b * 2 + 1, base)


@triton.jit
def seed_kernel(row_ptr, before_ptr, accepted_ptr, count_ptr, out_ptr, T, D, BLOCK: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.load(count_ptr + b * 2 + 1) + tl.load(accepted_ptr + b * 3)
    if j > 0:
        tl.store(out_ptr + b * D + d, tl.load(row_ptr + (b * T + j - 1) * D + d, mask=d < D), mask=d < D)
    else:
        tl.store(out_ptr + b * D + d, tl.load(before_ptr + b * D + d, mask=d < D), mask=d < D)


@triton.jit
def length_kernel(length_ptr, saved_ptr, accepted_ptr, count_ptr, L, B, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < L * B
    b = at % B
    n = tl.load(accepted_ptr + b * 3, mask=live, other=0).to(tl.int32)
    base = tl.load(count_ptr + b * 2 + 1, mask=live, other=0)
    tl.store(length_ptr + at, tl.load(saved_ptr + b, mask=live, other=0) + base + n, mask=live)


@triton.jit
def ring_kernel(fed_ptr, accepted_ptr, count_ptr, ring_ptr, pending_ptr, T, R, BT: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    n = tl.load(accepted_ptr + b * 3)
    bonus = tl.load(accepted_ptr + b * 3 + 1)
    base = tl.load(count_ptr + b * 2 + 1)
    held = tl.load(ring_ptr + b * R)
    j = tl.arange(0, BT)
    token = tl.load(fed_ptr + b * T + base + j, mask=j < n, other=0)
    token = tl.where(j == n, bonus, token)
    emitted = n + (bonus >= 0).to(tl.int64)
    tl.debug_barrier()
    tl.store(ring_ptr + b * R + 1 + held + j, token, mask=(j < emitted) & (1 + held + j < R))
    tl.store(ring_ptr + b * R, held + emitted)
    tl.store(pending_ptr + b, bonus)


@triton.jit
def keep_kernel(kept_ptr, made_ptr, second_ptr, second_made_ptr, keep_ptr, X, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    b = tl.program_id(1).to(tl.int64)
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = (x < X) & (tl.load(keep_ptr + b) > 0)
    tl.store(kept_ptr + b * X + x, tl.load(made_ptr + b * X + x, mask=live), mask=live)
    tl.store(second_ptr + b * X + x, tl.load(second_made_ptr + b * X + x, mask=live), mask=live)


def keep_rows(
    kept_BX: Tensor, made_BX: Tensor, second_BX: Tensor, second_made_BX: Tensor, keep_B: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rounds.keep_rows``."""
    b, x = kept_BX.shape
    launch(
        keep_kernel, (-(-x // 1024), b), kept_BX, made_BX, second_BX, second_made_BX, keep_B, x, BLOCK=1024,
        num_warps=4, early=True,
    )  # fmt: skip
    return kept_BX, second_BX


def assemble_verify(
    drafts_BK: Tensor,
    probs_BK: Tensor,
    pending_B: Tensor,
    p_min: float,
    first: bool,
    map_D: Tensor | None,
    most_B: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rounds.assemble_verify``."""
    b, k = drafts_BK.shape
    fed = torch.empty(b, k + 1, dtype=torch.int64, device=drafts_BK.device)
    counts = torch.empty(b, 2, dtype=torch.int32, device=drafts_BK.device)
    # never early: past its start nothing of the round before runs any more, and a verify may read states that it wrote
    launch(
        assemble_kernel, (b,), drafts_BK, probs_BK, pending_B, drafts_BK if map_D is None else map_D,
        pending_B if most_B is None else most_B, fed, counts, k, float(p_min), FIRST=first, MAP=map_D is not None,
        MOST=most_B is not None, BK=power(k + 1, 2), num_warps=1,
    )  # fmt: skip
    return fed, counts


def gather_seed(rows_BTD: Tensor, before_BD: Tensor, accepted_B3: Tensor, counts_B2: Tensor) -> Tensor:
    """See ``workbench_kernels.rounds.gather_seed``."""
    b, t, d = rows_BTD.shape
    out = torch.empty_like(before_BD)
    launch(seed_kernel, (-(-d // 1024), b), rows_BTD, before_BD, accepted_B3, counts_B2, out, t, d, BLOCK=1024)
    return out


def rollback_lengths(lengths_LB: Tensor, saved_B: Tensor, accepted_B3: Tensor, counts_B2: Tensor) -> Tensor:
    """See ``workbench_kernels.rounds.rollback_lengths``."""
    n, b = lengths_LB.shape
    launch(
        length_kernel, (-(-n * b // 128),), lengths_LB, saved_B, accepted_B3, counts_B2, n, b, BLOCK=128, num_warps=1
    )
    return lengths_LB


def ring_commit(
    verify_BT: Tensor, accepted_B3: Tensor, counts_B2: Tensor, ring_BR: Tensor, pending_B: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rounds.ring_commit``."""
    b, t = verify_BT.shape
    launch(
        ring_kernel, (b,), verify_BT, accepted_B3, counts_B2, ring_BR, pending_B, t, ring_BR.shape[1],
        BT=power(t + 1, 2), num_warps=1,
    )  # fmt: skip
    return ring_BR, pending_B
