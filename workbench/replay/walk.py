"""Walk any policy over a draft table, round by round, as the live engine would go.

Estimators, never mixed: "own" on texts the target generated as the table draws, greedily or with the same shaping and
seed, where a walk is the live run; "forced" on any text, where it is the live run made to commit that text; "ratio" on
texts that follow the target's law, where a walk is a draw from the live runs by the ratio rule that gave this text.
Slot rates are a diagnostic of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.frames import rounds_frame
from workbench.core.records import RoundRecord
from workbench.replay.oracle import begin
from workbench.replay.ratio import check_ratio, ratio_rounds
from workbench.replay.timing import CostGrid, RoundSeconds
from workbench.replay.tracks import (
    RoundCost,
    Track,
    check_timed,
    estimator_for,
    kept,
    policy_for,
    seconds_of,
    tracks,
)
from workbench.spec.accept import accept_greedy
from workbench.spec.policies import Policy, PolicyRun, RoundView

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.table import DraftTable

ESTIMATORS = ("own", "forced", "ratio")
# Largest margin, by the model's dtype, at which two routes of the fast class may pick different tokens.
ROUNDING = {"float64": 1e-9, "float32": 1e-2, "bfloat16": 1.0}


def walk(
    table: DraftTable,
    *,
    k: int = 3,
    policy: Policy | None = None,
    estimator: str | None = None,
    seed: int | None = None,
    cost: CostGrid | None = None,
    **given: Any,
) -> pl.DataFrame:
    """Rounds that a policy would have run over the recorded texts.

    Args:
        table: The draft table, with a chain at every start (stride 1).
        k: Draft length; default 3.
        policy: Replaces the policy that k and the options describe.
        estimator: "own", "forced" or "ratio"; None takes "own" when every document is the target's own text, made as
            the table draws, else "forced".
        seed: Of the acceptances that "ratio" draws; None is 0. The others draw nothing.
        cost: How long rounds take, for policies that read time: a ``CostModel``, or what else has its ``grid``; None
            tells them 0, and refuses ``Gate``.
        **given: Policy options by name, instead of a policy: p_min, pmin0, adaptive, floor, cap, floor_context,
            p_min_reads.

    Returns:
        A rounds frame with one more column, ``estimator``; its time columns are 0. Under "ratio" drafts that were not
        accepted are unknown, null among ``draft_ids``, and so is ``draft_top1``.

    Raises:
        UserError: An option is not valid, the table is thinned or has too few slots for the policy, or its texts are
            not what the estimator needs.
    """
    import polars as pl

    chosen = policy_for(table, k, policy, given)
    check_timed(chosen, cost)
    picked = chosen_estimator(table, estimator, seed)
    if picked == "ratio":
        check_ratio(table, chosen)
    width, frames = int(table.manifest.model["hidden_size"]), []
    timed = None if cost is None else RoundSeconds.of(cost, chosen.k_max, longest_text(table))
    edge = rounding(table)
    for i, track in enumerate(tracks(table)):
        if picked == "own":
            check_own(track, edge, drawn=not table.plain)
        frames.append(track_rounds(track, chosen, picked, width=width, seed=seed or 0, sequence=i, cost=timed))
    return pl.concat(frames).with_columns(pl.lit(picked).alias("estimator"))


def chosen_estimator(table: DraftTable, estimator: str | None, seed: int | None) -> str:
    """The estimator of a walk, once the table is known to suit it.

    Args:
        table: The draft table.
        estimator: "own", "forced" or "ratio"; None takes "own" when every document is the target's own text, made as
            the table draws, else "forced".
        seed: Of the acceptances that "ratio" draws; None goes with the others too.

    Returns:
        Its name.

    Raises:
        UserError: Another name, a seed that nothing draws from, or texts that are not the target's own.
    """
    picked = estimator_for(table, estimator, ESTIMATORS, hint="slot_rates(table) gives unconditional hits per slot")
    if seed is not None:
        check_int("seed", seed, low=0)
        if picked != "ratio":
            raise UserError(f"seed={seed} goes with estimator='ratio': a walk by {picked!r} draws nothing")
    return picked


def track_rounds(
    track: Track,
    policy: Policy,
    estimator: str,
    *,
    width: int,
    seed: int = 0,
    sequence: int = 0,
    cost: RoundCost | None = None,
) -> pl.DataFrame:
    """Rounds of one document, which ``check_own`` passes when the estimator is "own".

    Args:
        track: Its columns.
        policy: The policy.
        estimator: "own", "forced" or "ratio".
        width: Width of the model's residual stream.
        seed: Of the acceptances that "ratio" draws.
        sequence: The document's stream under it: its place in the table.
        cost: How long rounds take; None for 0 seconds.

    Returns:
        A rounds frame.
    """
    if estimator == "ratio":
        return ratio_rounds(track, policy.start(width=width), seed, sequence, cost)
    records = walk_track(track, begin(policy, track, estimator, width=width), estimator, cost)
    return rounds_frame(records, doc_id=track.doc_id, source=track.source)


def longest_text(table: DraftTable) -> int:
    """Tokens of a table's longest text."""
    import pyarrow.compute as pc

    return int(pc.max(table.dataset.data.table["length"]).as_py())


