"""An exception anywhere in a round leaves everything as it was, and decoding goes on as if it had never been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from workbench.cache.hybrid import STRATEGIES, HybridCache
from workbench.cache.kv import KVPlane
from workbench.cache.recurrent import RecurrentPlane
from workbench.core.errors import NonFiniteError, UserError
from workbench.spec import round as rounds
from workbench.spec.policies import AdaptiveFloor
from workbench.spec.proposers import GivenProposer, MTPProposer
from workbench.spec.round import run_round
from workbench.spec.session import Session

LAYERS = range(5)


class Interrupt(KeyboardInterrupt):
    """What a reader of a notebook does in the middle of a cell."""


@contextmanager
def raising(
    owner: Any, name: str, *, when: str = "before", call: int = 0, error: BaseException | None = None
) -> Iterator[list[int]]:
    """``owner.name`` raises on its ``call``-th use, before or after doing its work; the count of uses."""
    original, uses = getattr(owner, name), [0]

    def patched(*args: Any, **more: Any) -> Any:
        uses[0] += 1
        if uses[0] != call + 1:
            return original(*args, **more)
        if when == "after":
            original(*args, **more)
        raise error or Interrupt(f"in {name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, patched)
        yield uses


def in_module(find: Callable[[Any], Any], **how: Any) -> Callable[[Any], Any]:
    """The forward of a module of the model."""
    return lambda state: raising(find(state.model), "forward", **how)


POINTS: dict[str, Callable[[Any], Any]] = {
    "policy, before the chain": lambda s: raising(s.policy, "next_k"),
    "policy, in the chain": lambda s: raising(s.policy, "drops", call=1),
    "propose, before": lambda s: raising(s.proposer, "propose"),
    "propose, after": lambda s: raising(s.proposer, "propose", when="after"),
    "head, first step": in_module(lambda m: m.mtp),
    "head, third step": in_module(lambda m: m.mtp, call=2),
    "head, row written": in_module(lambda m: m.mtp.attention, when="after"),
    "head, row written, second step": in_module(lambda m: m.mtp.ffn, call=1),
    "draft not finite": lambda s: raising(s.model, "unembed", call=1, error=NonFiniteError(3, "NaN")),
    **{f"layer {i}, mixer": in_module(lambda m, i=i: m.layers[i].mixer) for i in LAYERS},
    **{f"layer {i}, written": in_module(lambda m, i=i: m.layers[i].mixer, when="after") for i in LAYERS},
    **{f"layer {i}, ffn": in_module(lambda m, i=i: m.layers[i].ffn, when="after") for i in LAYERS},
    "row append": lambda s: raising(KVPlane, "append", call=4, when="after"),
    "check": lambda s: raising(rounds, "check_finite", error=NonFiniteError(9, "infinity")),
    "picks": lambda s: raising(rounds, "greedy"),
    "accept, before": lambda s: raising(rounds, "judge"),
    "accept, after": lambda s: raising(rounds, "judge", when="after"),
    "observe, before": lambda s: raising(s.proposer, "observe"),
    "observe, after": lambda s: raising(s.proposer, "observe", when="after"),
    "commit, before": lambda s: raising(HybridCache, "commit"),
}
CUTS: dict[str, Callable[[Any], Any]] = {
    "commit, first layer": lambda s: raising(RecurrentPlane, "cut"),
    "commit, second layer": lambda s: raising(RecurrentPlane, "cut", call=1),
    "commit, last layer done": lambda s: raising(RecurrentPlane, "cut", call=2, when="after"),
}
REFEEDS: dict[str, Callable[[Any], Any]] = {
    "commit, before feeding again": lambda s: raising(s.cache, "refeed"),
    **{
        f"commit, feeding again, layer {i}": (lambda s, i=i: raising(s.model.layers[i].ffn, "forward", call=1))
        for i in LAYERS
    },
}
CASES = [
    *((name, STRATEGIES[i % 3]) for i, name in enumerate(POINTS)),
    *((name, strategy) for name in CUTS for strategy in ("tape", "columns")),
    *((name, "snapshot") for name in REFEEDS),
]
NEW = 30


def wrong(at: int) -> bool:
    return at % 3 == 1


def start(lively, parts, *, strategy: str, carry: bool = True, refresh: bool = True):
    proposer = parts.obedient(lively.model, lively.truth, wrong, refresh=refresh)
    return lively.session(
        proposer=proposer, policy=AdaptiveFloor(k=5, floor=4), strategy=strategy, carry=carry, refresh=refresh
    )


def told(session: Session) -> list[Any]:
    return [(r.key(), r.draft_ids, r.draft_top1, r.emitted) for r in session.state.records]


@pytest.fixture(scope="module")
def whole(lively, parts) -> Callable[..., tuple[list[Any], Any]]:
    """Rounds and final state of a session that nothing aborted."""

    @cache
    def run(**how: Any) -> tuple[list[Any], Any]:
        session = start(lively, parts, **how)
        session.burst(NEW)
        assert session.tokens == lively.truth[: len(lively.ids) + 1 + NEW]
        return told(session), parts.frozen.of(session.state)

    return run


@pytest.mark.parametrize("name, strategy", CASES, ids=lambda x: x)
@pytest.mark.parametrize("carry, refresh", [(True, True), (False, False)], ids=["carried", "fed alone, not refreshed"])
@torch.inference_mode()
def test_an_abort_leaves_everything_as_it_was(lively, parts, whole, name, strategy, carry, refresh):
    inject = {**POINTS, **CUTS, **REFEEDS}[name]
    how = dict(strategy=strategy, carry=carry, refresh=refresh)
    session = start(lively, parts, **how)
    state, goal = session.state, len(session.tokens) + NEW
    for _ in range(3):
        run_round(state, goal - len(state.tokens))
    for _ in range(2):  # aborted twice at the same place
        before = parts.frozen.of(state)
        with inject(state) as uses, pytest.raises((Interrupt, NonFiniteError)):
            run_round(state, goal - len(state.tokens))
        assert uses[0] >= 1, "the injection was never reached"
        assert before.difference(parts.frozen.of(state)) is None
    session.burst(goal - len(state.tokens))
    records, end = whole(**how)
    assert told(session) == records
    now = parts.frozen.of(state)
    assert now.tokens == end.tokens
    assert now.cache.first_difference(end.cache) is None
    assert now.drafter.first_difference(end.drafter) is None


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_an_abort_between_the_pending_token_and_the_drafts(lively, parts, layer):
    """carry=False feeds twice; the second forward is interrupted."""
    session = start(lively, parts, strategy="tape", carry=False)
    run_round(session.state, 40)
    before = parts.frozen.of(session.state)
    with raising(lively.model.layers[layer].ffn, "forward", call=1), pytest.raises(Interrupt):
        run_round(session.state, 40)
    assert before.difference(parts.frozen.of(session.state)) is None


def test_weights_that_turn_bad_are_named_by_position_and_nothing_moves(lively, parts):
    session = start(lively, parts, strategy="columns")
    with torch.inference_mode():
        run_round(session.state, 40)
    before, at = parts.frozen.of(session.state), len(session.tokens) - 1
    norm = lively.model.norm.clone()
    for value, word in ((float("nan"), "NaN"), (float("inf"), "infinity|NaN")):
        lively.model.norm[3] = value
        try:
            with pytest.raises(NonFiniteError, match=f"logits of position {at} hold ({word})"):
                session.burst(10)
        finally:
            lively.model.norm.copy_(norm)
        assert before.difference(parts.frozen.of(session.state)) is None
    session.burst(10)
    assert session.tokens == lively.truth[: len(session.tokens)]


@torch.inference_mode()
def test_a_policy_that_fails_to_learn_leaves_a_whole_round(lively, parts):
    session = start(lively, parts, strategy="tape")
    with raising(session.state.policy, "observe"), pytest.raises(Interrupt):
        run_round(session.state, 40)
    assert len(session.state.records) == 1
    assert session.state.cache.lengths == [len(session.tokens) - 1]
    session.burst(20)
    assert session.tokens == lively.truth[: len(session.tokens)]


def test_a_script_offers_the_same_chain_again(lively, parts):
    own = lively.own
    session = lively.session(k=3, proposer=GivenProposer([own[1:4], own[5:8]]))
    for _ in range(2):
        with raising(rounds, "check_finite"), pytest.raises(Interrupt):
            session.burst(8)
    session.burst(8)
    assert [(r.draft_ids, r.accepted) for r in session.state.records] == [(tuple(own[1:4]), 3), (tuple(own[5:8]), 3)]


# --- prompts ---------------------------------------------------------------------------------------------------------

FEEDS: dict[str, Callable[[Any], Any]] = {
    "second chunk": lambda s: raising(s.model, "forward", call=1),
    "second chunk done": lambda s: raising(s.model, "forward", call=1, when="after"),
    "inside a layer": lambda s: raising(s.model.layers[3].ffn, "forward", call=1),
    "drafter": lambda s: raising(s.proposer, "prime", call=1),
    "drafter told": lambda s: raising(s.proposer, "prime", call=1, when="after"),
    "drafter's row": lambda s: raising(s.model.mtp.ffn, "forward", call=1),
    "drafter done": lambda s: raising(s.proposer, "flush", call=1, when="after"),
    "not finite": lambda s: raising(s.model, "unembed", call=1, error=NonFiniteError(9, "NaN")),
}


@pytest.mark.parametrize("strategy", ["tape", "columns", "snapshot"])
@pytest.mark.parametrize("name", FEEDS)
def test_an_abort_of_a_prompt_leaves_the_session_as_it_was(lively, parts, name, strategy):
    session = lively.session(k=3, proposer=MTPProposer(lively.model), chunk=3, strategy=strategy)
    session.burst(5)
    before, more = parts.frozen.of(session.state), [9, 8, 7, 6, 5, 4, 3, 2, 1]
    with FEEDS[name](session.state), pytest.raises((Interrupt, NonFiniteError)):
        session.feed(more)
    assert before.difference(parts.frozen.of(session.state)) is None
    session.feed(more)
    session.burst(12)
    text = [*lively.truth[: len(lively.ids) + 6], *more]
    assert session.tokens == [*text, *parts.plain(lively.model, text, 13)]


def test_an_abort_of_the_flush_after_a_burst_loses_nothing(lively, parts):
    session = lively.session(k=3, proposer=parts.obedient(lively.model, lively.truth, wrong))
    session.burst(5)
    session.state.policy, keep = parts.script((0,)).start(width=1), session.state.policy
    with raising(lively.model.mtp.ffn, "forward", call=3), pytest.raises(Interrupt):
        session.burst(6)  # six rounds queue six pairs; the flush fails in its fourth
    session.state.policy = keep
    session.burst(10)
    twin = MTPProposer(lively.model)
    text = torch.tensor([session.tokens[:-1]])
    twin.prime(text, lively.model.forward(text, lively.model.new_cache(), logits="none"))
    twin.flush()
    assert session.state.proposer.cache.first_difference(twin.cache) is None


def test_a_refused_prompt_changes_nothing(lively, parts):
    session = lively.session(k=3, capacity=20)
    before = parts.frozen.of(session.state)
    for bad in ([], [211], [-1], [1.5], [True], range(16), "text", 7):
        with pytest.raises(UserError):
            session.feed(bad)
        assert before.difference(parts.frozen.of(session.state)) is None
