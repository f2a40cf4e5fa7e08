"""The target's final norm, kept beside its trunk rows so that post-norm rows and logits can be rebuilt from them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.manifest import Manifest

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

NORM_FILE = "norm.safetensors"
LAYERS = "tap i is the output rows of layer i, counted from 0; hidden is the last layer's, before the final norm"


def norm_facts(model: HybridModel) -> dict[str, Any]:
    """Kind, epsilon and fingerprint (of the weight's float32 bytes) of the final norm, for the manifest."""
    weight = model.norm.detach().float().cpu().contiguous().numpy()
    return {
        "kind": "rms_norm(x) * (1 + weight)",
        "eps": model.config.rms_norm_eps,
        "file": NORM_FILE,
        "fingerprint": hashlib.sha256(weight.tobytes()).hexdigest()[:16],
    }


def row_facts(model: HybridModel) -> dict[str, Any]:
    """What a reader of trunk rows needs to know of them: the norm they lack, and how layers are counted."""
    return {"norm": norm_facts(model), "pre_norm": True, "layer_convention": LAYERS}


def norm_bytes(model: HybridModel) -> bytes:
    """The final norm's weight as a safetensors file with one tensor, "weight" [H] in float32."""
    from safetensors.torch import save

    return save({"weight": model.norm.detach().float().cpu().contiguous()})


def post_norm(hidden_NH: np.ndarray, path: str | Path) -> np.ndarray:
    """Apply a dataset's final norm to its trunk rows.

    Args:
        hidden_NH: Trunk rows, float32.
        path: The dataset's directory.

    Returns:
        float32 [N, H]; times the vocabulary head they are logits.

    Raises:
        CheckpointError: The directory holds no dataset.
    """
    from safetensors.numpy import load_file

    facts = Manifest.read(path).extra["norm"]
    scale = 1.0 + load_file(Path(path) / facts["file"])["weight"]
    x = hidden_NH.astype(np.float32)
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(facts["eps"])) * scale
