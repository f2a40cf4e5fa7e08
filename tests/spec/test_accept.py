"""Acceptance on plain integers: the longest prefix of the target's own picks, and what stops and given texts cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.spec.accept import Verdict, accept_greedy

tokens = st.integers(0, 4)


@pytest.mark.parametrize(
    "draft, picks, accepted, emitted",
    [
        ([], [7], 0, (7,)),
        ([1, 2, 3], [1, 2, 3, 4], 3, (1, 2, 3, 4)),
        ([1, 2, 3], [1, 2, 9, 4], 2, (1, 2, 9)),
        ([1, 2, 3], [9, 2, 3, 4], 0, (9,)),
        ([1, 2, 3], [1, 9, 3, 4], 1, (1, 9)),
    ],
)
def test_the_longest_prefix_and_the_pick_after_it(draft, picks, accepted, emitted):
    assert accept_greedy(draft, picks) == Verdict(accepted, emitted, emitted[-1], "")


@given(st.lists(tokens, max_size=8), st.data())
def test_every_emitted_token_is_the_targets_own_pick(draft, data):
    picks = data.draw(st.lists(tokens, min_size=len(draft) + 1, max_size=len(draft) + 1))
    stops = data.draw(st.frozensets(tokens, max_size=2))
    verdict = accept_greedy(draft, picks, stop_ids=stops)
    n = verdict.accepted
    assert list(verdict.emitted) == picks[: len(verdict.emitted)]
    assert draft[:n] == picks[:n] and verdict.emitted[:n] == tuple(draft[:n])
    if verdict.round_stop == "stop":
        assert verdict.bonus is None and len(verdict.emitted) == n and draft[n - 1] in stops
    else:
        assert verdict.round_stop == "" and verdict.bonus == verdict.emitted[n] and len(verdict.emitted) == n + 1
        assert n == len(draft) or draft[n] != picks[n]
    assert not stops.intersection(draft[: max(n - 1, 0)])


def test_a_stop_token_cuts_what_follows_it():
    assert accept_greedy([1, 0, 3], [1, 0, 3, 4], stop_ids=frozenset({0})) == Verdict(2, (1, 0), None, "stop")
    assert accept_greedy([1, 0], [1, 0, 3], stop_ids=frozenset({0})) == Verdict(2, (1, 0), None, "stop")
    assert accept_greedy([0], [0, 3], stop_ids=frozenset({0})) == Verdict(1, (0,), None, "stop")


def test_a_stop_token_as_bonus_is_an_ordinary_bonus_and_a_rejected_one_is_nothing():
    assert accept_greedy([1, 2], [1, 0, 5], stop_ids=frozenset({0})) == Verdict(1, (1, 0), 0, "")
    assert accept_greedy([1, 0], [1, 2, 5], stop_ids=frozenset({0})) == Verdict(1, (1, 2), 2, "")


@pytest.mark.parametrize(
    "draft, picks, force, verdict",
    [
        # the draft is pick and text: it stands; after the last, the text's token follows instead of the pick
        ([1, 2], [1, 2, 3], [1, 2, 9], Verdict(2, (1, 2, 9), 9, "")),
        # the draft is the pick but not the text: it counts, the text's token is committed, the round ends
        ([1, 2], [1, 2, 3], [1, 9, 3], Verdict(2, (1, 9), 9, "forced")),
        ([1, 2], [1, 2, 3], [9, 2, 3], Verdict(1, (9,), 9, "forced")),
        # the draft is the text but not the pick: rejected
        ([1, 2], [7, 2, 3], [1, 2, 3], Verdict(0, (1,), 1, "")),
        # neither
        ([1, 2], [7, 2, 3], [8, 2, 3], Verdict(0, (8,), 8, "")),
        ([], [7], [8], Verdict(0, (8,), 8, "")),
    ],
)
def test_a_given_text_is_committed_whatever_is_drafted_and_picked(draft, picks, force, verdict):
    assert accept_greedy(draft, picks, force=force) == verdict


@given(st.lists(tokens, max_size=8), st.data())
def test_with_a_given_text_what_is_emitted_is_that_text(draft, data):
    n = len(draft) + 1
    picks = data.draw(st.lists(tokens, min_size=n, max_size=n))
    force = data.draw(st.lists(tokens, min_size=n, max_size=n))
    verdict = accept_greedy(draft, picks, force=force)
    assert list(verdict.emitted) == force[: len(verdict.emitted)]
    assert verdict.accepted == next((i for i in range(len(draft)) if draft[i] != picks[i] or
                                     (i and draft[i - 1] != force[i - 1])), len(draft))  # fmt: skip
    assert len(verdict.emitted) == verdict.accepted + (verdict.round_stop != "forced")
    if picks == force:
        assert verdict == accept_greedy(draft, picks)
