"""Exact duplicates: documents with the very same tokens, found by a hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from workbench.core.errors import check_choice
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene.grams import PARTS, counted, listed
from workbench.corpus.hygiene.outcome import Cleaned, Drop, cleaned

STEP = "exact"


def dedup(tapes: Corpus | Sequence[Tape] | Tape, *, part: str = "all") -> Cleaned:
    """Keep the first of the documents that have the same tokens.

    Tokens alone are compared: not ids of documents, splits, prompt lengths or masks. A document without a token of the
    chosen part repeats none.

    Args:
        tapes: The documents.
        part: Which tokens are compared: "all" (default), "prompt" (documents that answer the same question), "output"
            (what follows the prompt) or "supervised" (what may be trained on).

    Returns:
        The outcome; ``.tapes`` are kept, ``.dropped`` says which document each other one repeats.

    Raises:
        UserError: These are no tapes, or the part is unknown.
    """
    corpus = listed(tapes)
    check_choice("part", part, PARTS)
    first: dict[bytes, Tape] = {}
    drops: dict[int, Drop] = {}
    with progress(len(corpus), desc="dedup", unit="doc") as bar:
        for i, tape in enumerate(corpus):
            text = tape.tokens[counted(tape, part)]
            if len(text):
                before = first.setdefault(hashlib.sha256(text.astype("<i4").tobytes()).digest(), tape)
                if before is not tape:
                    reason = f"the same {len(text)} tokens as {before.doc_id!r}"
                    drops[i] = Drop(tape, STEP, reason, before.doc_id, 1.0)
            bar.update()
    return cleaned(corpus, drops, step=STEP, parameters={"part": part})
