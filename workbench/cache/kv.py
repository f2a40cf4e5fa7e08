"""Key/value rows of one attention layer: what every kind of plane offers, and the dense one.

Legend: B sequences, T rows, N key/value heads, D head width, S rows held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

BLOCK = 64  # keys per block; exact attention merges blocks of this size in order


def grown(held: int, rows: int) -> int:
    """Rows that storage of ``held`` holds after it has made room for ``rows``: doubled at least, in whole blocks."""
    return held if rows <= held else -(-max(rows, 2 * held) // BLOCK) * BLOCK


class AttentionPlane(ABC):
    """K and V rows of one layer. Rows at or past a sequence's length are free and hold finite values.

    Positions are absolute: row p of a sequence is its p-th, wherever it is kept.
    """

    window: int | None = None  # a row sees its own and the window - 1 rows before it; None for all
    formats: tuple[str, str] = ("dense", "dense")  # of K and V

    @abstractmethod
    def append(self, k_BTND: Tensor, v_BTND: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Write ``counts[b]`` rows at ``lengths[b]`` of every sequence.

        Args:
            k_BTND: New keys.
            v_BTND: New values.
            lengths: Rows each sequence holds already.
            counts: Valid rows of each sequence; rows past them are ignored.
        """

    @abstractmethod
    def read(self, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V [N, stop - start, D] of sequence ``b`` as attention sees them, from position ``start`` on.

        Places outside what is held, up to the end of a block, come as any finite values.
        """

    @abstractmethod
    def stored(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """Bytes [N, rows, bytes of a row] of the rows that may still be seen; the last is row ``length`` - 1."""

    @abstractmethod
    def load(self, b: int, length: int, k_NRP: Tensor, v_NRP: Tensor) -> None:
        """Take into an empty sequence what ``stored(b, length)`` of a plane of the same kind gave."""

    @abstractmethod
    def enlarged(self, capacity: int) -> AttentionPlane:
        """This plane with its rows for up to ``capacity`` rows per sequence allocated; itself it stays as it is."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Hold at least ``rows`` rows per sequence, or as many as are ever needed."""

    @abstractmethod
    def clear(self) -> None:
        """Hold nothing, as when new, in the memory that it has."""

    @abstractmethod
    def fork(self) -> AttentionPlane:
        """An independent copy."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes allocated."""

    @property
    @abstractmethod
    def layout(self) -> str:
        """Shape and format of a row, in words; states move only between planes of one layout."""

    @abstractmethod
    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what ``export`` gives."""

    def export(self, length: int) -> dict[str, Tensor]:
        """Copies of the rows of a cache of one sequence that may still be seen after ``length``: bytes of k and v."""
        k, v = self.stored(0, length)
        return {"k": k.clone(), "v": v.clone()}

    def adopt(self, state: Mapping[str, Tensor], length: int) -> None:
        """Hold exported rows as those of a cache of one sequence."""
        self.load(0, length, state["k"], state["v"])

    def parts(self, b: int, length: int) -> dict[str, Tensor]:
        """Contents of sequence ``b`` by name, the row first: "k" and "v", bytes of the rows that may still be seen."""
        k, v = self.stored(b, length)
        return {"k": k.transpose(0, 1), "v": v.transpose(0, 1)}

    def oldest(self, length: int) -> int:
        """First position that row ``length`` may see."""
        return 0 if self.window is None else max(0, length - self.window + 1)

    def rows(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V rows [N, rows, D] of sequence ``b`` that may still be seen; without a window, all ``length``."""
        return self.read(b, self.oldest(length), length)


class KVPlane(AttentionPlane):
    """Dense rows in the model's type, in blocks of 64."""

    def __init__(self, batch: int, heads: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.k_BNSD = torch.zeros(batch, heads, BLOCK, dim, dtype=dtype, device=device)
        self.v_BNSD = torch.zeros_like(self.k_BNSD)

    def reserve(self, rows: int) -> None:
        """Hold at least ``rows`` rows per sequence, growing by doubling, in whole blocks."""
        held = self.k_BNSD.shape[2]
        if rows <= held:
            return
        b, n, _, d = self.k_BNSD.shape
        bigger = []
        for old in (self.k_BNSD, self.v_BNSD):
            new = torch.zeros(b, n, grown(held, rows), d, dtype=old.dtype, device=old.device)
            new[:, :, :held] = old
            bigger.append(new)
        self.k_BNSD, self.v_BNSD = bigger  # both, once there was memory for both

    def append(self, k_BTND: Tensor, v_BTND: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Write ``counts[b]`` rows at ``lengths[b]`` of every sequence."""
        self.reserve(max(at + n for at, n in zip(lengths, counts, strict=True)))
        for b, (at, n) in enumerate(zip(lengths, counts, strict=True)):
            if n:
                self.k_BNSD[b].narrow(1, at, n).copy_(k_BTND[b, :n].transpose(0, 1))
                self.v_BNSD[b].narrow(1, at, n).copy_(v_BTND[b, :n].transpose(0, 1))

    def read(self, b: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the rows."""
        return self.k_BNSD[b, :, start:stop], self.v_BNSD[b, :, start:stop]

    def stored(self, b: int, length: int) -> tuple[Tensor, Tensor]:
        """The rows' own bytes."""
        start = self.oldest(length)
        k, v = (x[b, :, start:length].contiguous().view(torch.uint8) for x in (self.k_BNSD, self.v_BNSD))
        return k, v

    def load(self, b: int, length: int, k_NRP: Tensor, v_NRP: Tensor) -> None:
        """Take the bytes of rows."""
        self.reserve(length)
        start, dtype = self.oldest(length), self.k_BNSD.dtype
        self.k_BNSD[b, :, start:length] = k_NRP.contiguous().view(dtype)
        self.v_BNSD[b, :, start:length] = v_NRP.contiguous().view(dtype)

    def enlarged(self, capacity: int) -> KVPlane:
        """This plane with room for ``capacity`` rows."""
        twin = copy(self)
        twin.reserve(-(-capacity // BLOCK) * BLOCK)
        return twin

    def clear(self) -> None:
        """Zeros in every row, for whatever stood there need not be finite."""
        self.k_BNSD.zero_()
        self.v_BNSD.zero_()

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

    def parts(self, b: int, length: int) -> dict[str, Tensor]:
        """Contents of sequence ``b`` by name, the row first: "k" and "v", [length, N, D]."""
        k, v = self.rows(b, length)
        return {"k": k.transpose(0, 1), "v": v.transpose(0, 1)}

    def fork(self) -> KVPlane:
        """An independent copy."""
        twin = object.__new__(KVPlane)
        twin.k_BNSD, twin.v_BNSD, twin.window = self.k_BNSD.clone(), self.v_BNSD.clone(), self.window
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 2 * self.k_BNSD.numel() * self.k_BNSD.element_size()
