"""Key/value rows of one attention layer, dense, in blocks of 64 rows.

Legend: B sequences, T rows, N key/value heads, D head width, S rows held.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        if rows > held:
            self.k_BNSD, self.v_BNSD = self.grown(max(rows, 2 * held))

    def grown(self, rows: int) -> tuple[Tensor, Tensor]:
        """K and V with room for ``rows`` rows, in whole blocks, to be taken in place of the present ones."""
        b, n, held, d = self.k_BNSD.shape
        want = -(-rows // BLOCK) * BLOCK
        if want <= held:
            return self.k_BNSD, self.v_BNSD
        out = []
        for old in (self.k_BNSD, self.v_BNSD):
            new = torch.zeros(b, n, want, d, dtype=old.dtype, device=old.device)
            new[:, :, :held] = old
            out.append(new)
        return out[0], out[1]

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

    def parts(self, b: int, length: int) -> dict[str, Tensor]:
        """Contents of sequence ``b`` by name, the row first: "k" and "v", [length, N, D]."""
        k, v = self.rows(b, length)
        return {"k": k.transpose(0, 1), "v": v.transpose(0, 1)}

    def fork(self) -> KVPlane:
        """An independent copy."""
        twin = object.__new__(KVPlane)
        twin.k_BNSD, twin.v_BNSD = self.k_BNSD.clone(), self.v_BNSD.clone()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.k_BNSD.numel() * self.k_BNSD.element_size()
