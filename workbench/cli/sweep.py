"""``workbench sweep``: many policies over recorded draft tables, the one to take, and a page to look at them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from workbench.cli.common import Outcome, add_common, load
from workbench.cli.options import Kind, add_options, given
from workbench.cli.parser import Parser, one_of, real, whole
from workbench.core.errors import UserError
from workbench.core.progress import progress

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay import DraftTable
    from workbench.replay.cost import CostModel
    from workbench.sweep import Recommendation

GO_ON = "finished cells are kept where --out was given: run the same command again to go on from there"
TOP = 10  # rows shown
TURNS, MEASURED_FROM, SPARE = 8, 64, 256  # of a measurement: repeats, shortest context, room for its rounds
STRATEGY = "columns"  # how sessions commit on a CPU
PUBLISHED = "published:"
GRID = ("k", "p_min", "pmin0", "floor", "cap", "floor_context", "statistic")
WALK = ("estimator", "width", "draws", "level", "resume")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    from workbench.replay.walk import ESTIMATORS
    from workbench.sweep import sweep
    from workbench.sweep.recommend import OBJECTIVES

    about = "Walk a grid of policies over draft tables, offline. --model and its options go with --cost measure."
    parser = Parser("sweep", about, usage="TABLE...")
    parser.add_argument("tables", nargs="+", metavar="TABLE", help="directory that replay wrote, or NAME=DIRECTORY")
    flags = {"no": False, "yes": True}
    kinds = {
        "k": Kind(lengths, "A:B|N,N"),
        "p_min": Kind(several(real), "X,X"),
        "pmin0": Kind(several(lambda text: flags[one_of(list(flags))(text)]), "no,yes"),
        "floor": Kind(several(floor), "none|default|N,..."),
        "cap": Kind(several(whole), "N,N"),
        "floor_context": Kind(several(whole), "N,N"),
        "statistic": Kind(several(str), "drawn,top"),
    }
    names = add_options(parser, sweep, title="grid", only=GRID, kinds=kinds)
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="TEXT",
        help="a policy beside the grid, such as 'ema k=6 alpha=0.3'; repeatable",
    )
    names += add_options(parser, sweep, title="walk", only=WALK, choices={"estimator": ESTIMATORS})
    parser.add_argument(
        "--cost",
        metavar="COST",
        help=f"a file of CostModel.save, {PUBLISHED}NAME, or measure for this machine and --model (default: none)",
    )
    parser.add_argument(
        "--objective",
        type=one_of(OBJECTIVES),
        metavar="{" + ",".join(OBJECTIVES) + "}",
        help="what the recommendation makes large (default: speedup under --cost, else emitted_per_round)",
    )
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with sliders")
    seed = "of the resampling, and of the acceptances that ratio draws (default: 0)"
    add_common(parser, out="directory that keeps finished cells", seed=seed)
    parser.set_defaults(names=names)
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Sweep, and return the frame's rows and a recommendation per table."""
    from workbench.sweep import recommend, sweep

    options = given(args, args.names)
    if args.seed is not None:
        options["seed"] = args.seed
    page = None if args.html is None else checked_page(args.html)
    tables = open_tables(args.tables)
    began = perf_counter()
    cost = read_cost(args, tables)
    frame = sweep(tables, policies=args.policy or None, cost=cost, out=args.out, **options)
    objective = args.objective or ("emitted_per_round" if cost is None else "speedup")
    chosen = {name: recommend(frame, objective=objective, table=name) for name in tables}
    data: dict[str, Any] = {"verb": "sweep", "out": args.out, "html": args.html, "objective": objective}
    data |= {"cost": None if cost is None else cost.key(), "cells": frame["cell"].n_unique()}
    data |= {"recommended": [facts_of(one) for one in chosen.values()], "rows": frame.to_dicts()}
    if page is not None:
        from workbench.cli.sweep_page import write_page

        write_page(frame, list(chosen.values()), page, objective=objective)
    data["seconds"] = perf_counter() - began
    lines = top_lines(frame, objective)
    lines += [f"{name}: {one.sentence}" for name, one in chosen.items()]
    lines.append(f"{data['cells']:,} cells in {data['seconds']:.1f} s")
    if args.out is not None:
        lines.append(f"kept in {args.out}; open it with workbench.load_sweep({args.out!r})")
    if page is not None:
        lines.append(f"page: {args.html}")
    return Outcome(data, "\n".join(lines))


def facts_of(one: Recommendation) -> dict[str, Any]:
    """A recommendation as JSON."""
    names = ("table", "label", "spec", "objective", "source", "value", "low", "high", "probability_best", "runner_up")
    more = ("documents", "draws", "same", "sentence")
    return {"policy" if name == "label" else name: getattr(one, name) for name in (*names, *more)}


def top_lines(frame: pl.DataFrame, objective: str) -> list[str]:
    """The best policies of every table, over all sources, as lines."""
    lines = []
    for part in frame.filter(source="all").drop_nulls(objective).partition_by("table", maintain_order=True):
        rows = part.sort(objective, descending=True, maintain_order=True).head(TOP)
        for row in rows.iter_rows(named=True):
            interval = ""
            if row.get(f"{objective}_low") is not None:
                interval = f" ({row[f'{objective}_low']:.3f} to {row[f'{objective}_high']:.3f})"
            lines.append(
                f"{row['table']}  {row['policy']}: {objective} {row[objective]:.3f}{interval}, "
                f"{row['tau'] or 0:.2f} accepted a round without bonus ({row['estimator']} walk, pooled)"
            )
    return lines


