"""Whatever is done to a session, in any order, its text is plain decode's and its planes are a fresh session's.

Steps: bursts under any draft length and either shaping, suffixes with and without a stable position, rewinds to the
last turn and to any place, growth, captures and restores (from the entry, from a store in memory, from disk), forks,
cancellations, errors between verify and commit, demotion and promotion, resets; the cache's formats, window and
strategy are drawn at the start. After every step each new token is held against the target's own row, and every plane
against those of forwards of the test's own, one token each; at the end of each example against a session given the text
in one prompt.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from workbench.cache.hybrid import STRATEGIES, HybridCache
from workbench.cache.ring import RingPlane
from workbench.core.errors import UserError
from workbench.core.metrics import Telemetry
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.spec import round as rounds
from workbench.spec import turns
from workbench.spec.compare import compare_sessions
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import capture, restore
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal
from workbench.spec.session import Session
from workbench.spec.store import PrefixStore
from workbench.spec.turns import Turn

SHAPINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": dict(temperature=0.8, top_k=30, repetition_penalty=1.2, frequency_penalty=0.1, seed=3),
}
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": dict(k=3),
    "adaptive": dict(k=5, adaptive=True),
    "p_min": dict(k=4, p_min=0.3),
}
FORMATS: dict[str, dict[str, Any]] = {
    "dense": {},
    "q8_0/q5_1": dict(k_format="q8_0", v_format="q5_1"),
    "fp8": dict(k_format="fp8", v_format="fp8"),
    "window": dict(window=6),
    "window, fp8/q8_0": dict(window=6, k_format="fp8", v_format="q8_0"),
}
BASE = dict(ignore_eos=True, chunk=5)
CONTEXT, WIDEST = 120, 8  # a ring of 13 slots, lapped several times
POINTS = ("check_finite", "cut", "observe", "commit", "flush")
ID = st.integers(0, 82)
IDS = st.lists(ID, min_size=1, max_size=11)


class Interrupt(KeyboardInterrupt):
    """An error between verify and commit."""


@cache
def target(build: Any) -> HybridModel:
    layers = (LINEAR, FULL, LINEAR)
    return build(layer_types=layers, head_dim=32, tied=False, seed=2, max_position_embeddings=CONTEXT)


class Oracle:
    """The target's own rows after every prefix of a text, and the planes of target and drafter there."""

    def __init__(self, model: HybridModel, formats: dict[str, Any], *, drafts: bool = False) -> None:
        kept = {name: formats[name] for name in ("k_format", "v_format") if name in formats}
        self.model, self.fed, self.rows = model, [], []
        self.cache = model.new_cache(window=formats.get("window"), widest=CONTEXT, **kept)  # a ring that never laps
        self.drafter = MTPProposer(model, **kept) if drafts else None
        self.places = [(self.cache.save(), self.drafter and self.drafter.mark())]

    @torch.inference_mode()
    def goto(self, prefix: list[int]) -> None:
        """Hold the rows of exactly these tokens."""
        same = next((i for i, (a, b) in enumerate(zip(prefix, self.fed)) if a != b), min(len(prefix), len(self.fed)))
        if same < len(self.fed):
            saved, mark = self.places[same]
            self.cache.restore(saved)
            if self.drafter is not None:
                self.drafter.rewind(mark)
            del self.fed[same:], self.rows[same:], self.places[same + 1 :]
        for token in prefix[same:]:
            fed = torch.tensor([[token]])
            rows = self.model.forward(fed, self.cache)
            if self.drafter is not None:
                self.drafter.observe(fed, rows)
                self.drafter.flush()
            self.rows.append(rows.logits_BTV[0, 0])
            self.fed.append(token)
            self.places.append((self.cache.save(), self.drafter and self.drafter.mark()))

    def row(self, text: list[int], at: int) -> torch.Tensor:
        """Logits for the token at this position."""
        if text[:at] != self.fed[:at]:
            self.goto(text[:at])
        return self.rows[at - 1]

    def difference(self, session: Session) -> str:
        """Where a session's planes differ from these; "" when they are equal. Looks at a copy of the session."""
        text = session.tokens
        self.goto(text[:-1])
        own: Any = SimpleNamespace(state=SimpleNamespace(cache=self.cache, proposer=self.drafter), tokens=text)
        found = compare_sessions(session.fork(), own)
        return str(found) if found else ""


