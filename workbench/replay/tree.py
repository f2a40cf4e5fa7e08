"""Trees over a draft table: the exact walk of every shape, round by round, from the drafter's recorded candidates.

A round from position p drafts the table's chain at p as its spine; the hedges at depth d are the next candidates of the
drafter's row in slot d. Which of them stand follows from two facts of the start alone: how many spine tokens stand, and
the rank of the token wanted after them. Where the next round starts follows from what stood, so shapes are walked, not
multiplied out. Hedges cost the drafter nothing; what they cost the target is for a cost model to say.
Legend: T rows of a tape, N rows of all tapes, G documents, K slots, k candidates, S shapes, D depths, F facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import DRAWS, LEVEL, bootstrap_by
from workbench.core.errors import UserError
from workbench.core.progress import progress
from workbench.replay.oracle import EXACT, hits
from workbench.replay.tracks import Track, estimator_for, policy_for, tracks
from workbench.replay.walk import check_own, rounding
from workbench.spec.tree import TreeShape, accept_tree, tree_rows

if TYPE_CHECKING:
    import polars as pl

    from workbench.replay.table import DraftTable

Shapes = str | TreeShape | Iterable[str | TreeShape]
COUNTED = ("rounds", "accepted", "hedge_hits", "cut", "drafted", "steps")
NO_RANK = 127  # no candidate is the wanted token
BLOCK = 512  # shapes walked together
_ROUNDS, _ACCEPTED, _HEDGES, _CUT, _DRAFTED, _STEPS = range(len(COUNTED))


@dataclass(frozen=True, eq=False)
class Candidates:
    """One document, as trees see it.

    Args:
        track: Its columns.
        ids: Per start and slot the spine's token, then the drafter's most likely others, int64 [T, K, k]; -1 where
            there is none.
    """

    track: Track
    ids: np.ndarray


def tree_walk(
    table: DraftTable,
    shapes: Shapes,
    *,
    estimator: str | None = None,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> pl.DataFrame:
    """What rounds that draft a tree would have accepted over the recorded texts, for many shapes.

    Depth is bounded by the budget as a chain is: a round drafts at most one depth less than tokens are left. A spine
    token is what the table drafted: the most likely one, or a draw; hedges are the most likely others.

    Args:
        table: A draft table with a chain at every start; shapes with hedges need ``replay(..., shadow=k)`` with k of
            at least their largest count.
        shapes: A shape, as "1,2,2" or ``TreeShape``, or several; ``tree_shapes`` lists all under a node budget.
        estimator: "own" or "forced", as of ``walk``; None takes "own" where the texts allow it.
        draws: Resamples of documents; default 2000.
        seed: Of the resampling.
        level: Coverage of the intervals; default 0.95.

    Returns:
        One row per shape and source, "all" included: shape, nodes, verify_width, depth, is_chain, k_max (slots of the
        table), source, estimator, aggregation ("pooled"), documents, rounds, cut (rounds that the budget shortened),
        emitted, accepted, hedge_hits, drafted (nodes), steps (of the drafter), yield (emitted per round, bonus
        included) and tau (accepted per round) with ``_low`` and ``_high`` by document bootstrap, and per document
        document_emitted and document_rounds, which ``best_tree`` pairs.

    Raises:
        UserError: A shape or an option is not valid, or the table does not hold what it needs.
    """
    import polars as pl

    chosen = shapes_of(shapes)
    documents, picked = documents_of(table, chosen, estimator)
    facts = [facts_of(one, picked) for one in documents]
    emitted_G = np.array([one.track.length - 1 - one.track.first for one in documents])
    source_G = np.array([one.track.source for one in documents])
    groups = [(name, np.flatnonzero(source_G == name)) for name in np.unique(source_G).tolist()]
    groups.append(("all", np.arange(len(documents))))
    rows: list[dict[str, Any]] = []
    options = {"draws": draws, "seed": seed, "level": level}
    with progress(len(chosen), desc="tree walk", unit="shape") as bar:
        for lo in range(0, len(chosen), BLOCK):
            block = chosen[lo : lo + BLOCK]
            counts_SGF = walk_shapes(facts, [one.track.first for one in documents], block)
            bar.update(len(block))
            parts = [_source_rows(block, counts_SGF[:, at], emitted_G[at], options) for _, at in groups]
            for s, shape in enumerate(block):
                for (source, _), part in zip(groups, parts, strict=True):
                    rows.append(
                        {
                            "shape": str(shape),
                            "nodes": shape.nodes,
                            "verify_width": shape.verify_width,
                            "depth": shape.depth,
                            "is_chain": shape.is_chain,
                            "k_max": table.k_max,
                            "source": source,
                            "estimator": picked,
                            "aggregation": "pooled",
                            **part[s],
                        }
                    )
    lists = dict.fromkeys(("document_emitted", "document_rounds"), pl.List(pl.Int32))
    floats = {name + end: pl.Float64 for name in ("yield", "tau") for end in ("", "_low", "_high")}
    return pl.DataFrame(rows, schema_overrides={**lists, **floats})


def _source_rows(
    shapes: Sequence[TreeShape], counts_SGF: np.ndarray, emitted_G: np.ndarray, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Totals, ratios and intervals of each shape over some documents."""
    rounds_GS, accepted_GS = (counts_SGF[:, :, i].T for i in (_ROUNDS, _ACCEPTED))
    emitted_GS = np.broadcast_to(emitted_G[:, None], rounds_GS.shape)
    both = np.concatenate([emitted_GS, accepted_GS], 1), np.concatenate([rounds_GS, rounds_GS], 1)
    found = bootstrap_by(np.arange(len(emitted_G)), *both, **options)
    out = []
    for s in range(len(shapes)):
        row: dict[str, Any] = {"documents": len(emitted_G), "emitted": int(emitted_G.sum())}
        row |= dict(zip(COUNTED, counts_SGF[s].sum(0).tolist(), strict=True))
        for name, one in (("yield", found[s]), ("tau", found[s + len(shapes)])):
            row |= {name: one.value, f"{name}_low": one.low, f"{name}_high": one.high}
        out.append(row | {"document_emitted": emitted_G.tolist(), "document_rounds": rounds_GS[:, s].tolist()})
    return out


