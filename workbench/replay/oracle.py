"""The best draft lengths for recorded texts, by dynamic programming from the end of each text backwards.

A round that starts at p, drafts K tokens and finds the first a(p) drafts of the chain there on the text emits
min(a(p), K) + 1 tokens: the chain at p does not depend on the rounds before it, so the least that the rest of a text
can take is V(p) = min over K of t(K) + V(p + min(a(p), K) + 1), exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.core.errors import UserError
from workbench.replay.tracks import Track, estimator_for, policy_for, tracks
from workbench.spec.policies import Oracle, Policy, PolicyRun, Scripted

if TYPE_CHECKING:
    from workbench.replay.table import DraftTable

EXACT = ("own", "forced")  # the estimators by which a round's outcome is known beforehand


def begin(policy: Policy, track: Track, estimator: str, *, width: int) -> PolicyRun:
    """A fresh run of a policy for the walk of one document; an Oracle's is the best schedule there.

    Args:
        policy: The policy.
        track: The document.
        estimator: "own" or "forced".
        width: Width of the model's residual stream.

    Returns:
        The run.
    """
    if isinstance(policy, Oracle):
        policy = best_schedule(track, policy, estimator)
    return policy.start(width=width)


def oracle_schedules(table: DraftTable, oracle: Oracle, *, estimator: str | None = None) -> dict[str, Scripted]:
    """The draft lengths an oracle takes on every document, as policies that run live too.

    Args:
        table: The draft table, with a chain at every start (stride 1).
        oracle: The oracle.
        estimator: "own" or "forced"; None takes "own" when every document is the target's own text, else "forced".

    Returns:
        A ``Scripted`` policy by document id.

    Raises:
        UserError: The table is thinned or has too few slots, or the estimator is not valid.
    """
    if not isinstance(oracle, Oracle):
        raise UserError(f"oracle={oracle!r} is not valid: give an Oracle(k=..)")
    policy_for(table, 0, oracle, {})
    picked = estimator_for(table, estimator, EXACT)
    return {track.doc_id: best_schedule(track, oracle, picked) for track in tracks(table)}


def best_schedule(track: Track, oracle: Oracle, estimator: str) -> Scripted:
    """Draft lengths of the rounds of an oracle over one document.

    Args:
        track: The document.
        oracle: The oracle.
        estimator: "own" or "forced".

    Returns:
        The length at the start of every round of the best walk; of equally good ones the shortest.
    """
    rows = track.length - 1
    if oracle.seconds is None:  # rounds first, then drafts: no count of drafts weighs as much as a round
        seconds = [float(rows * oracle.k + 1 + k) for k in range(oracle.k + 1)]
    else:
        seconds = list(oracle.seconds)
    hits_T = hits(track, oracle.k, estimator).tolist()
    return Scripted(ks=best_lengths(hits_T, track.first, seconds))


def hits(track: Track, k: int, estimator: str) -> np.ndarray:
    """Leading drafts of the chain at every start that go on along the text.

    Args:
        track: The document.
        k: Longest draft.
        estimator: "own" has a draft go on when it is the text's token, "forced" when it is the target's pick as well.

    Returns:
        int64 [T].
    """
    rows = track.length - 1
    at_TK = np.arange(rows)[:, None] + np.arange(k)
    known_TK, at_TK = at_TK < rows, np.minimum(at_TK, rows - 1)
    drafts_TK = track.draft_ids[:, :k]
    on_TK = known_TK & (drafts_TK == track.tokens[at_TK + 1])
    if estimator == "forced":
        on_TK &= drafts_TK == track.target_id[at_TK]
    return on_TK.cumprod(1).sum(1)  # type: ignore[no-any-return]


def best_lengths(hits_T: Sequence[int], first: int, seconds: Sequence[float]) -> dict[int, int]:
    """Draft length at every start that makes the rest of the text take least; of equally good ones the shortest.

    Args:
        hits_T: Leading drafts that go on along the text, by start.
        first: The first start.
        seconds: t(0), t(1), .. t(k).

    Returns:
        Lengths by start; as many drafts as the rest of the text has room for.
    """
    rows, k = len(hits_T), len(seconds) - 1
    rest, lengths = [0.0] * (rows + 1), {}
    for at in range(rows - 1, first - 1, -1):
        best, hit = 0, hits_T[at]
        least = seconds[0] + rest[at + 1]
        for length in range(1, min(k, rows - at - 1) + 1):
            total = seconds[length] + rest[at + min(hit, length) + 1]
            if total < least:
                best, least = length, total
        rest[at], lengths[at] = least, best
    return lengths
