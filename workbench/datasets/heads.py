"""Logits of many rows, block by block, so that memory is bounded whatever the vocabulary.

Legend: R rows, H hidden, V vocabulary, D ids of a trimmed draft head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.core.errors import NonFiniteError
from workbench.model.hybrid import HybridModel

HEAD_VALUES = 1 << 24  # logits held at a time
DEVICE_VALUES = 1 << 27  # likewise on a GPU, where a block must be tall enough to be worth reading the head for


def block_rows(width: int, device: torch.device) -> int:
    """Rows of a block of logits of this width."""
    return max(16, (HEAD_VALUES if device.type == "cpu" else DEVICE_VALUES) // width)


def head_slices(model: HybridModel, rows_RH: Tensor, *, draft: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Logits of rows that carry the final norm, in slices that bound memory.

    Args:
        model: The target.
        rows_RH: Its rows, or the drafter's carriers.
        draft: By the head that drafts, which may be trimmed; ids that it lacks have -inf.

    Yields:
        A slice of the rows, and their logits, float32.
    """
    unembed = model.unembed_draft if draft else model.unembed
    step = block_rows(model.config.vocab_size, rows_RH.device)
    for lo in range(0, rows_RH.shape[0], step):
        part = slice(lo, min(lo + step, rows_RH.shape[0]))
        yield part, unembed(rows_RH[part].unsqueeze(0))[0]


def extremes(logits_RV: Tensor) -> Tensor:
    """Least and largest logit of every row, [R, 2]; both NaN where the row holds NaN."""
    if logits_RV.device.type == "cpu":  # where one pass for both is far slower than two
        return torch.stack([logits_RV.amin(-1), logits_RV.amax(-1)], 1)
    return torch.stack(logits_RV.aminmax(dim=-1), 1)


def non_finite(extremes_R2: Tensor) -> Tensor:
    """True for rows whose extremes say that they hold NaN or infinity."""
    return ~extremes_R2.isfinite().all(-1)


def row_error(low: float, position: int) -> NonFiniteError:
    """The error of a row that is not finite.

    Args:
        low: Its least logit.
        position: Its absolute position.

    Returns:
        The error, to raise.
    """
    return NonFiniteError(position, "NaN" if low != low else "infinity")
