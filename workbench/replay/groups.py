"""What the optional columns of a draft table hold, of rows of logits.

On a CPU the bits of every number are a function of its row alone, not of the rows beside it. Sums over a vocabulary are
in float64, of blocks of rows that bound memory.
Legend: R rows, V vocabulary, K slots, N temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.datasets.topk import largest
from workbench.model.ops import Numerics, mapped
from workbench.sampling.pick import picks

WIDE_VALUES = 1 << 22  # numbers turned to float64 at a time
_SAME = Numerics(exact=True)  # maps whose bits do not depend on an element's place


def weights(logits_RV: Tensor, temperature: float = 1.0) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """exp((x - peak) / temperature) in float64, block by block, with its logarithm first: (rows, nats, weights)."""
    step = max(1, WIDE_VALUES // logits_RV.shape[1])
    for lo in range(0, len(logits_RV), step):
        part = slice(lo, min(lo + step, len(logits_RV)))
        wide_RV = logits_RV[part].double()
        nats_RV = (wide_RV - wide_RV.amax(-1, keepdim=True)).div_(temperature)
        yield part, nats_RV, exps(nats_RV)


def exps(nats: Tensor) -> Tensor:
    """exp of every element."""
    return mapped(torch.exp, nats, _SAME)


def totals(values_RV: Tensor) -> Tensor:
    """Sum of every row; one row is summed as two are, by the route of many."""
    return values_RV.sum(-1) if len(values_RV) > 1 else values_RV.repeat(2, 1).sum(-1)[:1]


def shadow(logits_RV: Tensor, top_R: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of every row.

    Args:
        logits_RV: The drafter's rows.
        top_R: Largest probability of each, softmax at T = 1.
        k: How many, at most V.

    Returns:
        Ids int64 [R, k] by (logit descending, id ascending), and probabilities float64 [R, k], the first being top_R.
    """
    values_Rk, ids_Rk = largest(logits_RV, k)
    wide_Rk = values_Rk.double()
    return ids_Rk, exps(wide_Rk - wide_Rk[:, :1]) * top_R[:, None].double()


def log_probs(logits_RV: Tensor, ids_R: Tensor, logsumexp_R: Tensor) -> Tensor:
    """Log-probability of one token per row, softmax at T = 1, float64 [R]."""
    return logits_RV.gather(-1, ids_R[:, None])[:, 0].double() - logsumexp_R.double()


def token_probs(logits_RV: Tensor, ids_R: Tensor) -> Tensor:
    """Probability of one token per row, softmax at T = 1, float64 [R]."""
    parts = []
    for part, _, weights_RV in weights(logits_RV):
        parts.append(weights_RV.gather(-1, ids_R[part, None])[:, 0] / totals(weights_RV))
    return torch.cat(parts)


def two_best(logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's two most likely tokens int64 [R, 2], their probabilities and the entropy in nats, float64, T = 1."""
    probs, entropies = [], []
    _, ids_R2 = largest(logits_RV, 2)
    for part, nats_RV, weights_RV in weights(logits_RV):
        total_R = totals(weights_RV)
        probs.append(weights_RV.gather(-1, ids_R2[part]) / total_R[:, None])
        mean_R = totals(nats_RV.mul_(weights_RV)) / total_R
        entropies.append(mapped(torch.log, total_R, _SAME) - mean_R)
    return ids_R2, torch.cat(probs), torch.cat(entropies)


def overlaps(p_RV: Tensor, q_RV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """1 - ||p - q||_1 / 2 of two laws at each temperature: the share of tokens both draw under the best coupling.

    Args:
        p_RV: Logits of one.
        q_RV: Logits of the other.
        temperatures: Above 0.

    Returns:
        Float64 [R, N]. What the first slot accepts by the ratio rule at that start, on average over what is drafted.
        Never multiply it along a chain: the next slot's laws stand after the token that was accepted.

    Source: sum(min(p, q)) = 1 - ||p - q||_1 / 2; Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5.
    """
    columns = []
    for temperature in temperatures:
        parts = []
        for (_, _, p_W), (_, _, q_W) in zip(weights(p_RV, temperature), weights(q_RV, temperature), strict=True):
            both_W = torch.minimum(p_W / totals(p_W)[:, None], q_W / totals(q_W)[:, None])
            parts.append(totals(both_W))
        columns.append(torch.cat(parts))
    return torch.stack(columns, 1)


def rank_of(logits_RV: Tensor, ids_R: Tensor) -> Tensor:
    """Rank from 1 of one token per row, by (logit descending, id ascending): int64 [R]."""
    value_R1 = logits_RV.gather(-1, ids_R[:, None])
    rank_R = 1 + (logits_RV > value_R1).sum(-1)
    same_RV = logits_RV == value_R1
    for i in (same_RV.sum(-1) > 1).nonzero()[:, 0].tolist():
        rank_R[i] += same_RV[i, : int(ids_R[i])].sum()
    return rank_R


class Ranks:
    """Ranks and log-probabilities of a tape's drafts in the target's rows, filled in as those rows come.

    The draft in slot j of the chain at p stands in the target's row p + j, so that a row judges one slot of each of
    the K starts up to it.

    Args:
        rows: Rows of the tape.
        k: Slots.
    """

    def __init__(self, rows: int, k: int) -> None:
        self.ids = np.full((rows, k), -1, np.int32)
        self.rank, self.logp = self.ids.copy(), np.full((rows, k), np.nan, np.float32)

    def judge(self, logits_RV: Tensor, first: int) -> None:
        """Take in the target's rows of positions ``first`` and on, whose drafts are in ``ids``."""
        logsumexp_R = picks(logits_RV).logsumexp
        row_R = np.arange(first, first + len(logits_RV))
        for slot in range(self.ids.shape[1]):
            start_R = row_R - slot
            ids_R = np.where(start_R >= 0, self.ids[np.maximum(start_R, 0), slot], -1)
            has = np.flatnonzero(ids_R >= 0)
            if not len(has):
                continue
            at = torch.from_numpy(has).to(logits_RV.device)
            x_RV = logits_RV if len(has) == len(row_R) else logits_RV[at]
            tokens = torch.from_numpy(ids_R[has].astype(np.int64)).to(logits_RV.device)
            self.rank[start_R[has], slot] = rank_of(x_RV, tokens).cpu().numpy()
            self.logp[start_R[has], slot] = log_probs(x_RV, tokens, logsumexp_R[at]).float().cpu().numpy()
