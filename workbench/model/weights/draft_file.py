"""The file of a draft vocabulary: ids and where they come from, beside the weights whose rows they name.

Rows of the head are not stored a second time. What ties the ids to them is a fingerprint of the head in bfloat16, which
is the same for a checkpoint in any type it is loaded in.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from workbench.core.errors import CheckpointError
from workbench.model.draft_vocab import DraftVocab

DRAFT_FILE = "draft_head.safetensors"
KIND = "draft vocabulary"
ROWS = 1 << 15  # rows hashed at a time


@torch.no_grad()
def head_fingerprint(weight_VH: Tensor) -> str:
    """Hash of a head's shape and of its weights rounded to bfloat16, 16 hex digits."""
    digest = hashlib.sha256(f"{tuple(weight_VH.shape)}".encode())
    for part in weight_VH.detach().split(ROWS):
        digest.update(part.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def write_draft_vocab(path: Path, chosen: DraftVocab, weight_VH: Tensor) -> Path:
    """Write a draft vocabulary, whole or not at all.

    Args:
        path: A directory, where it gets its usual name, or a file.
        chosen: The ids.
        weight_VH: The head they were cut from.

    Returns:
        The file.
    """
    file = path / DRAFT_FILE if path.is_dir() else path
    about = {"source": chosen.source, "coverage": chosen.coverage}
    facts = {"format": "pt", "kind": KIND, "vocab_size": str(len(weight_VH)), "about": json.dumps(about)}
    partial = file.with_name(file.name + ".partial")
    save_file({"ids": chosen.ids}, partial, metadata={**facts, "head": head_fingerprint(weight_VH)})
    os.replace(partial, file)
    return file


def read_draft_vocab(file: Path, weight_VH: Tensor) -> DraftVocab:
    """Read a draft vocabulary of this head.

    Args:
        file: The file.
        weight_VH: The head whose rows the ids are to name.

    Returns:
        The ids.

    Raises:
        CheckpointError: It is no such file, or was made for a head of another size or with other weights.
    """
    try:
        with safe_open(file, framework="numpy") as handle:
            facts, names = handle.metadata() or {}, list(handle.keys())
            if facts.get("kind") != KIND or names != ["ids"]:
                raise CheckpointError(f"{file} is not a draft vocabulary: save_draft_vocab writes one")
            ids = handle.get_tensor("ids")
        about = json.loads(facts["about"])
        size, head, chosen = int(facts["vocab_size"]), facts["head"], DraftVocab(ids, **about)
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist: save_draft_vocab writes a draft vocabulary") from None
    except CheckpointError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is not a whole draft vocabulary ({error}): trim and save it again") from None
    if size != len(weight_VH):
        raise CheckpointError(
            f"{file} is a draft vocabulary over {size} ids, and this model has {len(weight_VH)}: trim this model and "
            "save it again, or remove the file"
        )
    if head != (here := head_fingerprint(weight_VH)):
        raise CheckpointError(
            f"{file} was cut from head {head}, and this model's head is {here}: trim this model and save it again, or "
            "remove the file"
        )
    if (
        ids.dtype != "int64"
        or ids.ndim != 1
        or not len(ids)
        or ids[0] < 0
        or ids[-1] >= size
        or (ids[1:] <= ids[:-1]).any()
    ):
        raise CheckpointError(f"{file} holds ids that are not ascending ids below {size}: trim and save it again")
    return chosen
