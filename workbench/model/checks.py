"""What a forward is asked for, and the rows of logits it gives, checked in sentences.

Legend: B sequences, T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.core.errors import NonFiniteError, UserError, check_choice


def check_ids(tokens_BT: Tensor, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, in a sentence that names the first; reads them back from a GPU.

    Args:
        tokens_BT: Token ids.
        vocab_size: Ids are below this.

    Raises:
        UserError: There are none, or one is out of range.
    """
    if tokens_BT.numel() == 0:
        raise UserError("no tokens were given: at least one token id is needed")
    low, high = int(tokens_BT.min()), int(tokens_BT.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise UserError(f"token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}")


def check_request(logits: str | Sequence[int], taps: Sequence[int], *, rows: int, layers: int) -> None:
    """Refuse logits or taps that a forward cannot give.

    Args:
        logits: "all", "last", "none", or row indices.
        taps: Layer indices.
        rows: Rows of the forward.
        layers: Layers of the model.

    Raises:
        UserError: A name, a row or a layer is not valid.
    """
    if isinstance(logits, str):
        check_choice("logits", logits, ("all", "last", "none"), hint="or give row indices")
    elif any(not -rows <= int(row) < rows for row in logits):
        raise UserError(f"logits={list(logits)!r} is not valid: this forward has rows 0 to {rows - 1}")
    if any(not 0 <= int(layer) < layers for layer in taps):
        raise UserError(f"taps={list(taps)!r} is not valid: this model's layers are 0 to {layers - 1}")


def check_finite(logits_TV: Tensor, first: int) -> None:
    """Refuse a block of logits rows that holds NaN or infinity, naming the first bad position.

    Args:
        logits_TV: Rows of logits.
        first: Absolute position of row 0.

    Raises:
        NonFiniteError: A row is not finite.
    """
    sums = logits_TV.sum(-1)
    if bool(torch.isfinite(sums).all()):
        return
    for i, row in enumerate(logits_TV):
        if not bool(torch.isfinite(row).all()):
            raise NonFiniteError(first + i, "NaN" if bool(row.isnan().any()) else "infinity")
