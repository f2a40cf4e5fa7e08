"""Run a sweep: walk what a store does not hold yet, and make the frame from sums per document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from workbench.core.bootstrap import LEVEL
from workbench.core.errors import check_flag
from workbench.core.progress import progress
from workbench.sweep.cells import Cell, cell_of
from workbench.sweep.frame import frame_of
from workbench.sweep.grid import grid
from workbench.sweep.held import hold
from workbench.sweep.plan import bootstrap_of, longest_draft, named_tables, planned, setting_of, walk_all, walked_of
from workbench.sweep.store import CellStore, read_store

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.cost import CostModel
    from workbench.replay.table import DraftTable

PART, PART_SECONDS = 256, 10.0  # cells, or seconds of walking, after which a part is written


def sweep(
    table: DraftTable | Sequence[DraftTable] | Mapping[str, DraftTable],
    *,
    policies: Any = None,
    k: int | Iterable[int] | None = None,
    p_min: float | Iterable[float] = 0.0,
    pmin0: bool | Iterable[bool] = False,
    floor: int | str | Iterable[int | str | None] | None = None,
    cap: int | Iterable[int] = 7,
    floor_context: int | Iterable[int] = 1024,
    statistic: str | Iterable[str] = "drawn",
    estimator: str | None = None,
    cost: CostModel | None = None,
    width: int = 1,
    out: str | Path | None = None,
    resume: bool = True,
    draws: int = 1000,
    seed: int = 0,
    level: float = LEVEL,
) -> pl.DataFrame:
    """Walk many policies over recorded tables: one row per policy, table and source.

    Args:
        table: A draft table, several, or a mapping from names to tables; tables of several temperatures are several.
        policies: Explicit policies, beside or instead of the grid.
        k: Draft lengths of the grid; None for 1 to the tables' slots, or for no grid where explicit policies are given.
        p_min: Thresholds in [0, 1]; default 0, none.
        pmin0: Whether the threshold tests slot 0 too; default False.
        floor: None for fixed K; a number for an adaptive floor; "default" for the floor by the model's
            width; default None.
        cap: Largest draft lengths of adaptive policies; default 7.
        floor_context: Committed lengths past which a default floor relaxes; default 1024.
        statistic: "drawn" or "top", what the threshold reads; default "drawn".
        estimator: "own", "forced" or "ratio" for all tables; None takes "own" where a table holds the
            target's own texts, made as it draws, else "forced".
        cost: Model of round times, for speed-up and tokens per second; None leaves these null.
        width: Sequences decoded side by side, for the cost; default 1.
        out: Directory that keeps finished cells; None for none.
        resume: Go on with the cells of ``out``; False refuses a directory that holds anything.
        draws: Resamples of documents behind the intervals; default 1000.
        seed: Of the resampling, and of the acceptances that "ratio" draws; default 0.
        level: Coverage of the intervals; default 0.95.

    Returns:
        A frame ordered by table, policy and source, the source "all" first. ``cell`` and ``source`` identify a row:
        table, temperature, estimator; policy (its label), family, spec (JSON), k_max and its parameters, null where it
        has none; width, cost, extrapolated (share of the cell's rounds at contexts longer than the cost model knows);
        documents with a round, rounds, cut (by a stop, the budget or the context), emitted,
        drafted, accepted; aggregation ("pooled"), and by it tau (accepted per round, without bonus), accepted_length
        (over rounds not cut), efficiency (accepted per drafted), speedup and tokens_per_second (under ``cost``), each
        with _low and _high by document bootstrap; emitted_per_round, drafted_per_token (drafted per emitted); joint,
        reach and cond per slot; tau_request_mean and accepted_length_request_mean (means over documents).

    Raises:
        UserError: A policy, table or option is not valid, or ``out`` holds cells of another table, setting or version.
        CheckpointError: A part of ``out`` is not as it was written.
    """
    tables = named_tables(table)
    bootstrap, setting = bootstrap_of(draws, seed, level), setting_of(cost, width)
    check_flag("resume", resume)
    if k is None and policies is None:
        k = range(1, longest_draft(tables.values(), [cost]) + 1)
    chosen = grid(k=k, p_min=p_min, pmin0=pmin0, floor=floor, cap=cap, floor_context=floor_context,
                  statistic=statistic, policies=policies)  # fmt: skip
    about: dict[str, Any] = {"estimator": estimator, "seed": seed, "cost": cost}
    walked = [walked_of(name, one, chosen, **about) for name, one in tables.items()]
    plan = {one.name: planned(one, chosen, setting, stored=out is not None) for one in walked}
    finished: dict[str, Cell] = {}
    with ExitStack() as stack:
        store = None
        if out is not None:
            run: dict[str, Any] = {"bootstrap": vars(bootstrap), "cost": cost, "resume": resume}
            store = stack.enter_context(CellStore(Path(out), walked, setting=setting, **run))
            finished = store.read()

        def keep(part: list[Cell]) -> None:
            if store is not None:
                store.append(part)
            finished.update({cell.key: cell for cell in part})

        todo = sum(key not in finished for keys in plan.values() for key in keys)
        bar = stack.enter_context(progress(todo, desc="sweep", unit="cell", enabled=None if todo else False))
        for one in walked:
            missing = {key: policy for key, policy in plan[one.name].items() if key not in finished}
            if not missing:
                continue
            part: list[Cell] = []
            began = monotonic()
            walks = walk_all(tables[one.name], one, list(missing.values()), cost)
            try:
                for key, counts in zip(missing, walks, strict=True):
                    part.append(cell_of(counts, key=key, walked=one, cost=cost, width=width))
                    bar.update()
                    if len(part) >= PART or monotonic() - began >= PART_SECONDS:
                        done, part, began = part, [], monotonic()
                        keep(done)
            finally:  # an interruption keeps what is walked
                keep(part)
        if store is not None:
            held = sum(len(shard["cells"]) for shard in store.manifest.shards)
            store.finish({"cells": held, "tables": len(store.manifest.parameters["tables"])})
    cells = [finished[key] for keys in plan.values() for key in keys]
    hold(cells, walked, bootstrap)
    return frame_of(cells, walked, setting=setting, **vars(bootstrap))


def load_sweep(
    path: str | Path, *, draws: int | None = None, seed: int | None = None, level: float | None = None
) -> pl.DataFrame:
    """The frame of everything a store holds, whichever grids it was walked for.

    Args:
        path: The directory given to ``sweep`` as ``out``.
        draws: Resamples behind the intervals; None for those of the last run.
        seed: Of the resampling; None likewise.
        level: Coverage; None likewise.

    Returns:
        The frame, ordered by when cells were walked; see ``sweep``.

    Raises:
        CheckpointError: It is no sweep, is incomplete, or its bytes are not those that were written.
    """
    manifest, walked, cells = read_store(Path(path))
    last = manifest.extra["bootstrap"]
    given: dict[str, Any] = {"draws": draws, "seed": seed, "level": level}
    bootstrap = bootstrap_of(**{name: last[name] if value is None else value for name, value in given.items()})
    hold(cells, walked, bootstrap)
    return frame_of(cells, walked, setting=manifest.parameters["setting"], **vars(bootstrap))
