"""Greedy picks and unfiltered probabilities of rows of logits. Legend: R rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(logits_RV: Tensor) -> Tensor:
    """Id of the largest logit of every row; the lower id wins a tie."""
    return logits_RV.argmax(-1)


def top1(logits_V: Tensor) -> tuple[int, float]:
    """Greedy pick of one row and its probability under softmax at T = 1 over the whole row."""
    pick = int(logits_V.argmax())
    return pick, float((logits_V[pick] - torch.logsumexp(logits_V, 0)).exp())


def margins(logits_RV: Tensor) -> Tensor:
    """Largest minus second-largest logit of every row, float32."""
    best = logits_RV.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
