"""Token n-grams of many texts: ids that are equal exactly where the n-grams are, and hashes of their contents.

A text is an integer array of token ids. Nothing here knows of tapes, but for the choice of the tokens that count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape

PARTS = ("all", "prompt", "output", "supervised")
PAD = -1  # fills a text shorter than n up to one n-gram; no token id is negative

_GOLDEN, _MIX_A, _MIX_B = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def counted(tape: Tape, part: str) -> np.ndarray:
    """Positions of a tape's tokens that count, ascending.

    Args:
        tape: The document.
        part: "all", "prompt", "output" (what follows the prompt) or "supervised" (what may be trained on).

    Returns:
        int64 [tokens that count].
    """
    if part == "supervised" and tape.supervised is not None:
        return np.flatnonzero(tape.supervised)
    first, last = (tape.prompt_len, len(tape)) if part == "output" else (0, len(tape))
    return np.arange(first, tape.prompt_len if part == "prompt" else last)


def listed(tapes: Corpus | Sequence[Tape] | Tape, *, name: str = "tapes") -> Corpus:
    """Tapes as a corpus with unique ids.

    Args:
        tapes: A corpus, a tape, or a sequence of tapes.
        name: What the user calls them, for the sentence.

    Returns:
        The corpus.

    Raises:
        UserError: It is none of these, or it is empty.
    """
    if isinstance(tapes, Corpus):
        return tapes
    given = [tapes] if isinstance(tapes, Tape) else tapes
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(t, Tape) for t in given):
        raise UserError(f"{name}={type(tapes).__name__} is not valid: give what corpus(...) returns, or a list of Tape")
    return Corpus(given)


def padded(text: np.ndarray, n: int) -> np.ndarray:
    """A text of fewer than n tokens, filled up so that it is one n-gram; others, and an empty one, as they are."""
    return np.pad(text, (0, n - len(text)), constant_values=PAD) if 0 < len(text) < n else text


def gram_ids(texts: Sequence[np.ndarray], n: int) -> list[np.ndarray]:
    """Number the n-grams of texts, so that two have the same number exactly where they hold the same tokens.

    Numbers of twice the width come from pairs of numbers, so n-grams cost about log2(n) sorts of all tokens, and no
    hash can collide.

    Args:
        texts: Token ids, one array per text.
        n: Tokens per n-gram.

    Returns:
        int64 [max(tokens - n + 1, 0)] per text: the n-gram that begins at each token. The numbers themselves mean
        nothing beyond this call.
    """
    sizes = [len(text) for text in texts]
    flat = np.concatenate([np.zeros(0, np.int64), *texts]).astype(np.int64)
    if len(flat) < n:
        return [np.zeros(0, np.int64) for _ in texts]
    ids, width = _ranks(flat), 1
    out: np.ndarray | None = None
    made, left = 0, n
    while left:
        if left & 1:
            out, made = (ids, width) if out is None else (_joined(out, made, ids, width), made + width)
        left >>= 1
        if left:
            ids, width = _joined(ids, width, ids, width), 2 * width
    assert out is not None and made == n
    ends = np.cumsum(sizes)
    return [out[end - size : max(end - n + 1, end - size)] for size, end in zip(sizes, ends)]


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _joined(left: np.ndarray, left_width: int, right: np.ndarray, right_width: int) -> np.ndarray:
    """Numbers of the n-grams made of a left one and the right one that follows it, over one flat text."""
    n = len(left) - right_width
    return _ranks(left[:n] * (int(right.max()) + 1) + right[left_width : left_width + n])


def gram_hashes(text: np.ndarray, n: int) -> np.ndarray:
    """Hash the n-grams of one text by their contents alone, so that no other text changes them.

    Args:
        text: Token ids.
        n: Tokens per n-gram.

    Returns:
        uint64 [max(tokens - n + 1, 0)].

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014), chained over the tokens.
    """
    count = max(len(text) - n + 1, 0)
    tokens = np.ascontiguousarray(text, dtype=np.int64).view(np.uint64)
    out = np.full(count, n, dtype=np.uint64)
    for j in range(n if count else 0):
        out ^= tokens[j : j + count]
        out += _GOLDEN
        out = (out ^ (out >> np.uint64(30))) * _MIX_A
        out = (out ^ (out >> np.uint64(27))) * _MIX_B
        out ^= out >> np.uint64(31)
    return out
