"""Plain forms on Python integers: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.shape_draw.ref import Draws, one_uniform, probability


def greedy(
    picks_BT: Tensor, verify_BT: Tensor, counts_B2: Tensor, last_B: Tensor | None, stops_S: Tensor | None
) -> Tensor:
    """See ``workbench_kernels.accept.accept_greedy``."""
    stops = set() if stops_S is None else set(stops_S.tolist())
    rows = []
    for b, (k, base) in enumerate(counts_B2.tolist()):
        picks, drafts = picks_BT[b].tolist(), verify_BT[b].tolist()[base:]
        own = picks if base else [int(last_B[b]) if last_B is not None else -1, *picks]
        n = 0
        while n < k and drafts[n] == own[n] and (n == 0 or drafts[n - 1] not in stops):
            n += 1
        stopped = n > 0 and drafts[n - 1] in stops
        rows.append([n, -1 if stopped else own[n], int(stopped)])
    return torch.tensor(rows, dtype=torch.int64, device=picks_BT.device).view(-1, 3)


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
    t = p_logits_BTV.shape[1]
    stops = set() if stops_S is None else set(stops_S.tolist())
    rows = []
    for b, k in enumerate(counts_B.tolist()):
        start, n, stopped = int(starts_B[b]), 0, False
        while n < k and not stopped:
            token, row, at = int(drafts_BT[b, n]), b * t + n, b * (t - 1) + n
            p = probability(p_logits_BTV[b, n, token], p_BT.cut_R[row], p_BT.peak_R[row], p_BT.mass_R[row], temperature)
            q = 1.0
            if q_logits_BTV is not None and q_BT is not None:
                q = float(
                    probability(
                        q_logits_BTV[b, n, token], q_BT.cut_R[at], q_BT.peak_R[at], q_BT.mass_R[at], temperature
                    )
                )
            if not one_uniform(start + 1 + n, 2, start, key) * q < float(p):
                break
            n, stopped = n + 1, token in stops
        rows.append([n, -1, int(stopped)])
    return torch.tensor(rows, dtype=torch.int64, device=p_logits_BTV.device).view(-1, 3)
