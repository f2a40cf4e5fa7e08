"""Rows as they are stored, and back: bfloat16 bits, float32, or e4m3 with a scale per token.

An e4m3 value q of a row with scale s stands for s q; the scale is the row's largest magnitude over 448, so that the
row's own values alone decide its bytes. Every step is rounded as IEEE says, on a CPU and on a GPU alike.

Legend: R rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from workbench.cache.formats import FP8
from workbench.datasets.bfloat import from_bfloat16_bits

SCALE_BYTES = 4


def stored_columns(name: str, x_RH: Tensor, dtype: str) -> dict[str, Tensor]:
    """Columns that keep rows, where the rows are.

    Args:
        name: Name of the column.
        x_RH: The rows.
        dtype: "bfloat16", "float32" or "fp8".

    Returns:
        ``name``: int16 (bits of bfloat16), float32 or uint8 (bits of e4m3) [R, H]; ``name_scale`` float32 [R] for fp8;
        ``name_whole`` bool [R], whether every value of the row is finite.
    """
    columns = {f"{name}_whole": x_RH.isfinite().all(-1)}
    if dtype == "bfloat16":
        return columns | {name: x_RH.to(torch.bfloat16).view(torch.int16)}
    if dtype == "float32":
        return columns | {name: x_RH.float()}
    packed = FP8().encode(x_RH)
    scale_R = packed[:, :SCALE_BYTES].reshape(-1).view(torch.float32)
    return columns | {name: packed[:, SCALE_BYTES:].contiguous(), f"{name}_scale": scale_R}


def read_rows(name: str, columns: Mapping[str, np.ndarray], rows: int) -> np.ndarray:
    """The rows that a document's columns keep.

    Args:
        name: Name of the column.
        columns: Flat columns by name, as they lie in a shard.
        rows: How many rows they hold, at least 1.

    Returns:
        float32 [R, H].
    """
    flat = columns[name]
    if flat.dtype == np.uint16:
        return from_bfloat16_bits(flat).reshape(rows, -1)
    if flat.dtype == np.float32:
        return flat.reshape(rows, -1)
    assert flat.dtype == np.uint8, flat.dtype
    q_RH = torch.from_numpy(flat.copy()).view(torch.float8_e4m3fn).float().numpy().reshape(rows, -1)
    return q_RH * columns[f"{name}_scale"][:, None]
