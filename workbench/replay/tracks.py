"""The documents of a draft table as arrays, and what is asked of a table and a policy before a walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.core.errors import UserError, check_choice
from workbench.core.tape import first_pending
from workbench.replay.shards import shard_tables
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import Policy, PolicyRun, trimmed

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.replay.table import DraftTable

COLUMNS = (
    *("doc_id", "source", "own", "prompt_len", "length", "token", "next_token", "target_id", "target_margin"),
    *("draft_ids", "draft_top1"),
)
OPTIONAL = ("draft_top", "target_p", "forced_q", "forced_top")
POLICY_OPTIONS = ("p_min", "pmin0", "adaptive", "floor", "cap", "floor_context", "p_min_reads")


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
        draft_top: float [length - 1, K], the largest probability of a draft's row; draft_top1 where drafts are picks.
        target_p: float [length - 1]; None without forced chains.
        forced_q: float [length - 1, K]; None likewise.
        forced_top: float [length - 1, K]; None likewise.
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
    draft_top: np.ndarray
    target_p: np.ndarray | None
    forced_q: np.ndarray | None
    forced_top: np.ndarray | None


def tracks(table: DraftTable) -> Iterator[Track]:
    """Documents of a table, in order, read a shard at a time."""
    more = [name for name in OPTIONAL if name in table.dataset.column_names]
    for shard in shard_tables(table, (*COLUMNS, *more)):
        yield from tracks_of(shard)


def tracks_of(shard: pa.Table) -> Iterator[Track]:
    """Documents of one shard, in order."""
    import polars as pl

    frame = pl.from_arrow(shard)
    assert isinstance(frame, pl.DataFrame)
    more = [name for name in OPTIONAL if name in frame.columns]
    for part in frame.partition_by("doc_id", maintain_order=True):
        head = part.row(0, named=True)
        ids = np.where(np.isnan(raw := np.array(part["draft_ids"].to_numpy(), dtype=np.float64)), -1, raw)
        floats = {name: np.array(part[name].to_numpy(), dtype=np.float64) for name in ("draft_top1", *more)}
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
            floats["draft_top1"],
            floats.get("draft_top", floats["draft_top1"]),
            floats.get("target_p"),
            floats.get("forced_q"),
            floats.get("forced_top"),
        )


def policy_for(table: DraftTable, k: int, policy: Policy | None, given: dict[str, Any]) -> Policy:
    """The policy asked for, once the table is known to have a chain at every start and slots enough.

    Args:
        table: The draft table.
        k: Draft length.
        policy: Replaces what k and the options describe.
        given: Options by name.

    Returns:
        The policy.

    Raises:
        UserError: An option is not valid, or the table is thinned or has too few slots.
    """
    valid = ", ".join(POLICY_OPTIONS)
    if unknown := [name for name in given if name not in POLICY_OPTIONS]:
        raise UserError(
            f"option {', '.join(map(repr, unknown))} is not valid in a walk: valid options are k, policy, estimator, "
            f"{valid}; what shapes the chains themselves, such as carrier, is set when the table is made"
        )
    if policy is not None and given:
        raise UserError(f"policy and {', '.join(map(repr, given))} were both given: a policy holds its own options")
    chosen = policy or GenerateOptions(k=k, **given).policy()
    if chosen.k_max > table.k_max:
        raise UserError(
            f"the policy drafts up to {chosen.k_max} tokens and the table has {table.k_max} slots: replay with "
            f"k_max={chosen.k_max} or more, or use a smaller k"
        )
    stride = int(table.manifest.parameters["stride"])
    if stride != 1:
        raise UserError(f"the table has a chain at one start in {stride} only; a walk needs replay(..., stride=1)")
    return chosen


def first_difference(table: DraftTable, column: str) -> tuple[str, str] | None:
    """First document whose text was made otherwise than this table says, and how; None when there is none."""
    import pyarrow.compute as pc

    columns = table.dataset.data.table
    at = pc.index(pc.not_equal(columns[column], ""), True).as_py()
    return None if at < 0 else (columns["doc_id"][at].as_py(), columns[column][at].as_py())


def own_trouble(table: DraftTable) -> str:
    """Why the texts of a table are not what the target would generate by itself, as recorded; "" when they are."""
    if table.plain:
        if set(table.dataset.unique("own")) == {"greedy"}:
            return ""
        return "estimator='own' needs texts that this target generated greedily (wb.own_tapes); use 'forced' for others"
    found = first_difference(table, "draws_differ")
    if found is None:
        return ""
    return (
        f"estimator='own' needs texts that this target drew with the table's shaping and seed (wb.own_tapes with the "
        f"same options), and {found[0]!r} is none: {found[1]}; replay with the shaping and seed of the text, or use "
        "'forced'"
    )


def estimator_for(table: DraftTable, estimator: str | None, valid: Sequence[str], *, hint: str = "") -> str:
    """The estimator of a walk over a table.

    Args:
        table: The draft table.
        estimator: As asked for; None takes "own" where the texts allow it, else "forced".
        valid: Those that will do.
        hint: What else to do, in the sentence that refuses another name.

    Returns:
        Its name.

    Raises:
        UserError: Another name, or "own" on texts that are not the target's own.
    """
    trouble = own_trouble(table) if estimator in (None, "", "own") else ""
    picked = check_choice("estimator", estimator or ("forced" if trouble else "own"), valid, hint=hint)
    if picked == "own" and trouble:
        raise UserError(trouble)
    return picked


class RoundCost(Protocol):
    """How long a round takes, as ``CostModel`` knows it."""

    def round_seconds(self, *, steps: int, drafted: int, context: int = 0) -> float:
        """Duration of a round, seconds.

        Args:
            steps: Drafter steps.
            drafted: Drafts verified.
            context: Tokens known when the round starts.
        """
        ...


def check_timed(policy: Policy, cost: object | None) -> None:
    """Refuse a walk of a policy that reads time without a model of it.

    Raises:
        UserError: It does, and there is none.
    """
    if cost is None and getattr(policy, "timed", False):
        raise UserError(
            f"{type(policy).__name__} reads the duration of rounds, which a table does not hold: give cost=, such as a "
            "CostModel"
        )


class Kept(NamedTuple):
    """What a policy keeps of a chain.

    Args:
        drafted: Tokens kept.
        cause: Why the chain ends there, as in ``RoundRecord.chain_stop``.
        steps: Drafter steps run for it.
    """

    drafted: int
    cause: str
    steps: int


def kept(run: PolicyRun, top_K: np.ndarray, k: int) -> Kept:
    """What a policy keeps of a chain of up to k drafts.

    Args:
        run: The policy's run.
        top_K: What it reads in every slot.
        k: Drafts asked for.

    Returns:
        Tokens kept, why the chain ends, and the drafter steps.
    """
    n, cause, steps = k, "k" if k else "none", k
    for slot in range(k):
        why = run.drops(slot, float(top_K[slot]), 1)
        if why is not None:
            n, cause, steps = slot, why, slot + 1
            break
    stays = trimmed(run, n, 1)
    return Kept(n, cause, steps) if stays == n else Kept(stays, "policy", steps)


def seconds_of(cost: RoundCost | None, chain: Kept, committed: int) -> float:
    """Duration of a round by a cost model; 0 without one."""
    return 0.0 if cost is None else cost.round_seconds(steps=chain.steps, drafted=chain.drafted, context=committed)
