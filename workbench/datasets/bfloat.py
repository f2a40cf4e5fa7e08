"""bfloat16 as the uint16 of its bits: how hidden rows are stored where the file format has no such type."""

from __future__ import annotations

import numpy as np


def to_bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Round float32 values to bfloat16, to nearest and ties to even.

    Args:
        x: Finite float32, any shape.

    Returns:
        uint16 of the same shape.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bits, exactly.

    Args:
        bits: uint16, any shape.

    Returns:
        float32 of the same shape.
    """
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
