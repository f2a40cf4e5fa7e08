"""Plain forms on Python integers: the specification."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
    fed = torch.zeros(b, k + 1, dtype=torch.int64, device=drafts_BK.device)
    counts = torch.zeros(b, 2, dtype=torch.int32, device=drafts_BK.device)
    least = torch.tensor(p_min, dtype=torch.float32)
    for i in range(b):
        base = int(pending_B[i] >= 0)
        if base:
            fed[i, 0] = pending_B[i]
        n, most = 0, k if most_B is None else min(k, int(most_B[i]) - 1)
        while n < most and int(drafts_BK[i, n]) >= 0 and not math.isnan(float(probs_BK[i, n])):
            if float(probs_BK[i, n]) < float(least) and (n > 0 or (first and base)):
                break
            token = int(drafts_BK[i, n])
            fed[i, base + n] = token if map_D is None else map_D[token]
            n += 1
        counts[i, 0], counts[i, 1] = n, base
    return fed, counts


def gather_seed(rows_BTD: Tensor, before_BD: Tensor, accepted_B3: Tensor, counts_B2: Tensor) -> Tensor:
    """See ``workbench_kernels.rounds.gather_seed``."""
    out = torch.empty_like(before_BD)
    for b in range(len(out)):
        j = int(counts_B2[b, 1]) + int(accepted_B3[b, 0])
        out[b] = rows_BTD[b, j - 1] if j else before_BD[b]
    return out


def rollback_lengths(lengths_LB: Tensor, saved_B: Tensor, accepted_B3: Tensor, counts_B2: Tensor) -> Tensor:
    """See ``workbench_kernels.rounds.rollback_lengths``."""
    lengths_LB[:] = saved_B + counts_B2[:, 1] + accepted_B3[:, 0].int()
    return lengths_LB


def ring_commit(
    verify_BT: Tensor, accepted_B3: Tensor, counts_B2: Tensor, ring_BR: Tensor, pending_B: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``workbench_kernels.rounds.ring_commit``."""
    for b, (n, bonus, _) in enumerate(accepted_B3.tolist()):
        base = int(counts_B2[b, 1])
        tokens = [*verify_BT[b, base : base + n].tolist(), *([bonus] if bonus >= 0 else [])]
        for token in tokens:
            ring_BR[b, 0] += 1
            if int(ring_BR[b, 0]) < ring_BR.shape[1]:
                ring_BR[b, int(ring_BR[b, 0])] = token
        pending_B[b] = bonus
    return ring_BR, pending_B
