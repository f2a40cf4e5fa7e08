"""Two recordings of the same documents side by side: what another drafter or checkpoint gains under each policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import LEVEL, bootstrap_difference
from workbench.core.errors import UserError, check_choice
from workbench.core.progress import progress
from workbench.spec.policies.naming import canonical
from workbench.sweep.cells import RATIOS, Cell, Walked, cell_of
from workbench.sweep.frame import groups_of, stacked
from workbench.sweep.grid import grid
from workbench.sweep.plan import bootstrap_of, longest_draft, named_tables, planned, setting_of, walk_all, walked_of

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.cost import CostModel
    from workbench.replay.table import DraftTable

QUANTITIES = ("tau", "accepted_length", "efficiency")
TIMED = ("speedup", "tokens_per_second")


def compare_tables(
    a: DraftTable,
    b: DraftTable,
    policies: Any = None,
    *,
    k: int | Iterable[int] | None = None,
    p_min: float | Iterable[float] = 0.0,
    floor: int | str | Iterable[int | str | None] | None = None,
    estimator: str | None = None,
    cost: CostModel | tuple[CostModel, CostModel] | None = None,
    width: int = 1,
    quantities: Sequence[str] | None = None,
    draws: int = 1000,
    seed: int = 0,
    level: float = LEVEL,
) -> pl.DataFrame:
    """Paired difference a − b of two drafters, checkpoints or temperatures, per policy and source.

    Both sides see the same resampled documents. By "forced" they must hold the same texts; by "own" and "ratio" each
    target walks its own continuations, and the documents are paired by their ids.

    Args:
        a: Draft table of one side.
        b: Of the other, over the same documents.
        policies: Explicit policies, beside or instead of the grid.
        k: Draft lengths; None for 1 to the smaller number of slots, or for no grid where policies are given.
        p_min: Thresholds in [0, 1]; default 0.
        floor: As for ``sweep``; default None, fixed K.
        estimator: For both; None chooses as ``walk`` does, and must come out the same on both sides.
        cost: Model of round times, or one for each side; None leaves speed out.
        width: Sequences decoded side by side, for the cost; default 1.
        quantities: Among "tau", "accepted_length", "emitted_per_round", "efficiency", "drafted_per_token", "speedup"
            and "tokens_per_second"; None for tau, accepted length and efficiency, and under ``cost`` the last two.
        draws: Resamples of documents; default 1000.
        seed: Of the resampling; default 0.
        level: Coverage; default 0.95.

    Returns:
        One row per policy, source ("all" first) and quantity: policy, family, spec, k_max, source, estimator,
        documents, aggregation ("pooled"), quantity, a, b, difference, low, high. An interval that excludes 0 is a
        difference beyond the spread between documents.

    Raises:
        UserError: The tables hold different documents or go by different estimators, or an option is not valid.
    """
    import polars as pl

    bootstrap = bootstrap_of(draws, seed, level)
    pair = cost if isinstance(cost, tuple) else (cost, cost)
    names = quantities_of(quantities, timed=pair[0] is not None and pair[1] is not None)
    tables = (a, b)
    if k is None and policies is None:
        k = range(1, longest_draft(tables, pair) + 1)
    chosen = grid(k=k, p_min=p_min, floor=floor, policies=policies)
    walked = [
        walked_of(name, one, chosen, estimator=estimator, seed=seed, cost=model)
        for name, one, model in zip("ab", named_tables({"a": a, "b": b}).values(), pair)
    ]
    check_paired(walked, tables)
    sides: list[list[Cell]] = []
    with progress(2 * len(chosen), desc="compare", unit="cell") as bar:
        for one, table, model in zip(walked, tables, pair):
            keys = planned(one, chosen, setting_of(model, width), stored=False)
            made = []
            for key, counts in zip(keys, walk_all(table, one, chosen, model), strict=True):
                made.append(cell_of(counts, key=key, walked=one, cost=model, width=width))
                bar.update()
            sides.append(made)
    groups = [groups_of(one, cells[0]) for one, cells in zip(walked, sides)]
    rows = []
    for source in groups[0]:
        ids = [np.array(one.documents)[group[source]] for one, group in zip(walked, groups)]
        for quantity in names:
            stacks = [stacked(cells, quantity, group[source]) for cells, group in zip(sides, groups)]
            assert stacks[0] is not None and stacks[1] is not None, "quantities_of leaves out what has no cost"
            found = bootstrap_difference((ids[0], *stacks[0]), (ids[1], *stacks[1]), **vars(bootstrap))
            values = [_ratios(*stack) for stack in stacks if stack is not None]
            for i, (cell, interval) in enumerate(zip(sides[0], found, strict=True)):
                rows.append(
                    _about(cell)
                    | {"source": source, "estimator": walked[0].estimator, "documents": len(ids[0])}
                    | {"aggregation": "pooled", "quantity": quantity, "a": values[0][i], "b": values[1][i]}
                    | {"difference": interval.value, "low": interval.low, "high": interval.high}
                )
    floats = dict.fromkeys(("a", "b", "difference", "low", "high"), pl.Float64)
    frame = pl.DataFrame(rows, schema_overrides={"spec": pl.String, **floats})
    order = {cell.key: i for i, cell in enumerate(sides[0])}
    place = pl.col("cell").replace_strict(order, return_dtype=pl.Int64)
    return frame.sort(place, maintain_order=True).drop("cell")


def quantities_of(given: Sequence[str] | None, *, timed: bool) -> tuple[str, ...]:
    """The quantities to compare, checked.

    Args:
        given: What was asked for; None for the default.
        timed: Whether both sides have a cost model.

    Returns:
        Their names.

    Raises:
        UserError: One is not known, or needs a cost model.
    """
    names = (
        (QUANTITIES + (TIMED if timed else ()))
        if given is None
        else tuple([given] if isinstance(given, str) else given)
    )
    for name in names:
        check_choice("quantities", name, RATIOS)
        if name in TIMED and not timed:
            raise UserError(f"quantity {name!r} needs a cost model on both sides: give cost=..., or leave it out")
    if not names:
        raise UserError("quantities is empty: name one, such as 'tau', or leave it out")
    return names


def check_paired(walked: Sequence[Walked], tables: Sequence[DraftTable]) -> None:
    """Refuse two tables that do not hold the same documents, or do not go by one estimator.

    Args:
        walked: Their descriptions.
        tables: The tables.

    Raises:
        UserError: They are not paired.
    """
    first, second = walked
    if first.estimator != second.estimator:
        raise UserError(
            f"a goes by estimator {first.estimator!r} and b by {second.estimator!r}: give estimator='forced' to "
            "compare them on one text, or make both tables the same way"
        )
    pairs = [dict(zip(one.documents, one.sources)) for one in walked]
    if lone := sorted({*pairs[0]} ^ {*pairs[1]}):
        raise UserError(
            f"the two tables hold different documents; {len(lone)} are in one of them only (first: {lone[0]!r}): "
            "replay the same corpus with both models"
        )
    if moved := [name for name, source in pairs[0].items() if pairs[1][name] != source]:
        raise UserError(
            f"the two tables hold different documents: {moved[0]!r} is of source {pairs[0][moved[0]]!r} in a and "
            f"{pairs[1][moved[0]]!r} in b; replay the same corpus with both models"
        )
    prints = [one.manifest.corpus.get("fingerprint") for one in tables]
    if first.estimator == "forced" and (prints[0] is None or prints[0] != prints[1]) and (name := _other_text(*tables)):
        raise UserError(
            f"the two tables hold different documents: {name!r} has another text or prompt in b; replay the same "
            "corpus with both models"
        )


def _other_text(a: DraftTable, b: DraftTable) -> str | None:
    """First document whose tokens or prompt length differ between two tables; None when there is none."""
    import polars as pl

    columns = ("prompt_len", "token", "next_token")
    texts = [
        one.frame.group_by("doc_id", maintain_order=True).agg(pl.col(name).hash().alias(name) for name in columns)
        for one in (a, b)
    ]
    both = texts[0].join(texts[1], on="doc_id", suffix="_b", maintain_order="left")
    other = both.filter(pl.any_horizontal(pl.col(name) != pl.col(f"{name}_b") for name in columns))
    return None if other.is_empty() else str(other["doc_id"][0])


def _about(cell: Cell) -> dict[str, Any]:
    spec = None if cell.spec is None else canonical(cell.spec)
    return {"cell": cell.key, "policy": cell.label, "family": cell.family, "spec": spec, "k_max": cell.k_max}


def _ratios(top_GM: np.ndarray, bottom_GM: np.ndarray) -> list[float | None]:
    """Pooled ratios, None where undefined."""
    return [float(n / d) if d > 0 else None for n, d in zip(top_GM.sum(0), bottom_GM.sum(0))]
