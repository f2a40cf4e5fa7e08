"""The verify forward, its row-by-row oracle, and a bisect that names the first layer whose rows differ.

Legend: B sequences (1 here), T rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache, same_bits
from workbench.model.hybrid import HybridModel, Rows


def verify(model: HybridModel, cache: HybridCache, tokens_BT: Tensor, *, rowwise: bool = False) -> Rows:
    """Run the pending token and its drafts through the target's funnel.

    Args:
        model: The target.
        cache: State to extend; the caller holds a checkpoint.
        tokens_BT: Tokens to feed.
        rowwise: Feed one row at a time, as an oracle.

    Returns:
        Rows with all logits.
    """
    if not rowwise:
        return model.forward(tokens_BT, cache, logits="all")
    parts = [model.forward(tokens_BT[:, i : i + 1], cache, logits="all") for i in range(tokens_BT.shape[1])]
    logits = [part.logits_BTV for part in parts if part.logits_BTV is not None]
    return Rows(
        torch.cat([part.trunk_BTH for part in parts], 1),
        torch.cat([part.normed_BTH for part in parts], 1),
        torch.cat(logits, 1),
    )


@dataclass(frozen=True)
class RowDifference:
    """Where a batched verify and the row-by-row oracle first part.

    Args:
        layer: First layer whose output rows differ; the number of layers when only the logits do.
        row: First row that differs there.
        largest: Largest absolute difference in that layer.
        logits: Largest absolute difference of the logits.
        margin: Top-2 margin of the oracle's logits in the first row whose pick differs; None when picks agree.
    """

    layer: int
    row: int
    largest: float
    logits: float
    margin: float | None


def bisect_rows(model: HybridModel, cache: HybridCache, tokens_BT: Tensor) -> RowDifference | None:
    """Compare a batched verify with the row-by-row oracle, layer by layer.

    Args:
        model: The target.
        cache: State both start from; left as it is.
        tokens_BT: Tokens to feed.

    Returns:
        The first difference, or None when every layer's rows agree in every bit.
    """
    layers = range(len(model.layers))
    whole = model.forward(tokens_BT, cache.fork(), taps=layers)
    twin = cache.fork()
    parts = [model.forward(tokens_BT[:, i : i + 1], twin, taps=layers) for i in range(tokens_BT.shape[1])]
    single = torch.cat([part.logits_BTV for part in parts if part.logits_BTV is not None], 1)
    assert whole.logits_BTV is not None
    gap = float((whole.logits_BTV - single).abs().max())
    changed = (whole.logits_BTV.argmax(-1) != single.argmax(-1))[0].nonzero()
    margin = None
    if len(changed):
        best = single[0, int(changed[0])].topk(2).values
        margin = float(best[0] - best[1])
    for layer in layers:
        a, b = whole.taps[layer], torch.cat([part.taps[layer] for part in parts], 1)
        if not same_bits(a, b):
            return RowDifference(layer, _first_row(a, b), float((a - b).abs().max()), gap, margin)
    if not same_bits(whole.logits_BTV, single):
        return RowDifference(len(model.layers), _first_row(whole.logits_BTV, single), gap, gap, margin)
    return None


def _first_row(a_BTX: Tensor, b_BTX: Tensor) -> int:
    """First row that differs in any bit, the sign of zeros included."""
    return next(t for t in range(a_BTX.shape[1]) if not same_bits(a_BTX[:, t], b_BTX[:, t]))
