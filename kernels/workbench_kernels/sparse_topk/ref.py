"""Plain PyTorch form: the specification. Probabilities and sums are float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench_kernels.rmsnorm.ref import wide


class Sparse(NamedTuple):
    """What is kept of R rows of logits: see ``sparse_topk``."""

    ids_Rk: Tensor
    logits_Rk: Tensor
    probs_Rk: Tensor
    tail_R: Tensor
    logsumexp_R: Tensor
    logsumexp_t_R: Tensor


def sparse_topk(logits_RV: Tensor, k: int, temperature: float) -> Sparse:
    """See ``workbench_kernels.sparse_topk.sparse_topk``."""
    values, ids = logits_RV.sort(dim=-1, descending=True, stable=True)
    x = logits_RV.double()
    one, hot = x.logsumexp(-1), (x / temperature).logsumexp(-1)
    probs = (values.double() / temperature - hot[:, None]).exp()
    kept = wide(values[:, :k]).contiguous()
    out = kept.dtype
    return Sparse(ids[:, :k].int(), kept, probs[:, :k].to(out), probs[:, k:].sum(-1).to(out), one.to(out), hot.to(out))


def stock(logits_RV: Tensor, *, k: int, temperature: float = 1.0) -> tuple[Tensor, ...]:
    """The library's largest k and normaliser, nothing else: what the kernel is timed against."""
    values, ids = torch.topk(logits_RV, k, dim=-1)
    return values, ids, torch.logsumexp(logits_RV, -1)