def rounding(table: DraftTable) -> float:
    """Margin up to which another pick may be rounding: 0 in exact mode; in the fast class no bound where filters act,
    since a token at their edge comes and goes with the last bit."""
    model = table.manifest.model
    if model["exact"]:
        return 0.0
    shaping = table.manifest.parameters["shaping"]
    filters = shaping["top_k"] > 0 or shaping["top_p"] < 1 or shaping["min_p"] > 0
    return float("inf") if filters and shaping["temperature"] > 0 else ROUNDING[model["dtype"]]


def check_own(track: Track, rounding: float, *, drawn: bool = False) -> None:
    """Refuse a text that the target, as recorded, would not have generated.

    Args:
        track: The columns of one document.
        rounding: Margin up to which another pick may be rounding; 0 in exact mode.
        drawn: The picks are draws.

    Raises:
        UserError: A recorded pick differs from the text by more.
    """
    before = track.first - 1  # the row that chose the first pending token
    picks, text, margins = track.target_id[before:], track.tokens[track.first :], track.target_margin[before:]
    bad = np.flatnonzero((picks != text) & (margins >= rounding))
    if len(bad):
        at = int(bad[0])
        kind, pick = ("sampled", "draw") if drawn else ("greedy", "pick")
        raise UserError(
            f"the text of {track.doc_id} is not this target's {kind} text at position {track.first + at}, where "
            f"its {pick} leads by {margins[at]:.2g}: it was generated by another model or in another numerical class; "
            "use estimator='forced'"
        )


def walk_track(track: Track, run: PolicyRun, estimator: str, cost: RoundCost | None = None) -> list[RoundRecord]:
    """Rounds of one document.

    Args:
        track: Its columns.
        run: A fresh run of the policy.
        estimator: "own", for a text that ``check_own`` passes, or "forced".
        cost: How long rounds take; None for 0 seconds.

    Returns:
        Records equal to the live ones, without times.
    """
    records: list[RoundRecord] = []
    tokens, at = track.tokens.tolist(), track.first
    targets = track.target_id.tolist()
    read = track.draft_top if getattr(run, "statistic", "drawn") == "top" else track.draft_top1
    while at < track.length - 1:
        budget = track.length - 1 - at
        wish = run.next_k(at + 1)
        k = max(0, min(wish, budget - 1))
        chain = kept(run, read[at], k)
        drafted = chain.drafted
        tried = track.draft_ids[at, : chain.steps]
        assert (tried >= 0).all(), f"no draft recorded at {track.doc_id} {at} slot {int((tried < 0).argmax())}"
        drafts = track.draft_ids[at, :drafted].tolist()
        seen = track.draft_top1[at, :drafted].tolist()
        text = tokens[at + 1 : at + 2 + len(drafts)]
        if estimator == "own":  # the text is what the target picked
            verdict = accept_greedy(drafts, text)
        else:
            verdict = accept_greedy(drafts, targets[at : at + len(drafts) + 1], force=text)
        records.append(
            RoundRecord(
                index=len(records),
                start=at,
                base=1,
                k=k,
                draft_ids=tuple(drafts),
                draft_top1=tuple(seen),
                accepted=verdict.accepted,
                emitted=len(verdict.emitted),
                bonus=verdict.bonus,
                chain_stop=chain.cause,
                round_stop=verdict.round_stop or ("budget" if k < wish else ""),
                steps=chain.steps,
            )
        )
        seconds = seconds_of(cost, chain, at + 1)
        at += len(verdict.emitted)
        run.observe(RoundView(len(drafts), verdict.accepted, at + 1, chain.steps, seconds))
    return records


def slot_rates(table: DraftTable) -> pl.DataFrame:
    """Unconditional hits per slot: a draft counts when it is the target's pick on the tape's own prefix.

    A diagnostic, never a yield: beyond slot 1 the target's pick follows the tape, the draft follows its own chain.

    Args:
        table: The draft table; any stride.

    Returns:
        Columns source, slot (from 1), starts, hits, rate (null without a start).
    """
    import polars as pl

    rows = []
    for track in tracks(table):
        n, k = track.draft_ids.shape
        for slot in range(k):
            drafts = track.draft_ids[: max(n - slot, 0), slot]
            has = drafts >= 0
            hits = int((drafts == track.target_id[slot:])[has].sum())
            rows.append((track.source, slot + 1, int(has.sum()), hits))
    schema = {"source": pl.String, "slot": pl.Int64, "starts": pl.Int64, "hits": pl.Int64}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return (
        frame.group_by("source", "slot", maintain_order=True)
        .agg(pl.col("starts").sum(), pl.col("hits").sum())
        .with_columns(pl.when(pl.col("starts") > 0).then(pl.col("hits") / pl.col("starts")).alias("rate"))
    )
