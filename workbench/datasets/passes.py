"""Documents on their way through the target: chunks of a group, the rows that records need, and the records they fill.

Legend: B documents of a group, T rows of a chunk, R scored rows, C carriers, N records, H hidden, S tokens.
The making side (``run_group``) issues forwards and never waits for a result; the reading side (``filled_records``)
runs on the writing thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.cache.kv import AttentionPlane
from workbench.core.errors import UserError
from workbench.core.tape import Tape
from workbench.datasets.groups import chunk_counts
from workbench.datasets.heads import extremes, head_slices
from workbench.datasets.options import ExtractOptions
from workbench.datasets.topk import SparseRows, check_mass, check_rows, kept_columns
from workbench.datasets.window import Filled, Window
from workbench.model.hybrid import HybridModel, Rows
from workbench.model.transfer import HostCopies, Landing, upload

KEPT = ("ids", "logits", "probs", "tail", "logsumexp", "logsumexp_t")


@dataclass(frozen=True, eq=False)
class Passed:
    """One chunk of a group, with the rows of it that records need.

    Args:
        documents: Index of every document, [B].
        windows: What each still needs, [B].
        ends: Position after the chunk, [B].
        scored: Scored positions of each document, [B].
        carriers: Positions of trunk rows of each, [B].
        landing: Columns of all scored rows and all carriers, document after document.
    """

    documents: Sequence[int]
    windows: Sequence[Window]
    ends: Sequence[int]
    scored: Sequence[np.ndarray]
    carriers: Sequence[np.ndarray]
    landing: Landing


def padded_tokens(tapes: Sequence[Tape], rows: Sequence[int]) -> np.ndarray:
    """The first tokens of every tape, int64 [B, S], zeros on the right."""
    tokens_BS = np.zeros((len(tapes), max(rows)), np.int64)
    for b, (tape, n) in enumerate(zip(tapes, rows, strict=True)):
        tokens_BS[b, :n] = tape.tokens[:n]
    return tokens_BS


def flat_places(places: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Indices into rows [B * width] of each document's own places."""
    return np.concatenate([b * width + at for b, at in enumerate(places)])


def reserve(planes: Sequence[object], rows: int) -> None:
    """Make room in a cache's attention planes at once, so that it does not grow by copies."""
    for plane in planes:
        if isinstance(plane, AttentionPlane):
            plane.reserve(rows)


def group_rows(
    model: HybridModel, tapes: Sequence[Tape], fed: Sequence[int], *, chunk: int, taps: Sequence[int] = ()
) -> Iterator[tuple[int, list[int], Rows]]:
    """Forwards of documents that run together, chunk by chunk, without logits; no result is waited for.

    Args:
        model: The target.
        tapes: The documents, their ids of the vocabulary.
        fed: Leading tokens of each to run.
        chunk: Tokens per forward and document.
        taps: Layers whose output rows are wanted.

    Yields:
        Position before the chunk, rows of each document in it, and what the forward gave, [B, the most of them].
    """
    cache = model.new_cache(batch=len(tapes), capacity=max(fed))
    reserve(cache.planes, max(fed))
    tokens_BS = upload(padded_tokens(tapes, fed), model.device)
    for start in range(0, max(fed), chunk):
        counts = chunk_counts(fed, start, chunk)
        tokens_BT = tokens_BS[:, start : start + max(counts)]
        yield start, counts, model.forward(tokens_BT, cache, counts=counts, logits="none", taps=taps, checked=True)


@torch.inference_mode()
def run_group(
    model: HybridModel,
    documents: Sequence[int],
    tapes: Sequence[Tape],
    windows: Sequence[Window],
    options: ExtractOptions,
    copies: HostCopies,
    bar: Any,
) -> Iterator[Passed]:
    """Run documents together, chunk by chunk, and send home the rows that their records need.

    Args:
        model: The target.
        documents: Their indices.
        tapes: The documents, their ids of the vocabulary.
        windows: What their records need.
        options: Kept ids, temperature, chunk and type of the trunk rows are read.
        copies: Brings columns to the host.
        bar: Progress, counted in tokens.

    Yields:
        Chunks that hold a row which some record needs.
    """
    fed = [window.end for window in windows]
    for start, counts, rows in group_rows(model, tapes, fed, chunk=options.chunk):
        t, ends = max(counts), [start + n for n in counts]
        scored = [w.scored_in(start, end) for w, end in zip(windows, ends, strict=True)]
        carriers = [w.carriers_in(start, end) for w, end in zip(windows, ends, strict=True)]
        scored_R, carriers_C = (flat_places([at - start for at in places], t) for places in (scored, carriers))
        if len(scored_R) or len(carriers_C):
            picked = upload(np.concatenate([scored_R, carriers_C]), model.device).split(
                [len(scored_R), len(carriers_C)]
            )
            columns = dict[str, Tensor]()
            if len(scored_R):
                columns = scored_columns(
                    model,
                    rows.normed_BTH.flatten(0, 1)[picked[0]],
                    top_k=options.top_k,
                    temperature=options.temperature,
                )
            columns |= _trunk(rows.trunk_BTH.flatten(0, 1)[picked[1]], options.hidden_dtype)
            yield Passed(documents, windows, ends, scored, carriers, copies.send(columns))
        bar.update(sum(counts))


