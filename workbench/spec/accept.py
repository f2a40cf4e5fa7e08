"""Which drafted tokens stand, on plain integers.

By equality, greedy and under shared noise alike: a draft stands while it is the token the target itself picks or draws
there, so that what is emitted is the target's own text. By ratio: a draft x of law q stands with probability
min(1, p(x) / q(x)), and else is replaced by a draw from max(p - q, 0), so that what is emitted follows the target's
law.

Source: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for the ratio; Daliri et al.
2024 (arXiv 2408.07978) for shared noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of comparing a chain with the target.

    Args:
        accepted: Drafts that count as accepted.
        emitted: Tokens the round adds to the text.
        bonus: The last emitted token when it is not a draft; None when a stop cut it off.
        round_stop: "" for a whole round, "stop", "stop_string" or "cancel" when that came before the bonus, "forced"
            when an accepted draft was not the text to be committed.
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


def accept_ratio(
    draft: Sequence[int],
    *,
    accepts: Callable[[int], bool],
    redraw: Callable[[int], int],
    bonus: Callable[[], int],
    stop_ids: frozenset[int] = frozenset(),
) -> Verdict:
    """Accept drafts one by one by the ratio test; the first that fails is redrawn and ends the round.

    Args:
        draft: Drafted ids d_1..d_k.
        accepts: The test of the draft in a slot, from 0; asked in order, each at most once.
        redraw: The token that replaces the draft in a slot.
        bonus: The token after a chain that stands whole.
        stop_ids: Tokens that end the text.

    Returns:
        The verdict.
    """
    for n, token in enumerate(draft):
        if not accepts(n):
            drawn = redraw(n)
            return Verdict(n, (*draft[:n], drawn), drawn, "")
        if token in stop_ids:
            return Verdict(n + 1, tuple(draft[: n + 1]), None, "stop")
    drawn = bonus()
    return Verdict(len(draft), (*draft, drawn), drawn, "")


def cut(verdict: Verdict, kept: int, reason: str | None) -> Verdict:
    """The verdict when only its first tokens are taken.

    Args:
        verdict: What acceptance alone says.
        kept: Tokens taken, at least 1.
        reason: Why the text ends after them; None when it does not.

    Returns:
        The verdict of a round that never had more.
    """
    if kept == len(verdict.emitted):
        return verdict
    assert reason is not None, "only an end of the text cuts a round"
    return Verdict(min(verdict.accepted, kept), verdict.emitted[:kept], None, reason)
