"""Columns of rows and of chains, as tensors where the model is: what the target says, and what the drafter proposes.

Nothing is read back before a chunk is done, but for what draws and the optional groups of columns need. Greedy picks
on a GPU come from one reading of each row, and a trimmed head is then read by its own ids alone.
Legend: R rows, P starts, H hidden, V vocabulary, K slots, D ids of a trimmed draft head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workbench.cache.kv import KVPlane
from workbench.datasets.heads import block_rows, extremes, head_slices, non_finite, row_error
from workbench.model.chain import ChainBatch
from workbench.model.draft_head import DraftHead
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import upload
from workbench.replay.draws import TapeDraws
from workbench.replay.groups import log_probs, overlaps, shadow, token_probs, two_best
from workbench.replay.options import ReplayOptions
from workbench.sampling.pick import margins, picks
from workbench_kernels.sparse_topk import sparse_topk

WIDE = ("nll", "draft_top1", "target_p", "forced_q", "extremes", "draft_extremes", "forced_extremes")  # not narrowed


class Lead(NamedTuple):
    """The greedy pick of each row: id, its probability at T = 1, its lead in logits, and the row's normaliser, [R]."""

    ids: Tensor
    top1: Tensor
    margin: Tensor
    logsumexp: Tensor


def leads(logits_RV: Tensor) -> Lead:
    """Picks and margins of rows.

    Args:
        logits_RV: Rows in float32.

    Returns:
        On a CPU, bits that do not depend on the rows beside a row; on a GPU, from one reading of it.
    """
    if logits_RV.device.type == "cpu":
        found = picks(logits_RV)
        return Lead(found.ids, found.top1, margins(logits_RV), found.logsumexp)
    return read_once(logits_RV)


def read_once(logits_RV: Tensor, *, impl: str | None = None) -> Lead:
    """``leads`` by the op that keeps the largest of a row; ``impl`` as the op's."""
    kept = sparse_topk(logits_RV, k=min(2, logits_RV.shape[1]), impl=impl)
    alone = logits_RV.shape[1] == 1
    margin = torch.full_like(kept.logsumexp_R, torch.inf) if alone else kept.logits_Rk[:, 0] - kept.logits_Rk[:, 1]
    return Lead(kept.ids_Rk[:, 0].long(), kept.probs_Rk[:, 0], margin, kept.logsumexp_R)


@dataclass(frozen=True, eq=False)
class Job:
    """Chains to be made from the starts of one chunk.

    Args:
        model: The target with its head.
        plane: True rows of the head's cache.
        carrier: The head's row of each start, which gives the first draft, [P, H].
        normed: The target's row of each start, [P, H].
        starts: Their positions.
        of: The document of each start, as its place in the plane; those of one side by side.
        options: What is recorded.
        draws: How rows become tokens; None for picks.
    """

    model: HybridModel
    plane: KVPlane
    carrier: Tensor
    normed: Tensor
    starts: list[int]
    of: list[int]
    options: ReplayOptions
    draws: TapeDraws | None

    def chains(self) -> ChainBatch:
        """Chains without private rows."""
        several = {"sequences": self.of} if any(self.of) else {}
        return ChainBatch(self.model, self.plane, self.starts, **several)


def score_rows(
    model: HybridModel,
    normed_RH: Tensor,
    next_R: Tensor,
    first: int,
    draws: TapeDraws | None,
    options: ReplayOptions,
) -> dict[str, Tensor]:
    """Columns of the target's rows.

    Args:
        model: The target.
        normed_RH: Its rows; of one document when there are draws.
        next_R: The token that follows each.
        first: Position of row 0, where there are draws.
        draws: How rows become tokens; None for picks.
        options: What is recorded.

    Returns:
        Columns [R] or [R, width], and the ``extremes`` by which rows are found out that are not finite.
    """
    parts = []
    for part, logits in head_slices(model, normed_RH):
        found = {"extremes": extremes(logits)}
        token, lead = next_R[part], leads(logits)
        found["nll"] = lead.logsumexp - logits.gather(-1, token[:, None])[:, 0]
        positions = range(first + part.start + 1, first + part.stop + 1)
        if draws is None:
            found |= {"target_id": lead.ids, "target_margin": lead.margin}
        else:
            _check_now(found["extremes"], range(first + part.start, first + part.stop))
            found["target_id"], found["target_margin"] = draws.picks(logits, positions, None)
        if options.forced:
            found["target_p"] = _law_probs(draws, logits, positions, token)
        if options.target:
            names = ("target_top2", "target_top2_probs", "target_entropy")
            found |= dict(zip(names, two_best(logits), strict=True))
        parts.append(found)
    return _joined(parts)


def own_chains(job: Job) -> dict[str, Tensor]:
    """Columns [P, width] of the chains that are fed their own drafts."""
    model, starts, options, draws = job.model, job.starts, job.options, job.draws
    batch, carrier, slots = job.chains(), job.carrier, []
    drafted_PK = np.empty((len(starts), options.k_max), np.int32)
    bare = draws is None and not (options.shadow or options.ranks or options.overlap)
    for slot in range(options.k_max):
        parts = []
        if bare:
            for _, logits, ids_D in drafter_slices(model, carrier):
                lead = leads(logits)
                ids = lead.ids if ids_D is None else ids_D[lead.ids]
                found = {"draft_ids": ids, "draft_top1": lead.top1, "draft_margin": lead.margin}
                parts.append(found | {"draft_extremes": _drafter_extremes(model, logits)})
        else:
            for part, logits in head_slices(model, carrier, draft=True):
                parts.append(_draft(job, logits, part, slot, drafted_PK))
        slots.append(_joined(parts))
        if draws is not None:
            drafted_PK[:, slot] = slots[-1]["draft_ids"].cpu().numpy()
        if slot + 1 < options.k_max:
            carrier = batch.step(torch.cat([found["draft_ids"] for found in parts]), carrier)
    return _side_by_side(slots)


