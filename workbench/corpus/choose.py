"""Which documents of a source are taken: those of a split, and a limit's fair share of every register."""

from __future__ import annotations

import hashlib
from collections import defaultdict

from workbench.core.errors import UserError
from workbench.corpus.sources import Document


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


Quarantine = list[tuple[str, str]]


def set_aside(quarantine: Quarantine | None, document: Document, error: UserError) -> None:
    """Note a document that cannot be used, with the reason; without a list the error stands."""
    if quarantine is None:
        raise error
    quarantine.append((document.doc_id, str(error)))