def scored_columns(model: HybridModel, normed_RH: Tensor, *, top_k: int, temperature: float) -> dict[str, Tensor]:
    """Columns of rows that go through the head.

    Args:
        model: The target.
        normed_RH: Its rows, at least one, which carry the final norm.
        top_k: Ids to keep per row.
        temperature: Of the probabilities.

    Returns:
        What ``KEPT`` names, and the extremes of every row, on the rows' device.
    """
    parts = []
    for _, logits_RV in head_slices(model, normed_RH):
        kept = kept_columns(logits_RV, top_k=top_k, temperature=temperature)
        parts.append((*kept, extremes(logits_RV)))
    return {name: torch.cat(each) for name, each in zip((*KEPT, "extremes"), zip(*parts), strict=True)}


def _trunk(trunk_CH: Tensor, hidden_dtype: str) -> dict[str, Tensor]:
    """Trunk rows as they are stored, and whether each is finite."""
    stored = trunk_CH.to(torch.bfloat16).view(torch.int16) if hidden_dtype == "bfloat16" else trunk_CH.float()
    return {"hidden": stored, "whole": trunk_CH.isfinite().all(-1)}


def filled_records(
    passed: Passed, tapes: Sequence[Tape], *, on_bad: str = ExtractOptions.on_bad
) -> Iterator[tuple[int, Filled | str, bool]]:
    """What a chunk completes.

    Args:
        passed: The chunk.
        tapes: All documents, by index.
        on_bad: "stop" at a row that is refused, or "quarantine", which goes on without its document; default "stop".

    Yields:
        Index of a document, records of it in order, and whether they are its last; of a document that is left out the
        reason instead, once, whatever records came before.

    Raises:
        NonFiniteError: A row of logits holds NaN or infinity; the message names document and position.
        UserError: A trunk row is not finite, or the mass of a row is not one.
    """
    columns = passed.landing.arrays()
    r = c = 0
    for b, document in enumerate(passed.documents):
        scored, carriers, window = passed.scored[b], passed.carriers[b], passed.windows[b]
        rows, trunks = slice(r, r + len(scored)), slice(c, c + len(carriers))
        r, c = rows.stop, trunks.stop
        if window.refused or (not len(scored) and not len(carriers)):
            continue
        try:
            kept = None
            if len(scored):
                check_rows(columns["extremes"][rows], scored)
                kept = SparseRows(*(columns[name][rows] for name in KEPT))
                check_mass(kept.probs, kept.tail, scored)
            check_whole(columns["whole"][trunks], carriers)
        except UserError as error:
            error.args = (f"document {tapes[document].doc_id!r}: {error}",)
            if on_bad == "stop":
                raise
            window.refused = True
            yield document, str(error), True
            continue
        hidden = columns["hidden"][trunks]
        stored = hidden.view(np.uint16) if hidden.dtype == np.int16 else hidden
        filled = window.add(passed.ends[b], scored, kept, stored)
        if filled is not None:
            yield document, filled, window.done == len(window.positions)


def check_whole(whole_C: np.ndarray, at_C: np.ndarray, what: str = "trunk row") -> None:
    """Refuse rows that are not finite, naming the first.

    Args:
        whole_C: Whether each row is finite.
        at_C: Its position.
        what: Which rows these are, for the sentence; default "trunk row".

    Raises:
        UserError: One is not finite.
    """
    if not whole_C.all():
        raise UserError(
            f"the {what} of position {int(at_C[~whole_C][0])} is not finite: check the checkpoint's weights and "
            "dtype (half precision overflows on real models)"
        )
