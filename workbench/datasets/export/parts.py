"""What turns exported rows into logits: a model's embedding, head and final norm, and the ids of its draft head.

Legend: S rows, H hidden, V vocabulary, D ids of the trimmed head.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import sync_directory
from workbench.model.ops import rms_norm

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

FILE = "parts.safetensors"
NORM_KINDS = {"1+w": 1.0, "w": 0.0}  # what is added to the stored weight of the final norm


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model that a trainer of drafters needs beside its rows.

    Args:
        embedding_VH: Input embedding, in the model's type.
        head_VH: Output head over the whole vocabulary; the embedding itself where they are tied.
        final_norm_H: Stored weight of the final norm, float32.
        eps: Added to the mean square under the root.
        norm_kind: "1+w" where the norm multiplies by one plus its weight, the default, or "w".
        draft_ids_D: Absolute ids of the trimmed draft head, int64, ascending; None for the whole vocabulary.

    Raises:
        UserError: Shapes do not fit each other, the kind is unknown, or the ids are not ascending ids of the head.
    """

    embedding_VH: Tensor
    head_VH: Tensor
    final_norm_H: Tensor
    eps: float
    norm_kind: str = "1+w"
    draft_ids_D: Tensor | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.head_VH.shape)
        if len(shape) != 2 or tuple(self.embedding_VH.shape) != shape or tuple(self.final_norm_H.shape) != shape[1:]:
            raise UserError(
                f"an embedding of shape {tuple(self.embedding_VH.shape)}, a head of {shape} and a final norm of "
                f"{tuple(self.final_norm_H.shape)} are not parts of one model: give [V, H], [V, H] and [H]"
            )
        if self.norm_kind not in NORM_KINDS or not self.eps >= 0:
            raise UserError(
                f"norm_kind={self.norm_kind!r} with eps={self.eps!r} is not valid: a final norm multiplies by '1+w' "
                "or by 'w', and its eps is a number of at least 0"
            )
        ids = self.draft_ids_D
        if ids is not None:
            good = ids.dtype == torch.int64 and ids.ndim == 1 and len(ids) > 0
            if not good or int(ids[0]) < 0 or int(ids[-1]) >= shape[0] or not bool((ids.diff() > 0).all()):
                raise UserError(
                    f"the ids of the trimmed head are not valid: they must be int64, ascending and distinct, from 0 "
                    f"to {shape[0] - 1}"
                )

    @classmethod
    def of(cls, model: HybridModel) -> ModelParts:
        """The parts of a model, on the host."""
        embedding = model.embed.detach().cpu()
        head = embedding if model.head is None else model.head.detach().cpu()
        trimmed = model.draft_head
        ids = None if trimmed is None else trimmed.ids_D.detach().cpu().clone()
        return cls(embedding, head, model.norm.detach().float().cpu(), model.config.rms_norm_eps, "1+w", ids)

    @property
    def tied(self) -> bool:
        """True where the head is the embedding."""
        return self.head_VH is self.embedding_VH

    @property
    def scale_H(self) -> Tensor:
        """What the normalised row is multiplied by, float32."""
        return NORM_KINDS[self.norm_kind] + self.final_norm_H

    @property
    def kept_ids_D(self) -> Tensor:
        """Ids that drafts may use, int64, ascending: those of the trimmed head, or all."""
        return torch.arange(len(self.head_VH)) if self.draft_ids_D is None else self.draft_ids_D

    @property
    def draft_head_DH(self) -> Tensor:
        """Rows of the head for ``kept_ids_D``."""
        return self.head_VH if self.draft_ids_D is None else self.head_VH[self.draft_ids_D]

    @torch.no_grad()  # the norm takes its sums otherwise where gradients are wanted
    def normed(self, trunk_SH: Tensor) -> Tensor:
        """Rows after the final norm, float32: rounded to the model's type they have the bits of its own."""
        return rms_norm(trunk_SH.float().contiguous(), self.scale_H, self.eps)

    def logits(self, normed_SH: Tensor) -> Tensor:
        """Logits [S, V] in float32 of rows after the final norm."""
        return normed_SH.float() @ self.head_VH.float().T

    def save(self, path: str | Path) -> Path:
        """Write the parts into a directory as safetensors, whole or not at all.

        The tensors are "embedding" [V, H], "head" [V, H] where it is not the embedding, "final_norm" [H] and, for a
        trimmed head, "draft_ids" [D], "draft_head" [D, H], "d2t" [D] (a draft id plus its entry is the target's id)
        and "t2d" [V] (True for ids that drafts may use). The header holds eps, the kind of norm, and ``tied``.

        Args:
            path: The directory, made if needed.

        Returns:
            The file.
        """
        from safetensors.torch import save_file

        tensors = {"embedding": self.embedding_VH.contiguous(), "final_norm": self.final_norm_H.contiguous()}
        if not self.tied:
            tensors["head"] = self.head_VH.contiguous()
        if self.draft_ids_D is not None:
            tensors |= {name: value.contiguous() for name, value in self._trim().items()}
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        facts = json.dumps({"eps": self.eps, "norm_kind": self.norm_kind, "tied": self.tied}, sort_keys=True)
        file = directory / FILE
        temporary = file.with_name(FILE + ".tmp")
        save_file(tensors, temporary, metadata={"workbench": facts})
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, file)
        sync_directory(directory)
        return file

    def _trim(self) -> dict[str, Tensor]:
        """Tensors that follow from the ids of the trimmed head."""
        ids_D = self.kept_ids_D
        t2d_V = torch.zeros(len(self.head_VH), dtype=torch.bool)
        t2d_V[ids_D] = True
        return {
            "draft_ids": ids_D,
            "draft_head": self.draft_head_DH,
            "d2t": ids_D - torch.arange(len(ids_D)),
            "t2d": t2d_V,
        }

    @classmethod
    def load(cls, path: str | Path) -> ModelParts:
        """Read the parts that ``save`` wrote.

        Args:
            path: The directory.

        Returns:
            The parts.

        Raises:
            CheckpointError: It holds none, or its tensors do not fit each other.
        """
        from safetensors import SafetensorError, safe_open

        file = Path(path) / FILE
        if not file.is_file():
            raise CheckpointError(f"{path} has no {FILE}: give a directory that an export wrote its parts into")
        try:
            with safe_open(file, framework="pt") as opened:
                facts: dict[str, Any] = json.loads((opened.metadata() or {})["workbench"])
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            embedding = found["embedding"]
            head = embedding if facts["tied"] else found["head"]
            ids = found.get("draft_ids")
            parts = cls(embedding, head, found["final_norm"], facts["eps"], facts["norm_kind"], ids)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{file} does not hold the parts of a model ({error}): export again") from None
        for name, expected in ({} if ids is None else parts._trim()).items():
            if name not in found or not torch.equal(found[name], expected):
                raise CheckpointError(f"{name!r} of {file} is not what its draft ids say: export again")
        return parts
