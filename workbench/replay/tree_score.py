"""What a tree frame says: the best tree against the best chain of the same verify; and the published estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import DRAWS, LEVEL, bootstrap_difference
from workbench.core.errors import UserError, check_real
from workbench.core.frames import require
from workbench.replay.tree import Shapes, documents_of, facts_of, shapes_of

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.table import DraftTable

READ = (
    *("shape", "verify_width", "depth", "is_chain", "k_max", "source", "estimator", "yield"),
    *("document_emitted", "document_rounds"),
)
HEDGE_CREDIT = 0.95  # of the published estimate


def best_tree(frame: pl.DataFrame, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL) -> pl.DataFrame:
    """The tree with hedges that yields most against the chain that does, at the same verify width.

    Chains may be as long as the width and the table's slots allow, and shorter where that yields more: a verdict
    against trees or for them is worth nothing where only one side may be long.

    Args:
        frame: What ``tree_walk`` returned, chains of every length among the shapes.
        draws: Resamples of documents, the same for both sides; default 2000.
        seed: Of the resampling.
        level: Coverage of the interval; default 0.95.

    Returns:
        One row per source and verify width that a tree has: source, estimator, verify_width, tree, tree_depth,
        tree_yield, chain, chain_depth, chain_yield (tokens emitted per round), difference (tree less chain) with
        difference_low and difference_high by paired document bootstrap, documents. Both sides were picked on these
        documents, so the interval is of that pair, not of the choice.

    Raises:
        UserError: The frame is no tree frame, holds no tree with hedges, or lacks the longest chain of a width.
    """
    import polars as pl

    require(frame, READ, "a frame of trees")
    if not len(frame.filter(~pl.col("is_chain"))):
        raise UserError("the frame holds chains only: walk shapes with hedges too, such as tree_shapes(8)")
    rows = []
    for (source, estimator), part in frame.group_by("source", "estimator", maintain_order=True):
        trees, chains = part.filter(~pl.col("is_chain")), part.filter(pl.col("is_chain"))
        for width in trees["verify_width"].unique().sort().to_list():
            longest = min(width - 1, part["k_max"][0])
            if missing := [d for d in range(1, longest + 1) if d not in chains["depth"]]:
                raise UserError(
                    f"the frame lacks chains that a verify of {width} rows has room for: add the shape "
                    f"{','.join('1' * missing[-1])!r} (tree_shapes(..., max_depth={part['k_max'][0]}) lists all)"
                )
            tree = _most(trees.filter(pl.col("verify_width") == width))
            chain = _most(chains.filter(pl.col("verify_width") <= width))
            rows.append(
                {
                    "source": source,
                    "estimator": estimator,
                    "verify_width": width,
                    **_pair(tree, chain, draws, seed, level),
                }
            )
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(("difference_low", "difference_high"), pl.Float64))


def _most(rows: pl.DataFrame) -> dict[str, Any]:
    """The row that yields most; the narrower, then the shallower, then the first of equals."""
    return rows.sort("yield", "verify_width", "depth", descending=[True, False, False], maintain_order=True).row(
        0, named=True
    )


def _pair(tree: dict[str, Any], chain: dict[str, Any], draws: int, seed: int, level: float) -> dict[str, Any]:
    sides = []
    for one in (tree, chain):
        names = np.arange(len(one["document_rounds"]))
        sides.append((names, one["document_emitted"], one["document_rounds"]))
    found = bootstrap_difference(*sides, draws=draws, seed=seed, level=level)[0]
    out: dict[str, Any] = {}
    for name, one in (("tree", tree), ("chain", chain)):
        out |= {name: one["shape"], f"{name}_depth": one["depth"], f"{name}_yield": one["yield"]}
    ends = {"difference": found.value, "difference_low": found.low, "difference_high": found.high}
    return out | ends | {"documents": len(tree["document_rounds"])}


def product_yield(
    table: DraftTable, shapes: Shapes, *, estimator: str | None = None, hedge_credit: float = HEDGE_CREDIT
) -> pl.DataFrame:
    """The published estimate of a shape's yield, by independent products: a diagnostic, never a yield.

    It multiplies what slots accept over all starts: E_d = s_d (1 + E_{d+1}) + credit (h_d - s_d), and 1 + E_1 in all,
    s_d being how often the spine stands at depth d where it stood before, and h_d how often any node does. But rounds
    pick their starts by what the round before accepted, so that ``tree_walk`` differs from it.

    Args:
        table: As for ``tree_walk``.
        shapes: A shape, or several.
        estimator: "own" or "forced"; None takes "own" where the texts allow it.
        hedge_credit: What a hedge that stands counts, without its bonus; 0.95 as published.

    Returns:
        One row per shape and source, "all" included: shape, nodes, verify_width, source, estimator, starts,
        product_yield (null where a depth that counts was never reached).

    Raises:
        UserError: As of ``tree_walk``, or the credit is out of range.

    Source: the shape search of the project of seed 001.
    """
    import polars as pl

    check_real("hedge_credit", hedge_credit, low=0, high=1)
    chosen = shapes_of(shapes)
    documents, picked = documents_of(table, chosen, estimator)
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {}
    for one in documents:
        facts, at = facts_of(one, picked), slice(one.track.first, None)
        room = np.arange(len(facts.reach), 0, -1)  # slots from a start to the end of the tape
        columns = tuple(values[at] for values in (facts.reach, facts.rank, room))
        for source in (one.track.source, "all"):
            parts.setdefault(source, []).append(columns)
    rows = []
    for shape in chosen:
        for source in (*sorted(name for name in parts if name != "all"), "all"):
            reach, rank, room = (np.concatenate(x) for x in zip(*parts[source], strict=True))
            value: float | None = 0.0
            for d in range(shape.depth, 0, -1):
                tested = (reach >= d - 1) & (room >= d)
                if not tested.any():
                    value = None  # no matter where nothing stands before it
                    continue
                spine = (reach >= d) | (rank == 1)
                any_node = (reach >= d) | (rank <= shape.counts[d - 1])
                stood, nodes = spine[tested].mean(), any_node[tested].mean()
                deeper = 0.0 if stood == 0 else value
                value = None if deeper is None else float(stood * (1 + deeper) + hedge_credit * (nodes - stood))
            found = None if value is None else 1 + value
            rows.append((str(shape), shape.nodes, shape.verify_width, source, picked, len(reach), found))
    names = {"shape": pl.String, "nodes": pl.Int64, "verify_width": pl.Int64, "source": pl.String}
    names |= {"estimator": pl.String, "starts": pl.Int64, "product_yield": pl.Float64}
    return pl.DataFrame(rows, schema=names, orient="row")
