"""Bursts of a session: one under options of its own, and the rounds it is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from workbench.core.errors import UserError, check_int
from workbench.core.records import RoundRecord
from workbench.model.hybrid import HybridModel
from workbench.spec.device import burst
from workbench.spec.options import GenerateOptions, named_options, refuse_anticipating
from workbench.spec.policies import Policy, PolicyRun
from workbench.spec.prompt import prompt_ids, token_ids
from workbench.spec.result import Generation
from workbench.spec.round import run_round
from workbench.spec.sink import Cancelled, Sink
from workbench.spec.turns import Parked, own_policy

if TYPE_CHECKING:
    from workbench.spec.grammars import Grammar
    from workbench.spec.session import Session

FIXED = (
    "carrier",
    "refresh",
    "primed",
    "shift",
    "strategy",
    "k_format",
    "v_format",
    "window",
    "anatomy",
)  # what caches and drafter were made by
DRAFTING = ("k", "p_min", "pmin0", "adaptive", "floor", "cap", "floor_context", "p_min_reads")


def stop_ids_of(model: HybridModel, options: GenerateOptions, grammar: Grammar | None) -> frozenset[int]:
    """Tokens that end a text.

    Raises:
        UserError: An id is out of range, there are stop strings and no tokenizer, or ``ignore_eos`` meets a grammar.
    """
    if grammar is not None and options.ignore_eos:
        raise UserError("ignore_eos=True with a grammar is not valid: only the end of text may follow a whole match")
    if options.stop and model.tokenizer is None:
        raise UserError("stop strings need a tokenizer, and this checkpoint has none: give stop_token_ids instead")
    stops = frozenset(token_ids("stop_token_ids", options.stop_token_ids, model.config.vocab_size))
    if not options.ignore_eos:
        stops |= frozenset(model.config.eos_token_id)
    return stops if grammar is None else stops | frozenset(grammar.eos_ids)


def check_fixed(own: GenerateOptions, options: GenerateOptions) -> None:
    """Refuse other options than those that a session's caches and drafter were made by.

    Raises:
        UserError: One differs.
    """
    if moved := [name for name in FIXED if getattr(options, name) != getattr(own, name)]:
        raise UserError(
            f"{moved[0]}={getattr(options, moved[0])!r} cannot change within a session, which was made with "
            f"{getattr(own, moved[0])!r}: make another session"
        )


def generate(
    session: Session,
    suffix: str | Sequence[int] | None,
    max_new_tokens: int,
    cancel: Callable[[], bool] | None,
    policy: Policy | None,
    given: Mapping[str, object],
) -> Generation:
    """One burst; see ``Session.generate``."""
    state = session.state
    check_int("max_new_tokens", max_new_tokens, low=1)
    options, run, chosen = _burst_options(session, policy, given)
    if isinstance(suffix, str):
        ids = prompt_ids(state.model, suffix)[0] if suffix else []
    else:
        ids = [] if suffix is None else token_ids("suffix", suffix, state.model.config.vocab_size)
    if not ids and not state.tokens:
        raise UserError("this session holds no text yet: give a prompt")
    prompt, times = [*state.tokens, *ids], session.times
    rounds, firsts = len(state.records), len(session.first_logprobs)
    steps = session.probe.reading() if session.probe is not None else None
    with _under(session, options, run, chosen):
        sink = session.sink(max_new_tokens, cancel=cancel)
        try:
            if ids:
                session.feed(ids, sink=sink)
            finish = session.burst(max_new_tokens - bool(ids), sink=sink)
        except Cancelled:
            finish = "cancel"
    return Generation(
        prompt=tuple(prompt),
        tokens=sink.tokens,
        records=tuple(state.records[rounds:]),
        finish=finish,
        setup=session.times.since(times),
        draft_steps=session.probe.times(steps) if session.probe is not None else None,
        exact=state.model.exact,
        tokenizer=state.model.tokenizer,
        first_logprob=session.first_logprobs[-1] if len(session.first_logprobs) > firsts else None,
        cut_text=sink.text if options.stop else None,
        fed=bool(ids),
    )


def _burst_options(
    session: Session, policy: Policy | None, given: Mapping[str, object]
) -> tuple[GenerateOptions, PolicyRun | None, Policy | None]:
    """Options of a burst, and the policy it goes by, with its run."""
    state, own = session.state, session.options
    options = named_options(own, given)
    check_fixed(own, options)
    stop_ids_of(state.model, options, session.grammar)
    drafts = policy is not None or ("k" in given and options.k > 0)
    if state.proposer is None:
        if drafts:
            raise UserError(
                "this session was demoted to plain decode: call promote() before a burst that drafts"
                if session.parked is not None
                else "this session was made without a drafter (k=0): make one with k > 0, and use k=0 for the bursts "
                "that shall not draft"
            )
        return options, None, None
    run, chosen = state.policy, session.policy
    if policy is not None or any(name in given for name in DRAFTING):
        chosen = policy or (options.policy() if options.k else None)
        run = None if chosen is None else chosen.start(width=state.model.config.hidden_size)
    if options.chooser().by_ratio and chosen is not None:
        refuse_anticipating(chosen)
    return options, run, chosen if run is not None else None


def rounds(
    session: Session, max_new_tokens: int, force: Sequence[int] | None, sink: Sink | None
) -> Generator[RoundRecord, None, str]:
    """The rounds of a burst, one at a time; see ``Session.rounds``."""
    state = session.state
    check_int("max_new_tokens", max_new_tokens, low=0)
    script = None if force is None else token_ids("force", force, state.model.config.vocab_size)
    if not state.tokens:
        raise UserError("this session holds no text yet: feed a prompt before a burst")
    if len(state.tokens) == state.cache.lengths[0]:
        raise UserError("this session was restored and has chosen no token yet: feed the rest of its prompt first")
    if script is not None and len(script) < max_new_tokens:
        raise UserError(
            f"force holds {len(script)} tokens, but max_new_tokens={max_new_tokens}: give a text at least that "
            "long, or ask for fewer"
        )
    if script is not None and (state.chooser.by_ratio or state.constraint is not None):
        raise UserError(
            "force goes with accept='coupled' and without a grammar: a given text is judged against the target's "
            "own tokens"
        )
    if session.options.on_device:
        burst.check(session, forced=script is not None)
    first = len(state.tokens)
    own = session.sink(max_new_tokens) if sink is None and max_new_tokens else sink
    left = max_new_tokens if own is None else min(max_new_tokens, own.max_new_tokens - own.generated)
    goal = first + left
    end = min(goal, state.cache.capacity)
    ended = session.stopped or (own is not None and own.finish is not None)
    state.sink = own
    try:
        if session.options.on_device and len(state.tokens) < end and not ended:
            assert own is not None
            yield from burst.rounds(session, left, own)
            ended = own.finish is not None or len(state.tokens) >= end
        while len(state.tokens) < end and not ended:
            began = perf_counter()
            rest = None if script is None else script[len(state.tokens) - first :]
            with torch.inference_mode():
                record = run_round(state, goal - len(state.tokens), rest)
            assert own is not None
            ended = own.finish is not None
            session.times = replace(session.times, rounds=session.times.rounds + perf_counter() - began)
            yield record
    finally:
        state.sink = None
        session.check()
    began = perf_counter()
    if state.proposer is not None:
        with torch.inference_mode():
            state.proposer.flush()
    session.times = replace(session.times, rounds=session.times.rounds + perf_counter() - began)
    if own is not None and own.finish is not None:
        return own.finish
    if session.stopped:
        return "stop"
    return "length" if len(state.tokens) >= goal else "context"


@contextmanager
def _under(session: Session, options: GenerateOptions, run: PolicyRun | None, chosen: Policy | None) -> Iterator[None]:
    """Go by other options and another policy for a while."""
    state, own = session.state, session.options
    kept = state.policy, state.chooser, state.stop_ids, state.carry, state.rowwise, state.logprobs
    acting, session.acting = session.acting, chosen
    session.options, session.lent = options, Parked(None, own_policy(session))
    state.policy, state.chooser = run, state.chooser if options == own else options.chooser()
    state.stop_ids = stop_ids_of(state.model, options, session.grammar)
    state.carry, state.rowwise, state.logprobs = options.carry, options.rowwise, options.logprobs
    try:
        yield
    finally:
        session.options, session.lent, session.acting = own, None, acting
        state.policy, state.chooser, state.stop_ids, state.carry, state.rowwise, state.logprobs = kept
