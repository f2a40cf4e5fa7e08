"""Drafts one by one: what the drafter believed of each, what kind of token it is, and whether the target took it.

Classes are read from a token's own text, so they need no tokenizer here; whoever has one passes its ``pieces``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.core.frames import require

if TYPE_CHECKING:
    import polars as pl

CLASSES = ("word start", "continuation", "digit", "punctuation", "whitespace", "newline", "other")
# Round stops after which the drafts behind the accepted prefix were never compared with the target.
UNTESTED = ("stop", "stop_string", "cancel", "forced")


def token_class(text: str) -> str:
    """The class of a token, from its own text.

    The first character that is not white space decides. A word at the beginning of a line carries no space of its own
    in most vocabularies and counts as a continuation: the text of one token cannot tell.

    Args:
        text: Text of one token.

    Returns:
        "word start" (white space, then a letter), "continuation" (a letter first), "digit", "punctuation" (marks and
        symbols), "newline" (white space with a line end), "whitespace" (other white space), or "other" (empty, part of
        a split character, control characters).
    """
    body = text.lstrip()
    if not body:
        return "other" if not text else "newline" if "\n" in text or "\r" in text else "whitespace"
    kind = unicodedata.category(body[0])[0]
    if body[0] == "�" or kind not in "LMNPS":
        return "other"
    if kind in "LM":
        return "word start" if len(body) < len(text) else "continuation"
    return "digit" if kind == "N" else "punctuation"


def drafts_frame(
    rounds: pl.DataFrame, *, pieces: Callable[[Sequence[int]], Sequence[str]] | None = None
) -> pl.DataFrame:
    """One row per draft that the target compared with its own token.

    A round compares its accepted drafts and the first that failed. Drafts behind a stop, or behind the place where a
    forced text left an accepted draft, were never compared and are left out.

    Args:
        rounds: A rounds frame.
        pieces: Texts of token ids, such as ``model.tokenizer.pieces``; adds the column token_class.

    Returns:
        Columns doc_id, source, start, slot (from 1), draft_id, confidence (the drafter's probability, T = 1; null where
        the walk does not know it), hit, and token_class with ``pieces`` (null where the draft is unknown).

    Raises:
        UserError: A column is missing.
    """
    import polars as pl

    columns = ("doc_id", "source", "start", "drafted", "accepted", "draft_ids", "draft_top1", "round_stop")
    require(rounds, columns, "a rounds frame")
    failed = ~pl.col("round_stop").is_in(UNTESTED)
    tested = pl.min_horizontal(pl.col("accepted") + failed.cast(pl.Int32), "drafted")
    known = rounds.select(*columns, tested=tested, slot=pl.int_ranges(1, pl.col("drafted").cast(pl.Int64) + 1))
    # An empty list explodes into one row of nulls, which the comparison drops.
    drafts = known.filter(pl.col("drafted") > 0).explode("draft_ids", "draft_top1", "slot")
    drafts = drafts.filter(pl.col("slot") <= pl.col("tested"))
    out = drafts.select(
        "doc_id",
        "source",
        "start",
        pl.col("slot").cast(pl.Int32),
        draft_id="draft_ids",
        confidence=pl.col("draft_top1").cast(pl.Float64),
        hit=pl.col("slot") <= pl.col("accepted"),
    )
    if pieces is None:
        return out
    ids = out["draft_id"].unique().drop_nulls().sort()
    classes = [token_class(text) for text in pieces(ids.to_list())]
    names = pl.DataFrame({"draft_id": ids, "token_class": pl.Series(classes, dtype=pl.String)})
    return out.join(names, on="draft_id", how="left", maintain_order="left")
