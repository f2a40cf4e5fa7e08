"""The rounds of one policy, counted per document: what metrics, intervals and cost models are sums of.

A round is kept as its numbers of steps, drafts and accepted drafts, whether something cut it, and how long the text was
when it began. Legend: G documents, D drafted, A accepted, S drafter steps, C buckets of committed length, K slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.frames import require
from workbench.core.metrics import AGGREGATIONS, Acceptance, SlotCounts, check_identities, ratio
from workbench.core.records import CUTS
from workbench.spec.policies import Policy

if TYPE_CHECKING:
    import polars as pl

CONTEXTS = (0, 128, 512, 2048, 8192, 32768)
COLUMNS = ("doc_id", "source", "start", "steps", "drafted", "accepted", "emitted", "round_stop")


@dataclass(frozen=True, eq=False)
class WalkCounts:
    """One policy's rounds over some documents, as counts; ``==`` compares every count.

    Args:
        policy: The policy.
        estimator: "own", "forced" or "ratio".
        k_max: Slots K of the arrays.
        documents: Document ids [G].
        sources: Their registers [G].
        contexts: Lower edges of buckets of committed length, tokens, the first 0 [C].
        emitted_G: Tokens emitted, int64.
        outcome_GDA: Rounds by drafts and accepted drafts, int64 [G, K+1, K+1].
        whole_GDA: Of these, the rounds that no stop, budget or context cut.
        work_GCSD: Rounds by bucket of the committed length they began with, drafter steps run and drafts verified,
            int64 [G, C, K+1, K+1].
        route: "fast" for the compiled walk, "plain" for rounds walked one by one.
    """

    policy: Policy
    estimator: str
    k_max: int
    documents: tuple[str, ...]
    sources: tuple[str, ...]
    contexts: tuple[int, ...]
    emitted_G: np.ndarray
    outcome_GDA: np.ndarray
    whole_GDA: np.ndarray
    work_GCSD: np.ndarray
    route: str = "plain"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WalkCounts):
            return NotImplemented
        return self._same_kind(other) and self.documents == other.documents and self.sources == other.sources and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS
        )  # fmt: skip

    def _same_kind(self, other: WalkCounts) -> bool:
        names = ("policy", "estimator", "k_max", "contexts")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def rounds_G(self) -> np.ndarray:
        """Rounds per document, int64."""
        return self.outcome_GDA.sum((1, 2))

    @property
    def cut_G(self) -> np.ndarray:
        """Rounds per document that a stop, the budget or the context cut, int64."""
        return self.rounds_G - self.whole_GDA.sum((1, 2))

    @property
    def drafted_G(self) -> np.ndarray:
        """Drafted tokens per document, int64."""
        return self.outcome_GDA.sum(2) @ np.arange(self.k_max + 1)

    @property
    def accepted_G(self) -> np.ndarray:
        """Accepted tokens per document, bonus tokens not among them, int64."""
        return self.outcome_GDA.sum(1) @ np.arange(self.k_max + 1)

    @property
    def steps_G(self) -> np.ndarray:
        """Drafter steps per document, those of discarded tokens included, int64."""
        return self.work_GCSD.sum((1, 3)) @ np.arange(self.k_max + 1)

    @property
    def slots(self) -> SlotCounts:
        """Rounds that drafted, tested and accepted each slot, [G, K] each."""
        return slots_of(self.outcome_GDA)

    @property
    def whole_slots(self) -> SlotCounts:
        """The same over rounds that nothing cut."""
        return slots_of(self.whole_GDA)

    def acceptance(self, aggregation: str = "pooled") -> Acceptance:
        """Every acceptance metric, as ``core.metrics.acceptance`` gives it for the rounds frame.

        Args:
            aggregation: "pooled" (default) or "request_mean".

        Returns:
            The metrics over the slots that some round drafted; ``chain_stops`` and ``round_stops`` are empty, since
            counts do not keep reasons.

        Raises:
            UserError: Another aggregation.
        """
        check_choice("aggregation", aggregation, AGGREGATIONS)
        out = self._pooled()
        if aggregation == "request_mean":
            out = replace(out, aggregation=aggregation, **self._request_means(len(out.joint)))
        check_identities(out)
        return out

    def _pooled(self) -> Acceptance:
        outcome_DA, whole_DA = self.outcome_GDA.sum(0), self.whole_GDA.sum(0)
        k = int(np.flatnonzero(outcome_DA.sum(1)).max(initial=0))
        counts, whole = _first(slots_of(outcome_DA[None]), k), _first(slots_of(whole_DA[None]), k)
        rounds, whole_rounds = int(outcome_DA.sum()), int(whole_DA.sum())
        drafted, accepted = int(self.drafted_G.sum()), int(self.accepted_G.sum())
        emitted = int(self.emitted_G.sum())
        return Acceptance(
            aggregation="pooled",
            requests=int((self.rounds_G > 0).sum()),
            rounds=rounds,
            cut=rounds - whole_rounds,
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            tau=ratio(accepted, rounds),
            accepted_length=ratio(whole_rounds + int(whole.accepted_GK.sum()), whole_rounds),
            emitted_per_round=ratio(emitted, rounds),
            efficiency=ratio(accepted, drafted),
            full_accepts=int(np.trace(outcome_DA)) - int(outcome_DA[0, 0]),
            joint=counts.pooled("joint"),
            reach=counts.pooled("reach"),
            cond=counts.pooled("cond"),
            joint_whole=whole.pooled("joint"),
            pos_drafted=tuple(counts.drafted_GK[0].tolist()),
            pos_tested=tuple(counts.tested_GK[0].tolist()),
            pos_accepted=tuple(counts.accepted_GK[0].tolist()),
            lengths=tuple(outcome_DA.sum(0)[: k + 1].tolist()),
        )

    def _request_means(self, k: int) -> dict[str, Any]:
        """Every ratio as the mean over the documents that have one."""
        counts, whole = _first(self.slots, k), _first(self.whole_slots, k)
        whole_G = whole.rounds_G
        pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {
            "tau": (self.accepted_G, self.rounds_G),
            "accepted_length": (whole_G + whole.accepted_GK.sum(1), whole_G),
            "emitted_per_round": (self.emitted_G, self.rounds_G),
            "efficiency": (self.accepted_G, self.drafted_G),
        }
        out: dict[str, Any] = {name: _means(*pair)[0] for name, pair in pairs.items()}
        out |= {name: _means(*counts.parts(name)) for name in ("joint", "reach", "cond")}
        return out | {"joint_whole": _means(*whole.parts("joint"))}

    def select(self, *, source: str | None = None, documents: Sequence[str] | None = None) -> WalkCounts:
        """The counts of some documents.

        Args:
            source: Keep the documents of this register; None keeps all.
            documents: Keep these, in the order of the walk; None keeps all.

        Returns:
            Their counts.

        Raises:
            UserError: No document is of that source, or one of the documents was not walked.
        """
        keep_G = np.ones(len(self.documents), bool)
        if source is not None:
            check_choice("source", source, sorted(set(self.sources)))
            keep_G &= np.array(self.sources) == source
        if documents is not None:
            if missing := set(documents) - set(self.documents):
                raise UserError(
                    f"documents names {sorted(missing)[0]!r}, which was not walked: name some of the "
                    f"{len(self.documents)} documents of the table, such as {self.documents[0]!r}"
                )
            keep_G &= np.isin(self.documents, list(documents))
        kept = np.flatnonzero(keep_G).tolist()
        return replace(
            self,
            documents=tuple(self.documents[i] for i in kept),
            sources=tuple(self.sources[i] for i in kept),
            **{name: getattr(self, name)[kept] for name in ARRAYS},
        )

    def merge(self, other: WalkCounts) -> WalkCounts:
        """The counts of both, documents of this one first.

        Args:
            other: The same policy by the same estimator, over other documents.

        Returns:
            The counts over all documents.

        Raises:
            UserError: It is of another policy, estimator, k_max or contexts, or shares a document.
        """
        return joined([self, other])


ARRAYS = ("emitted_G", "outcome_GDA", "whole_GDA", "work_GCSD")


def check_contexts(contexts: Sequence[int]) -> tuple[int, ...]:
    """Edges of buckets of committed length: integers that ascend from 0.

    Args:
        contexts: Lower edges, tokens.

    Returns:
        The edges.

    Raises:
        UserError: The first is not 0, or they do not ascend.
    """
    edges = tuple(check_int("contexts", edge, low=0) for edge in contexts)
    if edges[:1] != (0,) or any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"contexts={tuple(contexts)!r} is not valid: give lower edges that ascend from 0")
    return edges


def counts_of(
    rounds: pl.DataFrame,
    *,
    policy: Policy,
    k_max: int,
    estimator: str,
    documents: Mapping[str, str] | None = None,
    contexts: Sequence[int] = CONTEXTS,
) -> WalkCounts:
    """Count the rounds of a frame; of a walk's, or of live ones.

    Args:
        rounds: A rounds frame of one policy.
        policy: The policy.
        k_max: Slots to count; at least the longest draft.
        estimator: By which the rounds were walked.
        documents: Source by document id, in the order wanted, for documents that may have no round; None takes those
            of the frame in its order.
        contexts: Lower edges of buckets of committed length; default (0, 128, 512, 2048, 8192, 32768).

    Returns:
        The counts.

    Raises:
        UserError: A column is missing, a round holds more than k_max steps, or is of a document not named.
    """
    require(rounds, COLUMNS, "counts_of")
    edges, size = check_contexts(contexts), check_int("k_max", k_max, low=0) + 1
    if documents is None:
        documents = dict(zip(rounds["doc_id"].to_list(), rounds["source"].to_list(), strict=True))
    place = {name: i for i, name in enumerate(documents)}
    if unknown := set(rounds["doc_id"].unique()) - set(place):
        raise UserError(f"a round is of document {min(unknown)!r}, which documents does not name: name every document")
    group_N = np.array([place[name] for name in rounds["doc_id"]], np.int64)
    steps_N, drafted_N, accepted_N = (rounds[name].to_numpy().astype(np.int64) for name in COLUMNS[3:6])
    longest = max(int(column_N.max(initial=0)) for column_N in (steps_N, drafted_N, accepted_N))
    if longest >= size:
        raise UserError(f"a round holds {longest} drafts or steps and k_max={k_max} was given: give {longest} or more")
    whole_N = ~np.isin(rounds["round_stop"].to_numpy().astype(str), CUTS)
    bucket_N = np.searchsorted(edges, rounds["start"].to_numpy() + 1, side="right") - 1
    emitted_G = np.zeros(len(place), np.int64)
    outcome_GDA = np.zeros((len(place), size, size), np.int64)
    whole_GDA, work_GCSD = np.zeros_like(outcome_GDA), np.zeros((len(place), len(edges), size, size), np.int64)
    np.add.at(emitted_G, group_N, rounds["emitted"].to_numpy())
    np.add.at(outcome_GDA, (group_N, drafted_N, accepted_N), 1)
    np.add.at(whole_GDA, (group_N[whole_N], drafted_N[whole_N], accepted_N[whole_N]), 1)
    np.add.at(work_GCSD, (group_N, bucket_N, steps_N, drafted_N), 1)
    names, sources = tuple(documents), tuple(documents.values())
    return WalkCounts(
        policy, estimator, k_max, names, sources, edges, emitted_G, outcome_GDA, whole_GDA, work_GCSD
    )  # fmt: skip


def joined(parts: Sequence[WalkCounts]) -> WalkCounts:
    """The counts of several walks of one policy over different documents, in order; see ``WalkCounts.merge``."""
    head = parts[0]
    for other in parts[1:]:
        if not head._same_kind(other):
            raise UserError(
                f"counts of {head.policy!r} by {head.estimator!r} and of {other.policy!r} by {other.estimator!r} do "
                "not merge: policy, estimator, k_max and contexts must be equal"
            )
    names = [name for part in parts for name in part.documents]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(f"two of the counts hold document {twice!r}: merge walks over different documents")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    sources = tuple(source for part in parts for source in part.sources)
    route = "fast" if all(part.route == "fast" for part in parts) else "plain"
    return replace(head, documents=tuple(names), sources=sources, route=route, **arrays)


def slots_of(outcome_GDA: np.ndarray) -> SlotCounts:
    """Rounds that drafted, tested and accepted each slot.

    Args:
        outcome_GDA: Rounds by drafts and accepted drafts, [G, K+1, K+1].

    Returns:
        The counts, [G, K] each.
    """
    at_least_GDA = (
        outcome_GDA[:, ::-1, ::-1].cumsum(1).cumsum(2)[:, ::-1, ::-1]
    )  # d or more drafted, a or more accepted
    slot = np.arange(outcome_GDA.shape[1] - 1)
    return SlotCounts(
        at_least_GDA[:, 0, 0],
        at_least_GDA[:, slot + 1, 0],
        at_least_GDA[:, slot + 1, slot],
        at_least_GDA[:, 0, slot + 1],
    )


def _first(counts: SlotCounts, k: int) -> SlotCounts:
    """The counts of the first k slots."""
    return SlotCounts(counts.rounds_G, *(x[:, :k] for x in (counts.drafted_GK, counts.tested_GK, counts.accepted_GK)))


def _means(top: np.ndarray, bottom: np.ndarray) -> tuple[float | None, ...]:
    """Per column, the mean of top / bottom over the documents where bottom is not 0; None without one."""
    top_GM, bottom_GM = (x.reshape(len(x), -1).astype(np.float64) for x in (top, bottom))
    known_GM = bottom_GM > 0
    shares_GM = np.divide(top_GM, bottom_GM, out=np.zeros_like(top_GM), where=known_GM)
    return tuple(ratio(float(s), int(n)) for s, n in zip(shares_GM.sum(0), known_GM.sum(0)))
