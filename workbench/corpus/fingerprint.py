"""A short hash that names a corpus by what its tapes hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from workbench.core.tape import Tape


def corpus_fingerprint(tapes: Iterable[Tape]) -> str:
    """Hash document ids, token ids, prompt lengths, masks, sources, splits and whether the target wrote them, in order.

    Args:
        tapes: The documents.

    Returns:
        16 hex digits.
    """
    digest = hashlib.sha256()
    for tape in tapes:
        head = [tape.doc_id, tape.source, tape.split, tape.prompt_len, len(tape), tape.supervised is not None]
        head += [tape.own.facts()] if tape.own else []
        digest.update(json.dumps(head).encode())
        digest.update(tape.tokens.astype("<i4").tobytes())
        if tape.supervised is not None:
            digest.update(tape.supervised.tobytes())
    return digest.hexdigest()[:16]


def document_hash(tape: Tape) -> str:
    """Hash of a document's token ids alone, as little-endian int32: 64 hex digits."""
    return hashlib.sha256(tape.tokens.astype("<i4").tobytes()).hexdigest()
