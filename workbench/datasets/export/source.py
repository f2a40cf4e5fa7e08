"""Documents of a sequence store as tensors, one at a time, whatever they were packed in.

Legend: S tokens, H hidden.
Tap i is the output rows of layer i, counted from 0; last rows are trunk rows, before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.core.manifest import Manifest
from workbench.datasets.shards import load_shards

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.datasets.export.parts import ModelParts

KIND = "sequence"
TAP = "tap_"
KEPT_AS = {"uint16": "bfloat16", "float32": "float32", "uint8": "fp8"}  # type of a column to type of a row


@dataclass(frozen=True, eq=False)
class SequenceRow:
    """One document.

    Args:
        doc_id: Its id.
        tokens_S: Token ids, int64.
        mask_S: Whether a token may be trained on, bool.
        last_SH: Trunk rows, before the final norm, bfloat16 or float32.
        taps: Layer to its output rows [S, H].
    """

    doc_id: str
    tokens_S: Tensor
    mask_S: Tensor
    last_SH: Tensor
    taps: dict[int, Tensor]


class SequenceSource:
    """A finished sequence store, every file of it checked against its hash.

    Args:
        path: Its directory.

    Raises:
        CapabilityError: The directory holds anchor records, which have one row per anchor.
        CheckpointError: It is no finished sequence store, its bytes have changed, or its rows are not pre-norm.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.manifest = Path(path), Manifest.read(path)
        if self.manifest.kind == "anchors":
            raise CapabilityError(
                f"{path} holds anchor records, with the rows of single positions; this format holds every position of "
                "a document: write a sequence store with extract_sequences, or `workbench extract --kind sequence`, "
                "and export that"
            )
        self.rows = load_shards(path, kind=KIND).with_format("arrow")
        if self.manifest.extra.get("pre_norm") is not True:
            raise CheckpointError(
                f"{path} does not say that its rows lie before the final norm, and no export can tell: extract again"
            )
        names = self.rows.column_names
        self.layers = tuple(sorted(int(n[len(TAP) :]) for n in names if n.startswith(TAP) and n[len(TAP) :].isdigit()))

    @classmethod
    def of(cls, path: str | Path, parts: ModelParts) -> SequenceSource:
        """A store, and parts of the model that made it; errors are those of the class and of ``check_parts``."""
        source = cls(path)
        source.check_parts(parts)
        return source

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def hidden_size(self) -> int:
        """Width of a row."""
        return int(self.manifest.model["hidden_size"])

    @property
    def hidden_dtype(self) -> str:
        """Type that rows are kept in."""
        return KEPT_AS[str(self.rows.features["hidden"].feature.dtype)]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.manifest.model["layers"])

    def check_parts(self, parts: ModelParts) -> None:
        """Refuse parts of another model than the one that made the data.

        Args:
            parts: What is to travel with an export.

        Raises:
            UserError: Vocabulary, width or final norm differ.
        """
        from safetensors.torch import load_file

        norm = self.manifest.extra["norm"]
        weight_H = load_file(self.path / norm["file"])["weight"]
        shape = (int(self.manifest.model["vocab_size"]), self.hidden_size)
        same = tuple(parts.head_VH.shape) == tuple(parts.embedding_VH.shape) == shape
        same = same and torch.equal(weight_H, parts.final_norm_H) and parts.eps == norm["eps"]
        if not same or parts.norm_kind != "1+w":
            raise UserError(
                f"the model's head {tuple(parts.head_VH.shape)} or its final norm is not that of {self.path}, made "
                f"with vocabulary and width {shape}: give the model that made the data"
            )

    def chosen(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """The layers to export.

        Args:
            layers: Wanted ones, ascending; None for all that are stored.

        Raises:
            CapabilityError: One of them is not stored.
        """
        wanted = self.layers if layers is None else tuple(layers)
        if missing := sorted(set(wanted) - set(self.layers)):
            held = ", ".join(map(str, self.layers)) or "none"
            raise CapabilityError(
                f"layers={list(wanted)} is not valid: {self.path} holds the output rows of layers {held} and not of "
                f"{missing[0]}; choose among those, or extract again with that layer tapped"
            )
        return wanted

    def documents(self, layers: Sequence[int]) -> Iterator[SequenceRow]:
        """Every document in the order of the store, with these layers' rows."""
        for index in range(len(self.rows)):
            yield self._row(self.rows[index : index + 1], layers)

    def _row(self, table: pa.Table, layers: Sequence[int]) -> SequenceRow:
        doc_id = table.column("doc_id")[0].as_py()
        tokens_S = torch.from_numpy(_values(table, "tokens").astype(np.int64))
        mask_S = torch.from_numpy(_values(table, "loss_mask").astype(bool))
        last_SH = self._hidden(table, "hidden", len(tokens_S))
        taps = {layer: self._hidden(table, f"{TAP}{layer}", len(tokens_S)) for layer in layers}
        if len(mask_S) != len(tokens_S):
            raise CheckpointError(f"document {doc_id!r} of {self.path} has a mask of another length: extract again")
        return SequenceRow(doc_id, tokens_S, mask_S, last_SH, taps)

    def _hidden(self, table: pa.Table, name: str, tokens: int) -> Tensor:
        flat = _values(table, name)
        if len(flat) != tokens * self.hidden_size:
            raise CheckpointError(
                f"column {name} of {self.path} holds {len(flat)} values where {tokens} rows of {self.hidden_size} are "
                "due: extract again"
            )
        if flat.dtype == np.uint16:
            return torch.from_numpy(flat.view(np.int16).copy()).view(torch.bfloat16).view(tokens, -1)
        if flat.dtype == np.uint8:
            scale_S = torch.from_numpy(_values(table, f"{name}_scale").copy())
            packed_SH = torch.from_numpy(flat.copy()).view(torch.float8_e4m3fn).view(tokens, -1)
            return packed_SH.float() * scale_S[:, None]
        return torch.from_numpy(flat.copy()).view(tokens, -1)


def _values(table: pa.Table, name: str) -> Any:
    """The values of a list column's only row."""
    column = table.column(name).combine_chunks()
    array = column.chunk(0) if hasattr(column, "num_chunks") else column
    return array.flatten().to_numpy(zero_copy_only=False)