def shapes_of(shapes: Shapes) -> list[TreeShape]:
    """Shapes as given, each once; a sentence when there is none."""
    several = [shapes] if isinstance(shapes, (str, TreeShape)) else shapes
    if not isinstance(several, Iterable):
        raise UserError(f"shapes={shapes!r} is not valid: give a shape such as '1,2,2', or several")
    found = list(dict.fromkeys(TreeShape(one) for one in several))
    if not found:
        raise UserError("shapes is empty: give at least one, such as '1,2,2', or tree_shapes(max_nodes)")
    return found


def documents_of(table: DraftTable, shapes: Sequence[TreeShape], estimator: str | None) -> tuple[list[Candidates], str]:
    """The documents of a table with the candidates of their starts, and the estimator; a sentence when it will not do.

    Args:
        table: The draft table.
        shapes: Shapes to be walked.
        estimator: "own", "forced" or None.

    Returns:
        Candidates of every document, as many per slot as the shapes ask for, and the estimator taken.

    Raises:
        UserError: The table does not hold what shapes and estimator need.
    """
    deepest, widest = max(shapes, key=lambda s: s.depth), max(shapes, key=lambda s: s.widest)
    if deepest.depth > table.k_max:
        raise UserError(
            f"tree shape {str(deepest)!r} has {deepest.depth} depths and the table has {table.k_max} slots: replay "
            f"with k_max={deepest.depth} or more, or limit the shapes with tree_shapes(..., max_depth={table.k_max})"
        )
    if widest.widest > max(table.k_shadow, 1):
        raise UserError(
            f"tree shape {str(widest)!r} asks for {widest.widest} candidates at one depth and the table holds "
            f"{table.k_shadow}: replay with shadow={widest.widest} or more, or use smaller counts"
        )
    policy_for(table, deepest.depth, None, {})
    picked = estimator_for(table, estimator, EXACT, hint="a tree is verified by equality with the target's picks")
    found = list(_candidates(table, widest.widest))
    if picked == "own":
        edge = rounding(table)
        for one in found:
            check_own(one.track, edge, drawn=not table.plain)
    return found, picked


