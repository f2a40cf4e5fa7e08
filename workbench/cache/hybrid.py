"""The cache of a whole decoder: one plane per layer, one length per sequence, and transactions over all of them.

``ckpt = cache.checkpoint()`` opens a transaction; forwards then record what a commit needs. ``commit(ckpt, keep=n)``
leaves every plane as if exactly the first n rows had been fed; ``rollback(ckpt)`` leaves the state before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from weakref import WeakSet

import torch
from torch import Tensor

from workbench.cache.kv import AttentionPlane
from workbench.cache.recurrent import RecurrentPlane
from workbench.cache.ring import RingPlane
from workbench.core.errors import UserError, check_choice

STRATEGIES = ("tape", "columns", "snapshot")


@dataclass(eq=False)
class Checkpoint:
    """State before a verify: lengths, references to each window and state; for a snapshot, what was fed.

    ``cut`` says that a commit may keep a part of what was fed.
    """

    lengths: list[int]
    recurrent: list[tuple[Tensor, Tensor]]
    cut: bool = True
    fed: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    open: bool = True


@dataclass(eq=False)
class Saved:
    """A past state of a cache, to return to while its K/V rows stand.

    Args:
        lengths: Rows per sequence.
        recurrent: Each delta layer's window and state, by reference: such tensors are replaced, never written to.
        stale: The cache was cut back below these lengths since, so its rows may be another text's.
    """

    lengths: tuple[int, ...]
    recurrent: tuple[tuple[Tensor, Tensor], ...]
    stale: bool = False


class HybridCache:
    """Planes of every layer for B sequences.

    Args:
        planes: One plane per layer: K/V rows, or a recurrent state.
        batch: Sequences B.
        capacity: Rows a sequence may hold.
        strategy: How ``commit`` cuts a verify short: "tape" replays recorded inputs, "columns" keeps the state after
            every row, "snapshot" restores and feeds the kept tokens again.
        refeed: For "snapshot": called with (cache, tokens [B, T], counts) to run the model on the cache.
    """

    def __init__(
        self,
        planes: Sequence[AttentionPlane | RecurrentPlane],
        *,
        batch: int,
        capacity: int,
        strategy: str = "tape",
        refeed: Callable[[HybridCache, Tensor, list[int]], object] | None = None,
    ) -> None:
        self.planes = list(planes)
        self.batch, self.capacity = batch, capacity
        self.strategy = check_choice("strategy", strategy, STRATEGIES)
        self.lengths = [0] * batch
        self.refeed = refeed
        self.rings = [plane for plane in self.planes if isinstance(plane, RingPlane)]
        self._open: Checkpoint | None = None
        self._torn = False
        self._saves: WeakSet[Saved] = WeakSet()

    @property
    def recurrent(self) -> list[RecurrentPlane]:
        """The delta layers' planes, in order."""
        return [plane for plane in self.planes if isinstance(plane, RecurrentPlane)]

    @property
    def idle(self) -> bool:
        """True when no transaction is open and no forward was interrupted."""
        return self._open is None and not self._torn

    def room(self, b: int = 0) -> int:
        """Rows sequence ``b`` may still take."""
        return self.capacity - self.lengths[b]

    def admit(self, tokens_BT: Tensor, counts: Sequence[int]) -> None:
        """Let a forward begin, or refuse it with nothing changed; a snapshot keeps its tokens.

        Args:
            tokens_BT: Token ids of the forward.
            counts: Valid tokens per sequence.

        Raises:
            UserError: The tokens do not fit this cache, or an earlier forward on it never came to its end.
        """
        self._check_whole("roll back the open checkpoint, or start again from a new cache")
        b, t = tokens_BT.shape
        if b != self.batch or len(counts) != self.batch:
            raise UserError(
                f"tokens of {b} sequences and {len(counts)} counts were given to a cache of {self.batch}: give one "
                "row of tokens and one count per sequence"
            )
        if t < 1 or any(not 0 <= n <= t for n in counts):
            raise UserError(
                f"counts={list(counts)!r} is not valid for {t} tokens per sequence: give 0 to {t} for each, and at "
                "least one token"
            )
        for i, n in enumerate(counts):
            if self.lengths[i] + n > self.capacity:
                raise UserError(
                    f"sequence {i} holds {self.lengths[i]} rows and {n} more were given, but its cache has room for "
                    f"{self.capacity}: make the cache larger or feed fewer tokens"
                )
        self._check_width(max(counts))
        if self._open is not None and self._open.cut and self.strategy == "snapshot":
            self._open.fed.append((tokens_BT.clone(), list(counts)))
        self._torn = True

    def _check_width(self, rows: int) -> None:
        widest = min((ring.widest for ring in self.rings), default=rows)
        if rows > widest:
            raise UserError(
                f"{rows} rows in one forward are not valid for a cache with window={self.rings[0].window} and "
                f"widest={widest}: feed at most {widest} at a time, or make the cache with widest={rows}"
            )

    def advance(self, counts: Sequence[int]) -> None:
        """Count the rows a forward has written, at its end."""
        self.lengths = [at + n for at, n in zip(self.lengths, counts, strict=True)]
        self._torn = False

    def checkpoint(self, *, cut: bool = True) -> Checkpoint:
        """Open a transaction; exactly one may be open at a time.

        Args:
            cut: Record what a commit of only some rows needs; False costs nothing, and is for forwards that are kept
                whole or rolled back, such as a prefill.

        Returns:
            The handle that ``commit`` or ``rollback`` closes.

        Raises:
            UserError: A transaction is open already.
        """
        if self._open is not None:
            raise UserError("a checkpoint of this cache is still open: commit it or roll it back first")
        self._check_whole("start again from a new cache")
        planes = self.recurrent
        for plane in planes:
            plane.tape = [] if cut else None
            plane.keep_columns = self.strategy == "columns"
        for ring in self.rings:
            ring.mark(self.lengths)
        self._open = Checkpoint(list(self.lengths), [(plane.conv_BWC, plane.state_BHKV) for plane in planes], cut)
        return self._open

    def _check_whole(self, remedy: str) -> None:
        if self._torn:
            raise UserError(f"a forward on this cache was interrupted, so its layers disagree: {remedy}")

    def _check_open(self, ckpt: Checkpoint) -> None:
        if ckpt is not self._open:
            raise UserError("this checkpoint is not the open one of this cache: take a new one with checkpoint()")

    def _close(self, ckpt: Checkpoint) -> None:
        self._check_open(ckpt)
        self._open = None
        ckpt.open = False

    def rollback(self, ckpt: Checkpoint) -> None:
        """Leave every plane as it was at ``ckpt``, also after a forward that was interrupted."""
        self._close(ckpt)
        self._restore(ckpt)

    def _restore(self, ckpt: Checkpoint) -> None:
        self._torn = False
        self._cut_back(ckpt.lengths)
        for plane, (conv, state) in zip(self.recurrent, ckpt.recurrent, strict=True):
            plane.conv_BWC, plane.state_BHKV = conv, state
            plane.tape = None
        for ring in self.rings:
            ring.restore()

    def commit(self, ckpt: Checkpoint, *, keep: int | Sequence[int]) -> None:
        """Leave every plane as if exactly the first ``keep`` rows since ``ckpt`` had been fed.

        Args:
            ckpt: The open checkpoint.
            keep: Rows to keep, one number or one per sequence, from 0 to the rows fed.

        Raises:
            UserError: ``keep`` is out of range, the checkpoint is not the open one, or a window's ring has lapped rows
                that the kept ones need; nothing changes then.
        """
        self._check_open(ckpt)
        self._check_whole("roll back instead of committing")
        wanted = [int(keep)] * self.batch if isinstance(keep, int | Integral) else [int(n) for n in keep]
        fed = [now - was for now, was in zip(self.lengths, ckpt.lengths, strict=True)]
        if len(wanted) != self.batch or any(not 0 <= n <= f for n, f in zip(wanted, fed, strict=True)):
            raise UserError(f"keep={keep!r} is not valid: rows fed since the checkpoint are {fed}; keep 0 to that many")
        planes = self.recurrent
        if wanted == fed:
            self._close(ckpt)
            for plane in planes:
                plane.tape = None
            for ring in self.rings:
                ring.release()
            return
        if not ckpt.cut:
            raise UserError(f"keep={keep!r} is not valid: a checkpoint with cut=False is kept whole or rolled back")
        if self.strategy == "snapshot":
            self._check_width(max(wanted))
            self._refeed(ckpt, wanted)
            return
        if any(wanted):
            lengths = [was + n for was, n in zip(ckpt.lengths, wanted, strict=True)]
            self._check_rewind(lengths)
            for plane, (conv, state) in zip(planes, ckpt.recurrent, strict=True):
                plane.cut(conv, state, wanted)
                plane.tape = None
            self._close(ckpt)
            self._cut_back([was + n for was, n in zip(ckpt.lengths, wanted, strict=True)])
            for ring in self.rings:
                ring.release()
        else:
            self.rollback(ckpt)

    def _check_rewind(self, lengths: Sequence[int]) -> None:
        for ring in self.rings:
            for b, length in enumerate(lengths):
                ring.check_rewind(b, length)

    def _refeed(self, ckpt: Checkpoint, wanted: list[int]) -> None:
        assert self.refeed is not None, "a snapshot cache is made by the model, which passes refeed"
        self.rollback(ckpt)
        tokens: list[list[int]] = [[] for _ in range(self.batch)]
        for tokens_BT, counts in ckpt.fed:
            for b, n in enumerate(counts):
                tokens[b] += tokens_BT[b, :n].tolist()
        kept = [row[:n] for row, n in zip(tokens, wanted, strict=True)]
        if any(kept):
            width = max(map(len, kept))
            filled = [row + [0] * (width - len(row)) for row in kept]
            device = ckpt.fed[0][0].device
            for ring in self.rings:
                ring.mark(self.lengths)
            try:
                self.refeed(self, torch.tensor(filled, device=device), [len(row) for row in kept])
            except BaseException:
                self._restore(ckpt)
                raise
            for ring in self.rings:
                ring.release()

    def truncate(self, rows: int) -> None:
        """Forget every row from ``rows`` on, also after an interrupted forward; for caches of K/V planes alone.

        Raises:
            UserError: A window's ring has lapped rows that are needed there; nothing changes then.
        """
        assert not self.recurrent and self._open is None and rows <= min(self.lengths)
        self._check_rewind([rows] * self.batch)
        self._cut_back([rows] * self.batch)
        self._torn = False

    @torch.inference_mode()
    def clear(self) -> None:
        """Hold nothing, as when new, in the memory that the planes have; no transaction may be open.

        Nothing that was saved before can be returned to.
        """
        assert self._open is None
        self.lengths, self._torn = [0] * self.batch, False
        for saved in self._saves:
            saved.stale = True
        for plane in self.planes:
            plane.clear()

    @property
    def layout(self) -> str:
        """Format of every plane, in words."""
        return "; ".join(plane.layout for plane in self.planes)

    def shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what ``export`` gives after ``length`` rows."""
        return {f"{i}.{name}": x for i, plane in enumerate(self.planes) for name, x in plane.shapes(length).items()}

    def export(self) -> dict[str, Tensor]:
        """Copies of all that one sequence's planes hold, by layer and name; also inside a transaction.

        Returns:
            Tensors that ``adopt`` takes.
        """
        assert self.batch == 1 and not self._torn
        at = self.lengths[0]
        return {f"{i}.{name}": x for i, plane in enumerate(self.planes) for name, x in plane.export(at).items()}

    def adopt(self, state: Mapping[str, Tensor], length: int) -> None:
        """Hold exported planes; names and shapes must be those of ``shapes``. An exception leaves the cache empty.

        Args:
            state: From ``export``.
            length: Rows they were exported after.
        """
        assert self.batch == 1 and self._open is None and self.lengths == [0] and length <= self.capacity
        try:
            for i, plane in enumerate(self.planes):
                plane.adopt({name: state[f"{i}.{name}"] for name in plane.shapes(length)}, length)
        except BaseException:
            self.clear()
            raise
        self.lengths = [length]

    def _cut_back(self, lengths: Sequence[int]) -> None:
        """Set lengths to earlier ones; what was saved beyond them cannot be returned to any more."""
        self.lengths = list(lengths)
        for saved in self._saves:
            saved.stale |= any(was > now for was, now in zip(saved.lengths, lengths, strict=True))

    def save(self) -> Saved:
        """The present state, to ``restore`` later; it holds references, and copies nothing.

        It may be taken inside a transaction; a rollback then makes it stale.
        """
        self._check_whole("roll back the open checkpoint, or start again from a new cache")
        return self._keep(Saved(tuple(self.lengths), tuple((p.conv_BWC, p.state_BHKV) for p in self.recurrent)))

    def _keep(self, saved: Saved) -> Saved:
        self._saves.add(saved)
        return saved

    def adopt_saved(self, saved: Saved) -> Saved:
        """What another cache saved, for this cache, which was forked from that one since.

        Args:
            saved: Saved before the fork.

        Returns:
            A handle of this cache's own.
        """
        return self._keep(Saved(saved.lengths, saved.recurrent, saved.stale))

    def check_saved(self, saved: Saved) -> None:
        """Refuse what cannot be restored.

        Raises:
            UserError: A transaction is open, or the cache was cut back below the saved state since.
        """
        if self._open is not None:
            raise UserError("a checkpoint of this cache is still open: commit it or roll it back first")
        if saved not in self._saves:
            raise UserError("this state was saved from another cache: restore it there")
        if saved.stale:
            raise UserError(
                f"the saved state of {list(saved.lengths)} rows is gone, since the cache was cut back below it: feed "
                "its text again"
            )
        self._check_rewind(saved.lengths)

    def restore(self, saved: Saved) -> None:
        """Return to a saved state, bit for bit; the rows after it are forgotten.

        Raises:
            UserError: See ``check_saved``; nothing changes then.
        """
        self.check_saved(saved)
        self._cut_back(saved.lengths)
        self._torn = False
        for plane, (conv, state) in zip(self.recurrent, saved.recurrent, strict=True):
            plane.conv_BWC, plane.state_BHKV = conv, state
            plane.tape = None

    def grow(self, capacity: int) -> Callable[[], None]:
        """Admit more rows, and allocate them at once; an exception changes nothing.

        Args:
            capacity: Rows a sequence may hold from now on, at least as many as before.

        Returns:
            Undoes it, while no forward has run since.
        """
        assert capacity >= self.capacity, f"a cache of {self.capacity} rows cannot shrink to {capacity}"
        was, planes = self.capacity, self.planes
        bigger = [p if isinstance(p, RecurrentPlane) else p.enlarged(capacity) for p in planes]

        def put(chosen: Sequence[AttentionPlane | RecurrentPlane], limit: int) -> None:
            self.planes, self.capacity = list(chosen), limit
            self.rings = [plane for plane in self.planes if isinstance(plane, RingPlane)]

        put(bigger, capacity)
        return lambda: put(planes, was)

    def fork(self) -> HybridCache:
        """An independent copy of a cache without an open transaction."""
        if self._open is not None:
            raise UserError("a cache with an open checkpoint cannot be forked: commit it or roll it back first")
        self._check_whole("start again from a new cache")
        twin = HybridCache(
            [plane.fork() for plane in self.planes],
            batch=self.batch,
            capacity=self.capacity,
            strategy=self.strategy,
            refeed=self.refeed,
        )
        twin.lengths = list(self.lengths)
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated by all planes."""
        return sum(plane.nbytes for plane in self.planes)

    def first_difference(self, other: HybridCache) -> str | None:
        """Name the first place where two caches differ in bits, or None when they are equal.

        Args:
            other: A cache of the same model.

        Returns:
            None, or a sentence naming layer, plane, sequence and row.
        """
        if self.lengths != other.lengths:
            return f"lengths differ: {self.lengths} and {other.lengths}"
        for layer, (a, b) in enumerate(zip(self.planes, other.planes, strict=True)):
            if isinstance(a, RecurrentPlane):
                assert isinstance(b, RecurrentPlane)
                for name in ("conv_BWC", "state_BHKV"):
                    if not same_bits(getattr(a, name), getattr(b, name)):
                        return f"layer {layer}: {name} differs"
                continue
            assert isinstance(a, AttentionPlane) and isinstance(b, AttentionPlane)
            if (a.formats, a.window) != (b.formats, b.window):
                kinds = [f"{'/'.join(x.formats)} with window={x.window}" for x in (a, b)]
                return f"layer {layer}: cache formats differ: {kinds[0]} and {kinds[1]}"
            for seq, length in enumerate(self.lengths):
                for name, x, y in zip("kv", a.stored(seq, length), b.stored(seq, length), strict=True):
                    if not same_bits(x, y):
                        at = a.oldest(length) + int((x != y).any(-1).any(0).nonzero()[0])
                        return f"layer {layer}: {name} of sequence {seq} differs first in row {at}"
        return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True when two tensors agree in shape, type and every bit, the sign of zeros included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(view), b.contiguous().view(view))
