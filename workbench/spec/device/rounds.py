"""Rounds of one sequence on the device: propose, verify and settle as three parts that read nothing back.

The same round as ``workbench.spec.round``, with the text, lengths, verdicts and budget kept on the device. A round
always drafts K tokens; those that the policy's threshold or the budget forbid are not fed. A sequence that has ended
lets further rounds pass without a trace, so that a stream of rounds may run past its end.
Legend: B sequences (1), T places of a verify (K + 1), K drafts, H hidden, V vocabulary, R cells of the text, M rounds
of a stream, L positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.model import kernel_path
from workbench.model.hybrid import HybridModel
from workbench.spec.device.graphs import Graphs
from workbench.spec.device.law import Choices, DeviceLaw
from workbench.spec.device.planes import Planes
from workbench_kernels.rounds import assemble_verify, keep_rows
from workbench_kernels.settle import (
    ALIVE,
    COUNTED,
    KEEP,
    LEFT,
    LENGTH,
    LOGGED,
    QUEUED,
    ROUND,
    SLOTS,
    Books,
    settle_round,
)

RUNG = 1024  # the shortest context that graphs are captured for; longer ones double


@dataclass(frozen=True)
class Stand:
    """What a reader on the host learns.

    Args:
        length: Rows of the target.
        slots: Final rows of the drafter.
        queued: Pairs queued for it.
        left: Tokens that may still be emitted.
        done: Rounds run since ``load``.
        log: Of every round run since the last reading: the facts of ``LOGGED``, its drafts, and the bits of
            their probabilities.
        fault: Index into ``FAULTS``, and a position.
    """

    length: int
    slots: int
    queued: int
    left: int
    done: int
    log: list[list[int]]
    fault: tuple[int, int]


class Judged(NamedTuple):
    """What a verify gives.

    Args:
        fed_BT: Pending token and drafts.
        counts_B2: Drafts and base.
        picks_BT: The target's own token after each.
        sound_BT: NaN where a row is not finite.
        trunk_TH: Rows before the final norm.
        normed_TH: Rows after it.
    """

    fed_BT: Tensor
    counts_B2: Tensor
    picks_BT: Tensor
    sound_BT: Tensor
    trunk_TH: Tensor
    normed_TH: Tensor


class DeviceRounds:
    """A program of rounds over the planes of one session.

    Args:
        model: The target.
        cache: Its cache: dense planes, one sequence.
        drafts: The MTP head's cache; None for plain decode.
        k: Drafts per round.
        law: How rows become tokens.
        capacity: Longest text.
        p_min: Least probability of a draft that is fed.
        pmin0: It holds for the first draft too.
        reads_top: It tests the largest probability of the row instead of the draft's.
        carrier: "normed" or "pre_norm".
        stop_ids: Tokens that end the text.
        stream: M, rounds that run between two readings.
        graphs: Capture parts as CUDA graphs.
        override_LK: Drafts to take in place of the head's own picks, by the position of the pending token, int64; the
            head runs all the same. None for its own.
    """

    def __init__(
        self,
        model: HybridModel,
        cache: HybridCache,
        drafts: HybridCache | None,
        *,
        k: int,
        law: DeviceLaw,
        capacity: int,
        p_min: float = 0.0,
        pmin0: bool = False,
        reads_top: bool = False,
        carrier: str = "normed",
        stop_ids: Sequence[int] = (),
        stream: int = 1,
        graphs: bool = True,
        override_LK: Tensor | None = None,
    ) -> None:
        assert k == 0 or drafts is not None, "drafts need a drafter's cache"
        self.model, self.k, self.law, self.stream = model, k, law, stream
        self.drafting, self.carrier, self.override_LK = drafts is not None, carrier, override_LK
        self.p_min, self.pmin0, self.reads_top = p_min, pmin0, reads_top
        t, device, width = k + 1, model.device, model.config.hidden_size
        room = capacity + 2 * t + 1
        self.planes = Planes(model, cache, drafts, t, room)
        whole: dict = dict(dtype=torch.int64, device=device)
        self.books = Books(
            torch.zeros(8, 1, dtype=torch.int32, device=device), torch.zeros(k, 1, dtype=torch.int32, device=device),
            torch.zeros(1, t, **whole), torch.zeros(1, **whole), torch.zeros(1, **whole), torch.zeros(1, t, **whole),
            torch.zeros(1, room, **whole), torch.zeros(stream, 1, len(LOGGED) + 2 * k, **whole),
            torch.zeros(1, 2, **whole),
        )  # fmt: skip
        self.drafted_BK = torch.zeros(1, k, **whole)
        self.probs_BK = torch.zeros(1, k, dtype=torch.float32, device=device)
        rows = [torch.zeros(t, width, dtype=model.dtype, device=device) for _ in range(4)]
        self.old_trunk_TH, self.old_normed_TH = rows[:2]
        self.judged = Judged(
            torch.zeros(1, t, **whole), torch.zeros(1, 2, dtype=torch.int32, device=device),
            torch.zeros(1, t, **whole), torch.zeros(1, t, dtype=torch.float32, device=device), *rows[2:],
        )  # fmt: skip
        self.stops_S = torch.tensor(sorted(stop_ids), **whole) if stop_ids else None
        self.ahead_K = torch.arange(k, **whole)
        self.graphs = Graphs(device, graphs, self._idle)
        self.longest = 0
        self._known: dict[tuple[str, int], tuple[object, ...]] = {}
        self._bound: tuple[object, ...] = ()

    # ------------------------------------------------------------------------------------------------ in and out

    def load(self, tokens: Sequence[int], pairs: Tensor, carriers_QH: Tensor, slots: int, budget: int) -> None:
        """Take a sequence in.

        Args:
            tokens: The text, the pending token last.
            pairs: Tokens of the pairs the drafter has not seen, the pending one last, int64 [Q], Q up to T.
            carriers_QH: Their carriers.
            slots: Final rows of the drafter.
            budget: Tokens that may be emitted.
        """
        books, k, t = self.books, self.k, self.k + 1
        start, q = len(tokens) - 1, len(pairs)
        self.planes.load()
        ints = [start, slots, q, budget, 0, int(budget > 0), 0, len(tokens)]
        books.ints_XB.copy_(torch.tensor(ints, dtype=torch.int32)[:, None])
        books.slots_KB.copy_(torch.arange(slots + q, slots + q + k, dtype=torch.int32)[:, None])
        books.places_BT.copy_(torch.arange(start + 1, start + 1 + t)[None])
        books.seed_B.fill_(q - 1)
        books.pending_B.fill_(tokens[-1])
        books.queue_BT.zero_()
        books.queue_BT[0, :q] = pairs
        books.text_BR[0, : len(tokens)] = torch.tensor(tokens, device=self.model.device)
        books.fault_B2.zero_()
        self.carriers()[:q] = carriers_QH

    def read(self, since: int) -> Stand:
        """What the rounds after the first ``since`` did, at most M of them; waits for them."""
        books, width = self.books, self.books.log_MBX.shape[2]
        parts = [books.ints_XB.view(-1).long(), books.fault_B2.view(-1), books.log_MBX.view(-1)]
        flat = torch.cat(parts).tolist()
        done = flat[ROUND]
        log = [flat[10 + at * width :][:width] for at in (i % self.stream for i in range(since, done))]
        return Stand(flat[LENGTH], flat[SLOTS], flat[QUEUED], flat[LEFT], done, log, (flat[8], flat[9]))

    def rebind(self, cache: HybridCache, drafts: HybridCache | None) -> None:
        """Use the planes that the caches hold now; graphs that read other planes or weights are let go."""
        before = self._bound
        self.planes.rebind(cache, drafts)
        self._bound = (self.planes.addresses, self.model.draft_head, *map(_state, self.model.parameters()))
        if self._bound != before:
            self.graphs.kept.clear()
            self._known.clear()

    def carriers(self) -> Tensor:
        """Carriers of the queued pairs, [T, H]."""
        return self.old_normed_TH if self.carrier == "normed" else self.old_trunk_TH

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """The sequence counts as ended, so that rounds pass without a trace; afterwards it goes on."""
        kept = [x.clone() for x in self.books]
        self.books.ints_XB[LEFT].zero_()
        self.books.ints_XB[ALIVE].zero_()
        try:
            yield
        finally:
            for x, was in zip(self.books, kept, strict=True):
                x.copy_(was)

    # ------------------------------------------------------------------------------------------------- the parts

    def _way(self, rows: int) -> kernel_path.Way:
        return kernel_path.way_of(self.model.exact, rows, 1)

    def draft(self) -> None:
        """The queued pairs through the drafter, and a chain of K tokens after the pending one."""
        model, books, planes = self.model, self.books, self.planes
        ints = books.ints_XB
        way = self._way(self.k + 1)
        mix = planes.draft_mixer(ints[SLOTS], self.longest, ints[QUEUED], way)
        rows = kernel_path.draft_step(model, books.queue_BT[0], self.carriers(), mix, way=way)
        if not self.k:
            return
        hidden = rows.index_select(0, books.seed_B)
        chosen = None if self.override_LK is None else self.override_LK.index_select(0, ints[LENGTH].long())
        for j in range(self.k):
            length = ints[COUNTED] + j if self.law.reads_text else ints[COUNTED]
            made = self._choose_draft(hidden, books.places_BT[0, j : j + 1], length)
            token = made.tokens_R if chosen is None else chosen[:, j]
            self.drafted_BK[:, j].copy_(token)
            self.probs_BK[:, j].copy_(made.tops_R if self.reads_top else made.probs_R)
            if self.law.reads_text:
                books.text_BR[0].index_copy_(0, length.long(), token)
            if j + 1 < self.k:
                mix = planes.draft_mixer(books.slots_KB[j], self.longest, None, self._way(1))
                hidden = kernel_path.draft_step(model, token, hidden, mix, way=self._way(1))

    def _choose_draft(self, hidden_BH: Tensor, place_1: Tensor, length_1: Tensor) -> Choices:
        """The drafter's token of one row, an id of the target's."""
        model, head = self.model, self.model.draft_head
        if head is None:
            logits = model.unembed_draft(hidden_BH.unsqueeze(0))[0]
            return self.law.choose(logits, place_1, self.books.text_BR[0], length_1)
        rows = kernel_path.logits_of(hidden_BH, head.weight_DH, True)
        if self.law.plain:
            made = self.law.choose(rows, place_1, self.books.text_BR[0], length_1)
            return Choices(head.ids_D[made.tokens_R], made.probs_R, made.tops_R)
        whole = rows.new_full((len(rows), model.config.vocab_size), float("-inf")).index_copy_(1, head.ids_D, rows)
        return self.law.choose(whole, place_1, self.books.text_BR[0], length_1)

    def verify(self) -> Judged:
        """The pending token and its drafts through the target, and the target's own token after each."""
        model, books = self.model, self.books
        fed, counts = assemble_verify(
            self.drafted_BK, self.probs_BK, books.pending_B, p_min=self.p_min, first=self.pmin0,
            most_B=books.ints_XB[LEFT],
        )  # fmt: skip
        if self.law.reads_text and self.k:
            books.text_BR[0].index_copy_(0, books.ints_XB[COUNTED] + self.ahead_K, fed[0, 1:])
        way = self._way(self.k + 1)
        mix = self.planes.mixer(books.ints_XB[LENGTH], self.longest, way)
        trunk, normed, _ = kernel_path.decoder(model, fed[0], mix, way=way)
        logits = kernel_path.logits_of(normed, model.embed if model.head is None else model.head, True)
        made = self.law.choose(logits, books.places_BT[0], books.text_BR[0], books.ints_XB[COUNTED])
        return Judged(fed, counts, made.tokens_R[None], made.probs_R[None], trunk, normed)

    def _verify_apart(self) -> None:
        for kept, made in zip(self.judged, self.verify(), strict=True):
            kept.copy_(made)

    def settle(self, judged: Judged) -> None:
        """The verdict, and every plane, length and book that follows from it."""
        fed, counts, picks, sound, trunk, normed = judged
        settle_round(self.books, picks, sound, fed, counts, self.probs_BK, stops_S=self.stops_S)
        keep_B = self.books.ints_XB[KEEP]
        self.planes.commit(keep_B)
        flat = [x.view(1, -1) for x in (self.old_normed_TH, normed, self.old_trunk_TH, trunk)]
        keep_rows(flat[0], flat[1], flat[2], flat[3], keep_B)

    def round(self) -> None:
        """One whole round."""
        if self.drafting:
            self.draft()
        self.settle(self.verify())

    # ------------------------------------------------------------------------------------------------ running it

    def key(self, part: str) -> tuple[object, ...]:
        """Everything that shapes the launches of a part."""
        model, head = self.model, self.model.draft_head
        return (
            part, None if head is None else head.weight_DH.data_ptr(), self.k, self.drafting, self.longest, self.p_min,
            self.pmin0, self.reads_top, self.carrier, model.exact, model.dtype, self.override_LK is not None,
            self.law.signature(), None if self.stops_S is None else tuple(self.stops_S.tolist()),
            self.planes.addresses,
        )  # fmt: skip

    def reach(self, length: int, rounds: int) -> None:
        """Let attention cover what that many rounds from a length may hold: a rung of 1,024, doubled."""
        need, rung = length + (rounds + 1) * (self.k + 1) + 1, RUNG
        while rung < need:
            rung *= 2
        self.longest = min(rung, *(kv.k_BNSD.shape[2] for kv in self.planes.attention))

    def run(self, rounds: int) -> None:
        """Whole rounds, one after another, with nothing read between."""
        for _ in range(rounds):
            self.graphs.run(self._keyed("round"), self.round)

    def run_parts(self) -> tuple[float, float, float]:
        """One round by its three parts.

        Returns:
            Seconds of draft, verify and settle on the device.
        """
        marks = Marks(self.model.device)
        parts = {"draft": self.draft, "verify": self._verify_apart, "settle": lambda: self.settle(self.judged)}
        for name, part in parts.items():
            if name != "draft" or self.drafting:
                self.graphs.run(self._keyed(name), part)
            marks.mark()
        a, b, c = marks.seconds()
        return a, b, c

    def _keyed(self, part: str) -> tuple[object, ...]:
        if (part, self.longest) not in self._known:
            self._known[part, self.longest] = self.key(part)
        return self._known[part, self.longest]


def _state(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies and how often it was written; what is derived from weights is captured as it was."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class Marks:
    """Times between marks on a device, without waiting at them.

    Args:
        device: Where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seen: list[torch.cuda.Event] = []
        self.at: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Note the present place in the device's work."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.seen.append(event)
        else:
            self.at.append(perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between marks; waits for the last."""
        if not self.cuda:
            return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]
        self.seen[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.seen, self.seen[1:], strict=False)]
