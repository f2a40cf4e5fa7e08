"""Write a model as a Hugging Face directory that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from workbench.core.errors import CheckpointError
from workbench.model.weights.draft_file import DRAFT_FILE
from workbench.model.weights.names import parameter_table

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def published_tensors(model: HybridModel, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Published names to tensors, unstacked.

    Args:
        model: The model.
        dtype: Type to store; None for the model's own.

    Returns:
        Contiguous CPU tensors under canonical names.
    """
    params = dict(model.named_parameters())
    tensors: dict[str, torch.Tensor] = {}
    for name, parts in parameter_table(model.config, mtp=model.mtp is not None).items():
        at = 0
        for part in parts:
            rows = part.shape[0]
            piece = params[name].detach()[at : at + rows].reshape(part.shape)
            tensors[part.name] = piece.to("cpu", dtype or model.dtype).contiguous().clone()
            at += rows
    return tensors


def save_model(model: HybridModel, path: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write config.json, model.safetensors, the tokenizer files and, of a trimmed draft head, its ids.

    Args:
        model: The model.
        path: Directory, made if needed.
        dtype: Type to store; None for the model's own.

    Returns:
        The directory.

    Raises:
        CheckpointError: The directory holds other weights, which a loader would read instead of these or beside them.
    """
    path.mkdir(parents=True, exist_ok=True)
    others = {*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")} - {
        path / "model.safetensors",
        path / DRAFT_FILE,
    }
    if others:
        raise CheckpointError(
            f"{path} holds other weights ({', '.join(sorted(file.name for file in others))}); save to an empty "
            "directory, or remove them first"
        )
    partial = path / "model.safetensors.partial"
    save_file(published_tensors(model, dtype), partial, metadata={"format": "pt"})
    (path / DRAFT_FILE).unlink(missing_ok=True)  # of the weights before
    os.replace(partial, path / "model.safetensors")
    if model.draft_head is not None:
        model.save_draft_vocab(path)
    config = model.config.to_dict()
    config["dtype"] = str(dtype or model.dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if model.path is not None and model.path.resolve() != path.resolve():
        for name in _TOKENIZER_FILES:
            if (model.path / name).exists():
                shutil.copyfile(model.path / name, path / name)
    return path
