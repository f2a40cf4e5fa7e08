"""Plain PyTorch form of the convolution: the specification. Float64 inputs are computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.rmsnorm.ref import wide


def causal_conv(
    u_BTP: Tensor, window_BWC: Tensor, taps_LC: Tensor, counts_B: Tensor | None, after: bool
) -> tuple[Tensor, Tensor | None]:
    """See ``workbench_kernels.causal_conv.causal_conv``."""
    b, w, c = window_BWC.shape
    t = u_BTP.shape[1]
    fed = wide(torch.cat([window_BWC, u_BTP[..., :c]], 1))
    total = torch.zeros(b, t, c, dtype=fed.dtype, device=fed.device)
    for i in range(w + 1):
        total += fed[:, i : i + t] * wide(taps_LC)[i]
    counts = torch.full((b,), t, dtype=torch.int32, device=u_BTP.device) if counts_B is None else counts_B
    window = window_after(u_BTP, window_BWC, counts) if after else None
    return torch.nn.functional.silu(total).to(u_BTP.dtype), window


def window_after(u_BTP: Tensor, window_BWC: Tensor, keep_B: Tensor) -> Tensor:
    """The last W rows of [window | the first ``keep`` inputs]."""
    _, w, c = window_BWC.shape
    fed = torch.cat([window_BWC, u_BTP[..., :c]], 1)
    parts = [fed[b, n : n + w] for b, n in enumerate(keep_B.tolist())]
    return torch.stack(parts) if parts else window_BWC.clone()
