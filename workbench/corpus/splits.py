"""Splits by document: a label that depends on a document's id alone, so that no rebuild moves it across."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from workbench.core.errors import check_int, check_real
from workbench.core.tape import Corpus

_SLICE = re.compile(r"@\d+$")


def label_splits(tapes: Corpus, *, heldout: float = 0.1, seed: int = 0) -> Corpus:
    """Label every tape "train" or "heldout" by a hash of its document id; slices of a document stay together.

    Args:
        tapes: The documents.
        heldout: Share to hold out, 0 to 1; default 0.1.
        seed: Another seed gives another split; default 0.

    Returns:
        The same tapes, labelled.

    Raises:
        UserError: The share or the seed is out of range.
    """
    check_real("heldout", heldout, low=0.0, high=1.0)
    check_int("seed", seed, low=0)

    def label(doc_id: str) -> str:
        digest = hashlib.sha256(f"{seed}:split:{_SLICE.sub('', doc_id)}".encode()).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < heldout * 2**64 else "train"

    labelled = [replace(tape, split=label(tape.doc_id)) for tape in tapes]
    return Corpus(labelled, name=tapes.name, tokenizer=tapes.tokenizer)


def of_split(tapes: Corpus, split: str) -> Corpus:
    """The tapes of one split; an error when there is none."""
    name = f"{tapes.name} (split={split})"
    return Corpus([tape for tape in tapes if tape.split == split], name=name, tokenizer=tapes.tokenizer)
