"""Whatever is done to a session, in any order, its text is plain decode's and its planes are a fresh session's.

Steps: bursts under any draft length and either shaping, suffixes with and without a stable position, rewinds, growth,
forks, cancellations, errors between verify and commit, demotion and promotion. After every step each new token is held
against the target's own row, computed by forwards of the test's own; at the end of each example every plane is compared
with those of a session given the text in one prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from workbench.cache.hybrid import HybridCache
from workbench.core.metrics import Telemetry
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.spec import round as rounds
from workbench.spec.compare import compare_sessions
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal
from workbench.spec.session import Session

SHAPINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": dict(temperature=0.8, top_k=30, repetition_penalty=1.2, frequency_penalty=0.1, seed=3),
}
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": dict(k=3),
    "adaptive": dict(k=5, adaptive=True),
    "p_min": dict(k=4, p_min=0.3),
}
BASE = dict(ignore_eos=True, chunk=5)
CONTEXT = 120
POINTS = ("check_finite", "cut", "observe", "commit", "flush")
ID = st.integers(0, 82)
IDS = st.lists(ID, min_size=1, max_size=11)


class Interrupt(KeyboardInterrupt):
    """An error between verify and commit."""


@cache
def target(build: Any) -> HybridModel:
    return build(layer_types=(LINEAR, FULL, LINEAR), tied=False, seed=2, max_position_embeddings=CONTEXT)


class Oracle:
    """The target's own row after every prefix of a text."""

    def __init__(self, model: HybridModel) -> None:
        self.model, self.fed, self.rows = model, [], []
        self.cache = model.new_cache()

    @torch.inference_mode()
    def row(self, text: list[int], at: int) -> torch.Tensor:
        """Logits for the token at this position."""
        if text[:at][: len(self.fed)] != self.fed[:at]:
            self.fed, self.rows, self.cache = [], [], self.model.new_cache()
        if at > len(self.fed):
            new = text[len(self.fed) : at]
            self.rows += self.model.forward(torch.tensor([new]), self.cache).logits_BTV[0]
            self.fed += new
        return self.rows[at - 1]


class Guided(MTPProposer):
    """The MTP head, with the target's own row in place of its own at four positions of five: most drafts are right."""

    def __init__(self, model: HybridModel, oracle: Oracle, capacity: int) -> None:
        self.oracle = oracle
        super().__init__(model, capacity=capacity)

    def reset(self) -> None:
        self.text: list[int] = []
        super().reset()

    def observe(self, tokens_BT: torch.Tensor, rows: Any) -> None:
        at = self.position
        super().observe(tokens_BT, rows)
        self.text = [*self.text[:at], *tokens_BT[0].tolist()]

    def propose(self, ctx: DraftContext) -> Proposal:
        known, right = [*self.text[: self.position], ctx.pending], [True]

        def choose(logits_V: torch.Tensor, drafted: Any) -> Any:
            at = len(known) + len(drafted)
            right[0] = right[0] and at % 5 != 2
            return ctx.choose(self.oracle.row([*known, *drafted], at) if right[0] else logits_V, drafted)

        return super().propose(replace(ctx, choose=choose))


