"""Walks of many policies over a draft table at once: compiled, shard by shard, counted per document.

A walk gives exactly the counts of the plain one, ``counts_of(walk(table, policy=p))``. Policies of the library run
compiled; others are walked one round at a time, and their counts say so. What is held at a time is one shard's arrays
and the counts of as many policies as ``COUNT_BYTES`` hold; longer lists of policies read the shards again.
Legend: P policies, R rows of a shard, K slots, G documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.progress import progress
from workbench.replay.counts import CONTEXTS, WalkCounts, check_contexts, counts_of, joined
from workbench.replay.ratio import check_ratio
from workbench.replay.rows import Documents, Rows, shard_rows
from workbench.replay.timing import CostGrid, RoundSeconds
from workbench.replay.tracks import check_timed, policy_for, tracks
from workbench.replay.walk import check_own, chosen_estimator, rounding, track_rounds
from workbench.spec.policies import ArrayPolicy, Oracle, Policy, Scripted
from workbench.spec.policies.rules import FAMILIES, PARAMS

if TYPE_CHECKING:
    from workbench.replay.table import DraftTable

COUNT_BYTES = 1 << 28
TASKS = 4  # per thread and shard, so that threads end together


def walk_counts(
    table: DraftTable,
    policies: Policy | Iterable[Policy],
    *,
    estimator: str | None = None,
    seed: int | None = None,
    contexts: Sequence[int] = CONTEXTS,
    cost: CostGrid | None = None,
    threads: int | None = None,
) -> Iterator[WalkCounts]:
    """Walk many policies over a draft table and count their rounds.

    Args:
        table: The draft table, with a chain at every start (stride 1).
        policies: One or many; the library's own run compiled, others round by round.
        estimator: "own", "forced" or "ratio"; None as for ``walk``.
        seed: Of the acceptances that "ratio" draws; None is 0.
        contexts: Lower edges of buckets of committed length that work is counted by; default (0, 128, 512, 2048, 8192,
            32768).
        cost: How long rounds take, for policies that read time: a ``CostModel``, or what else has its ``grid``; None
            tells them 0, and refuses ``Gate``.
        threads: Threads to walk on; None takes torch's.

    Returns:
        Counts per policy, in the order given, made as they are asked for.

    Raises:
        UserError: An option is not valid, a policy does not fit the table, or its texts are not what the estimator
            needs.
    """
    listed = list(policies) if isinstance(policies, Iterable) else [policies]
    if not listed:
        raise UserError("policies is empty: give at least one policy, such as FixedK(k=3)")
    for policy in listed:
        policy_for(table, 0, policy, {})
        check_timed(policy, cost)
    picked = chosen_estimator(table, estimator, seed)
    if picked == "ratio":
        for policy in listed:
            check_ratio(table, policy)
    edges = check_contexts(contexts)
    if threads is None:
        import torch

        threads = torch.get_num_threads()
    check_int("threads", threads, low=1)
    return _counts(table, listed, picked, seed or 0, edges, cost, threads)


def compiled(policy: Policy) -> bool:
    """Whether the compiled walk runs this policy: one of the library's own, not a class derived from it."""
    if not type(policy).__module__.startswith("workbench."):
        return False
    return isinstance(policy, (Oracle, Scripted)) or getattr(policy, "family", None) in FAMILIES


def _counts(
    table: DraftTable,
    policies: list[Policy],
    picked: str,
    seed: int,
    edges: tuple[int, ...],
    cost: CostGrid | None,
    threads: int,
) -> Iterator[WalkCounts]:
    documents = Documents.of(table)
    reached = tuple(edge for edge in edges if edge < documents.longest)
    total = len(policies) * sum(documents.rows)
    with progress(total, desc="walk", unit="row") as bar, ThreadPoolExecutor(threads) as pool:
        at = 0
        while at < len(policies):
            batch = Batch(policies[at:], documents, picked, reached, edges)
            if batch.policies:
                batch.walk(table, seed, cost, threads, pool, bar)
                yield from batch.results()
            else:
                yield _plain(table, policies[at], documents, picked, seed, edges, cost, bar)
            at += max(len(batch.policies), 1)


