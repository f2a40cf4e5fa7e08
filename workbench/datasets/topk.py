"""From rows of logits to what a record keeps: the largest k, their probabilities, the tail and the normalisers.

Legend: R rows, V vocabulary, k kept ids.
Ids are ordered by (logit descending, id ascending). Probabilities are of the full vocabulary, in float64, and never
renormalised over the kept ids; the tail is a sum of its own over the ids not kept, so that the mass can be checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError
from workbench.datasets.heads import row_error
from workbench_kernels.sparse_topk import MOST, Sparse, sparse_topk

MASS_TOLERANCE = 2e-5
BLOCK_VALUES = 1 << 22  # logits turned to float64 at a time: 32 MiB


@dataclass(frozen=True, eq=False)
class SparseRows:
    """What is kept of R rows of logits.

    Args:
        ids: int32 [R, k], by (logit descending, id ascending).
        logits: float32 [R, k], as the model gave them.
        probs: float32 [R, k], softmax over the full vocabulary at the temperature.
        tail: float32 [R], probability of all ids not kept, summed over them.
        logsumexp: float32 [R] at T = 1.
        logsumexp_t: float32 [R] at the temperature, of logits / T.
    """

    ids: np.ndarray
    logits: np.ndarray
    probs: np.ndarray
    tail: np.ndarray
    logsumexp: np.ndarray
    logsumexp_t: np.ndarray

    def take(self, index: np.ndarray | slice) -> SparseRows:
        """The rows at ``index``."""
        return SparseRows(*(getattr(self, f.name)[index] for f in fields(self)))

    @staticmethod
    def concat(parts: Sequence[SparseRows]) -> SparseRows:
        """Rows of all parts, in order."""
        return SparseRows(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(SparseRows)))


def largest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every row, ties by the lower id.

    Args:
        logits_RV: Finite logits.
        k: How many, 1 to V.

    Returns:
        Values [R, k] and ids int64 [R, k], by (logit descending, id ascending).
    """
    values, ids = torch.topk(logits_RV, k, dim=-1)
    ids, order = ids.sort(-1)
    values, again = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, again)
    least = values[:, -1:]
    cut = ((logits_RV == least).sum(-1) > (values == least).sum(-1)).nonzero().flatten()
    if len(cut):  # the k-th value is shared with ids that topk left out: sort these rows whole
        rows, places = logits_RV[cut].sort(dim=-1, descending=True, stable=True)
        values[cut], ids[cut] = rows[:, :k], places[:, :k]
    return values, ids


def sparse_rows(logits_RV: Tensor, *, top_k: int, temperature: float) -> SparseRows:
    """Keep the largest logits of every row with their probabilities, the tail and the normalisers.

    Args:
        logits_RV: Finite logits, float32.
        top_k: Ids to keep per row, 1 to V.
        temperature: Of the probabilities, above 0.

    Returns:
        The kept rows, on the host.
    """
    return SparseRows(
        *(column.cpu().numpy() for column in kept_columns(logits_RV, top_k=top_k, temperature=temperature))
    )


def kept_columns(logits_RV: Tensor, *, top_k: int, temperature: float) -> Sparse:
    """What ``SparseRows`` holds, where the logits are.

    A GPU reads every row once, by the op of the same name, for up to 64 ids; more, and on a CPU, by stock operations.

    Args:
        logits_RV: Logits, float32.
        top_k: Ids to keep per row, 1 to V.
        temperature: Of the probabilities, above 0.

    Returns:
        Columns on the logits' device.
    """
    if logits_RV.device.type == "cuda" and top_k <= MOST:
        return sparse_topk(logits_RV, k=top_k, temperature=temperature)
    block = max(1, BLOCK_VALUES // logits_RV.shape[1])
    parts = [_block(part, top_k, temperature) for part in logits_RV.split(block)]
    return parts[0] if len(parts) == 1 else Sparse(*(torch.cat(columns) for columns in zip(*parts)))


def _block(logits_RV: Tensor, top_k: int, temperature: float) -> Sparse:
    values, ids = largest(logits_RV, top_k)
    x = logits_RV.double()
    peak = values[:, :1].double()
    one = peak[:, 0] + (x - peak).exp_().sum(-1).log()
    weight = x.sub_(peak).div_(temperature).exp_()
    total = weight.sum(-1, keepdim=True)
    probs = weight.gather(-1, ids) / total
    tail = weight.scatter_(-1, ids, 0.0).sum(-1) / total[:, 0]
    hot = peak[:, 0] / temperature + total[:, 0].log()
    return Sparse(ids.to(torch.int32), values.float(), probs.float(), tail.float(), one.float(), hot.float())


def check_mass(probs_RK: np.ndarray, tail_R: np.ndarray, positions_R: Sequence[int] | np.ndarray) -> None:
    """Stop when the kept probabilities and the tail of a row do not sum to one.

    Args:
        probs_RK: float32 probabilities of the kept ids.
        tail_R: float32 tails, summed independently.
        positions_R: Position of every row, for the sentence.

    Raises:
        UserError: A sum is off by more than 2e-5.
    """
    off = np.abs(probs_RK.astype(np.float64).sum(-1) + tail_R.astype(np.float64) - 1.0)
    bad = np.flatnonzero(~(off <= MASS_TOLERANCE))
    if len(bad):
        raise UserError(
            f"the probabilities of position {int(positions_R[bad[0]])} and their tail miss 1 by {off[bad[0]]:.3g}; at "
            f"most {MASS_TOLERANCE} is valid: the row is corrupt, so nothing made from it is kept"
        )


def check_rows(extremes_R2: np.ndarray, positions_R: np.ndarray) -> None:
    """Refuse rows of logits that hold NaN or infinity, naming the first bad position.

    Args:
        extremes_R2: As ``heads.extremes`` gives them.
        positions_R: Absolute position of every row.

    Raises:
        NonFiniteError: A row is not finite.
    """
    bad = np.flatnonzero(~np.isfinite(extremes_R2).all(-1))
    if len(bad):
        raise row_error(float(extremes_R2[bad[0], 0]), int(positions_R[bad[0]]))
