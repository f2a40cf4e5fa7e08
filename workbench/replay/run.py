"""One tape through the target and, from every start at once, through the drafter.

The row of position p holds what the target says after x_p, and the chain that the drafter proposes when x_p is
pending: a function of the tokens up to p alone, since true rows do not depend on where rounds begin. Under sampling it
is one of the noise too, which belongs to positions. The forced chain is fed the tape's tokens instead of its own.
Legend: T rows of a chunk, P starts, H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.cache.kv import KVPlane
from workbench.core.errors import UserError
from workbench.core.tape import Tape, first_pending
from workbench.model.chain import ChainBatch
from workbench.model.hybrid import HybridModel, check_finite
from workbench.replay.draws import TapeDraws
from workbench.replay.options import ReplayOptions
from workbench.sampling.pick import margins, picks

HEAD_VALUES = 1 << 24  # logits held at a time


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows first..first+T-1 of one tape; a row that has no next token is not among them.

    Args:
        first: Position of row 0.
        target_id: The target's pick or draw for the next place, int32 [T].
        target_margin: Its lead, in logits, float32 [T]: the top-2 margin of a pick, see ``TapeDraws.picks`` for a draw.
        nll: -ln p of the tape's next token, softmax at T = 1, float32 [T], nats.
        draft_ids: Drafted ids, int32 [T, K]; -1 where there is no chain or the slot is past the end.
        draft_top1: The drafter's probability of each, float64 [T, K]; NaN likewise.
        draft_margin: The lead of each, float32 [T, K]; NaN likewise.
        draft_top: The largest probability of each draft's row, float32 [T, K]; None where drafts are picks.
        target_p: The target's shaped probability of the tape's next token, float64 [T]; None without forced chains.
        forced_q: The drafter's of the tape's token in each slot, fed the tape's tokens, float64 [T, K]; None likewise.
        forced_top: The largest probability of that row, softmax at T = 1, float32 [T, K]; None likewise.
        normed: The target's final-normed rows [T, H] on its device.
        trunk: Its trunk rows [T, H] on its device.
    """

    first: int
    target_id: np.ndarray
    target_margin: np.ndarray
    nll: np.ndarray
    draft_ids: np.ndarray
    draft_top1: np.ndarray
    draft_margin: np.ndarray
    draft_top: np.ndarray | None
    target_p: np.ndarray | None
    forced_q: np.ndarray | None
    forced_top: np.ndarray | None
    normed: Tensor
    trunk: Tensor