@dataclass(frozen=True, eq=False)
class Task:
    """Policies that one call of a kernel walks over a shard.

    Args:
        kernel: The kernel.
        statistic: What the policies read of a slot.
        params_PN: Their parameters.
        slots_P: Their longest drafts.
        base_P: Where their counts begin.
        planned: The one policy whose draft lengths are known beforehand; None for others.
        seconds_LSD: Durations of rounds; one 0 where the policies read no time.
    """

    kernel: Callable[..., None]
    statistic: str
    params_PN: np.ndarray
    slots_P: np.ndarray
    base_P: np.ndarray
    planned: Oracle | Scripted | None
    seconds_LSD: np.ndarray

    def run(self, rows: Rows, shift: int, contexts: np.ndarray, counts: np.ndarray) -> int:
        """Count the rounds of a shard before which ``shift`` documents came; how many rows were walked."""
        self.kernel(
            self.params_PN, self.slots_P, self.base_P, *self.plan(rows), rows.match_R, rows.prob_RK[self.statistic],
            rows.begin_G, rows.first_G, rows.end_G, shift, contexts, self.seconds_LSD, len(self.seconds_LSD) > 1,
            counts,
        )  # fmt: skip
        return len(self.slots_P) * len(rows.match_R)

    def plan(self, rows: Rows) -> tuple[np.ndarray, bool]:
        """Draft lengths of a planned policy, by row or by round, and whether by round."""
        if self.planned is None:
            return np.zeros(1, np.int64), False
        if isinstance(self.planned, Oracle):
            from workbench.replay.kernel import plan_rows

            given, plan_R = self.planned.seconds, np.zeros(len(rows.match_R), np.int64)
            seconds_K = np.zeros(self.planned.k + 1) if given is None else np.array(given, np.float64)
            plan_rows(rows.match_R, rows.begin_G, rows.first_G, rows.end_G, seconds_K, given is None, plan_R)
            return plan_R, False
        by_start = self.planned.by_start
        if by_start is None:
            return np.array(self.planned.ks, np.int64), True
        of_T = np.zeros(int(rows.end_G.max()), np.int64)
        for start, k in by_start.items():
            of_T[start : start + 1] = k
        return np.concatenate([of_T[:end] for end in rows.end_G.tolist()]), False