class Guided(MTPProposer):
    """The MTP head, with the target's own row in place of its own at four positions of five: most drafts are right."""

    def __init__(self, model: HybridModel, oracle: Oracle, capacity: int, **formats: Any) -> None:
        self.oracle, self.coming = oracle, []
        super().__init__(model, capacity=capacity, **formats)

    def adopt(self, state: Any, counts: tuple[int, int, int]) -> None:
        super().adopt(state, counts)
        self.text = self.coming[: self.position]

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
    done: Any = None  # what happened, over all examples

    @initialize(
        shaping=st.sampled_from(sorted(SHAPINGS)),
        policy=st.sampled_from(sorted(POLICIES)),
        formats=st.sampled_from(sorted(FORMATS)),
        strategy=st.sampled_from([None, *STRATEGIES]),
        prompt=IDS,
    )
    def begin(self, shaping: str, policy: str, formats: str, strategy: str | None, prompt: list[int]) -> None:
        self.model = target(self.build)
        self.shaping, self.formats = shaping, FORMATS[formats]
        self.options = {**BASE, **POLICIES[policy], **SHAPINGS[shaping], **self.formats, "strategy": strategy}
        self.oracle, self.guide = Oracle(self.model, self.formats, drafts=True), Oracle(self.model, self.formats)
        self.store, self.folder = PrefixStore(1 << 26), TemporaryDirectory()
        self.fresh(40)
        self.text = list(prompt)
        self.session.feed(prompt, boundaries=[len(prompt)])
        self.entries = list(self.session.captured)
        self.turn = self.absorb(1)
        self.places.append((self.session.turn, self.turn))

    def fresh(self, capacity: int) -> None:
        """A session without text."""
        kept = {name: self.formats[name] for name in ("k_format", "v_format") if name in self.formats}
        self.proposer = Guided(self.model, self.guide, capacity, **kept)
        options = GenerateOptions(**self.options)
        self.session = Session(self.model, options=options, proposer=self.proposer, capacity=capacity)
        self.places: list[tuple[Turn, list[int]]] = []
        self.reach = 0  # longest text that the session has had

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
        self.reach = max(self.reach, len(tokens))
        self.places = [(place, text) for place, text in self.places if len(text) <= len(tokens)]
        self.session.check()
        found = self.oracle.difference(self.session)
        assert not found, found
        return list(tokens)

    def room(self) -> int:
        return self.session.capacity - len(self.text)

    # --- steps ---

    # Hypothesis prefers rules of few arguments, and the first of them by name.

    @rule(how=st.tuples(st.integers(1, 6), st.sampled_from([None, None, 0, 1, 4]), st.sampled_from([None, *SHAPINGS])))
    def burst(self, how: tuple[int, int | None, str | None]) -> None:
        n, k, shaping = how
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
    @rule(data=st.data())
    def suffix(self, data: st.DataObject) -> None:
        ids = data.draw(IDS, label="ids")
        held = self.session.state.cache.lengths[0]
        self.text = [*self.text, *ids]
        if data.draw(st.booleans(), label="stable"):
            stable = data.draw(st.integers(1, len(ids)), label="position")
            boundaries = data.draw(st.sets(st.integers(held + 1, len(self.text)), max_size=2), label="boundaries")
            self.session.feed(ids, stable=stable, boundaries=sorted(boundaries))
            self.entries += self.session.captured
            self.turn = self.text[: len(self.text) - len(ids) + stable]
            self.absorb(1)
        else:
            n = data.draw(st.integers(1, 4), label="tokens")
            want = min(n, self.room())
            self.session.generate(ids, max_new_tokens=n)
            self.absorb(want)
            self.turn = self.text[: len(self.text) - want + 1]

    @rule(more=st.sampled_from([None, None, 5]))
    def rewind(self, more: int | None) -> None:
        capacity = self.session.capacity
        self.back(self.turn, capacity=None if more is None else min(capacity + more, CONTEXT))

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def rewind_to(self, data: st.DataObject) -> None:
        place, text = self.places[data.draw(st.integers(0, len(self.places) - 1), label="place")]
        if place.demoted and self.session.parked is None:
            with pytest.raises(UserError, match="taken while the session was demoted"):
                self.session.rewind(to=place)
            self.absorb(0)
        elif self.back(text, to=place):
            self.turn = text

    def back(self, text: list[int], **how: Any) -> bool:
        """Rewind; a ring may refuse, but only a place that it may have lapped."""
        capacity, window = self.session.capacity, self.formats.get("window")
        try:
            self.session.rewind(**how)
        except UserError as error:
            assert window is not None and "have been lapped" in str(error)
            assert max(0, len(text) - window) < self.reach + WIDEST - (window - 1 + WIDEST)
            assert self.session.capacity == capacity
            self.done["lapped"] += 1
            self.absorb(0)
            return False
        self.text = list(text)
        self.absorb(0)
        return True

    @rule(how=st.sampled_from(["capture", "checkpoint"]))
    def keep(self, how: str) -> None:
        if how == "checkpoint":
            self.places.append((self.session.checkpoint(), list(self.text)))
        elif len(self.text) == 1:
            with pytest.raises(UserError, match="holds no row to capture at"):
                capture(self.session)
        else:
            entry = capture(self.session)
            assert list(entry.tokens) == self.text[:-1]
            self.entries.append(entry)
            self.store.put(entry)

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        how, ids = data.draw(st.sampled_from(["entry", "memory", "disk"])), data.draw(st.one_of(st.just([]), IDS))
        entry = self.entries[data.draw(st.integers(0, len(self.entries) - 1), label="entry")]
        text = [*entry.tokens, *ids]
        self.fresh(min(len(text) + data.draw(st.integers(2, 30), label="room"), CONTEXT))
        self.proposer.coming = text
        if len(text) + 1 > self.session.capacity:
            with pytest.raises(UserError, match=r"do not fit|no room"):
                restore(self.session, entry, text)
            text = text[: self.session.capacity - 1]
            self.session.feed(text)
        elif how == "entry" and entry.drafter is None:
            with pytest.raises(UserError, match="no drafter rows"):
                restore(self.session, entry, text)
            self.session.feed(text)
        elif how == "entry":
            restore(self.session, entry, text)
        else:
            store = self.store if how == "memory" else PrefixStore(0, self.folder.name)
            store.put(entry)
            usable = [one for one in store.candidates(text, entry.terms.model) if one.drafter is not None]
            more_of = dict(options=self.session.options, capacity=self.session.capacity, proposer=self.proposer)
            self.session = Session.from_prefix(self.model, text, store, **more_of)
            assert self.session.reuse.reused == max(map(len, usable), default=0)
            self.entries += self.session.captured
        self.done[how] += 1
        self.text = text
        self.turn = self.absorb(1)

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
            self.session, self.places = twin, []
        assert not compare_sessions(self.session, other)
        other.generate([7], max_new_tokens=n) if self.room() > 1 else other.demote()
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

    @rule(drafts=st.booleans())
    def draft(self, drafts: bool) -> None:
        self.session.promote() if drafts else self.session.demote()
        self.absorb(0)

    @precondition(lambda self: self.room() < 6)  # often, and few texts would grow long
    @rule(ids=IDS)
    def reset(self, ids: list[int]) -> None:
        self.session.reset()
        assert self.session.tokens == [] and self.session.telemetry.rounds == 0
        self.done["reset"] += 1
        self.text, self.places, self.reach = ids[: self.session.capacity - 1], [], 0
        self.session.feed(self.text)
        self.turn = self.absorb(1)

    # --- the end of an example ---

    def same(self) -> None:
        if len(self.text) > 1:
            twin = Session(self.model, options=GenerateOptions(**{**self.options, "chunk": 64}))
            twin.feed(self.text[:-1], force=self.text[-1])
            found = compare_sessions(self.session, twin)
            assert not found, str(found)

    def teardown(self) -> None:
        if not hasattr(self, "turn"):
            return
        self.folder.cleanup()
        type(self).seen = type(self).seen.merge(self.session.telemetry)
        self.same()
        self.session.promote()
        self.same()
        self.rewind(None)
        self.same()


