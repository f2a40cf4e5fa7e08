"""The schedule of a policy that knows how many drafts every chain would have accepted: an upper bound for the others.

From the end of a text backwards, the best round from each position is the one whose own cost and the best cost from
where it ends are least together. Which position a round reaches depends on its draft length alone, so no policy that
drafts as much can have fewer rounds (or take less time, where rounds have one).
"""

from __future__ import annotations

import math

import numpy as np

from workbench.replay.tracks import Track
from workbench.spec.accept import accept_greedy
from workbench.spec.policies import Oracle, Scripted


def oracle_plan(match_T: np.ndarray, first: int, end: int, seconds_K: np.ndarray, plan_T: np.ndarray) -> float:
    """Write the best draft length of every position into ``plan_T``; among equals, that with the fewest drafts to come.

    Args:
        match_T: Drafts of the chain at each position that the text goes on with, int [end].
        first: Position of the first pending token.
        end: Position of the last token, which ends the walk.
        seconds_K: Cost of a round that drafts 0..K tokens; all 1 counts rounds.
        plan_T: Where lengths go, int [end].

    Returns:
        The cost of the whole text.
    """
    best_T, drafts_T = np.zeros(end + 1), np.zeros(end + 1, np.int64)
    for at in range(end - 1, first - 1, -1):
        least, drafts, length = math.inf, 0, 0
        for k in range(min(len(seconds_K), end - at)):
            after = at + min(match_T[at], k) + 1
            cost, total = seconds_K[k] + best_T[after], k + drafts_T[after]
            if cost < least or (cost == least and total < drafts):
                least, drafts, length = cost, total, k
        best_T[at], drafts_T[at], plan_T[at] = least, drafts, length
    return float(best_T[first]) if first < end else 0.0


def curve(policy: Oracle) -> np.ndarray:
    """What a round of 0..k drafts costs by the policy: its seconds, or 1 each."""
    return np.ones(policy.k + 1) if policy.seconds is None else np.array(policy.seconds, np.float64)


def scheduled(policy: Oracle, track: Track, estimator: str) -> Scripted:
    """The oracle's draft lengths on one text.

    Args:
        policy: The oracle.
        track: The text's columns.
        estimator: "own" or "forced".

    Returns:
        A policy with these lengths by start, which runs live too.
    """
    end = track.length - 1
    plan_T = np.zeros(end, np.int64)
    oracle_plan(reaches(track, estimator), track.first, end, curve(policy), plan_T)
    return Scripted(ks={at: k for at, k in enumerate(plan_T.tolist()) if at >= track.first})


def reaches(track: Track, estimator: str) -> np.ndarray:
    """Per position, how many drafts of its whole chain the text goes on with, int [length - 1]; 0 before the walk."""
    end, tokens, picks = track.length - 1, track.tokens.tolist(), track.target_id.tolist()
    out = np.zeros(end, np.int64)
    for at in range(track.first, end):
        drafts = track.draft_ids[at, : end - at - 1].tolist()
        text = tokens[at + 1 : at + 2 + len(drafts)]
        if estimator == "own":
            out[at] = accept_greedy(drafts, text).accepted
        else:  # a pick off the text counts as accepted and is not emitted
            out[at] = len(accept_greedy(drafts, picks[at : at + len(text)], force=text).emitted) - 1
    return out
