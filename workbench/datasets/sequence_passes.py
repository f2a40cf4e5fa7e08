"""Whole documents on their way through the target: every row of every chunk, and the documents they make up.

Legend: B documents of a group, T rows of a chunk, R rows of all documents of a chunk, H hidden, S tokens.
The making side (``run_documents``) issues forwards and never waits for a result; the reading side
(``whole_documents``) runs on the writing thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError
from workbench.core.schemas import tap_column
from workbench.core.tape import Tape
from workbench.datasets.passes import KEPT, check_whole, flat_places, group_rows, scored_columns
from workbench.datasets.rows import stored_columns
from workbench.datasets.sequence_options import SequenceOptions
from workbench.datasets.topk import check_mass, check_rows
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies, Landing, upload

CHECKS = ("extremes", "_whole")  # ends of the names of columns that are read and not kept


@dataclass(frozen=True, eq=False)
class Stretch:
    """One chunk of a group.

    Args:
        documents: Index of every document, [B].
        counts: Rows of each in this chunk, [B].
        ends: Position after the chunk, [B].
        landing: Columns of all rows, document after document.
    """

    documents: Sequence[int]
    counts: Sequence[int]
    ends: Sequence[int]
    landing: Landing


@torch.inference_mode()
def run_documents(
    model: HybridModel,
    documents: Sequence[int],
    tapes: Sequence[Tape],
    options: SequenceOptions,
    copies: HostCopies,
    bar: Any,
) -> Iterator[Stretch]:
    """Run documents together, chunk by chunk, and send home all of their rows.

    Args:
        model: The target.
        documents: Their indices.
        tapes: The documents, their ids of the vocabulary.
        options: Taps, kept ids, temperature, chunk and type of the rows are read.
        copies: Brings columns to the host.
        bar: Progress, counted in tokens.

    Yields:
        Every chunk.
    """
    sizes = [len(tape) for tape in tapes]
    for start, counts, rows in group_rows(model, tapes, sizes, chunk=options.chunk, taps=options.taps):
        places_R = upload(flat_places([np.arange(n) for n in counts], max(counts)), model.device)
        wanted = {"hidden": rows.trunk_BTH} | {tap_column(layer): rows.taps[layer] for layer in options.taps}
        columns = dict[str, Tensor]()
        for name, x_BTH in wanted.items():
            columns |= stored_columns(name, x_BTH.flatten(0, 1)[places_R], options.hidden_dtype)
        if options.top_k is not None:
            columns |= scored_columns(
                model, rows.normed_BTH.flatten(0, 1)[places_R], top_k=options.top_k, temperature=options.temperature
            )
        yield Stretch(documents, counts, [start + n for n in counts], copies.send(columns))
        bar.update(sum(counts))


def whole_documents(
    stretches: Iterable[Stretch],
    tapes: Sequence[Tape],
    wanted: Collection[int],
    *,
    on_bad: str = SequenceOptions.on_bad,
) -> Iterator[tuple[int, dict[str, np.ndarray] | str]]:
    """Put chunks together to documents.

    Args:
        stretches: Chunks, in order within each document.
        tapes: All documents, by index.
        wanted: Indices of the documents to hand out; rows of others are dropped.
        on_bad: "stop" at a row that is refused, or "quarantine", which goes on without its document; default "stop".

    Yields:
        Index of a document and its columns, [S, ...] each, as soon as its last chunk has come; of one that is left
        out the reason, as soon as it is known.

    Raises:
        NonFiniteError: A row of logits holds NaN or infinity; the message names document and position.
        UserError: A row is not finite, or the mass of a row is not one.
    """
    wanted, held = set(wanted), dict[int, dict[str, np.ndarray]]()
    for stretch in stretches:
        columns = stretch.landing.arrays()
        after = np.cumsum(stretch.counts)
        for document, n, end, stop in zip(stretch.documents, stretch.counts, stretch.ends, after, strict=True):
            if not n or document not in wanted:
                continue
            part = {name: x[stop - n : stop] for name, x in columns.items()}
            size, at = len(tapes[document]), slice(end - n, end)
            try:
                _check(part, np.arange(at.start, at.stop))
            except UserError as error:
                error.args = (f"document {tapes[document].doc_id!r}: {error}",)
                if on_bad == "stop":
                    raise
                wanted.discard(document)
                held.pop(document, None)
                yield document, str(error)
                continue
            kept = {name: x for name, x in part.items() if not name.endswith(CHECKS)}
            if document not in held:
                held[document] = {name: np.empty((size, *x.shape[1:]), x.dtype) for name, x in kept.items()}
            for name, x in kept.items():
                held[document][name][at] = x
            if end == size:
                yield document, held.pop(document)
    assert not held, "every document came to its end"


def _check(part: dict[str, np.ndarray], at: np.ndarray) -> None:
    for name, whole in part.items():
        if name.endswith("_whole"):
            layer = name.removesuffix("_whole").removeprefix("tap_")
            check_whole(whole, at, "trunk row" if layer == "hidden" else f"row of layer {layer}")
    if "extremes" in part:
        check_rows(part["extremes"], at)
        check_mass(part["probs"], part["tail"], at)


def sparse_names() -> dict[str, str]:
    """Names of the columns of a store, by those of ``SparseRows``."""
    stored = ("top_ids", "top_logits", "top_probs", "tail_probs", "logsumexp", "logsumexp_t")
    return dict(zip(KEPT, stored, strict=True))
