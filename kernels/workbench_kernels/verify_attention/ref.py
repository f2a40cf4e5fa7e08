"""Plain PyTorch attention: the specification. Float64 inputs are computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.rmsnorm.ref import wide


def attend(
    q_BTNGD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    gate_BTQ: Tensor | None,
    tree_TT: Tensor | None,
    window: int | None,
) -> Tensor:
    """See ``verify_attention`` and ``prefill_attention``."""
    b, t, n, g, d = q_BTNGD.shape
    out = wide(q_BTNGD).new_zeros(b, t, n * g * d)
    rows = torch.arange(t, device=q_BTNGD.device)[:, None]
    for i, at in enumerate(lengths_B.tolist()):
        keys = torch.arange(at + t, device=q_BTNGD.device)[None, :]
        sees = keys <= at + rows
        if window is not None:
            sees &= keys > at + rows - window
        if tree_TT is not None:
            sees[:, at:] = tree_TT
        scores = torch.einsum("tngd,nsd->ngts", wide(q_BTNGD[i]), wide(k_BNSD[i, :, : at + t])) * d**-0.5
        weight = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        out[i] = torch.einsum("ngts,nsd->tngd", weight, wide(v_BNSD[i, :, : at + t])).reshape(t, -1)
    if gate_BTQ is not None:
        out = out * torch.sigmoid(wide(gate_BTQ))
    return out.to(v_BNSD.dtype)


def replay(
    q_PNGD: Tensor,
    k_NSD: Tensor,
    v_NSD: Tensor,
    starts_P: Tensor,
    own_k_PJND: Tensor,
    own_v_PJND: Tensor,
    steps: int,
    gate_PQ: Tensor | None,
) -> Tensor:
    """See ``replay_attention``: every chain by itself."""
    p, n, g, d = q_PNGD.shape
    out = wide(q_PNGD).new_zeros(p, n * g * d)
    for i, start in enumerate(starts_P.tolist()):
        k = wide(torch.cat([k_NSD[:, :start], own_k_PJND[i, :steps].transpose(0, 1)], 1))
        v = wide(torch.cat([v_NSD[:, :start], own_v_PJND[i, :steps].transpose(0, 1)], 1))
        weight = (torch.einsum("ngd,nsd->ngs", wide(q_PNGD[i]), k) * d**-0.5).softmax(-1)
        out[i] = torch.einsum("ngs,nsd->ngd", weight, v).reshape(-1)
    if gate_PQ is not None:
        out = out * torch.sigmoid(wide(gate_PQ))
    return out.to(v_NSD.dtype)