class SessionMachine(RuleBasedStateMachine):
    build: Any = None
    seen = Telemetry()

    @initialize(shaping=st.sampled_from(sorted(SHAPINGS)), policy=st.sampled_from(sorted(POLICIES)), prompt=IDS)
    def begin(self, shaping: str, policy: str, prompt: list[int]) -> None:
        self.model = target(self.build)
        self.shaping = shaping
        self.options = {**BASE, **POLICIES[policy], **SHAPINGS[shaping]}
        self.oracle, self.text = Oracle(self.model), list(prompt)
        self.session = Session(
            self.model,
            options=GenerateOptions(**self.options),
            proposer=Guided(self.model, Oracle(self.model), 40),
            capacity=40,
        )
        self.session.feed(prompt)
        self.turn = self.absorb(1)

    # --- what is expected ---

    def absorb(self, at_most: int, shaping: str | None = None, exactly: bool = True) -> list[int]:
        """Hold the session's new tokens against the target's rows, and take them over."""
        tokens, chooser = self.session.tokens, GenerateOptions(**SHAPINGS[shaping or self.shaping]).chooser()
        assert tokens[: len(self.text)] == self.text
        for at in range(len(self.text), len(tokens)):
            assert tokens[at] == chooser.pick(self.oracle.row(tokens, at), tokens[:at]), f"position {at}"
        new = len(tokens) - len(self.text)
        assert new == at_most or (not exactly and new < at_most)
        self.text = tokens
        self.session.check()
        return list(tokens)

    def room(self) -> int:
        return self.session.capacity - len(self.text)

    # --- steps ---

    @rule(n=st.integers(1, 6), k=st.sampled_from([None, None, 0, 1, 4]), shaping=st.sampled_from([None, *SHAPINGS]))
    def burst(self, n: int, k: int | None, shaping: str | None) -> None:
        more: dict[str, Any] = {}
        if k is not None and (k == 0 or self.session.parked is None):
            more |= dict(k=k, adaptive=False)
        if shaping is not None:
            more |= {"temperature": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, **SHAPINGS[shaping]}
        done = self.session.generate(max_new_tokens=n, **more)
        want = min(n, self.room())
        assert len(done.tokens) == want and done.finish == ("length" if want == n else "context")
        self.absorb(want, shaping)

    @precondition(lambda self: self.room() > 13)
    @rule(ids=IDS, n=st.integers(1, 4), data=st.data())
    def suffix(self, ids: list[int], n: int, data: st.DataObject) -> None:
        self.text = [*self.text, *ids]
        if data.draw(st.booleans(), label="stable"):
            stable = data.draw(st.integers(1, len(ids)), label="position")
            self.session.feed(ids, stable=stable)
            self.turn = self.text[: len(self.text) - len(ids) + stable]
            self.absorb(1)
        else:
            want = min(n, self.room())
            self.session.generate(ids, max_new_tokens=n)
            self.absorb(want)
            self.turn = self.text[: len(self.text) - want + 1]

    @rule(more=st.sampled_from([None, None, 5]))
    def rewind(self, more: int | None) -> None:
        capacity = self.session.capacity
        self.session.rewind(capacity=None if more is None else min(capacity + more, CONTEXT))
        self.text = list(self.turn)
        self.absorb(0)

    @rule(more=st.integers(0, 20), fails=st.booleans())
    def grow(self, more: int, fails: bool) -> None:
        capacity = self.session.capacity
        if fails:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupt):
                patch.setattr(MTPProposer, "grow", raises)
                self.session.grow(min(capacity + more, CONTEXT))
            assert self.session.capacity == capacity
        else:
            self.session.grow(min(capacity + more, CONTEXT))
        self.absorb(0)

    @rule(n=st.integers(1, 3), swap=st.booleans())
    def fork(self, n: int, swap: bool) -> None:
        twin = self.session.fork()
        other = twin if not swap else self.session
        if swap:
            self.session = twin
        assert not compare_sessions(self.session, other)
        other.generate([7], max_new_tokens=n) if self.room() > 1 else other.rewind()
        self.absorb(0)

    @rule(n=st.integers(1, 6), after=st.integers(0, 4))
    def cancel(self, n: int, after: int) -> None:
        asked = iter([False] * after + [True] * 99)
        self.session.generate(max_new_tokens=n, cancel=lambda: next(asked))
        self.absorb(min(n, self.room(), after + 1), exactly=False)

    @rule(point=st.sampled_from(POINTS), call=st.integers(0, 2), ids=st.one_of(st.just([]), IDS))
    def error(self, point: str, call: int, ids: list[int]) -> None:
        fits = ids if len(ids) + 1 <= self.room() else []
        owner = {"observe": MTPProposer, "flush": MTPProposer, "commit": HybridCache}.get(point, rounds)
        original, uses = getattr(owner, point), [0]

        def failing(*args: Any, **more: Any) -> Any:
            uses[0] += 1
            if uses[0] == call + 1:
                raise Interrupt
            return original(*args, **more)

        known = len(self.text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, point, failing)
            try:
                self.session.generate(fits, max_new_tokens=6)
            except Interrupt:
                pass
        if fits and len(self.session.tokens) > known:  # the suffix was in before the error
            self.text = [*self.text, *fits]
            self.turn = self.session.tokens[: len(self.text) + 1]
        self.absorb(6, exactly=False)

    @rule()
    def demote(self) -> None:
        self.session.demote()
        self.absorb(0)

    @rule()
    def promote(self) -> None:
        self.session.promote()
        self.absorb(0)

    # --- the end of an example ---

    def same(self) -> None:
        if len(self.text) > 1:
            twin = Session(self.model, options=GenerateOptions(**{**self.options, "chunk": 64}))
            twin.feed(self.text[:-1], force=self.text[-1])
            found = compare_sessions(self.session, twin)
            assert not found, str(found)

    def teardown(self) -> None:
        if not hasattr(self, "session"):
            return
        type(self).seen = type(self).seen.merge(self.session.telemetry)
        self.same()
        self.session.promote()
        self.same()
        self.rewind(None)
        self.same()


def raises(*args: Any) -> None:
    raise Interrupt


def run(build: Any, examples: int, steps: int = 20, **more: Any) -> None:
    machine = type("Machine", (SessionMachine,), {"build": staticmethod(build)})
    chosen = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), **more)
    run_state_machine_as_test(machine, settings=chosen)
    assert machine.seen.rounds > examples and 0.3 < machine.seen.accepted / machine.seen.drafted < 0.95


def test_any_sequence_of_steps(tiny):
    run(tiny, 60)


@pytest.mark.full
def test_many_sequences_of_steps(tiny):
    run(tiny, 1000)


def tail_kept(self: MTPProposer, to: Any, whole: Any = MTPProposer.rewind) -> None:
    tail = self.tail
    whole(self, to)
    self.tail = tail


FAULTS: dict[str, Any] = {
    "states not restored": (HybridCache, "restore", lambda self, saved: self._cut_back(saved.lengths)),
    "a drafter shared by forks": (MTPProposer, "fork", lambda self: self),
    "a carrier not restored": (MTPProposer, "rewind", tail_kept),
}


@pytest.mark.parametrize("name", FAULTS)
def test_negative_control_the_machine_finds_a_fault(tiny, monkeypatch, name):
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises(AssertionError):
        run(tiny, 30, steps=8, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None)
