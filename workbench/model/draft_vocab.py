"""Which ids a trimmed draft head keeps: those given, or the most frequent ones of counts with every special id.

Counts come as a frame with the columns ``id`` and ``count``, a mapping of ids to counts, or one count per id. This
module knows no frame library: a frame is whatever gives columns by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.model.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """A choice of ids.

    Args:
        ids: Distinct ids, ascending, int64 [D].
        source: How they were chosen, in words.
        coverage: Share of the counted tokens that are among them; None where nothing was counted.
    """

    ids: np.ndarray
    source: str
    coverage: float | None = None


def choose_vocab(
    ids: Sequence[int] | None,
    top_n: int | None,
    counts: Any,
    *,
    vocab_size: int,
    special: Sequence[int],
    note: str = "",
) -> DraftVocab:
    """The ids of a trimmed head.

    Args:
        ids: Exactly these; None for the most frequent.
        top_n: How many of the most frequent, by (count descending, id ascending); ids that never occurred follow those
            that did. None with ``ids``.
        counts: Counts of tokens; with ``ids`` they only measure coverage.
        vocab_size: Ids of the target.
        special: Ids that ``top_n`` keeps on top, however rare.
        note: What was counted, in words; goes into ``source``.

    Returns:
        The choice.

    Raises:
        UserError: Neither or both of ``ids`` and ``top_n``, an id out of range or repeated, or counts that are none.
    """
    counted_V = None if counts is None else read_counts(counts, vocab_size)
    if (ids is None) == (top_n is None):
        raise UserError(
            "a draft vocabulary is made from ids or from top_n with counts: give one of the two, such as "
            "trim_draft_vocab(top_n=8192, counts=wb.token_counts(tapes))"
        )
    if ids is not None:
        kept, source = _distinct(ids, vocab_size), f"{len(ids):,} ids given"
    else:
        check_int("top_n", top_n, low=1, high=vocab_size)
        if counted_V is None:
            raise UserError(f"top_n={top_n} needs counts of tokens: give counts=wb.token_counts(tapes), or ids")
        ranked = np.argsort(-counted_V, kind="stable")[:top_n]
        extra = sorted({int(i) for i in special} - set(ranked.tolist()))
        kept = np.sort(np.concatenate([ranked, np.array(extra, np.int64)]))
        source = f"{top_n:,} most frequent ids"
        source += f" and {len(extra)} special" if extra else ""
    if note:
        source += f" of {note}" if ids is None else f", {note}"
    coverage = None if counted_V is None else float(counted_V[kept].sum() / counted_V.sum())
    return DraftVocab(kept, source, coverage)


def read_counts(counts: Any, vocab_size: int) -> np.ndarray:
    """Counts of every id, int64 [V].

    Args:
        counts: A frame with the columns ``id`` and ``count``, a mapping, or one count per id from 0 on.
        vocab_size: Ids of the target.

    Raises:
        UserError: It is none of these, an id is out of range or twice there, or a count is no whole number.
    """
    columns = getattr(counts, "columns", None)
    if columns is not None:
        if missing := [name for name in ("id", "count") if name not in list(columns)]:
            raise UserError(
                f"counts have the columns {', '.join(map(repr, columns)) or '(none)'} and lack {missing[0]!r}: give "
                "what wb.token_counts(tapes) returns"
            )
        ids, values = _whole("ids", counts["id"]), _whole("counts", counts["count"])
    elif isinstance(counts, Mapping):
        ids, values = _whole("ids", counts.keys()), _whole("counts", counts.values())
    elif isinstance(counts, Iterable) and not isinstance(counts, (str, bytes)):
        values = _whole("counts", counts)
        ids = np.arange(len(values))
    else:
        raise UserError(
            f"counts of type {type(counts).__name__} are not valid: give what wb.token_counts(tapes) returns, a "
            "mapping of ids to counts, or one count per id"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = int(ids.min() if ids.min() < 0 else ids.max())
        raise UserError(
            f"counts name id {bad}, and this model's ids are 0 to {vocab_size - 1}: count text made with its tokenizer"
        )
    if len(np.unique(ids)) < len(ids):
        raise UserError("counts name an id twice: give one count per id, such as what wb.token_counts(tapes) returns")
    if (values < 0).any() or values.sum() == 0:
        raise UserError("counts hold a negative number or nothing at all: give how often each id occurred")
    counted_V = np.zeros(vocab_size, np.int64)
    counted_V[ids] = values
    return counted_V


def special_ids(tokenizer: Tokenizer | None, stops: Sequence[int], vocab_size: int) -> list[int]:
    """Ids that no count may leave out: special tokens of the tokenizer, and those that end a text."""
    found = set(stops) | (set() if tokenizer is None else set(tokenizer.special_ids))
    return sorted(i for i in found if i < vocab_size)


def _distinct(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    given = _whole("ids", ids)
    if not len(given) or len(np.unique(given)) != len(given) or given.min() < 0 or given.max() >= vocab_size:
        raise UserError(
            f"{len(given)} draft ids are not valid: give distinct ids of the target, from 0 to {vocab_size - 1}, at "
            "least one"
        )
    return np.sort(given)


def _whole(what: str, values: Any) -> np.ndarray:
    """Whole numbers of any container as int64."""
    found = np.asarray(list(values))
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(f"{what} of a draft vocabulary must be whole numbers in one row; these are {found.dtype}")
    return found.astype(np.int64)
