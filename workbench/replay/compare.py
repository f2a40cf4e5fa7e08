"""Live rounds over a corpus, and where they differ from a walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus
from workbench.model.hybrid import HybridModel
from workbench.spec.session import generate

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.table import DraftTable


def live_rounds(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    estimator: str = "own",
    exact: bool | None = None,
    **options: Any,
) -> pl.DataFrame:
    """Rounds of the live engine over tapes.

    Args:
        model: The target.
        tapes: Own tapes for "own"; any for "forced".
        estimator: "own" decodes from each tape's prompt; "forced" makes the engine commit the tape's text.
        exact: Numerical class; None for the model's own.
        **options: Options of ``generate``.

    Returns:
        A rounds frame over all documents.
    """
    import polars as pl

    frames = []
    with numerical_class(model, exact):
        for tape in progress(as_corpus(tapes), desc="live rounds", unit="doc"):
            if estimator == "own":
                n = len(tape) - tape.prompt_len
                made = generate(model, tape, max_new_tokens=n, **options)
            else:
                made = generate(model, tape, force=tape, **options)
            frames.append(made.rounds)
    return pl.concat(frames)


def compare_rounds(walked: pl.DataFrame, live: pl.DataFrame, table: DraftTable | None = None) -> pl.DataFrame:
    """Rounds that a walk and a live run do not share.

    Two runs that part at one round meet again at the next common start; rounds on either side only are listed.

    Args:
        walked: Rounds of a walk.
        live: Rounds of the live engine.
        table: Adds the table's margins at each start, which tell rounding from error; None leaves them out.

    Returns:
        One row per differing start: doc_id, start, and drafted, accepted, chain_stop, round_stop and draft_ids of
        both sides (null where a side has no round there); empty when the two agree.
    """
    import polars as pl

    columns = ["drafted", "accepted", "chain_stop", "round_stop", "draft_ids"]
    left = walked.select("doc_id", "start", *columns)
    right = live.select("doc_id", "start", *[pl.col(c).alias(f"{c}_live") for c in columns])
    both = left.join(right, on=["doc_id", "start"], how="full", coalesce=True)
    same = pl.all_horizontal([pl.col(c).eq_missing(pl.col(f"{c}_live")) for c in columns])
    rows = both.filter(~same).sort("doc_id", "start")
    if table is None:
        return rows
    margins = table.frame.select(
        "doc_id", pl.col("position").alias("start"), "target_margin", "draft_margin", "draft_top1"
    )
    return rows.join(margins, on=["doc_id", "start"], how="left")