def _draft(job: Job, logits: Tensor, part: slice, slot: int, drafted_PK: np.ndarray) -> dict[str, Tensor]:
    """Columns of one slot of some chains, the optional ones included."""
    model, options, starts = job.model, job.options, job.starts[part]
    found = {"draft_extremes": _drafter_extremes(model, logits)}
    if job.draws is None:
        lead = leads(logits)
        top, logsumexp = lead.top1, lead.logsumexp
        found |= {"draft_ids": lead.ids, "draft_top1": top, "draft_margin": lead.margin}
    else:
        _check_now(found["draft_extremes"], [p + slot for p in starts])
        drawn = job.draws.draft(logits, [p + 1 + slot for p in starts], drafted_PK[part, :slot])
        top, logsumexp = drawn.top, drawn.logsumexp
        found |= {"draft_ids": drawn.ids, "draft_top1": drawn.p, "draft_margin": drawn.margin, "draft_top": top}
    if options.shadow:
        found["shadow_ids"], found["shadow_probs"] = shadow(logits, top, options.shadow)
    if options.ranks:
        found["draft_logp"] = log_probs(logits, found["draft_ids"], logsumexp)
    if options.overlap and slot == 0:
        target = model.unembed(job.normed[part].unsqueeze(0))[0]
        found["overlap"] = overlaps(target, logits, options.overlap)
    return found


def forced_chains(job: Job, tokens: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Columns [P, width] of the chains that are fed the tokens of their documents."""
    model, starts, draws = job.model, job.starts, job.draws
    batch, carrier, slots = job.chains(), job.carrier, []
    for slot in range(job.options.k_max):
        positions = [p + 1 + slot for p in starts]
        # past the end anything will do
        fed = [int(tokens[b][min(at, len(tokens[b]) - 1)]) for at, b in zip(positions, job.of, strict=True)]
        tokens_P = upload(fed, carrier.device)
        parts = []
        for part, logits in head_slices(model, carrier, draft=True):
            found, at = {"forced_extremes": _drafter_extremes(model, logits)}, positions[part]
            if draws is not None:
                _check_now(found["forced_extremes"], [p - 1 for p in at])
            lead = leads(logits)
            found |= {"forced_q": _law_probs(draws, logits, at, tokens_P[part]), "forced_top": lead.top1}
            found["forced_ids"] = lead.ids if draws is None else draws.picks(logits, at, None)[0]
            parts.append(found)
        slots.append(_joined(parts))
        if slot + 1 < job.options.k_max:
            carrier = batch.step(tokens_P, carrier)
    return _side_by_side(slots)


def drafter_slices(model: HybridModel, carrier_PH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Rows of the head that drafts: slice, logits, and the ids they stand for; None where that is their place.

    On a GPU a trimmed head gives [P, D] of its own ids; elsewhere rows are as wide as the vocabulary.
    """
    head = model.draft_head
    if head is None or carrier_PH.device.type == "cpu":
        for part, logits in head_slices(model, carrier_PH, draft=True):
            yield part, logits, None
        return
    yield from narrow_slices(model, carrier_PH, head)


def narrow_slices(model: HybridModel, carrier_PH: Tensor, head: DraftHead) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of a trimmed head over its own ids."""
    step = block_rows(len(head), carrier_PH.device)
    for lo in range(0, len(carrier_PH), step):
        part = slice(lo, min(lo + step, len(carrier_PH)))
        yield part, model.unembed_by(carrier_PH[part].unsqueeze(0), head.weight_DH)[0], head.ids_D


def _drafter_extremes(model: HybridModel, logits_PV: Tensor) -> Tensor:
    """Extremes over the ids that the head has."""
    head = model.draft_head
    if head is None or logits_PV.shape[1] == len(head.ids_D):
        return extremes(logits_PV)
    return extremes(logits_PV[:, head.ids_D])


def _law_probs(draws: TapeDraws | None, logits_RV: Tensor, positions: Sequence[int], tokens_R: Tensor) -> Tensor:
    """Probability of one token per row: shaped, or of softmax at T = 1 at temperature 0."""
    if draws is None or draws.shaping.greedy:
        return token_probs(logits_RV, tokens_R)
    return draws.probs(logits_RV, positions, tokens_R)


def _check_now(extremes_R2: Tensor, positions: Sequence[int]) -> None:
    """Refuse rows that are not finite before a token is drawn from them."""
    for i in non_finite(extremes_R2).nonzero()[:, 0].tolist():
        raise row_error(float(extremes_R2[i, 0]), positions[i])


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns of slices of rows as whole ones, in the types that tables hold; probabilities stay in float64."""
    out = {}
    for name in parts[0]:
        whole = torch.cat([part[name] for part in parts]) if len(parts) > 1 else parts[0][name]
        if not whole.is_floating_point():
            whole = whole.int()
        elif name not in WIDE:
            whole = whole.float()
        out[name] = whole
    return out


def _side_by_side(slots: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns [P, width] of slots, those of one slot contiguous."""
    names = {name: [slot[name].reshape(len(slot[name]), -1) for slot in slots if name in slot] for name in slots[0]}
    return {name: torch.cat(parts, 1) for name, parts in names.items()}