class Batch:
    """Policies at the head of a list that are walked together: compiled ones, as many as their counts leave room for.

    Args:
        policies: The list.
        documents: Of the table.
        picked: The estimator.
        reached: Edges of the buckets that some text reaches.
        edges: All edges.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        documents: Documents,
        picked: str,
        reached: tuple[int, ...],
        edges: tuple[int, ...],
    ) -> None:
        self.documents, self.picked, self.reached, self.edges = documents, picked, reached, edges
        self.policies: list[Policy] = []
        bases = [0]
        for policy in policies:
            size = len(documents.ids) * (2 + len(reached)) * _pairs(policy.k_max)
            if not compiled(policy) or (self.policies and 4 * (bases[-1] + size) > COUNT_BYTES):
                break
            self.policies.append(policy)
            bases.append(bases[-1] + size)
        self.base_P = np.array(bases, np.int64)
        self.counts = np.zeros(bases[-1], np.int32)
        self.emitted_G = np.zeros(len(documents.ids), np.int64)

    def walk(
        self,
        table: DraftTable,
        seed: int,
        cost: CostGrid | None,
        threads: int,
        pool: ThreadPoolExecutor,
        bar: Any,
    ) -> None:
        """Walk every policy over every shard."""
        tasks = list(self._tasks(int(table.manifest.model["hidden_size"]), cost, threads))
        contexts, shift = np.array(self.reached, np.int64), 0
        for rows in shard_rows(table, self.picked, seed):
            waiting = [pool.submit(task.run, rows, shift, contexts, self.counts) for task in tasks]
            for done in waiting:
                bar.update(done.result())
            here = slice(shift, shift + len(rows.begin_G))
            self.emitted_G[here] = np.maximum(rows.end_G - rows.first_G, 0)
            shift = here.stop

    def _tasks(self, width: int, cost: CostGrid | None, threads: int) -> Iterator[Task]:
        """Parts of the batch that one kernel walks."""
        from workbench.replay.kernel import walk_kernel

        groups: dict[tuple[str, str, bool], list[int]] = {}
        none = np.zeros((1, 1, 1))
        for i, policy in enumerate(self.policies):
            if isinstance(policy, (Oracle, Scripted)):
                slots, kernel = np.array([policy.k_max], np.int64), walk_kernel("")
                yield Task(kernel, "drawn", np.zeros((1, PARAMS)), slots, self.base_P[i : i + 1], policy, none)
            else:
                assert isinstance(policy, ArrayPolicy)
                timed = bool(getattr(policy, "timed", False))
                groups.setdefault((policy.family, policy.statistic, timed), []).append(i)
        for (family, statistic, timed), members in groups.items():
            seconds = none
            if timed and cost is not None:
                longest_draft = max(self.policies[p].k_max for p in members)
                seconds = RoundSeconds.of(cost, longest_draft, self.documents.longest).seconds_CSD
            each = -(-len(members) // (TASKS * threads))
            for part in (members[i : i + each] for i in range(0, len(members), each)):
                ours = [self.policies[p] for p in part]
                params = np.array([policy.params(width=width) for policy in ours])  # type: ignore[attr-defined]
                slots = np.array([policy.k_max for policy in ours], np.int64)
                yield Task(walk_kernel(family), statistic, params, slots, self.base_P[part], None, seconds)

    def results(self) -> Iterator[WalkCounts]:
        """The counts of every policy, in full arrays."""
        documents = self.documents
        for p, policy in enumerate(self.policies):
            flat = self.counts[self.base_P[p] : self.base_P[p + 1]]
            blocks_GBI = flat.reshape(len(documents.ids), 2 + len(self.reached), -1).astype(np.int64)
            size = policy.k_max + 1
            square_GBDA = np.zeros((*blocks_GBI.shape[:2], size, size), np.int64)
            square_GBDA[:, :, *np.tril_indices(size)] = blocks_GBI
            work_GCSD = np.zeros((len(documents.ids), len(self.edges), size, size), np.int64)
            work_GCSD[:, : len(self.reached)] = square_GBDA[:, 2:]
            yield WalkCounts(
                policy=policy,
                estimator=self.picked,
                k_max=policy.k_max,
                documents=documents.ids,
                sources=documents.sources,
                contexts=self.edges,
                emitted_G=self.emitted_G.copy(),
                outcome_GDA=square_GBDA[:, 0].copy(),
                whole_GDA=square_GBDA[:, 1].copy(),
                work_GCSD=work_GCSD,
                route="fast",
            )


def _pairs(k: int) -> int:
    """Pairs of numbers from 0 to k of which the second is not the larger."""
    return (k + 1) * (k + 2) // 2


def _plain(
    table: DraftTable,
    policy: Policy,
    documents: Documents,
    picked: str,
    seed: int,
    edges: tuple[int, ...],
    cost: CostGrid | None,
    bar: Any,
) -> WalkCounts:
    """Counts of a policy walked round by round."""
    width, edge = int(table.manifest.model["hidden_size"]), rounding(table)
    timed = None if cost is None else RoundSeconds.of(cost, policy.k_max, documents.longest)
    parts = []
    for i, track in enumerate(tracks(table)):
        if picked == "own":
            check_own(track, edge, drawn=not table.plain)
        rounds = track_rounds(track, policy, picked, width=width, seed=seed, sequence=i, cost=timed)
        named = {track.doc_id: track.source}
        parts.append(
            counts_of(rounds, policy=policy, k_max=policy.k_max, estimator=picked, documents=named, contexts=edges)
        )
        bar.update(track.length - 1)
    return joined(parts)
