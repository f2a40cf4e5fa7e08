"""Key/value rows kept packed: each row is packed once, when it is appended, and attention reads what unpacks.

A row is never attended in the precision it had before (quantise, then attend), its own row included. So what a row
sees depends on the text alone: not on how it was cut into forwards, and not on what was fed and taken back.

Rows are unpacked for one layer's attention at a time and not kept: while it runs, that layer's rows also exist in the
model's type, which ``nbytes`` does not count.

Legend: B sequences, T rows, N key/value heads, D head width, S rows held, P bytes of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from workbench.cache.formats import Format
from workbench.cache.kv import BLOCK, AttentionPlane, grown


class PackedPlane(AttentionPlane):
    """Rows of one layer, K and V each in its format.

    Args:
        batch: Sequences.
        heads: Key/value heads.
        dim: Head width.
        k_format: Of the keys.
        v_format: Of the values.
        dtype: Type that attention reads.
        device: Where rows are kept.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        dim: int,
        *,
        k_format: Format,
        v_format: Format,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.codecs = (k_format, v_format)
        self.formats = (k_format.name, v_format.name)
        self.dtype = dtype
        held = min(BLOCK, self.most_rows or BLOCK)
        self.packed_BNSP = [
            torch.zeros(batch, heads, held, f.row_bytes(dim, dtype), dtype=torch.uint8, device=device)
            for f in self.codecs
        ]

    @property
    def layout(self) -> str:
        """Heads, bytes of a row, formats and window."""
        (_, n, _, pk), (_, _, _, pv) = (packed.shape for packed in self.packed_BNSP)
        seen = "" if self.window is None else f", window {self.window}"
        return f"K/V {n}x({pk}+{pv}) bytes {self.formats[0]}/{self.formats[1]}{seen}"

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``export`` gives."""
        rows = length - self.oldest(length)
        return {
            name: (packed.shape[1], rows, packed.shape[3])
            for name, packed in zip(("k", "v"), self.packed_BNSP, strict=True)
        }

    @property
    def most_rows(self) -> int | None:
        """Rows it will ever hold; None for no bound."""
        return None

    @property
    def held(self) -> int:
        """Rows allocated per sequence."""
        return self.packed_BNSP[0].shape[2]

    def reserve(self, rows: int) -> None:
        """Hold at least ``rows`` rows per sequence, growing by doubling, in whole blocks, up to ``most_rows``."""
        want = grown(self.held, rows)
        want = want if self.most_rows is None else min(want, self.most_rows)
        for i, old in enumerate(self.packed_BNSP):
            b, n, held, p = old.shape
            if want > held:
                self.packed_BNSP[i] = old.new_zeros(b, n, want, p)
                self.packed_BNSP[i][:, :, :held] = old

    def append(self, k_BTND: Tensor, v_BTND: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Pack ``counts[b]`` rows and keep them at ``lengths[b]`` of every sequence."""
        self.reserve(max(at + n for at, n in zip(lengths, counts, strict=True)))
        for b, (at, n) in enumerate(zip(lengths, counts, strict=True)):
            if n:
                for codec, packed, x in zip(self.codecs, self.packed_BNSP, (k_BTND, v_BTND), strict=True):
                    self._put(packed[b], at, codec.encode(x[b, :n]).transpose(0, 1))

    def _put(self, packed_NSP: Tensor, at: int, rows_NTP: Tensor) -> None:
        packed_NSP.narrow(1, at, rows_NTP.shape[1]).copy_(rows_NTP)

    def _get(self, packed_NSP: Tensor, start: int, stop: int) -> Tensor:
        return packed_NSP[:, start:stop]

    def read(self, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The rows, unpacked."""
        k, v = (
            codec.decode(self._get(packed[b], start, stop), self.dtype)
            for codec, packed in zip(self.codecs, self.packed_BNSP, strict=True)
        )
        return k, v

    def stored(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """The packed rows."""
        k, v = (self._get(packed[b], self.oldest(length), length) for packed in self.packed_BNSP)
        return k, v

    def load(self, b: int, length: int, k_NRP: Tensor, v_NRP: Tensor) -> None:
        """Take packed rows."""
        self.reserve(length)
        for packed, rows in zip(self.packed_BNSP, (k_NRP, v_NRP), strict=True):
            self._put(packed[b], self.oldest(length), rows)

    def enlarged(self, capacity: int) -> PackedPlane:
        """This plane with room for ``capacity`` rows, or as many as it ever holds."""
        twin = copy(self)
        twin.packed_BNSP = list(self.packed_BNSP)
        twin.reserve(-(-capacity // BLOCK) * BLOCK)
        return twin

    def clear(self) -> None:
        """Zeros in every row."""
        for packed in self.packed_BNSP:
            packed.zero_()

    def fork(self) -> PackedPlane:
        """An independent copy."""
        twin = copy(self)
        twin.packed_BNSP = [packed.clone() for packed in self.packed_BNSP]
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(packed.numel() for packed in self.packed_BNSP)