def _candidates(table: DraftTable, k: int) -> Iterator[Candidates]:
    """Documents in order; the spine's token leads the candidates of a slot, wherever it ranks."""
    parts = table.frame.select("doc_id", "shadow_ids").partition_by("doc_id", maintain_order=True) if k > 1 else None
    for i, track in enumerate(tracks(table)):
        spine_TK1 = track.draft_ids[:, :, None]
        if parts is None:
            yield Candidates(track, spine_TK1)
            continue
        raw = np.array(parts[i]["shadow_ids"].to_numpy(), dtype=np.float64).reshape(*track.draft_ids.shape, -1)
        shadow_TKk = np.where(np.isnan(raw), -1, raw).astype(np.int64)
        last = np.argsort(shadow_TKk == spine_TK1, axis=-1, kind="stable")  # the spine's token behind the others
        others_TKk = np.take_along_axis(shadow_TKk, last, -1)
        yield Candidates(track, np.concatenate([spine_TK1, others_TKk[:, :, : k - 1]], -1))


@dataclass(frozen=True, eq=False)
class Facts:
    """What decides a round from each start, whatever the tree.

    Args:
        reach: Spine tokens that stand and are the tape's, up to K, int8 [T].
        rank: Rank among the candidates of the slot after them of the token wanted there; 1 where the spine's own token
            is wanted but is not the tape's, 127 where none is, int8 [T].
        on_tape: The wanted token is the tape's, so that a hedge that holds it is followed by a bonus, bool [T].
    """

    reach: np.ndarray
    rank: np.ndarray
    on_tape: np.ndarray


def facts_of(document: Candidates, estimator: str) -> Facts:
    """Facts of every start of one document.

    Args:
        document: Its candidates.
        estimator: "own": the tape's token is wanted; "forced": the target's pick is, and the tape's is committed.

    Returns:
        The facts.
    """
    track, (t, k, _) = document.track, document.ids.shape
    reach_T = hits(track, k, estimator)
    slot_T = np.minimum(reach_T, k - 1)
    at_T = np.arange(t) + slot_T
    row_T = np.minimum(at_T, t - 1)
    text_T = track.tokens[row_T + 1]
    want_T = text_T if estimator == "own" else track.target_id[row_T]
    same_Tk = document.ids[np.arange(t), slot_T] == want_T[:, None]
    some_T = same_Tk.any(1) & (reach_T < k) & (at_T < t)
    rank_T = np.where(some_T, same_Tk.argmax(1) + 1, NO_RANK)
    return Facts(reach_T.astype(np.int8), rank_T.astype(np.int8), want_T == text_T)


def walk_shapes(facts: Sequence[Facts], first: Sequence[int], shapes: Sequence[TreeShape]) -> np.ndarray:
    """Rounds of many shapes over many documents, counted.

    Args:
        facts: Of each document.
        first: Position of each document's first pending token.
        shapes: The shapes.

    Returns:
        Int64 [S, G, F]: rounds, accepted, hedges that stood, rounds the budget shortened, nodes drafted, drafter steps.
    """
    lengths = [len(one.reach) for one in facts]
    ends_G = np.cumsum(lengths)
    begin_G = ends_G - lengths + np.array(first)
    counts_SD = np.zeros((len(shapes), max(shape.depth for shape in shapes)), np.int64)
    for s, shape in enumerate(shapes):
        counts_SD[s, : shape.depth] = shape.counts
    nodes_SD = np.pad(counts_SD.cumsum(1), ((0, 0), (1, 0)))
    columns = (np.concatenate([getattr(one, name) for one in facts]) for name in ("reach", "rank", "on_tape"))
    out_SGF = np.zeros((len(shapes), len(facts), len(COUNTED)), np.int64)
    depth_S = np.array([shape.depth for shape in shapes])
    _compiled()(*columns, begin_G, ends_G, counts_SD, nodes_SD, depth_S, out_SGF)
    return out_SGF


