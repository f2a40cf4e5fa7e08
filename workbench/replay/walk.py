"""Walk any policy over a draft table, round by round, as the live engine would go.

Estimators, never mixed: "own" on texts the target generated greedily, where a walk is the live run; "forced" on any
text, where it is the live run made to commit that text; slot rates are a diagnostic of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_choice
from workbench.core.frames import rounds_frame
from workbench.core.records import RoundRecord
from workbench.core.tape import first_pending
from workbench.spec.accept import accept_greedy
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import Policy, PolicyRun, RoundView

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.table import DraftTable

ESTIMATORS = ("own", "forced")
POLICY_OPTIONS = ("p_min", "pmin0", "adaptive", "floor", "cap", "floor_context")
# Largest margin, by the model's dtype, at which two routes of the fast class may pick different tokens.
ROUNDING = {"float64": 1e-9, "float32": 1e-2, "bfloat16": 1.0}


@dataclass(frozen=True, eq=False)
class Track:
    """The columns of one document that a walk reads.

    Args:
        doc_id: The document.
        source: Its register.
        own: "greedy", "sampled" or "".
        first: Position of the first pending token.
        length: Tokens of the tape.
        tokens: int [length].
        target_id: int [length - 1].
        target_margin: float [length - 1].
        draft_ids: int [length - 1, K]; -1 where there is no draft.
        draft_top1: float [length - 1, K].
    """

    doc_id: str
    source: str
    own: str
    first: int
    length: int
    tokens: np.ndarray
    target_id: np.ndarray
    target_margin: np.ndarray
    draft_ids: np.ndarray
    draft_top1: np.ndarray


def tracks(table: DraftTable) -> Iterator[Track]:
    """Documents of a table, in order."""
    columns = ("doc_id", "source", "own", "prompt_len", "length", "token", "next_token", "target_id", "target_margin")
    frame = table.frame.select(*columns, "draft_ids", "draft_top1")
    for part in frame.partition_by("doc_id", maintain_order=True):
        head = part.row(0, named=True)
        ids = np.where(np.isnan(raw := np.array(part["draft_ids"].to_numpy(), dtype=np.float64)), -1, raw)
        yield Track(
            head["doc_id"],
            head["source"],
            head["own"],
            first_pending(head["prompt_len"]),
            head["length"],
            np.append(part["token"].to_numpy(), part["next_token"][-1]),
            part["target_id"].to_numpy(),
            part["target_margin"].to_numpy(),
            ids.astype(np.int64),
            np.array(part["draft_top1"].to_numpy(), dtype=np.float64),
        )


def walk(
    table: DraftTable,
    *,
    k: int = 3,
    policy: Policy | None = None,
    estimator: str | None = None,
    **given: Any,
) -> pl.DataFrame:
    """Rounds that a policy would have run over the recorded texts.

    Args:
        table: The draft table, with a chain at every start (stride 1).
        k: Draft length; default 3.
        policy: Replaces the policy that k and the options describe.
        estimator: "own" or "forced"; None takes "own" when every document is the target's own greedy text.
        **given: Policy options by name, instead of a policy: p_min, pmin0, adaptive, floor, cap, floor_context.

    Returns:
        A rounds frame with one more column, ``estimator``; its time columns are 0.

    Raises:
        UserError: An option is not valid, the table is thinned, has too few slots for the policy, or is no own text
            where "own" was asked for.
    """
    import polars as pl

    _check_given(policy, given)
    chosen = policy or GenerateOptions(k=k, **given).policy()
    if chosen.k_max > table.k_max:
        raise UserError(
            f"the policy drafts up to {chosen.k_max} tokens and the table has {table.k_max} slots: replay with "
            f"k_max={chosen.k_max} or more, or use a smaller k"
        )
    stride = int(table.manifest.parameters["stride"])
    if stride != 1:
        raise UserError(f"the table has a chain at one start in {stride} only; a walk needs replay(..., stride=1)")
    kinds = set(table.frame["own"].unique())
    picked = estimator or ("own" if kinds == {"greedy"} else "forced")
    check_choice("estimator", picked, ESTIMATORS, hint="slot_rates(table) gives unconditional hits per slot")
    if picked == "own" and kinds != {"greedy"}:
        raise UserError(
            "estimator='own' needs texts that this target generated greedily (wb.own_tapes); use 'forced' for others"
        )
    model = table.manifest.model
    width = int(model["hidden_size"])
    frames = []
    for track in tracks(table):
        if picked == "own":
            check_own(track, 0.0 if model["exact"] else ROUNDING[model["dtype"]])
        records = walk_track(track, chosen.start(width=width), picked)
        frames.append(rounds_frame(records, doc_id=track.doc_id, source=track.source))
    return pl.concat(frames).with_columns(pl.lit(picked).alias("estimator"))


def _check_given(policy: Policy | None, given: dict[str, Any]) -> None:
    valid = ", ".join(POLICY_OPTIONS)
    if unknown := [name for name in given if name not in POLICY_OPTIONS]:
        raise UserError(
            f"option {', '.join(map(repr, unknown))} is not valid in a walk: valid options are k, policy, estimator, "
            f"{valid}; what shapes the chains themselves, such as carrier, is set when the table is made"
        )
    if policy is not None and given:
        raise UserError(f"policy and {', '.join(map(repr, given))} were both given: a policy holds its own options")


def check_own(track: Track, rounding: float) -> None:
    """Refuse a text that the target, as recorded, would not have generated.

    Args:
        track: The columns of one document.
        rounding: Margin up to which another pick may be rounding; 0 in exact mode.

    Raises:
        UserError: A recorded pick differs from the text by more.
    """
    before = track.first - 1  # the row that chose the first pending token
    picks, text, margins = track.target_id[before:], track.tokens[track.first :], track.target_margin[before:]
    bad = np.flatnonzero((picks != text) & (margins >= rounding))
    if len(bad):
        at = int(bad[0])
        raise UserError(
            f"the text of {track.doc_id} is not this target's greedy text at position {track.first + at}, where "
            f"its pick leads by {margins[at]:.2g}: it was generated by another model or in another numerical class; "
            "use estimator='forced'"
        )


def walk_track(track: Track, run: PolicyRun, estimator: str) -> list[RoundRecord]:
    """Rounds of one document.

    Args:
        track: Its columns.
        run: A fresh run of the policy.
        estimator: "own", for a text that ``check_own`` passes, or "forced".

    Returns:
        Records equal to the live ones, without times.
    """
    records: list[RoundRecord] = []
    tokens, at = track.tokens.tolist(), track.first
    targets = track.target_id.tolist()
    while at < track.length - 1:
        budget = track.length - 1 - at
        wish = run.next_k(at + 1)
        k = max(0, min(wish, budget - 1))
        drafts: list[int] = []
        seen: list[float] = []
        cause = "k" if k else "none"
        for slot in range(k):
            token, p = int(track.draft_ids[at, slot]), float(track.draft_top1[at, slot])
            assert token >= 0, f"no draft recorded at {track.doc_id} {at} slot {slot}"
            why = run.drops(slot, p, 1)
            if why is not None:
                cause = why
                break
            drafts.append(token)
            seen.append(p)
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
                chain_stop=cause,
                round_stop=verdict.round_stop or ("budget" if k < wish else ""),
            )
        )
        at += len(verdict.emitted)
        run.observe(RoundView(len(drafts), verdict.accepted, at + 1))
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