def head_slices(model: HybridModel, normed_TH: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of rows, in slices that bound memory whatever the vocabulary."""
    step = max(16, HEAD_VALUES // model.config.vocab_size)
    for lo in range(0, normed_TH.shape[0], step):
        part = slice(lo, min(lo + step, normed_TH.shape[0]))
        yield part, model.unembed(normed_TH[part].unsqueeze(0))[0]


@torch.inference_mode()
def chain_tape(
    model: HybridModel,
    tape: Tape,
    options: ReplayOptions,
    *,
    sequence: int = 0,
    chains: bool = True,
    cache: Mapping[str, Any] | None = None,
) -> Iterator[Chunk]:
    """Run one tape in chunks.

    Args:
        model: The target with its head.
        tape: The document, of at least two tokens.
        options: Slots, stride, chunk, carrier, shaping and seed.
        sequence: The tape's random stream under the seed; default 0.
        chains: Draft; False only scores.
        cache: How the target keeps its rows, as arguments of ``new_cache``; None for dense and all of them.

    Yields:
        Chunks in order, covering positions 0..len-2.

    Raises:
        UserError: The tape has one token only.
        NonFiniteError: A row of logits holds NaN or infinity.
    """
    n = len(tape)
    if n < 2:
        raise UserError(f"tape {tape.doc_id!r} has {n} token; at least 2 are needed to score one")
    draws = None if options.plain else TapeDraws(tape.tokens, options, sequence)
    state = model.new_cache(capacity=n, widest=options.chunk, **(cache or {}))
    draft_cache = model.new_draft_cache(capacity=n) if chains else None
    tokens_1T = torch.from_numpy(tape.tokens.astype(np.int64))[None].to(model.device)
    last: Tensor | None = None
    for lo in range(0, n - 1, options.chunk):
        hi = min(lo + options.chunk, n - 1)
        rows = model.forward(tokens_1T[:, lo:hi], state, logits="none")
        normed, trunk = rows.normed_BTH[0], rows.trunk_BTH[0]
        if draws is not None:
            draws.prepare(lo + 1, hi - lo + options.k_max, model.config.vocab_size, model.device)
        target = _score(model, normed, tokens_1T[0, lo + 1 : hi + 1], lo, draws)
        slots = _Slots(lo, hi - lo, options.k_max, n, draws)
        if draft_cache is not None:
            carriers = model.carrier(rows, options.carrier)[0]
            known = carriers if last is None else torch.cat([last, carriers])
            last = carriers[-1:]
            begin = max(lo, 1)  # the pair of position p needs the row before it
            if begin < hi:
                pairs = known[: hi - begin]
                hidden = model.draft(tokens_1T[:, begin:hi], pairs.unsqueeze(0), draft_cache)[0]
                base = first_pending(tape.prompt_len)
                starts = [p for p in range(max(begin, base), hi) if (p - base) % options.stride == 0]
                if starts:
                    plane = draft_cache.planes[0]
                    assert isinstance(plane, KVPlane)
                    slots.fill(starts, _chains(model, plane, hidden, starts, begin, options.k_max, draws))
                    if draws is not None and draws.forced:
                        found = _forced(model, plane, hidden, starts, begin, options.k_max, draws)
                        slots.fill_forced(starts, found)
        ids, margin, nll, target_p = target
        yield Chunk(
            lo,
            ids,
            margin,
            nll,
            slots.ids,
            slots.top1,
            slots.margin,
            slots.top,
            target_p,
            slots.forced_q,
            slots.forced_top,
            normed=normed,
            trunk=trunk,
        )


class _Slots:
    """Columns of the slots of one chunk, empty until filled."""

    def __init__(self, first: int, t: int, k: int, length: int, draws: TapeDraws | None) -> None:
        def empty(dtype: type, have: bool = True) -> np.ndarray | None:
            return np.full((t, k), np.nan, dtype) if have else None

        self.first, self.length = first, length
        self.ids = np.full((t, k), -1, np.int32)
        self.top1, self.margin = np.full((t, k), np.nan), np.full((t, k), np.nan, np.float32)
        self.top = empty(np.float32, draws is not None)
        forced = draws is not None and draws.forced
        self.forced_q, self.forced_top = empty(np.float64, forced), empty(np.float32, forced)

    def _past(self, starts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the starts, and which of their slots lie past the end of the tape."""
        at = np.array(starts)
        return at - self.first, at[:, None] + 1 + np.arange(self.ids.shape[1]) >= self.length

    def fill(self, starts: list[int], found: tuple[np.ndarray, ...]) -> None:
        """Ids, probabilities, margins and largest probabilities of chains."""
        at, past = self._past(starts)
        ids, top1, margin, top = found
        self.ids[at] = np.where(past, -1, ids)
        self.top1[at], self.margin[at] = np.where(past, np.nan, top1), np.where(past, np.nan, margin)
        if self.top is not None:
            self.top[at] = np.where(past, np.nan, top)

    def fill_forced(self, starts: list[int], found: tuple[np.ndarray, np.ndarray]) -> None:
        """Probabilities of the tape's tokens, and largest probabilities, of forced chains."""
        at, past = self._past(starts)
        assert self.forced_q is not None and self.forced_top is not None
        self.forced_q[at], self.forced_top[at] = (np.where(past, np.nan, x) for x in found)


def _score(
    model: HybridModel, normed_TH: Tensor, next_T: Tensor, first: int, draws: TapeDraws | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    parts, probs = [], []
    for part, logits in head_slices(model, normed_TH):
        check_finite(logits, first + part.start)
        picked = picks(logits)
        nll = picked.logsumexp - logits.gather(-1, next_T[part][:, None])[:, 0]
        if draws is None:
            ids, margin = picked.ids, margins(logits)
        else:
            positions = range(first + part.start + 1, first + part.stop + 1)
            ids, margin = draws.picks(logits, positions, None)
            if draws.forced:
                probs.append(draws.probs(logits, positions, next_T[part]))
        parts.append((ids.int().cpu(), margin.float().cpu(), nll.cpu()))
    ids_T, margin_T, nll_T = (torch.cat(x).numpy() for x in zip(*parts, strict=True))
    return ids_T, margin_T, nll_T, torch.cat(probs).numpy() if probs else None


def _chains(
    model: HybridModel,
    plane: KVPlane,
    hidden_TH: Tensor,
    starts: list[int],
    begin: int,
    k: int,
    draws: TapeDraws | None,
) -> tuple[np.ndarray, ...]:
    """Ids, probabilities, margins and largest probabilities of the chains, [P, K] each."""
    batch = ChainBatch(model, plane, starts)
    carrier = hidden_TH[torch.tensor(starts, device=hidden_TH.device) - begin]
    columns: list[tuple[np.ndarray, ...]] = []
    drafted_PK = np.empty((len(starts), k), np.int32)
    for slot in range(k):
        parts = []
        for part, logits in head_slices(model, carrier):
            _check_drafts(logits, starts[part], slot)
            if draws is None:
                picked = picks(logits)
                parts.append((picked.ids, picked.top1, margins(logits), picked.top1))
            else:
                found = draws.draft(logits, [p + 1 + slot for p in starts[part]], drafted_PK[part, :slot])
                parts.append((found.ids, found.p, found.margin, found.top))
        ids, *rest = (torch.cat(x) for x in zip(*parts, strict=True))
        drafted_PK[:, slot] = ids.int().cpu().numpy()
        columns.append((drafted_PK[:, slot], *(x.cpu().numpy() for x in rest)))
        if slot + 1 < k:
            carrier = batch.step(ids, carrier)
    return tuple(np.stack(x, 1) for x in zip(*columns, strict=True))


def _forced(
    model: HybridModel, plane: KVPlane, hidden_TH: Tensor, starts: list[int], begin: int, k: int, draws: TapeDraws
) -> tuple[np.ndarray, np.ndarray]:
    """Shaped probabilities of the tape's tokens, and largest probabilities, of chains fed the tape, [P, K] each."""
    batch = ChainBatch(model, plane, starts)
    carrier = hidden_TH[torch.tensor(starts, device=hidden_TH.device) - begin]
    columns, last = [], len(draws.tokens) - 1
    for slot in range(k):
        positions = [p + 1 + slot for p in starts]
        fed = draws.tokens[np.minimum(positions, last)].astype(np.int64)  # past the end anything will do
        tokens_P = torch.from_numpy(fed).to(carrier.device)
        parts = []
        for part, logits in head_slices(model, carrier):
            _check_drafts(logits, starts[part], slot)
            parts.append((draws.probs(logits, positions[part], tokens_P[part]), picks(logits).top1.cpu()))
        columns.append([torch.cat(x).numpy() for x in zip(*parts, strict=True)])
        if slot + 1 < k:
            carrier = batch.step(tokens_P, carrier)
    q_PK, top_PK = (np.stack(x, 1) for x in zip(*columns, strict=True))
    return q_PK, top_PK


def _check_drafts(logits_PV: Tensor, starts: list[int], slot: int) -> None:
    """Refuse rows of a drafter that hold NaN or infinity."""
    for i in (~logits_PV.sum(-1).isfinite()).nonzero()[:, 0].tolist():
        check_finite(logits_PV[i : i + 1], starts[i] + slot)
