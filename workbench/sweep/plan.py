"""What a sweep is about to do: which tables by which estimator, under which setting, and the key of every cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError, check_int, check_real
from workbench.replay.counts import CONTEXTS, WalkCounts
from workbench.replay.fast import walk_counts
from workbench.replay.ratio import check_ratio
from workbench.replay.table import DraftTable
from workbench.replay.tracks import policy_for
from workbench.replay.walk import check_timed, chosen_estimator
from workbench.spec.policies import Policy
from workbench.spec.policies.naming import label_of, spec_of
from workbench.sweep.cells import Walked, cell_key
from workbench.sweep.held import Bootstrap

if TYPE_CHECKING:
    from workbench.replay.cost import CostModel

_nameless = count()


def named_tables(table: Any) -> dict[str, DraftTable]:
    """Tables by name; those given without one are called as their directories are.

    Args:
        table: One, a sequence, or a mapping.

    Returns:
        The mapping, in order.

    Raises:
        UserError: There is none, one is no table, or two share a name.
    """
    if isinstance(table, Mapping):
        pairs = [(str(name), one) for name, one in table.items()]
    else:
        listed = list(table) if isinstance(table, Sequence) and not isinstance(table, str) else [table]
        pairs = [(Path(getattr(one, "path", "")).resolve().name, one) for one in listed]
    for _, one in pairs:
        if not isinstance(one, DraftTable):
            raise UserError(
                f"{type(one).__name__} is not a draft table: give what wb.replay or wb.load_table returns, one, "
                "several or a mapping from names"
            )
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two tables are called {twice[0]!r}: give a mapping from names to tables")
    if not pairs:
        raise UserError("no table was given: give what wb.replay or wb.load_table returns")
    return dict(pairs)


def longest_draft(tables: Iterable[DraftTable], costs: Iterable[CostModel | None]) -> int:
    """The longest draft that every table holds and every cost model knows."""
    known = [one.k_max for one in costs if one is not None and one.k_max is not None]
    return min([table.k_max for table in tables] + known)


def bootstrap_of(draws: int, seed: int, level: float) -> Bootstrap:
    """Options of the bootstrap, checked."""
    check_int("draws", draws, low=1)
    check_int("seed", seed, low=0)
    return Bootstrap(draws, seed, check_real("level", level, low=0, high=1, open_low=True, open_high=True))


def setting_of(cost: CostModel | None, width: int) -> dict[str, Any]:
    """What every cell of a store shares, JSON-ready: cost, width, buckets of context."""
    check_int("width", width, low=1)
    return {"cost": None if cost is None else cost.key(), "width": width, "contexts": list(CONTEXTS)}


def walked_of(
    name: str,
    table: DraftTable,
    policies: Sequence[Policy],
    *,
    estimator: str | None,
    seed: int,
    cost: CostModel | None,
) -> Walked:
    """A table, once every policy is known to walk over it.

    Args:
        name: What the sweep calls it.
        table: The table.
        policies: The policies.
        estimator: By which they walk; None chooses as ``walk`` does.
        seed: Of the acceptances that "ratio" draws.
        cost: Model of round times; None for none.

    Returns:
        Its description.

    Raises:
        UserError: The table is thinned or has too few slots, its texts or a policy are not what the estimator needs,
            or a policy drafts further than the cost model knows.
    """
    for policy in policies:
        policy_for(table, 0, policy, {})
        check_timed(policy, cost)
    known = None if cost is None else cost.k_max
    if known is not None and (far := [one for one in policies if one.k_max > known]):
        raise UserError(
            f"policy {label_of(far[0])!r} drafts up to {far[0].k_max} tokens and cost model {cost.name!r} knows "  # type: ignore[union-attr]
            f"rounds of up to {known}: sweep up to k={known}, or give a cost model that was measured further"
        )
    picked = chosen_estimator(table, estimator, None)
    if picked == "ratio":  # one that anticipates is refused if there is any; the table is looked at once
        check_ratio(table, next((one for one in policies if one.anticipating), policies[0]))
    return Walked.of(name, table, picked, seed)


def planned(
    walked: Walked, policies: Sequence[Policy], setting: Mapping[str, Any], *, stored: bool
) -> dict[str, Policy]:
    """The cells of one table: policies by key, in order.

    Args:
        walked: The table.
        policies: The policies.
        setting: From ``setting_of``.
        stored: Whether cells are to be kept, which takes policies that can be told apart by what they say.

    Returns:
        The plan.

    Raises:
        UserError: A policy without ``spec()`` is to be kept.
    """
    plan = {}
    for policy in policies:
        spec = spec_of(policy)
        if spec is None and stored:
            raise UserError(
                f"policy {label_of(policy)!r} has no spec(), so a store cannot know its cells again: give it a spec() "
                "that returns a JSON-ready mapping, or sweep without out"
            )
        key = f"unkept-{next(_nameless):017d}" if spec is None else cell_key(walked, policy, spec, setting)
        plan[key] = policy
    return plan


def walk_all(
    table: DraftTable, walked: Walked, policies: Sequence[Policy], cost: CostModel | None
) -> Iterator[WalkCounts]:
    """Counts of every policy over a table, in order.

    Args:
        table: The table.
        walked: Its description.
        policies: The policies.
        cost: Seconds that policies which read a clock are told; None for 0.

    Returns:
        The counts, made as they are asked for.
    """
    return walk_counts(table, policies, estimator=walked.estimator, seed=walked.seed, contexts=CONTEXTS, cost=cost)
