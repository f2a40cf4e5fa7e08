"""``corpus``: documents of a source as tapes, those of a split, a limit's fair share of every register."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.cut import OVERFLOW, Cut
from workbench.corpus.sources import Document, read_source
from workbench.model.tokenizer import Tokenizer


def corpus(
    source: Any,
    *,
    split: str | None = None,
    tokenizer: Tokenizer | None = None,
    text_column: str = "text",
    limit: int | None = None,
    max_tokens: int | None = None,
    overflow: str = "slice",
    min_tokens: int | None = None,
    min_response: int | None = None,
    seed: int = 0,
) -> Corpus:
    """Make tapes of documents.

    Text becomes the ids that the tokenizer gives it, and no beginning-of-sequence token is invented. Conversations
    go through the checkpoint's chat template and keep their prompt length and the mask of what the assistant wrote.

    Args:
        source: "demo" (the shipped held-out samples) or "demo/<register>"; a file or a directory of text, .jsonl
            ({"text"}, {"tokens", "prompt_len"} or {"messages"} per line) or .parquet; a Hugging Face Dataset with a
            column "messages", "tokens" or text; or a list of texts or mappings.
        split: Keep documents of this split; None for all.
        tokenizer: The model's, ``model.tokenizer``; needed unless documents are token ids.
        text_column: Column that holds text; default "text".
        limit: Documents to keep, the same number per source as far as there are, chosen by the seed; None for all.
        max_tokens: Longest tape, tokens; None for no bound.
        overflow: What becomes of a longer document: "slice" into tapes named doc_id@start, "truncate", or "skip".
        min_tokens: Leave tapes with fewer tokens out; None refuses empty documents.
        min_response: Leave tapes with fewer tokens after their prompt out; None for no bound.
        seed: Seed of the choice under ``limit``; default 0.

    Returns:
        The tapes, in the order of the source, with their UTF-8 sizes where the text is known.

    Raises:
        UserError: The source, a document or an option cannot be used, or no document is left.
    """
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise UserError(f"tokenizer of type {type(tokenizer).__name__} is not valid: give model.tokenizer")
    for name, value in (("limit", limit), ("max_tokens", max_tokens), ("min_tokens", min_tokens)):
        if value is not None:
            check_int(name, value, low=1)
    if min_response is not None:
        check_int("min_response", min_response, low=1)
    check_choice("overflow", overflow, OVERFLOW)
    check_int("seed", seed, low=0)
    name, documents = read_source(source, text_column=text_column)
    if not documents:
        raise UserError(f"corpus {name!r} is empty: it needs at least one document")
    chosen = _of_split(documents, split, name)
    cut = Cut(tokenizer, text_column, max_tokens, overflow, min_tokens or 0, min_response or 0)
    tapes: dict[int, list[Tape]] = {}
    with progress(len(chosen) if limit is None else min(limit, len(chosen)), desc="tokenize", unit="doc") as bar:
        for i in range(len(chosen)) if limit is None else _spread(chosen, seed):
            kept = list(cut.tapes(chosen[i]))
            if kept:
                tapes[i] = kept
                bar.update()
            if len(tapes) == limit:
                break
    asked = {
        "split": split,
        "limit": limit,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "min_response": min_response,
    }
    said = [f"{key}={value}" for key, value in asked.items() if value is not None]
    if not tapes:
        raise UserError(
            f"corpus {name!r} is empty: its {len(chosen)} documents were all left out ({', '.join(said)}); the longest "
            f"tape had {cut.longest} tokens: loosen the bounds"
        )
    label = f"{name} ({', '.join(said)})" if said else name
    fingerprint = "" if tokenizer is None else tokenizer.fingerprint
    return Corpus([tape for i in sorted(tapes) for tape in tapes[i]], name=label, tokenizer=fingerprint)


def _of_split(documents: list[Document], split: str | None, name: str) -> list[Document]:
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


def _spread(documents: list[Document], seed: int) -> list[int]:
    """Indices in an order that takes sources in turn, and documents of a source by a hash of the seed and their id."""
    by_source: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    for i, document in enumerate(documents):
        by_source[document.source].append((hashlib.sha256(f"{seed}:{document.doc_id}".encode()).digest(), i))
    ranked = [(rank, source, i) for source, listed in by_source.items() for rank, (_, i) in enumerate(sorted(listed))]
    return [i for _, _, i in sorted(ranked)]
