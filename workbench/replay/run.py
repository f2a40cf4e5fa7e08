"""One tape through the target and, from every start at once, through the drafter.

The row of position p holds what the target says after x_p, and the chain that the drafter proposes when x_p is
pending: a function of the tokens up to p alone, since true rows do not depend on where rounds begin. Under sampling it
is one of the noise too, which belongs to positions. The forced chain is fed the tape's tokens instead of its own.
Optional columns are made from the same slices of logits; see ``groups``.
Legend: T rows of a chunk, P starts, H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from workbench.replay.groups import Ranks, log_probs, overlaps, shadow, token_probs, two_best
from workbench.replay.options import ReplayOptions
from workbench.sampling.pick import margins, picks

HEAD_VALUES = 1 << 24  # logits held at a time
WIDE = ("nll", "draft_top1", "target_p", "forced_q")  # columns that may be stored in float64


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows first..first+T-1 of one tape; a row that has no next token is not among them.

    Args:
        first: Position of row 0.
        target_id: The target's pick or draw for the next place, int32 [T].
        target_margin: Its lead, in logits, float32 [T]: the top-2 margin of a pick, see ``TapeDraws.picks`` for a draw.
        nll: -ln p of the tape's next token, softmax at T = 1, float32 [T], nats.
        columns: The columns of chains, and the optional ones of rows, by their name in the table: [T] or [T, width],
            -1 or NaN where a slot has no draft. Empty without chains.
        normed: The target's final-normed rows [T, H] on its device.
        trunk: Its trunk rows [T, H] on its device.
    """

    first: int
    target_id: np.ndarray
    target_margin: np.ndarray
    nll: np.ndarray
    columns: dict[str, np.ndarray]
    normed: Tensor
    trunk: Tensor


