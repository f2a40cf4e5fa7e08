"""Which documents of a source are taken: those of a split, and a limit's fair share of every register."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable

from workbench.core.errors import UserError
from workbench.core.progress import progress
from workbench.core.tape import Tape
from workbench.corpus.sources import Document, Quarantine, set_aside


def split_documents(documents: list[Document], split: str | None, name: str) -> list[Document]:
    """The documents of one split; all of them for None.

    Raises:
        UserError: The corpus has no such split; the sentence lists those it has.
    """
    if split is None:
        return documents
    chosen = [document for document in documents if document.split == split]
    if chosen:
        return chosen
    found = sorted({document.split for document in documents} - {""})
    if found:
        raise UserError(
            f"corpus {name!r} has no split {split!r}: choose one of {', '.join(map(repr, found))}, or leave it out"
        )
    raise UserError(
        f"the documents of corpus {name!r} carry no split, so split={split!r} finds none: leave it out, or label the "
        "tapes afterwards with workbench.corpus.label_splits"
    )


def spread(documents: list[Document], seed: int) -> list[int]:
    """Indices in an order that takes sources in turn, and documents of a source by a hash of the seed and their id."""
    by_source: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    for i, document in enumerate(documents):
        by_source[document.source].append((hashlib.sha256(f"{seed}:{document.doc_id}".encode()).digest(), i))
    ranked = [(rank, source, i) for source, listed in by_source.items() for rank, (_, i) in enumerate(sorted(listed))]
    return [i for _, _, i in sorted(ranked)]


def taken(
    documents: list[Document],
    tapes: Callable[[Document], list[Tape]],
    *,
    limit: int | None,
    seed: int,
    quarantine: Quarantine | None,
    desc: str,
) -> list[Tape]:
    """Tapes of documents, of a limit's fair share of every source.

    Args:
        documents: Where from.
        tapes: Makes those of one document; one that gives none does not count towards the limit.
        limit: Documents to take; None for all.
        seed: Of the choice under a limit.
        quarantine: See ``set_aside``.
        desc: Name on the progress bar.

    Returns:
        The tapes, in the order of the documents.
    """
    found: dict[int, list[Tape]] = {}
    with progress(len(documents) if limit is None else min(limit, len(documents)), desc=desc, unit="doc") as bar:
        for i in range(len(documents)) if limit is None else spread(documents, seed):
            try:
                kept = tapes(documents[i])
            except UserError as error:
                set_aside(quarantine, documents[i].doc_id, error)
                continue
            if kept:
                found[i] = kept
                bar.update()
            if len(found) == limit:
                break
    return [tape for i in sorted(found) for tape in found[i]]
