"""Splits by document: a label that depends on a document's id alone, so that no rebuild moves it across."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose

from workbench.core.errors import UserError, check_int, check_real
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene.grams import listed

_SLICE = re.compile(r"@\d+$")
FRACTIONS = {"train": 0.9, "heldout": 0.1}


def split(
    tapes: Corpus | Sequence[Tape] | Tape, *, fractions: Mapping[str, float] = FRACTIONS, seed: int = 0
) -> dict[str, Corpus]:
    """Part documents by a hash of the seed and their id; slices of a document stay together.

    Every name has an interval of hashes, the last name the lowest ones. So documents that are added, taken out or put
    in another order move no other document, and a larger share for the last name only adds documents to it.

    Args:
        tapes: The documents; take near duplicates out first, since a hash of ids parts them.
        fractions: Share of the hashes per name, adding up to 1; default 0.9 "train" and 0.1 "heldout".
        seed: Another seed gives another split; default 0.

    Returns:
        Tapes by name, labelled, in their order; every tape is in exactly one of them.

    Raises:
        UserError: The shares or the seed are out of range, or a name with a share gets no document.
    """
    labelled = label(listed(tapes), fractions=fractions, seed=seed)
    if none := [name for name, share in fractions.items() if share and all(t.split != name for t in labelled)]:
        raise UserError(
            f"split {none[0]!r} with a share of {fractions[none[0]]:g} gets none of the {len(labelled)} tapes: give it "
            "a larger share, another seed, or more documents"
        )
    parts = {name: of_split(labelled, name) for name, share in fractions.items() if share}
    assert sum(map(len, parts.values())) == len(labelled), "every tape is in exactly one part"
    return parts


def label(tapes: Corpus, *, fractions: Mapping[str, float], seed: int = 0) -> Corpus:
    """Label every tape with the name of its part; see ``split``.

    Args:
        tapes: The documents.
        fractions: Share of the hashes per name, adding up to 1.
        seed: Another seed gives another split; default 0.

    Returns:
        The same tapes, labelled.

    Raises:
        UserError: The shares or the seed are out of range.
    """
    check_int("seed", seed, low=0)
    if not isinstance(fractions, Mapping) or not fractions or not all(isinstance(n, str) and n for n in fractions):
        raise UserError(f"fractions={fractions!r} is not valid: it must map names to shares, such as {FRACTIONS}")
    shares = {name: check_real(f"fractions[{name!r}]", share, low=0.0, high=1.0) for name, share in fractions.items()}
    if not isclose(sum(shares.values()), 1.0, abs_tol=1e-9):
        raise UserError(f"fractions={dict(fractions)!r} add up to {sum(shares.values()):g}: they must add up to 1")
    upper, reached = {}, 0.0
    for name, share in reversed(shares.items()):
        reached += share
        upper[name] = reached * 2**64
    first = next(name for name, share in shares.items() if share)

    def part(doc_id: str) -> str:
        digest = hashlib.sha256(f"{seed}:split:{_SLICE.sub('', doc_id)}".encode()).digest()
        at = int.from_bytes(digest[:8], "big")
        return next((name for name, end in upper.items() if at < end), first)

    labelled = [replace(tape, split=part(tape.doc_id)) for tape in tapes]
    return Corpus(labelled, name=tapes.name, tokenizer=tapes.tokenizer)


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
    return label(tapes, fractions={"train": 1 - heldout, "heldout": heldout}, seed=seed)


def of_split(tapes: Corpus, split: str) -> Corpus:
    """The tapes of one split; an error when there is none."""
    name = f"{tapes.name} (split={split})"
    return Corpus([tape for tape in tapes if tape.split == split], name=name, tokenizer=tapes.tokenizer)
