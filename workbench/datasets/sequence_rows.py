"""Documents of a sequence store as arrays in their own shapes, and as tensors.

Legend: S tokens of the document, H hidden, K kept ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError, check_int
from workbench.datasets.rows import read_rows
from workbench.datasets.sequence_passes import sparse_names
from workbench.datasets.topk import SparseRows

if TYPE_CHECKING:
    import datasets

PER_KEPT = ("top_ids", "top_logits", "top_probs")


@dataclass(frozen=True, eq=False)
class SequenceRow:
    """One document of a sequence store.

    Args:
        doc_id: Its id.
        split: "train", "heldout" or another name.
        source: Register or file of the text.
        prompt_len: Leading tokens that are prompt.
        tokens_S: Ids, int32.
        loss_mask_S: Which tokens may be trained on, bool.
        hidden_SH: Trunk rows before the final norm, float32.
        taps: Layer, counted from 0, to its output rows, float32 [S, H].
        kept: What the target says after every token, S rows; None when the store keeps no logits.
    """

    doc_id: str
    split: str
    source: str
    prompt_len: int
    tokens_S: np.ndarray
    loss_mask_S: np.ndarray
    hidden_SH: np.ndarray
    taps: dict[int, np.ndarray]
    kept: SparseRows | None

    def __len__(self) -> int:
        return len(self.tokens_S)

    def tensors(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The document as tensors of their own memory, by the store's column names.

        Args:
            dtype: Type of the rows; default float32. Rows kept as bfloat16 come back bit for bit as bfloat16.

        Returns:
            ``tokens`` int64 [S], ``loss_mask`` bool [S], ``hidden`` and ``tap_<layer>`` [S, H] and, where kept,
            ``top_*`` [S, K] and ``tail_probs``, ``logsumexp``, ``logsumexp_t`` [S].
        """
        rows = {"hidden": self.hidden_SH} | {f"tap_{layer}": x for layer, x in self.taps.items()}
        out = {"tokens": torch.tensor(self.tokens_S, dtype=torch.int64), "loss_mask": torch.tensor(self.loss_mask_S)}
        out |= {name: torch.tensor(x).to(dtype) for name, x in rows.items()}
        if self.kept is not None:
            out |= {name: torch.tensor(getattr(self.kept, ours)) for ours, name in sparse_names().items()}
            out["top_ids"] = out["top_ids"].long()
        return out


def read_sequence(records: datasets.Dataset, index: int) -> SequenceRow:
    """One document of a sequence store.

    Args:
        records: The store, as ``load_sequences`` opens it.
        index: Which row; negative counts from the end.

    Returns:
        Its arrays.

    Raises:
        UserError: The records are no sequence store, or there is no such row.
    """
    if "loss_mask" not in records.column_names or "hidden" not in records.column_names:
        raise UserError(
            f"the records have columns {', '.join(records.column_names)}, so they are no sequence store: give what "
            "load_sequences(...) opens"
        )
    index = check_int("index", index, low=-len(records), high=len(records) - 1) % len(records)
    table = records.with_format("arrow")[index : index + 1]
    columns = {name: _values(table.column(name)) for name in records.column_names}
    n = len(columns["tokens"])
    layers = [int(name[4:]) for name in columns if name.startswith("tap_") and not name.endswith("_scale")]
    kept = None
    if "top_ids" in columns:
        shaped = {name: columns[name].reshape(n, -1) for name in PER_KEPT}
        kept = SparseRows(**{ours: shaped.get(name, columns[name]) for ours, name in sparse_names().items()})
    return SequenceRow(
        doc_id=columns["doc_id"],
        split=columns["split"],
        source=columns["source"],
        prompt_len=columns["prompt_len"],
        tokens_S=columns["tokens"],
        loss_mask_S=columns["loss_mask"],
        hidden_SH=read_rows("hidden", columns, n),
        taps={layer: read_rows(f"tap_{layer}", columns, n) for layer in layers},
        kept=kept,
    )


def sequences(records: datasets.Dataset) -> Iterator[SequenceRow]:
    """Every document of a sequence store, one at a time.

    Args:
        records: The store.

    Yields:
        Its documents, in order.
    """
    for index in range(len(records)):
        yield read_sequence(records, index)


def _values(column: Any) -> Any:
    """The one entry of a column: a plain value, or an array of a list's values."""
    import pyarrow as pa

    chunk = column.combine_chunks()
    chunk = chunk.chunk(0) if isinstance(chunk, pa.ChunkedArray) else chunk
    if pa.types.is_large_list(chunk.type):
        return chunk.flatten().to_numpy(zero_copy_only=False)
    return chunk[0].as_py()
