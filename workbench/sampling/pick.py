"""Greedy picks, their probabilities and margins, of rows of logits. Legend: R rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.lanes import LANES, SERIAL


def greedy(logits_RV: Tensor) -> Tensor:
    """Id of the largest logit of every row; the lower id wins a tie."""
    return logits_RV.argmax(-1)


@dataclass(frozen=True, eq=False)
class Picks:
    """The greedy pick of each row and how sure it is.

    Args:
        ids: int64 [R].
        top1: Probability of the pick, softmax at T = 1 over the whole row, unfiltered, float32 [R].
        logsumexp: Natural log of the row's normaliser, float32 [R].
    """

    ids: Tensor
    top1: Tensor
    logsumexp: Tensor


def picks(logits_RV: Tensor) -> Picks:
    """Picks of rows, with bits that do not depend on how many rows come together.

    Args:
        logits_RV: Rows in float32.

    Returns:
        The picks.
    """
    rows, vocab = logits_RV.shape
    x = logits_RV if rows > 1 else logits_RV.expand(2, vocab)  # one row would be summed by another route
    ids = x.argmax(-1)
    peak = x.gather(-1, ids[:, None])
    shifted = x - peak
    if x.device.type == "cpu":
        short = -vocab % LANES
        padded = torch.nn.functional.pad(shifted, (0, short), value=float("-inf")) if short else shifted
        step = max(2, SERIAL // padded.shape[1])
        total = torch.cat([part.exp().sum(-1) if len(part) > 1 else _alone(part) for part in padded.split(step)])
        log_total = torch.nn.functional.pad(total, (0, -len(total) % LANES), value=1.0).log()[: len(total)]
    else:
        total = shifted.exp().sum(-1)
        log_total = total.log()
    return Picks(ids[:rows], (1.0 / total)[:rows], (peak[:, 0] + log_total)[:rows])


def _alone(part_1V: Tensor) -> Tensor:
    return part_1V.expand(2, -1).exp().sum(-1)[:1]


def margins(logits_RV: Tensor) -> Tensor:
    """Largest minus second-largest logit of every row, float32."""
    best = logits_RV.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def top1(logits_V: Tensor) -> tuple[int, float]:
    """Greedy pick of one row and its probability under softmax at T = 1 over the whole row."""
    picked = picks(logits_V.unsqueeze(0))
    return int(picked.ids[0]), float(picked.top1[0])