def raises(*args: Any) -> None:
    raise Interrupt


def run(build: Any, examples: int, steps: int = 20, **more: Any) -> None:
    machine = type("Machine", (SessionMachine,), {"build": staticmethod(build), "done": Counter()})
    chosen = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "VERIFY", WIDEST)
        run_state_machine_as_test(machine, settings=chosen)
    assert machine.seen.rounds > examples and 0.3 < machine.seen.accepted / machine.seen.drafted < 0.95
    assert min(machine.done[name] for name in ("entry", "memory", "disk", "lapped")) > examples / 30


def test_any_sequence_of_steps(tiny):
    run(tiny, 60)


@pytest.mark.full
def test_many_sequences_of_steps(tiny):
    run(tiny, 1000)


def tail_kept(self: MTPProposer, to: Any, whole: Any = MTPProposer.rewind) -> None:
    tail = self.tail
    whole(self, to)
    self.tail = tail


def tail_lost(self: MTPProposer, state: Any, counts: Any, whole: Any = MTPProposer.adopt) -> None:
    whole(self, state, counts)
    self.tail = torch.zeros_like(self.tail)


def states_kept(self: HybridCache, whole: Any = HybridCache.clear) -> None:
    kept = [(plane.conv_BWC, plane.state_BHKV) for plane in self.recurrent]
    whole(self)
    for plane, pair in zip(self.recurrent, kept, strict=True):
        plane.conv_BWC, plane.state_BHKV = pair


FAULTS: dict[str, Any] = {
    "states not restored": (HybridCache, "restore", lambda self, saved: self._cut_back(saved.lengths)),
    "a drafter shared by forks": (MTPProposer, "fork", lambda self: self),
    "a carrier not restored": (MTPProposer, "rewind", tail_kept),
    "a carrier lost by an entry": (MTPProposer, "adopt", tail_lost),
    "states that outlive a reset": (HybridCache, "clear", states_kept),
    "lapped rows taken for whole ones": (RingPlane, "check_rewind", lambda self, b, length: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_negative_control_the_machine_finds_a_fault(tiny, monkeypatch, name):
    monkeypatch.setattr(*FAULTS[name])
    with pytest.raises(AssertionError):
        run(tiny, 60, steps=12, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None)
