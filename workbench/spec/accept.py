"""Which drafted tokens stand, on plain integers. Greedy: a draft stands while it is the target's own pick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of comparing a chain with the target.

    Args:
        accepted: Drafts that count as accepted.
        emitted: Tokens the round adds to the text.
        bonus: The last emitted token when it is not a draft; None when a stop cut it off.
        round_stop: "" for a whole round, "stop" when a stop token was an accepted draft, "forced" when an accepted
            draft was not the text to be committed.
    """

    accepted: int
    emitted: tuple[int, ...]
    bonus: int | None
    round_stop: str


def accept_greedy(
    draft: Sequence[int],
    picks: Sequence[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
    force: Sequence[int] | None = None,
) -> Verdict:
    """Accept the longest prefix of the draft that the target picks itself.

    Args:
        draft: Drafted ids d_1..d_k.
        picks: The target's picks g_1..g_{k+1}; g_1 follows the pending token.
        stop_ids: Tokens that end the text.
        force: Text to commit instead of the target's own, at least k + 1 ids from g_1's place on; a draft equal to
            the pick but not to this text counts as accepted and ends the round.

    Returns:
        The verdict.
    """
    n = 0
    while n < len(draft) and draft[n] == picks[n] and (force is None or force[n] == draft[n]):
        n += 1
        if draft[n - 1] in stop_ids:
            return Verdict(n, tuple(draft[:n]), None, "stop")
    if force is None:
        return Verdict(n, (*draft[:n], picks[n]), picks[n], "")
    emitted = (*draft[:n], force[n])
    if n < len(draft) and draft[n] == picks[n]:
        return Verdict(n + 1, emitted, force[n], "forced")
    return Verdict(n, emitted, force[n], "")
