"""Average two checkpoints of one training run, parameter by parameter.

Source: Wortsman et al. 2022 (arXiv 2203.05482), "Model soups".
"""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.core.errors import CheckpointError, check_real
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model
from workbench.model.weights.save import save_model


def average(a: str | Path, b: str | Path, *, out: str | Path, weight: float = 0.5) -> HybridModel:
    """Write (1 - weight) * a + weight * b as a bfloat16 checkpoint.

    Args:
        a: First checkpoint; its tokenizer files go along.
        b: Second checkpoint, of the same shape.
        out: Directory for the average.
        weight: Share of the second, in [0, 1]; default 0.5.

    Returns:
        The averaged model in float32.

    Raises:
        CheckpointError: The two have different shapes.
    """
    check_real("weight", weight, low=0.0, high=1.0)
    first, second = load_model(a), load_model(b)
    if first.config != second.config:
        raise CheckpointError(f"{a} and {b} have different configs; only checkpoints of one shape can be averaged")
    other = second.state_dict()
    first.load_state_dict({name: torch.lerp(value, other[name], weight) for name, value in first.state_dict().items()})
    save_model(first, Path(out), dtype=torch.bfloat16)
    return first
