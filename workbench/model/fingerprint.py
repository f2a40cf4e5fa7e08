"""A short hash that names a model by its configuration and every byte of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel


def fingerprint(model: HybridModel) -> str:
    """Hash a model's configuration, weight types and weight bytes.

    The result is kept on the model and made anew when a parameter has been replaced or written to.

    Args:
        model: The model.

    Returns:
        16 hex digits.
    """
    parameters = sorted(model.named_parameters())
    state = tuple((name, value.data_ptr(), value._version) for name, value in parameters)
    kept = model.__dict__.get("_fingerprint")
    if kept is not None and kept[0] == state:
        return kept[1]
    digest = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    for name, value in parameters:
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().to("cpu").contiguous().view(torch.uint8).numpy().data)
    result = digest.hexdigest()[:16]
    model.__dict__["_fingerprint"] = (state, result)
    return result