def head_slices(model: HybridModel, normed_TH: Tensor, *, draft: bool = False) -> Iterator[tuple[slice, Tensor]]:
    """Logits of rows, the target's or the drafter's, in slices that bound memory whatever the vocabulary."""
    unembed = model.unembed_draft if draft else model.unembed
    step = max(16, HEAD_VALUES // model.config.vocab_size)
    for lo in range(0, normed_TH.shape[0], step):
        part = slice(lo, min(lo + step, normed_TH.shape[0]))
        yield part, unembed(normed_TH[part].unsqueeze(0))[0]


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
        Chunks in order, covering positions 0..len-2. With ranks a chunk comes once the rows are known in which its last
        drafts stand, up to ``k_max - 1`` past its end.

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
    ranks = Ranks(n - 1, options.k_max) if chains and options.ranks else None
    held: list[Chunk] = []
    last: Tensor | None = None
    for lo in range(0, n - 1, options.chunk):
        hi = min(lo + options.chunk, n - 1)
        rows = model.forward(tokens_1T[:, lo:hi], state, logits="none")
        normed, trunk = rows.normed_BTH[0], rows.trunk_BTH[0]
        if draws is not None:
            draws.prepare(lo + 1, hi - lo + options.k_max, model.config.vocab_size, model.device)
        scored = _score(model, normed, tokens_1T[0, lo + 1 : hi + 1], lo, draws, options)
        slots = _Slots(lo, hi - lo, n, options) if chains else None
        if draft_cache is not None and slots is not None:
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
                    at = torch.tensor(starts, device=model.device)
                    job = _Job(model, plane, hidden[at - begin], normed[at - lo], starts, options, draws)
                    slots.fill(starts, _chains(job))
                    if options.forced:
                        slots.fill(starts, _forced(job, tape.tokens))
        columns = {**scored, **(slots.columns if slots is not None else {})}
        if ranks is not None:
            ranks.ids[lo:hi] = columns["draft_ids"]
            columns |= {"draft_rank": ranks.rank[lo:hi], "draft_target_logp": ranks.logp[lo:hi]}
            for part, logits in head_slices(model, normed):
                ranks.judge(logits, lo + part.start)
        target_id, margin, nll = (columns.pop(name) for name in ("target_id", "target_margin", "nll"))
        held.append(Chunk(lo, target_id, margin, nll, columns, normed=normed, trunk=trunk))
        reach = options.k_max - 1 if ranks is not None else 0
        while held and (hi == n - 1 or held[0].first + len(held[0].nll) + reach <= hi):
            yield held.pop(0)


class _Slots:
    """Columns of the chains of one chunk, empty until filled."""

    def __init__(self, first: int, t: int, length: int, options: ReplayOptions) -> None:
        self.first, self.length, self.k = first, length, options.k_max
        self.kinds = {column.name: column for column in options.columns() if column.per != "row"}
        self.columns = {name: column.empty(t) for name, column in self.kinds.items()}

    def fill(self, starts: list[int], found: dict[str, np.ndarray]) -> None:
        """Set columns of chains, [P, width] each; slots past the end of the tape stay empty."""
        at = np.array(starts)
        known_PK = at[:, None] + 1 + np.arange(self.k) < self.length
        for name, values_PW in found.items():
            column, kind = self.columns[name], self.kinds[name]
            known_PW = known_PK.repeat(kind.width // self.k, 1) if kind.per == "slot" else known_PK[:, :1]
            column[at - self.first] = np.where(known_PW, values_PW, column[at - self.first])


@dataclass(frozen=True, eq=False)
class _Job:
    """Chains to be made from the starts of one chunk.

    Args:
        model: The target with its head.
        plane: True rows of the head's cache.
        carrier: The head's row of each start, which gives the first draft, [P, H].
        normed: The target's row of each start, [P, H].
        starts: Their positions.
        options: What is recorded.
        draws: How rows become tokens; None for picks.
    """

    model: HybridModel
    plane: KVPlane
    carrier: Tensor
    normed: Tensor
    starts: list[int]
    options: ReplayOptions
    draws: TapeDraws | None


def _score(
    model: HybridModel,
    normed_TH: Tensor,
    next_T: Tensor,
    first: int,
    draws: TapeDraws | None,
    options: ReplayOptions,
) -> dict[str, np.ndarray]:
    """Columns of the target's rows."""
    parts = []
    for part, logits in head_slices(model, normed_TH):
        check_finite(logits, first + part.start)
        picked, token = picks(logits), next_T[part]
        found = {"nll": picked.logsumexp - logits.gather(-1, token[:, None])[:, 0]}
        positions = range(first + part.start + 1, first + part.stop + 1)
        if draws is None:
            found |= {"target_id": picked.ids, "target_margin": margins(logits)}
        else:
            found["target_id"], found["target_margin"] = draws.picks(logits, positions, None)
        if options.forced:
            found["target_p"] = _law_probs(draws, logits, positions, token)
        if options.target:
            names = ("target_top2", "target_top2_probs", "target_entropy")
            found |= dict(zip(names, two_best(logits), strict=True))
        parts.append(found)
    return _joined(parts)


def _law_probs(draws: TapeDraws | None, logits_RV: Tensor, positions: Sequence[int], tokens_R: Tensor) -> Tensor:
    """Probability of one token per row: shaped, or of softmax at T = 1 at temperature 0."""
    if draws is None or draws.shaping.greedy:
        return token_probs(logits_RV, tokens_R)
    return draws.probs(logits_RV, positions, tokens_R)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """Columns of slices of rows as whole arrays, in the types that tables hold; probabilities stay in float64."""
    out = {}
    for name in parts[0]:
        whole = torch.cat([part[name] for part in parts]).cpu()
        if not whole.is_floating_point():
            whole = whole.int()
        elif name not in WIDE:
            whole = whole.float()
        out[name] = whole.numpy()
    return out


def _chains(job: _Job) -> dict[str, np.ndarray]:
    """Columns of the chains that are fed their own drafts."""
    model, starts, options = job.model, job.starts, job.options
    batch, carrier, slots = ChainBatch(model, job.plane, starts), job.carrier, []
    drafted_PK = np.empty((len(starts), options.k_max), np.int32)
    for slot in range(options.k_max):
        parts = []
        for part, logits in head_slices(model, carrier, draft=True):
            _check_drafts(model, logits, starts[part], slot)
            if job.draws is None:
                picked = picks(logits)
                top, logsumexp = picked.top1, picked.logsumexp
                found = {"draft_ids": picked.ids, "draft_top1": top, "draft_margin": margins(logits)}
            else:
                drawn = job.draws.draft(logits, [p + 1 + slot for p in starts[part]], drafted_PK[part, :slot])
                top, logsumexp = drawn.top, drawn.logsumexp
                found = {"draft_ids": drawn.ids, "draft_top1": drawn.p, "draft_margin": drawn.margin, "draft_top": top}
            if options.shadow:
                found["shadow_ids"], found["shadow_probs"] = shadow(logits, top, options.shadow)
            if options.ranks:
                found["draft_logp"] = log_probs(logits, found["draft_ids"], logsumexp)
            if options.overlap and slot == 0:
                target = model.unembed(job.normed[part].unsqueeze(0))[0]
                found["overlap"] = overlaps(target, logits, options.overlap)
            parts.append(found)
        slots.append(_joined(parts))
        drafted_PK[:, slot] = slots[-1]["draft_ids"]
        if slot + 1 < options.k_max:
            carrier = batch.step(torch.cat([found["draft_ids"] for found in parts]), carrier)
    return _side_by_side(slots)


def _forced(job: _Job, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of the chains that are fed the tape's tokens."""
    model, starts, draws = job.model, job.starts, job.draws
    batch, carrier, slots, last = ChainBatch(model, job.plane, starts), job.carrier, [], len(tokens) - 1
    for slot in range(job.options.k_max):
        positions = [p + 1 + slot for p in starts]
        fed = tokens[np.minimum(positions, last)].astype(np.int64)  # past the end anything will do
        tokens_P = torch.from_numpy(fed).to(carrier.device)
        parts = []
        for part, logits in head_slices(model, carrier, draft=True):
            _check_drafts(model, logits, starts[part], slot)
            picked, at = picks(logits), positions[part]
            found = {"forced_q": _law_probs(draws, logits, at, tokens_P[part]), "forced_top": picked.top1}
            found["forced_ids"] = picked.ids if draws is None else draws.picks(logits, at, None)[0]
            parts.append(found)
        slots.append(_joined(parts))
        if slot + 1 < job.options.k_max:
            carrier = batch.step(tokens_P, carrier)
    return _side_by_side(slots)


def _side_by_side(slots: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns [P, width] of slots, those of one slot contiguous."""
    names = {name: [slot[name].reshape(len(slot[name]), -1) for slot in slots if name in slot] for name in slots[0]}
    return {name: np.concatenate(parts, 1) for name, parts in names.items()}


def _check_drafts(model: HybridModel, logits_PV: Tensor, starts: list[int], slot: int) -> None:
    """Refuse rows of a drafter that hold NaN or infinity among the ids that its head has."""
    if model.draft_head is not None:
        logits_PV = logits_PV[:, model.draft_head.ids_D]
    for i in (~logits_PV.sum(-1).isfinite()).nonzero()[:, 0].tolist():
        check_finite(logits_PV[i : i + 1], starts[i] + slot)
