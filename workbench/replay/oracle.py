"""The schedule of a policy that knows how many drafts every chain would have accepted: an upper bound for the others.

From the end of a text backwards, the best round from each position is the one whose own cost and the best cost from
where it ends are least together. Which position a round reaches depends on its draft length alone, so no policy that
drafts as much can have fewer rounds (or take less time, where rounds have one).
"""

from __future__ import annotations

import numpy as np


def oracle_plan(match_T: np.ndarray, first: int, end: int, seconds_K: np.ndarray, plan_T: np.ndarray) -> float:
    """Write the best draft length of every position into ``plan_T``, the least among equals.

    Args:
        match_T: Drafts of the chain at each position that the text goes on with, int [end].
        first: Position of the first pending token.
        end: Position of the last token, which ends the walk.
        seconds_K: Cost of a round that drafts 0..K tokens; all 1 counts rounds.
        plan_T: Where lengths go, int [end].

    Returns:
        The cost of the whole text.
    """
    best_T = np.zeros(end + 1)
    for at in range(end - 1, first - 1, -1):
        least, length = -1.0, 0
        for k in range(min(len(seconds_K), end - at)):
            cost = seconds_K[k] + best_T[at + min(match_T[at], k) + 1]
            if least < 0 or cost < least:
                least, length = cost, k
        best_T[at], plan_T[at] = least, length
    return float(best_T[first]) if first < end else 0.0
