"""Where records are taken: anchors of a tape, by bucket and seed, all of them, or as listed.

An anchor p is valid when 1 <= p and p + gamma < len(tape). Which anchors a tape gets depends on the seed, its document
id and its length alone, never on its place in the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.tape import Tape

Anchors = int | str | Sequence[int] | Mapping[str, Sequence[int]]


def check_anchors(anchors: Any) -> Anchors:
    """Return ``anchors`` in one of its valid forms, or raise a sentence.

    Args:
        anchors: A count per document, "all", a list of positions for every document, or a mapping from document id
            to its list.

    Returns:
        The same, lists as tuples of plain ints.

    Raises:
        UserError: It is none of these, or a list is empty, not of integers or not strictly increasing.
    """
    if isinstance(anchors, str) and anchors == "all":
        return anchors
    if isinstance(anchors, Mapping):
        return {str(doc_id): _positions(listed, f"anchors[{doc_id!r}]") for doc_id, listed in anchors.items()}
    if isinstance(anchors, (Sequence, np.ndarray)) and not isinstance(anchors, str):
        return _positions(anchors, "anchors")
    return check_int("anchors", anchors, low=1, hint="or 'all', or a list of positions")


def _positions(listed: Any, name: str) -> tuple[int, ...]:
    good = isinstance(listed, (Sequence, np.ndarray)) and not isinstance(listed, str) and len(listed) > 0
    if not good or not all(isinstance(p, Integral) and not isinstance(p, bool) for p in listed):
        raise UserError(f"{name}={listed!r} is not valid: it must be a list of positions, integers from 1 on")
    positions = tuple(int(p) for p in listed)
    if positions[0] < 1 or any(a >= b for a, b in pairwise(positions)):
        raise UserError(f"{name}={list(positions)!r} is not valid: positions start at 1 and must strictly increase")
    return positions


def anchor_positions(tape: Tape, *, anchors: Anchors, gamma: int, seed: int) -> np.ndarray:
    """Anchors of one tape.

    With a count, the valid positions from max(prompt_len - 1, 1) on that have a supervised slot are cut into that many
    equal buckets, and one is drawn from each; a tape with fewer positions gives all of them. "all" is every valid
    position from max(prompt_len - 1, 1) on.

    Args:
        tape: The document.
        anchors: As ``check_anchors`` returns it.
        gamma: Slots per record.
        seed: Seed of the draw; each document draws from its own generator.

    Returns:
        Positions, int64, strictly increasing, at least one.

    Raises:
        UserError: The tape is too short, its response is, or a listed position does not fit.
    """
    if len(tape) < gamma + 2:
        raise UserError(
            f"document {tape.doc_id!r} has {len(tape)} tokens; gamma={gamma} needs at least {gamma + 2}: leave shorter "
            f"documents out with corpus(..., min_tokens={gamma + 2}), or lower gamma"
        )
    last = len(tape) - gamma - 1
    if isinstance(anchors, Mapping):
        if tape.doc_id not in anchors:
            raise UserError(f"anchors names no positions for document {tape.doc_id!r}: every document needs a list")
        anchors = anchors[tape.doc_id]
    if not isinstance(anchors, (int, str)):
        if anchors[-1] > last:
            raise UserError(
                f"anchor {anchors[-1]} does not fit document {tape.doc_id!r} of {len(tape)} tokens: with gamma={gamma} "
                f"positions 1 to {last} are valid"
            )
        return np.asarray(anchors, dtype=np.int64)
    first = max(tape.prompt_len - 1, 1)
    if first > last:
        raise UserError(
            f"document {tape.doc_id!r} has {len(tape) - tape.prompt_len} tokens after its prompt; gamma={gamma} needs "
            f"at least {gamma}: leave such documents out with corpus(..., min_response={gamma}), or lower gamma"
        )
    if anchors == "all":
        return np.arange(first, last + 1)
    assert isinstance(anchors, int)
    valid = np.arange(first, last + 1)
    if tape.supervised is not None:
        valid = valid[np.lib.stride_tricks.sliding_window_view(tape.supervised[first + 1 :], gamma).any(-1)]
        if not len(valid):
            raise UserError(
                f"document {tape.doc_id!r} has no position with a supervised slot: leave it out, or list its anchors"
            )
    take = min(anchors, len(valid))
    edges = [i * len(valid) // take for i in range(take + 1)]
    draws = [_draw(seed, tape.doc_id, i, high - low) for i, (low, high) in enumerate(pairwise(edges))]
    return valid[[low + draw for low, draw in zip(edges, draws)]]


def _draw(seed: int, doc_id: str, bucket: int, width: int) -> int:
    """A number below ``width``, by a hash of seed, document and bucket: the same on every machine."""
    digest = hashlib.sha256(f"{seed}:{bucket}:{doc_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % width


def slot_mask(tape: Tape, positions: np.ndarray, gamma: int) -> np.ndarray:
    """Which slots are supervised: slot j of anchor p predicts token p + j + 1.

    Args:
        tape: The document.
        positions: Anchors, [N].
        gamma: Slots per record.

    Returns:
        bool [N, gamma]; all True when the tape has no mask.
    """
    if tape.supervised is None:
        return np.ones((len(positions), gamma), dtype=bool)
    return tape.supervised[positions[:, None] + 1 + np.arange(gamma)]