def _walk(
    reach_N: np.ndarray,
    rank_N: np.ndarray,
    on_tape_N: np.ndarray,
    begin_G: np.ndarray,
    ends_G: np.ndarray,
    counts_SD: np.ndarray,
    nodes_SD: np.ndarray,
    depth_S: np.ndarray,
    out_SGF: np.ndarray,
) -> None:
    """Count rounds; compiled."""
    for g in range(len(begin_G)):
        for s in range(len(depth_S)):
            at = begin_G[g]
            while at < ends_G[g]:
                depth = min(depth_S[s], ends_G[g] - at - 1)
                stood = min(reach_N[at], depth)
                emitted = accepted = stood + 1
                hit = stood < depth and rank_N[at] <= counts_SD[s, stood]
                if hit:
                    emitted += on_tape_N[at]
                else:
                    accepted = stood
                out_SGF[s, g, _ROUNDS] += 1
                out_SGF[s, g, _ACCEPTED] += accepted
                out_SGF[s, g, _HEDGES] += hit and rank_N[at] > 1
                out_SGF[s, g, _CUT] += depth < depth_S[s] and not (hit and not on_tape_N[at])
                out_SGF[s, g, _DRAFTED] += nodes_SD[s, depth]
                out_SGF[s, g, _STEPS] += depth
                at += emitted


@cache
def _compiled() -> Callable[..., None]:
    import numba

    return numba.njit(nogil=True)(_walk)


def tree_rounds(table: DraftTable, shape: str | TreeShape, *, estimator: str | None = None) -> pl.DataFrame:
    """The rounds of one shape, laid out row by row and verified as a live round would: what ``tree_walk`` counts.

    Args:
        table: As for ``tree_walk``.
        shape: The shape.
        estimator: "own" or "forced"; None takes "own" where the texts allow it.

    Returns:
        One row per round: doc_id, source, start, depth (spine tokens drafted), drafted (nodes), accepted, hedge (the
        last accepted node is one), emitted, bonus, round_stop ("budget" where it shortened the tree, "forced" where an
        accepted node was not the text), estimator.

    Raises:
        UserError: As of ``tree_walk``.
    """
    import polars as pl

    whole = TreeShape(shape)
    documents, picked = documents_of(table, [whole], estimator)
    rows: list[tuple[Any, ...]] = []
    for one in documents:
        track, at = one.track, one.track.first
        while at < track.length - 1:
            depth = min(whole.depth, track.length - 2 - at)
            text = track.tokens[at + 1 : at + depth + 2].tolist()
            picks = text if picked == "own" else track.target_id[at : at + depth + 1].tolist()
            drafted, path, hedge = 0, tuple[int, ...](), False
            stop, emitted = "", text[:1]
            if depth:
                tree = TreeShape(whole.counts[:depth])
                laid = tree_rows(tree, int(track.tokens[at]), one.ids[at, :depth].tolist())
                after = [picks[row.depth] for row in laid]  # right along the tape, and read no further
                path, verdict = accept_tree(laid, after, force=None if picked == "own" else text)
                drafted, hedge = tree.nodes, bool(path) and path[-1] > depth
                stop, emitted = verdict.round_stop, list(verdict.emitted)
            stop = stop or ("budget" if depth < whole.depth else "")
            rows.append(
                (track.doc_id, track.source, at, depth, drafted, len(path), hedge, len(emitted), emitted[-1], stop)
            )
            at += len(emitted)
    whole_numbers = dict.fromkeys(("start", "depth", "drafted", "accepted"), pl.Int32)
    schema = {"doc_id": pl.String, "source": pl.String, **whole_numbers, "hedge": pl.Boolean}
    schema |= {"emitted": pl.Int32, "bonus": pl.Int32, "round_stop": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(picked).alias("estimator"))
