"""Live rounds over a corpus, and where they differ from a walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError, check_choice
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Own, Tape, first_pending
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.replay.own import chosen_options, differs, sequence_of
from workbench.replay.walk import ESTIMATORS
from workbench.spec.generate import generate

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

    A tape that was sampled draws from its own random stream again; others from the stream of their place in the
    corpus, as in a draft table.

    Args:
        model: The target.
        tapes: Own tapes for "own", made with the shaping and seed among the options; any for "forced" and "ratio".
        estimator: "own" decodes from each tape's prompt; "forced" makes the engine commit the tape's text; "ratio"
            decodes a text of its own from each prompt, of the tape's length, by ``accept="ratio"``.
        exact: Numerical class; None for the model's own.
        **options: Options of ``generate``.

    Returns:
        A rounds frame over all documents.

    Raises:
        UserError: A tape is not what "own" would decode, or an option is not valid.
    """
    import polars as pl

    check_choice("estimator", estimator, ESTIMATORS)
    corpus = as_corpus(tapes)
    if "sequence" in options:
        raise UserError("sequence goes with wb.generate: here every tape has a random stream of its own; change seed")
    if estimator == "ratio":
        options = {"accept": "ratio", **options}
    if estimator == "own":
        _check_own(model, corpus, options)
    frames = []
    with numerical_class(model, exact):
        for i, tape in enumerate(progress(corpus, desc="live rounds", unit="doc")):
            given = {**options, "sequence": sequence_of(tape, i)}
            if estimator == "forced":
                made = generate(model, tape, force=tape, **given)
            else:
                made = generate(model, tape, max_new_tokens=len(tape) - first_pending(tape.prompt_len), **given)
            frames.append(made.rounds)
    return pl.concat(frames)


def _check_own(model: HybridModel, corpus: Corpus, options: dict[str, Any]) -> None:
    """Refuse tapes that decoding their prompt with these options would not give again."""
    here, chosen = fingerprint(model), chosen_options(options)
    chooser = chosen.chooser()
    for tape in corpus:
        if chooser.plain:
            if tape.own is None or tape.own != Own("greedy", here):
                raise UserError(
                    f"tape {tape.doc_id!r} is not this target's own greedy text (wb.own_tapes makes such tapes): use "
                    "estimator='forced' to make the engine commit it"
                )
            continue
        _, why = differs(tape, here, chosen.shaping(), chosen.seed)
        why = "accept='ratio' was given: estimator='ratio' decodes by that rule" if chooser.by_ratio else why
        if why:
            raise UserError(
                f"tape {tape.doc_id!r} is not what this target draws with these options: {why}; give the shaping and "
                "seed of the tape, or use estimator='forced' to make the engine commit it"
            )


def compare_rounds(walked: pl.DataFrame, live: pl.DataFrame, table: DraftTable | None = None) -> pl.DataFrame:
    """Rounds that a walk and a live run do not share.

    Two runs that part at one round meet again at the next common start; rounds on either side only are listed.

    Args:
        walked: Rounds of a walk.
        live: Rounds of the live engine.
        table: Adds where the two sides part and by what margin, which tells rounding from error; None leaves that out.

    Returns:
        One row per differing start: doc_id, start, and drafted, accepted, chain_stop, round_stop and draft_ids of
        both sides (null where a side has no round there); empty when the two agree. With a table also decision
        ("draft", "stop" or "accept": the first that differs), slot (from 0), margin (top-2 margin of the drafter's
        or the target's logits there, or the lead of a draw in such units; null for a stop) and draft_top1 of that slot;
        null where a side has no round.
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
    parted = [_parting(table.frame, row) for row in rows.iter_rows(named=True)]
    schema = {"decision": pl.String, "slot": pl.Int32, "margin": pl.Float64, "draft_top1": pl.Float64}
    return rows.hstack(pl.DataFrame(parted, schema=schema, orient="row"))


def _parting(frame: pl.DataFrame, row: dict[str, Any]) -> tuple[str | None, int | None, float | None, float | None]:
    """Decision, slot, margin and draft probability where the two sides of a differing round part."""
    import polars as pl

    a, b = row["draft_ids"], row["draft_ids_live"]
    if a is None or b is None:
        return None, None, None, None
    shorter = min(len(a), len(b))
    slot = next((j for j in range(shorter) if a[j] != b[j]), shorter)
    decision = "draft" if slot < shorter else "stop"
    if slot == shorter and len(a) == len(b):
        decision, slot = "accept", min(row["accepted"], row["accepted_live"])
    at = frame.filter(pl.col("doc_id") == row["doc_id"])
    chain = at.filter(pl.col("position") == row["start"]).row(0, named=True)
    top1 = chain["draft_top1"][slot] if slot < len(chain["draft_top1"]) else None
    if decision == "draft":
        return decision, slot, chain["draft_margin"][slot], top1
    if decision == "stop":
        return decision, slot, None, top1
    return decision, slot, at.filter(pl.col("position") == row["start"] + slot)["target_margin"][0], top1
