"""Policies in sessions: what a rewind, a fork, a burst under another policy and an abort leave of their state."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.core.errors import UserError
from workbench.spec import round as rounds
from workbench.spec.policies import ArrayRun, Cumulative, FixedK, Gate, MinConfidence, Policy, Scripted
from workbench.spec.policies.rules import SCRATCH
from workbench.spec.proposers import GivenProposer

FAMILIES = ("floor", "min_confidence", "cumulative", "ema", "ladder", "suspend", "goodput", "gate", "scripted", "user")


@pytest.fixture(scope="module")
def by_family(policies_module) -> dict[str, Policy]:
    """One random policy of every family that has a memory."""
    return {kind: policy for kind, policy in policies_module.random_policies(24, seed=4) if kind in FAMILIES}


def bits(run: Any) -> Any:
    """A run's state as a value."""
    if isinstance(run, ArrayRun):
        return run.state.tobytes()
    return {name: value for name, value in vars(run).items() if name != "policy"}


def carried(run: Any) -> Any:
    """What a run carries from round to round, as a value."""
    return run.state[:SCRATCH].tobytes() if isinstance(run, ArrayRun) else bits(run)


def keys(session: Any) -> list[Any]:
    return [(*record.key(), record.k, record.steps) for record in session.state.records]


@pytest.fixture
def begin(lively, parts, policies_module):
    """``begin(policy)``: a session whose drafts stand but where the position is a multiple of 3."""
    with policies_module.Cost().clock() as clock:

        def make(policy: Policy) -> Any:
            drafter = parts.obedient(lively.model, lively.truth, lambda at: at % 3 == 0)
            return lively.begin(policy=policy, proposer=drafter, clock=clock)

        yield make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rewind_and_a_fork_restore_the_state_exactly(lively, begin, by_family, family):
    session = begin(by_family[family])
    session.generate(lively.ids, max_new_tokens=8)
    session.generate([5], max_new_tokens=6)
    at_turn = bits(session.turn.policy)
    ahead = keys(session)
    session.generate(max_new_tokens=9)
    longer, later = keys(session), bits(session.state.policy)
    twin = session.fork()
    assert bits(twin.state.policy) == later and twin.state.policy is not session.state.policy
    session.rewind()
    assert bits(session.state.policy) == at_turn and bits(twin.state.policy) == later
    session.generate(max_new_tokens=5)
    session.generate(max_new_tokens=9)
    assert keys(session)[: len(ahead)] == ahead and keys(session) == longer and bits(session.state.policy) == later
    session.generate(max_new_tokens=12)
    assert bits(twin.state.policy) == later, "what one does later does not touch the other"
    twin.generate(max_new_tokens=12)
    assert keys(twin) == keys(session) and bits(twin.state.policy) == bits(session.state.policy)
    lively.same(session)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_burst_under_another_policy_leaves_the_own_one(lively, begin, by_family, family):
    session = begin(by_family[family])
    session.generate(lively.ids, max_new_tokens=8)
    before = bits(session.state.policy)
    session.generate(max_new_tokens=6, policy=FixedK(k=2))
    session.generate(max_new_tokens=3, k=0)
    assert bits(session.state.policy) == before
    session.demote()
    session.generate(max_new_tokens=3)
    session.promote()
    assert bits(session.state.policy) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_an_aborted_round_teaches_nothing(lively, begin, by_family, monkeypatch, family):
    """A round that fails after its chain was judged by the policy leaves the rounds that follow as they were."""
    wanted = begin(by_family[family])
    wanted.generate(lively.ids, max_new_tokens=30)
    session = begin(by_family[family])
    session.generate(lively.ids, max_new_tokens=1)
    check, uses = rounds.check_finite, []

    def failing(*args: Any) -> Any:
        uses.append(1)
        if len(uses) % 2:
            raise KeyboardInterrupt
        return check(*args)

    monkeypatch.setattr(rounds, "check_finite", failing)
    goal = len(lively.ids) + 30
    while len(session.tokens) < goal:
        run, left = session.state.policy, goal - len(session.tokens)
        before = carried(run)
        with pytest.raises(KeyboardInterrupt):
            session.burst(left)
        assert carried(run) == before
        one = session.rounds(left)
        next(one)
        one.close()
    assert keys(session) == keys(wanted)


