"""How often every token id occurs in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import UserError, check_choice
from workbench.core.tape import Corpus, Tape

if TYPE_CHECKING:
    import polars as pl

PARTS = ("output", "supervised", "all")


def token_counts(tapes: Corpus | Sequence[Tape] | Tape, *, part: str = "output") -> pl.DataFrame:
    """Count token ids, most frequent first: of a corpus, or of the model's own output.

    Args:
        tapes: Documents; those that ``wb.own_tapes`` made hold the target's own output after their prompts.
        part: "output" (default) counts what follows each tape's prompt, which is all of a plain text; "supervised"
            counts the tokens that may be trained on, such as the assistant's; "all" counts every token.

    Returns:
        One row per id that occurs, by (count descending, id ascending): id, count, share of all counted tokens, and
        cumulative, the share of this id and those before it.

    Raises:
        UserError: These are no tapes, or no token of theirs counts.
    """
    import polars as pl

    check_choice("part", part, PARTS)
    listed = [tapes] if isinstance(tapes, Tape) else tapes
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not all(isinstance(t, Tape) for t in listed):
        raise UserError(f"tapes={type(tapes).__name__} is not valid: give what corpus(...) returns, or a list of Tape")
    found = np.zeros(0, np.int64)
    for tape in listed:
        counts = np.bincount(_counted(tape, part), minlength=len(found))
        counts[: len(found)] += found
        found = counts
    ids = np.flatnonzero(found)
    if not len(ids):
        raise UserError(f"no token of {len(listed)} tapes counts as {part!r}: use part='all', or tapes with more text")
    ids = ids[np.argsort(-found[ids], kind="stable")]
    counts = found[ids]
    shares = counts / counts.sum()
    return pl.DataFrame({"id": ids, "count": counts, "share": shares, "cumulative": counts.cumsum() / counts.sum()})


def _counted(tape: Tape, part: str) -> np.ndarray:
    if part == "all":
        return tape.tokens
    if part == "supervised":
        return tape.tokens if tape.supervised is None else tape.tokens[tape.supervised]
    return tape.tokens[tape.prompt_len :]
