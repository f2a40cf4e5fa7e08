"""One tape through the target and, from every start at once, through the drafter.

The row of position p holds what the target says after x_p, and the chain that the drafter proposes when x_p is
pending: a function of the tokens up to p alone, since true rows do not depend on where rounds begin.
Legend: T rows of a chunk, P starts, H hidden, V vocabulary, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workbench.cache.kv import KVPlane
from workbench.core.errors import UserError
from workbench.core.tape import Tape, first_pending
from workbench.model.chain import ChainBatch
from workbench.model.hybrid import HybridModel, check_finite
from workbench.replay.options import ReplayOptions
from workbench.sampling.pick import margins, picks

HEAD_VALUES = 1 << 24  # logits held at a time


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows first..first+T-1 of one tape; a row that has no next token is not among them.

    Args:
        first: Position of row 0.
        target_id: The target's pick for the next place, int32 [T].
        target_margin: Its top-2 margin, float32 [T].
        nll: -ln p of the tape's next token, float32 [T], nats.
        draft_ids: Drafted ids, int32 [T, K]; -1 where there is no chain or the slot is past the end.
        draft_top1: The drafter's probability of each, float32 [T, K]; NaN likewise.
        draft_margin: The drafter's top-2 margin, float32 [T, K]; NaN likewise.
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
    normed: Tensor
    trunk: Tensor


def head_slices(model: HybridModel, normed_TH: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of rows, in slices that bound memory whatever the vocabulary."""
    step = max(16, HEAD_VALUES // model.config.vocab_size)
    for lo in range(0, normed_TH.shape[0], step):
        part = slice(lo, min(lo + step, normed_TH.shape[0]))
        yield part, model.unembed(normed_TH[part].unsqueeze(0))[0]


@torch.inference_mode()
def chain_tape(model: HybridModel, tape: Tape, options: ReplayOptions, *, chains: bool = True) -> Iterator[Chunk]:
    """Run one tape in chunks.

    Args:
        model: The target with its head.
        tape: The document, of at least two tokens.
        options: Slots, stride, chunk and carrier.
        chains: Draft; False only scores.

    Yields:
        Chunks in order, covering positions 0..len-2.

    Raises:
        UserError: The tape has one token only.
        NonFiniteError: A row of logits holds NaN or infinity.
    """
    n = len(tape)
    if n < 2:
        raise UserError(f"tape {tape.doc_id!r} has {n} token; at least 2 are needed to score one")
    cache = model.new_cache(capacity=n)
    draft_cache = model.new_draft_cache(capacity=n) if chains else None
    tokens_1T = torch.from_numpy(tape.tokens.astype(np.int64))[None].to(model.device)
    last: Tensor | None = None
    for lo in range(0, n - 1, options.chunk):
        hi = min(lo + options.chunk, n - 1)
        rows = model.forward(tokens_1T[:, lo:hi], cache, logits="none")
        normed, trunk = rows.normed_BTH[0], rows.trunk_BTH[0]
        target = _score(model, normed, tokens_1T[0, lo + 1 : hi + 1], lo)
        t, k = hi - lo, options.k_max
        ids = np.full((t, k), -1, np.int32)
        top, gap = np.full((t, k), np.nan, np.float32), np.full((t, k), np.nan, np.float32)
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
                    found = _chains(model, plane, hidden, starts, begin, options.k_max)
                    at = np.array(starts) - lo
                    past = np.array(starts)[:, None] + 1 + np.arange(k) >= n
                    ids[at] = np.where(past, -1, found[0])
                    top[at], gap[at] = (np.where(past, np.nan, x).astype(np.float32) for x in found[1:])
        yield Chunk(lo, *target, ids, top, gap, normed=normed, trunk=trunk)


def _score(
    model: HybridModel, normed_TH: Tensor, next_T: Tensor, first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parts = []
    for part, logits in head_slices(model, normed_TH):
        check_finite(logits, first + part.start)
        picked = picks(logits)
        nll = picked.logsumexp - logits.gather(-1, next_T[part][:, None])[:, 0]
        parts.append((picked.ids.int().cpu(), margins(logits).cpu(), nll.cpu()))
    ids, margin, likelihood = (torch.cat(x).numpy() for x in zip(*parts, strict=True))
    return ids, margin, likelihood


def _chains(
    model: HybridModel, plane: KVPlane, hidden_TH: Tensor, starts: list[int], begin: int, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    batch = ChainBatch(model, plane, starts)
    carrier = hidden_TH[torch.tensor(starts, device=hidden_TH.device) - begin]
    columns = []
    for slot in range(k):
        parts = []
        for part, logits in head_slices(model, carrier):
            for i in (~logits.sum(-1).isfinite()).nonzero()[:, 0].tolist():
                check_finite(logits[i : i + 1], starts[part.start + i] + slot)
            picked = picks(logits)
            parts.append((picked.ids, picked.top1, margins(logits)))
        ids, top, gap = (torch.cat(x) for x in zip(*parts, strict=True))
        columns.append((ids.int().cpu().numpy(), top.cpu().numpy(), gap.cpu().numpy()))
        if slot + 1 < k:
            carrier = batch.step(ids, carrier)
    ids_PK, top_PK, gap_PK = (np.stack(x, 1) for x in zip(*columns, strict=True))
    return ids_PK, top_PK, gap_PK
