"""Anchor records as NumPy arrays in their own shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError
from workbench.datasets.bfloat import from_bfloat16_bits

if TYPE_CHECKING:
    import datasets

PER_KEPT = ("top_ids", "top_logits", "top_probs")


def to_arrays(records: datasets.Dataset, columns: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Read records into arrays; take a slice with ``records.select(range(...))`` first when there are many.

    Args:
        records: Anchor records.
        columns: Names to read; None for all.

    Returns:
        Columns by name: ``hidden`` float32 [N, H], ``tokens`` [N, gamma + 1], ``top_*`` [N, gamma, k], other slot
        columns [N, gamma], strings as object arrays.

    Raises:
        UserError: A column is unknown, or these are no anchor records.
    """
    if "slot_mask" not in records.column_names:
        raise UserError(
            f"the records have columns {', '.join(records.column_names)}, so they are no anchor records: give what "
            "load_anchors(...) opens; read_sequence(...) reads a sequence store"
        )
    names = list(records.column_names if columns is None else columns)
    for name in names:
        if name not in records.column_names:
            raise UserError(f"column {name!r} is not valid: choose among {', '.join(records.column_names)}")
    table = records.select_columns(names).with_format("arrow")[:]
    gamma = records.features["slot_mask"].length
    return {name: _array(name, table.column(name), gamma) for name in names}


def _array(name: str, column: Any, gamma: int) -> np.ndarray:
    import pyarrow as pa

    if not pa.types.is_fixed_size_list(column.type):
        return column.to_numpy()
    n = len(column)
    flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    if name == "hidden" and flat.dtype == np.uint16:
        flat = from_bfloat16_bits(flat)
    return flat.reshape((n, gamma, -1) if name in PER_KEPT else (n, -1))
