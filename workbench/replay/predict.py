"""Predicted speed: the rounds of a walk, counted per document, times what such rounds cost.

Intervals resample whole documents, speculative and plain seconds of a document together. They tell the spread between
documents, not the error of the cost model.
Legend: G documents, C context buckets, S drafter steps, D drafts verified, A drafts accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import DRAWS, LEVEL, Interval, bootstrap_by, bootstrap_difference
from workbench.core.errors import UserError, check_int
from workbench.replay.cost import CostModel
from workbench.replay.curves import PHASES, RoundCost, between
from workbench.spec.policies.naming import label_of

if TYPE_CHECKING:
    from workbench.replay.counts import WalkCounts


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSeconds:
    """What the rounds of each document cost.

    Args:
        documents: Their ids, [G].
        emitted_G: Tokens their rounds emitted.
        phases_G: Phase to seconds.
        plain_G: Seconds of plain decode of the same tokens.
        extrapolated: Share of rounds at contexts longer than any the cost model was measured at; 0 for a model that
            knows no contexts.
    """

    documents: tuple[str, ...]
    emitted_G: np.ndarray
    phases_G: Mapping[str, np.ndarray]
    plain_G: np.ndarray
    extrapolated: float

    @property
    def seconds_G(self) -> np.ndarray:
        """Seconds of all phases."""
        return np.sum(list(self.phases_G.values()), axis=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """The predicted speed of one policy.

    Args:
        policy: Its label.
        estimator: Of the walk.
        cost: The cost model's key.
        width: Sequences that run together.
        tokens_per_second: Emitted tokens of all sequences per second, pooled over documents.
        speedup: Plain seconds of the same tokens over speculative ones, pooled over documents.
        seconds: Of all rounds.
        plain_seconds: Of plain decode of the same tokens.
        phases: Seconds of all rounds by phase: draft, verify, accept, commit, other.
        rounds: Rounds.
        emitted: Tokens they emitted.
        extrapolated: See ``DocumentSeconds``.
        parts: The same per document.
    """

    policy: str
    estimator: str
    cost: Mapping[str, str]
    width: int
    tokens_per_second: Interval
    speedup: Interval
    seconds: float
    plain_seconds: float
    phases: Mapping[str, float]
    rounds: int
    emitted: int
    extrapolated: float
    parts: DocumentSeconds = field(repr=False)

    def row(self) -> dict[str, Any]:
        """One flat mapping, for frames; intervals as value, ``_low`` and ``_high``, phases as ``t_<phase>``."""
        out: dict[str, Any] = {"policy": self.policy, "estimator": self.estimator, "cost": self.cost["name"]}
        out |= {"width": self.width, "rounds": self.rounds, "emitted": self.emitted}
        for name in ("tokens_per_second", "speedup"):
            interval: Interval = getattr(self, name)
            out |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
        out |= {"seconds": self.seconds, "plain_seconds": self.plain_seconds, "extrapolated": self.extrapolated}
        return out | {f"t_{phase}": seconds for phase, seconds in self.phases.items()}

    def difference(self, other: Prediction, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL) -> Interval:
        """Tokens per second of this policy minus those of another, both over the same resampled documents.

        Args:
            other: A prediction over the same documents, by the same cost model.
            draws: Resamples.
            seed: Of the resampling.
            level: Coverage.

        Returns:
            An interval; one that excludes 0 is a difference beyond the spread between documents.

        Raises:
            UserError: Documents, cost models or widths differ.
        """
        if (self.cost, self.width) != (other.cost, other.width):
            raise UserError(
                f"predictions by {self.cost['name']!r} at width {self.width} and {other.cost['name']!r} at width "
                f"{other.width} are not compared: predict both with one cost model and width"
            )
        sides = [(p.parts.documents, p.width * p.parts.emitted_G, p.parts.seconds_G) for p in (self, other)]
        return bootstrap_difference(sides[0], sides[1], draws=draws, seed=seed, level=level)[0]


def predict(
    counts: WalkCounts,
    cost: CostModel,
    *,
    width: int = 1,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> Prediction:
    """Predict the speed of a policy from a walk's counts.

    At a width above 1 every sequence is taken to run rounds like the policy's own together with as many others of the
    same shape; sequences whose draft lengths differ would wait for the longest.

    Args:
        counts: Of one policy, from ``wb.walk_counts``.
        cost: What rounds cost.
        width: Sequences that run together; default 1.
        draws: Resamples of documents; default 2000.
        seed: Of the resampling.
        level: Coverage of the intervals; default 0.95.

    Returns:
        The prediction.

    Raises:
        UserError: The policy drafts further, or the width is larger, than the cost model knows.
    """
    parts = document_seconds(counts, cost, width=width)
    emitted_G, plain_G, seconds_G = width * parts.emitted_G, parts.plain_G, parts.seconds_G
    two_G2 = np.stack([emitted_G, plain_G], 1)
    speed, speedup = bootstrap_by(parts.documents, two_G2, seconds_G, draws=draws, seed=seed, level=level)
    return Prediction(
        policy=label_of(counts.policy),
        estimator=counts.estimator,
        cost=cost.key(),
        width=width,
        tokens_per_second=speed,
        speedup=speedup,
        seconds=float(seconds_G.sum()),
        plain_seconds=float(plain_G.sum()),
        phases={phase: float(parts.phases_G[phase].sum()) for phase in PHASES},
        rounds=int(counts.outcome_GDA.sum()),
        emitted=int(counts.emitted_G.sum()),
        extrapolated=parts.extrapolated,
        parts=parts,
    )


def document_seconds(counts: WalkCounts, cost: CostModel, *, width: int = 1) -> DocumentSeconds:
    """Seconds of each document's rounds and of plain decode of the same tokens.

    Every round is taken at the middle of the part of its context bucket that its document fills.

    Args:
        counts: Of one policy.
        cost: What rounds cost.
        width: Sequences that run together; seconds are those of all of them.

    Returns:
        The sums.

    Raises:
        UserError: The policy drafts further, or the width is larger, than the cost model knows.
    """
    check_int("width", width, low=1)
    work_GCSD, outcome_GDA = counts.work_GCSD.astype(np.float64), counts.outcome_GDA.astype(np.float64)
    k = _largest(outcome_GDA.sum((0, 2)))
    steps = max(k, _largest(work_GCSD.sum((0, 1, 3))))
    rounds_GC = work_GCSD.sum((2, 3))
    context_GC = round_contexts(rounds_GC, counts.emitted_G, counts.contexts)
    phases_G = {phase: np.zeros(len(counts.documents)) for phase in PHASES}

    work_GCSD = work_GCSD[:, :, : steps + 1, : k + 1]
    at_GSD = np.einsum("gcsd,gc->gsd", work_GCSD, context_GC)  # rounds, weighted by their context
    for phase, table in between(cost.widths, width, lambda one: one.work(steps, k)).items():
        phases_G[phase] += np.einsum("gsd,sd->g", work_GCSD.sum(1), table[..., 0])
        phases_G[phase] += np.einsum("gsd,sd->g", at_GSD, table[..., 1])

    outcome_GDA = outcome_GDA[:, : k + 1, : k + 1]
    rounds_GD = work_GCSD.sum((1, 2))
    mean_GD = np.divide(at_GSD.sum(1), rounds_GD, out=np.zeros_like(rounds_GD), where=rounds_GD > 0)
    for phase, table in between(cost.widths, width, lambda one: one.outcome(k)).items():
        phases_G[phase] += np.einsum("gda,da->g", outcome_GDA, table[..., 0])
        phases_G[phase] += np.einsum("gda,gd,da->g", outcome_GDA, mean_GD, table[..., 1])

    rounds_G = rounds_GC.sum(1)
    tokens_GC = (
        rounds_GC * np.divide(counts.emitted_G, rounds_G, out=np.zeros_like(rounds_G), where=rounds_G > 0)[:, None]
    )
    base, slope = between(cost.widths, width, RoundCost.plain_line)
    beyond = 0.0
    if cost.contexts is not None and rounds_GC.sum() > 0:
        beyond = float(rounds_GC[context_GC > cost.contexts[1]].sum() / rounds_GC.sum())
    return DocumentSeconds(
        documents=counts.documents,
        emitted_G=counts.emitted_G,
        phases_G=phases_G,
        plain_G=(tokens_GC * (base + slope * context_GC)).sum(1),
        extrapolated=beyond,
    )


def round_contexts(rounds_GC: np.ndarray, emitted_G: np.ndarray, contexts: tuple[int, ...]) -> np.ndarray:
    """Mean context of the rounds in each bucket.

    The rounds of a document follow each other, so the first bucket it touches is filled up to its end and the last one
    from its beginning, by as many tokens as its rounds there emit on average; others are filled whole. A document
    within one bucket is taken at that bucket's middle, or in the last, which has none, at its lower edge.

    Args:
        rounds_GC: Rounds.
        emitted_G: Tokens emitted.
        contexts: Lower edges of the buckets.

    Returns:
        Tokens, [G, C].
    """
    low_C = np.array(contexts, dtype=np.float64)
    high_C = np.array([*contexts[1:], np.inf])
    rounds_G = rounds_GC.sum(1)
    yields_G = np.divide(emitted_G, rounds_G, out=np.zeros(len(rounds_G)), where=rounds_G > 0)
    half_GC = rounds_GC * yields_G[:, None] / 2
    middle_C = np.where(np.isinf(high_C), low_C, (low_C + np.where(np.isinf(high_C), 0, high_C)) / 2)
    out_GC = np.broadcast_to(middle_C, rounds_GC.shape).copy()
    used_GC = rounds_GC > 0
    first_G, last_G = used_GC.argmax(1), len(contexts) - 1 - used_GC[:, ::-1].argmax(1)
    for g in np.flatnonzero(used_GC.any(1) & (first_G < last_G)):
        a, b = first_G[g], last_G[g]
        out_GC[g, a] = max(low_C[a], high_C[a] - half_GC[g, a])
        out_GC[g, b] = min(high_C[b], low_C[b] + half_GC[g, b])
    return out_GC


def _largest(counts_N: np.ndarray) -> int:
    """The last index with a count; 0 without any."""
    return int(np.flatnonzero(counts_N).max(initial=0))