def test_the_round_s_phases_are_the_default_of_time(lively):
    seen = []

    class Watch(Scripted):
        def start(self, *, width: int) -> Any:
            run = super().start(width=width)
            run.observe = seen.append
            return run

    session = lively.session(policy=Watch(ks=(2,)))
    session.burst(6)
    assert [view.seconds for view in seen] == pytest.approx([r.phases.total for r in session.state.records])
    assert all(view.seconds > 0 for view in seen)
    assert [view.steps for view in seen] == [r.steps for r in session.state.records]
    now = iter(range(10_000))
    session = lively.session(policy=Watch(ks=(2,)), clock=lambda: float(next(now)))
    seen.clear()
    session.burst(6)
    assert {view.seconds for view in seen} == {5.0}


@pytest.mark.parametrize("stands", [False, True])
def test_a_gate_switches_by_the_session_s_clock(lively, parts, policies_module, stands):
    """A round of three drafts takes 1.75 s and a plain one 1 s: drafts that never stand are given up, others not."""
    policy = Gate(k=3, window=2, refresh_tokens=4, reprobe_tokens=50)
    drafter = parts.obedient(lively.model, lively.truth, lambda at: not stands)
    with policies_module.Cost(step=0.25, row=0.0).clock() as clock:
        session = lively.begin(policy=policy, proposer=drafter, clock=clock)
        session.generate(lively.ids, max_new_tokens=40)
    asked = [record.k for record in session.state.records]
    assert {(r.k, r.phases.total) for r in session.state.records[:2]} == {(3, 1.75)}
    if stands:
        assert asked[:8] == [3, 3, 0, 0, 3, 3, 0, 0], "plain decode is probed after every four tokens, and loses"
    else:
        assert asked[:8] == [3, 3, 3, 3, 0, 0, 3, 3] and set(asked[8:]) == {0}


def test_steps_of_every_way_a_chain_ends(lively, parts):
    """The MTP head runs a step for each token it draws, dropped ones included; other drafters for each they offer."""
    drafter = parts.obedient(lively.model, lively.truth)
    for policy, steps, drafted, cause in (
        (FixedK(k=3), 3, 3, "k"),
        (FixedK(k=3, p_min=1.0), 2, 1, "p_min"),
        (FixedK(k=3, p_min=1.0, pmin0=True), 1, 0, "p_min"),
        (MinConfidence(k=3, tau=1.0), 3, 0, "policy"),
        (Cumulative(k=3, threshold=1.0), 1, 0, "policy"),
        (FixedK(k=0), 0, 0, "none"),
    ):
        session = lively.session(policy=policy, proposer=drafter)
        session.burst(5)
        record = session.state.records[0]
        assert (record.steps, record.drafted, record.chain_stop) == (steps, drafted, cause), policy
    given = lively.session(policy=FixedK(k=3), proposer=GivenProposer([lively.own[1:3]]))
    given.burst(6)
    ends = [(r.steps, r.drafted, r.chain_stop) for r in given.state.records[:2]]
    assert ends == [(2, 2, "proposer"), (0, 0, "proposer")]


@pytest.mark.parametrize("carry", [True, False])
def test_a_trim_keeps_the_text(lively, by_family, carry):
    for policy in (by_family["user"], MinConfidence(k=4, tau=0.3)):
        session = lively.session(policy=policy, carry=carry)
        session.burst(30)
        assert session.tokens == lively.truth[: len(session.tokens)]
        stops = {r.chain_stop for r in session.state.records}
        assert "policy" in stops
        lively.same(session)


def test_a_wrong_trim_leaves_the_session_as_it_was(lively, parts):
    session = lively.session(policy=FixedK(k=3))
    session.burst(4)
    session.state.policy.trim = lambda drafted, base: drafted + 1
    before = parts.frozen.of(session.state)
    with pytest.raises(UserError, match=r"ArrayRun\.trim returned 4 for a chain of 3 tokens"):
        session.burst(8)
    assert before.difference(parts.frozen.of(session.state)) is None
