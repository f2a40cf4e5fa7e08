"""Key/value rows of a sliding window, kept in a ring: position p in slot p mod size.

A row sees itself and the window - 1 rows before it. Positions stay absolute, in slots as in the rotary embedding, so
nothing is ever moved and there is no base to rebase. The ring holds window - 1 + ``widest`` rows: one forward, or one
verify, of up to ``widest`` rows leaves every row that its start needs, so that any part of it can be taken back.
Past that a row is lapped, and going back to where it is needed is refused; an open checkpoint first sets aside the
rows that its rollback needs.

Exact attention walks the 64-key blocks that absolute positions define ([0, 64), [64, 128), ...), from the block of the
oldest key in sight on. A block that a row does not see adds exact zeros to it, so which rows share a forward does not
change bits, nor does the size of the ring.

Legend: B sequences, N key/value heads, S slots, P bytes of a packed row, R rows set aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from workbench.cache.formats import Format
from workbench.cache.quantised import PackedPlane
from workbench.core.errors import UserError


class RingPlane(PackedPlane):
    """The last rows of one layer.

    Args:
        batch: Sequences.
        heads: Key/value heads.
        dim: Head width.
        window: Rows that a row sees, its own included.
        widest: Rows that one forward may append, and that a verify may take back.
        capacity: Rows a sequence may ever have; a ring as large never laps.
        k_format: Of the keys.
        v_format: Of the values.
        dtype: Type that attention reads.
        device: Where rows are kept.
    """

    window: int

    def __init__(
        self,
        batch: int,
        heads: int,
        dim: int,
        *,
        window: int,
        widest: int,
        capacity: int,
        k_format: Format,
        v_format: Format,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window, self._asked = window, widest
        self._set_capacity(capacity)
        super().__init__(batch, heads, dim, k_format=k_format, v_format=v_format, dtype=dtype, device=device)
        self.intact = [0] * batch  # first position that no later row has lapped
        self._marked: list[int] | None = None
        self._aside: list[list[Tensor]] = []

    def _set_capacity(self, capacity: int) -> None:
        self.size = min(self.window - 1 + self._asked, capacity)
        self.widest = self._asked if self.size < capacity else capacity

    @property
    def most_rows(self) -> int:
        """Slots of the ring."""
        return self.size

    def append(self, k_BTND: Tensor, v_BTND: Tensor, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Pack and keep rows, lapping the oldest; an open checkpoint keeps a copy of the rows it needs."""
        assert max(counts) <= self.widest, "the cache refuses forwards that are wider than its rings"
        intact = [max(x, at + n - self.size) for x, at, n in zip(self.intact, lengths, counts, strict=True)]
        marked = self._marked
        if marked and not self._aside and any(x > self.oldest(m) for x, m in zip(intact, marked, strict=True)):
            self._aside = [[rows.clone() for rows in self.stored(b, m)] for b, m in enumerate(marked)]
        self.intact = intact
        super().append(k_BTND, v_BTND, lengths, counts)

    def _put(self, packed_NSP: Tensor, at: int, rows_NTP: Tensor) -> None:
        packed_NSP.index_copy_(1, self._slots(at, at + rows_NTP.shape[1], packed_NSP), rows_NTP)

    def _get(self, packed_NSP: Tensor, start: int, stop: int) -> Tensor:
        return packed_NSP.index_select(1, self._slots(start, stop, packed_NSP))

    def _slots(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Slots of these positions; a slot not allocated yet, whose position none may see, gives the last one."""
        return (torch.arange(start, stop, device=like.device) % self.size).clamp_(max=self.held - 1)

    def load(self, b: int, length: int, k_NRP: Tensor, v_NRP: Tensor) -> None:
        """Take packed rows of a window; those before it count as lapped."""
        super().load(b, length, k_NRP, v_NRP)
        self.intact[b] = self.oldest(length)

    def enlarged(self, capacity: int) -> RingPlane:
        """This ring for texts of up to ``capacity`` rows, which is more slots only while the capacity bounds them."""
        twin = copy(self)
        twin._set_capacity(capacity)  # a ring that capacity bounded has not lapped: its slots are its positions
        twin.intact, twin.packed_BNSP = list(self.intact), list(self.packed_BNSP)
        twin.reserve(twin.size)
        return twin

    # ---------------------------------------------------------------------------------------------- transactions

    def mark(self, lengths: Sequence[int]) -> None:
        """From here on, keep what ``restore`` to these lengths needs."""
        self._marked, self._aside = list(lengths), []

    def release(self) -> None:
        """The marked lengths are not needed any more."""
        self._marked, self._aside = None, []

    def restore(self) -> None:
        """Bring back the rows that were set aside, and forget the mark."""
        assert self._marked is not None
        for b, (length, kept) in enumerate(zip(self._marked, self._aside or [[]] * len(self._marked), strict=True)):
            for packed, rows in zip(self.packed_BNSP, kept, strict=False):
                self._put(packed[b], self.oldest(length), rows)
            if kept:
                self.intact[b] = min(self.intact[b], self.oldest(length))
        self.release()

    def check_rewind(self, b: int, length: int) -> None:
        """Refuse a length whose window has been lapped.

        Raises:
            UserError: A row that position ``length`` may see is gone.
        """
        if self.oldest(length) < self.intact[b]:
            raise UserError(
                f"sequence {b} cannot go back to {length} rows: with window={self.window} that needs the rows from "
                f"{self.oldest(length)} on, and those before {self.intact[b]} have been lapped; go back to "
                f"{self.intact[b] + self.window - 1} rows or more, make the cache with a larger widest than "
                f"{self.widest}, or feed the text again from the start"
            )

    def clear(self) -> None:
        """Zeros in every row, none of them lapped."""
        super().clear()
        self.intact = [0] * len(self.intact)
        self.release()

    def fork(self) -> RingPlane:
        """An independent copy, without the mark."""
        twin = super().fork()
        assert isinstance(twin, RingPlane)
        twin.intact = list(self.intact)
        twin.release()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those set aside by an open checkpoint included."""
        return super().nbytes + sum(rows.numel() for kept in self._aside for rows in kept)