def open_tables(arguments: Sequence[str]) -> dict[str, DraftTable]:
    """Tables by name, from directories or NAME=DIRECTORY.

    Args:
        arguments: The arguments.

    Returns:
        The tables, in order.

    Raises:
        UserError: Two share a name, or one cannot be opened.
    """
    from workbench.replay import load_table

    found: dict[str, DraftTable] = {}
    for text in arguments:
        name, equals, where = text.partition("=")
        if not equals or Path(text).is_dir():
            name, where = Path(text).resolve().name, text
        if name in found:
            raise UserError(f"two tables are called {name!r}: write NAME=DIRECTORY to tell them apart")
        found[name] = load_table(where)
    return found


def read_cost(args: argparse.Namespace, tables: dict[str, DraftTable]) -> CostModel | None:
    """The cost model of ``--cost``.

    Args:
        args: The arguments.
        tables: The tables, whose model a measurement must be of.

    Returns:
        The model; None without the option.

    Raises:
        UserError: The name is not known, the file holds none, or the model is not the tables'.
    """
    if args.cost is None:
        return None
    from workbench.replay.cost import CostModel

    if args.cost == "measure":
        return measured(args, tables)
    if args.cost.startswith(PUBLISHED):
        from workbench.replay.published import published_costs

        known, name = published_costs(), args.cost.removeprefix(PUBLISHED)
        if name not in known:
            valid = ", ".join(repr(PUBLISHED + one) for one in known)
            raise UserError(f"--cost {args.cost!r} is not valid: choose one of {valid}, a file, or measure")
        return known[name]
    if not Path(args.cost).is_file():
        raise UserError(
            f"--cost {args.cost!r} is not valid: there is no such file; give one that CostModel.save wrote, "
            f"{PUBLISHED}NAME, or measure"
        )
    return CostModel.load(args.cost)


def measured(args: argparse.Namespace, tables: dict[str, DraftTable]) -> CostModel:
    """Measure the phases of rounds on this machine.

    Args:
        args: The arguments: --model and its options, and --out, whose store goes by one measurement only.
        tables: The tables, which must be of that model in that numerical class.

    Returns:
        The fitted model.

    Raises:
        UserError: A table is of another model or class, or the store was begun under another measurement.
    """
    from workbench.bench.phases import PhaseMeter, run_name
    from workbench.model.fingerprint import fingerprint
    from workbench.replay.cost import CostModel
    from workbench.replay.walk import longest_text
    from workbench.sweep.store import COST

    kept = None if args.out is None else Path(args.out) / COST
    if kept is not None and kept.is_file():
        raise UserError(
            f"--cost measure measures anew, and {args.out} holds cells under an earlier measurement: go on with "
            f"--cost {kept}, or choose another --out"
        )
    model = load(args)
    head = None if model.draft_head is None else model.draft_head.digest
    here = fingerprint(model), model.exact, head
    for name, one in tables.items():
        there = one.key["model"], one.key["exact"], one.key["draft_head"]
        if there != here:
            made, given = map(_measured_as, (there, here))
            raise UserError(
                f"table {name!r} was made by {made}, and --model {args.model!r} would be measured as {given}: measure "
                "the table's own model, with --exact or --fast and --draft-vocab as it was replayed"
            )
    longest = max(one.k_max for one in tables.values())
    room = model.config.max_position_embeddings - SPARE
    contexts = sorted(
        {min(max(context, 1), room) for context in (MEASURED_FROM, max(map(longest_text, tables.values())))}
    )
    meter = PhaseMeter(
        model, exact=model.exact, contexts=contexts, k_max=longest, run=run_name(), strategies=[STRATEGY]
    )
    for _ in progress(range(TURNS), desc="measure phases", unit="turn"):
        meter.turn()
    return CostModel.fit(list(meter.rows()), name="measured")


def _measured_as(key: tuple[str, bool, str | None]) -> str:
    """A model, its numerics and a trimmed draft head, in words."""
    mark, exact, head = key
    return f"model {mark} in {'exact' if exact else 'fast'} numerics" + (f", draft head {head}" if head else "")


def checked_page(path: str) -> Path:
    """Where the page goes, refused before any work where it cannot be."""
    page = Path(path)
    if page.is_dir():
        raise UserError(f"--html {path!r} is a directory: give a file, such as {str(page / 'sweep.html')!r}")
    if not page.parent.is_dir():
        raise UserError(f"--html {path!r} cannot be written: there is no directory {str(page.parent)!r}; make it first")
    return page


def lengths(text: str) -> list[int]:
    """Draft lengths: a number, several, or a range with both ends, such as 1:8."""
    first, colon, last = text.partition(":")
    if not colon:
        return several(whole)(text)
    a, b = whole(first), whole(last)
    if a > b:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: a range A:B needs A of at most B")
    return list(range(a, b + 1))


def floor(text: str) -> int | str | None:
    """One floor: "none" for fixed K, "default" for the floor by the model's width, or a number."""
    words = {"none": None, "default": "default"}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, none or default") from None


def several(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A converter of values between commas."""
    return lambda text: [convert(part.strip()) for part in text.split(",")]
