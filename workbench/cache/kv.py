"""Key/value rows of one attention layer, dense, in blocks of 64 rows.

Legend: B sequences, T rows, N key/value heads, D head width, S rows held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

BLOCK = 64  # keys per block; exact attention merges blocks of this size in order


class KVPlane:
    """K and V rows of one layer; rows at or past a sequence's length are free and hold finite values."""

    def __init__(self, batch: int, heads: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.k_BNSD = torch.zeros(batch, heads, BLOCK, dim, dtype=dtype, device=device)
        self.v_BNSD = torch.zeros_like(self.k_BNSD)

    def reserve(self, rows: int) -> None:
        """Hold at least ``rows`` rows per sequence, growing by doubling, in whole blocks."""
        held = self.k_BNSD.shape[2]
        if rows <= held:
            return
        want = -(-max(rows, 2 * held) // BLOCK) * BLOCK
        b, n, _, d = self.k_BNSD.shape
        for name in ("k_BNSD", "v_BNSD"):
            old = getattr(self, name)
            new = torch.zeros(b, n, want, d, dtype=old.dtype, device=old.device)
            new[:, :, :held] = old
            setattr(self, name, new)

    def append(self, k_BTND: Tensor, v_BTND: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Write ``counts[b]`` rows at ``lengths[b]`` of every sequence.

        Args:
            k_BTND: New keys.
            v_BTND: New values.
            lengths: Rows each sequence holds already.
            counts: Valid rows of each sequence; rows past them are ignored.
        """
        self.reserve(max(at + n for at, n in zip(lengths, counts, strict=True)))
        for b, (at, n) in enumerate(zip(lengths, counts, strict=True)):
            if n:
                self.k_BNSD[b].narrow(1, at, n).copy_(k_BTND[b, :n].transpose(0, 1))
                self.v_BNSD[b].narrow(1, at, n).copy_(v_BTND[b, :n].transpose(0, 1))

    def rows(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V rows [N, length, D] of sequence ``b``."""
        return self.k_BNSD[b, :, :length], self.v_BNSD[b, :, :length]

    @property
    def layout(self) -> str:
        """Shape and format of a row, in words; states move only between planes of one layout."""
        _, n, _, d = self.k_BNSD.shape
        return f"K/V {n}x{d} {str(self.k_BNSD.dtype).removeprefix('torch.')}"

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``export`` gives."""
        _, n, _, d = self.k_BNSD.shape
        return {"k": (n, length, d), "v": (n, length, d)}

    def export(self, length: int) -> dict[str, Tensor]:
        """Copies of the first ``length`` rows of a cache of one sequence: k and v, [N, length, D]."""
        k, v = self.rows(0, length)
        return {
            "k": k.clone(memory_format=torch.contiguous_format),
            "v": v.clone(memory_format=torch.contiguous_format),
        }

    def adopt(self, state: Mapping[str, Tensor], length: int) -> None:
        """Hold exported rows as the first ones of a cache of one sequence."""
        k, v = (state[name].to(self.k_BNSD.device).transpose(0, 1).unsqueeze(0) for name in ("k", "v"))
        self.append(k, v, [0], [length])

    def fork(self) -> KVPlane:
        """An independent copy."""
        twin = object.__new__(KVPlane)
        twin.k_BNSD, twin.v_BNSD = self.k_BNSD.clone(), self.v_BNSD.clone()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.k_BNSD.numel() * self.k_BNSD.element_size()
