"""The target's law over the ids that drafts may use, from kept ids and logits or from trunk rows.

Both give softmax at T = 1 over the draft ids alone, which is what EAGLE-3 trains towards. Kept ids leave a tail out;
how much is said beside them.

Legend: S rows, K kept ids of the vocabulary, D draft ids, k kept draft ids, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.datasets.export.parts import ModelParts

ROWS, BLOCK = 512, 16_384  # rows, and ids of the head, that a product takes at a time


@dataclass(frozen=True, eq=False)
class KeptLaw:
    """The law over kept draft ids.

    Args:
        probs_Sk: Probabilities at T = 1 that sum to 1 over the kept draft ids, descending; 0 where fewer were kept.
        indices_Sk: Their places among the draft ids, int32, distinct in every row, also where the probability is 0.
        best_S: The target's pick over the whole vocabulary.
        mass_S: Share of the target's law over the whole vocabulary that the kept draft ids hold.
    """

    probs_Sk: Tensor
    indices_Sk: Tensor
    best_S: Tensor
    mass_S: Tensor


def kept_law(ids_SK: np.ndarray, logits_SK: np.ndarray, logsumexp_S: np.ndarray, parts: ModelParts, k: int) -> KeptLaw:
    """The law over the first k kept ids of every row that are draft ids.

    Args:
        ids_SK: Kept ids by falling logit.
        logits_SK: Their logits, float32.
        logsumexp_S: Log of the sum over the whole vocabulary at T = 1.
        parts: Knows the draft ids.
        k: Ids to keep; at most K and fewer than there are draft ids.

    Returns:
        The law; a row none of whose kept ids is a draft id has probabilities of 0.
    """
    draft_D = parts.kept_ids_D.numpy()
    place_V = np.full(len(parts.head_VH), -1, np.int64)
    place_V[draft_D] = np.arange(len(draft_D))
    order_SK = np.argsort(place_V[ids_SK] < 0, axis=-1, kind="stable")[:, :k]  # draft ids first, by falling logit
    index_Sk = place_V[np.take_along_axis(ids_SK, order_SK, -1)]
    held_Sk = index_Sk >= 0
    logit_Sk = np.take_along_axis(logits_SK.astype(np.float64), order_SK, -1)
    weight_Sk = np.where(held_Sk, np.exp(logit_Sk - logsumexp_S.astype(np.float64)[:, None]), 0.0)
    mass_S = weight_Sk.sum(-1)
    probs_Sk = weight_Sk / np.where(mass_S > 0, mass_S, 1.0)[:, None]
    index_Sk = np.where(held_Sk, index_Sk, _unused(index_Sk, held_Sk, len(draft_D)))
    return KeptLaw(
        torch.from_numpy(probs_Sk.astype(np.float32)),
        torch.from_numpy(index_Sk.astype(np.int32)),
        torch.from_numpy(ids_SK[:, 0].astype(np.int64)),
        torch.from_numpy(mass_S),
    )


def _unused(index_Sk: np.ndarray, held_Sk: np.ndarray, count: int) -> np.ndarray:
    """For every place without an id, a draft id that its row does not hold, each at most once in the row."""
    rows, k = index_Sk.shape
    width = min(count, 2 * k)  # among 2k ids at least k are not held
    taken = np.zeros((rows, width + 1), bool)  # the last column collects the ids beyond
    np.put_along_axis(taken, np.where(held_Sk & (index_Sk < width), index_Sk, width), True, -1)
    free_Sk = np.argsort(taken[:, :width], axis=-1, kind="stable")[:, :k]
    rank_Sk = np.clip(np.cumsum(~held_Sk, -1) - 1, 0, k - 1)
    return np.take_along_axis(free_Sk, rank_Sk, -1)


def full_law(trunk_SH: Tensor, parts: ModelParts) -> Iterator[tuple[Tensor, Tensor]]:
    """The law over all draft ids, rebuilt from trunk rows.

    Args:
        trunk_SH: Rows before the final norm.
        parts: Norm, head and draft ids.

    Yields:
        Probabilities [rows, D] at T = 1, float32, and the target's pick over the whole vocabulary, of 512 rows each.
    """
    for rows_SH in parts.normed(trunk_SH).split(ROWS):
        picked = _over_ids(rows_SH, parts.draft_head_DH)
        if parts.draft_ids_D is None:
            best_S = picked.argmax(-1)
        else:
            best_S = _best(rows_SH, parts.head_VH)
        yield picked.softmax(-1), best_S


def _over_ids(rows_SH: Tensor, head_DH: Tensor) -> Tensor:
    return torch.cat([rows_SH @ block.float().T for block in head_DH.split(BLOCK)], -1)


def _best(rows_SH: Tensor, head_VH: Tensor) -> Tensor:
    """Id of the largest logit; the lowest such id."""
    top_S = torch.full((len(rows_SH),), -torch.inf)
    best_S = torch.zeros(len(rows_SH), dtype=torch.int64)
    for first, block in zip(range(0, len(head_VH), BLOCK), head_VH.split(BLOCK)):
        value_S, at_S = (rows_SH @ block.float().T).max(-1)
        better = value_S > top_S
        top_S, best_S = torch.where(better, value_S, top_S), torch.where(better, at_S + first, best_S)
    return best_S
