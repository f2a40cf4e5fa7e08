"""A session: caches, drafter and policy of one text, through any number of bursts.

``feed`` and ``rounds`` are here; ``bursts`` and ``turns`` hold what calls them and acts between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from workbench.cache.hybrid import HybridCache
from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.core.metrics import Telemetry
from workbench.core.records import RoundRecord, SetupTimes
from workbench.model.hybrid import HybridModel
from workbench.spec import bursts, priming, turns
from workbench.spec.options import GenerateOptions, refuse_anticipating
from workbench.spec.policies import Policy
from workbench.spec.prefix import PrefixEntry, Reuse, restored
from workbench.spec.prompt import token_ids
from workbench.spec.proposers import MTPProposer, Proposer
from workbench.spec.result import Generation
from workbench.spec.round import DecodeState
from workbench.spec.sink import Sink
from workbench.spec.telemetry import StepProbe

if TYPE_CHECKING:
    from workbench.spec.device.rounds import DeviceRounds
    from workbench.spec.grammars import Grammar
    from workbench.spec.store import PrefixStore


class Session:
    """State of one text.

    The cache holds the rows of every token but the last, which is pending. ``generate`` continues the text, after text
    of the user's if some is given; ``feed`` and ``burst`` are its two halves. Each ``feed`` leaves a turn checkpoint,
    to which ``rewind`` returns. However the text was made, it and every plane are those of a fresh session given the
    same tokens: in exact mode bit for bit. An exception leaves the session as it was, or whole rounds further.

    Args:
        model: The target.
        options: How to decode; ``max_new_tokens`` is given per burst.
        policy: Replaces the policy the options describe.
        proposer: Replaces the MTP head; None uses it when k > 0.
        capacity: Longest text, tokens; None for the model's longest context.
        grammar: What the generated text must match; None for anything.
        clock: Seconds, for the phases of rounds and for policies that read time; None for ``time.perf_counter``.

    Raises:
        UserError: The capacity is not within the model's context, or two options exclude each other.
        CapabilityError: The checkpoint cannot draft and k > 0.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        options: GenerateOptions | None = None,
        policy: Policy | None = None,
        proposer: Proposer | None = None,
        capacity: int | None = None,
        grammar: Grammar | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        began = perf_counter()
        opts = options or GenerateOptions()
        limit = model.config.max_position_embeddings
        room = limit if capacity is None else check_int("capacity", capacity, low=1, high=limit)
        self.grammar, self.clock = grammar, clock
        self.replaced = policy  # what stands in for the policy that options describe
        chosen = self._policy_of(opts)
        self.probe = StepProbe(model.device) if opts.anatomy else None
        if chosen is not None and proposer is None:
            if not model.can_draft:
                raise CapabilityError(
                    f"checkpoint {model.source or 'in memory'} has no mtp.* weights, so it cannot draft: use k=0 for "
                    "plain decode, or give a proposer"
                )
            proposer = MTPProposer(
                model,
                carrier=opts.carrier,
                refresh=opts.refresh,
                capacity=room,
                shift=opts.shift,
                primed=opts.primed,
                probe=self.probe,
                k_format=opts.k_format,
                v_format=opts.v_format,
            )
        elif proposer is not None:
            proposer.reset()
        stops = bursts.stop_ids_of(model, opts, grammar)
        self.program: tuple[Any, DeviceRounds] | None = None  # rounds on the device, and what shaped them
        cache = turns.new_cache(model, opts, room)
        self._begin(model, opts, chosen, stops, cache, proposer if chosen is not None else None)
        self.times = SetupTimes(init=perf_counter() - began)

    def _policy_of(self, options: GenerateOptions) -> Policy | None:
        """The policy that a session of these options goes by; None for plain decode."""
        chosen = self.replaced or (options.policy() if options.k else None)
        if options.chooser().by_ratio and chosen is not None:
            refuse_anticipating(chosen)
        return chosen

    def _begin(
        self,
        model: HybridModel,
        options: GenerateOptions,
        policy: Policy | None,
        stops: frozenset[int],
        cache: HybridCache,
        proposer: Proposer | None,
    ) -> None:
        """Everything that is of one text, as it is before any, beside what cache and proposer hold."""
        self.state = DecodeState(
            model,
            cache,
            [],
            proposer,
            policy.start(width=model.config.hidden_size) if policy is not None else None,
            carry=options.carry,
            rowwise=options.rowwise,
            stop_ids=stops,
            chooser=options.chooser(),
            constraint=None if self.grammar is None else self.grammar.start(),
            logprobs=options.logprobs,
            clock=self.clock,
        )
        self.captured: tuple[PrefixEntry, ...] = ()  # by the last ``feed``
        self.placing = False  # while a prefix entry is being restored
        self.reuse: Reuse | None = None  # how ``from_prefix`` came by its text
        self.first_logprobs: list[float] = []  # of the tokens that ``feed`` chose
        self.turn: turns.Turn | None = None  # where ``rewind`` returns to
        self.parked: turns.Parked | None = None  # drafter and policy of a demoted session
        self.lent: turns.Parked | None = None  # the session's own policy, while a burst runs under another
        self.options, self.policy = options, policy
        self.acting = policy  # the policy of the burst that runs
        self.given = 0  # length of the text when its pending token is the user's, else out of date

    @classmethod
    def from_prefix(
        cls,
        model: HybridModel,
        tokens: Sequence[int],
        store: PrefixStore,
        *,
        boundaries: Sequence[int] = (),
        sink: Sink | None = None,
        stable: int | None = None,
        options: GenerateOptions | None = None,
        policy: Policy | None = None,
        proposer: Proposer | None = None,
        capacity: int | None = None,
        grammar: Grammar | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Session:
        """A session fed a prompt, with as much of it as a store holds restored instead of computed.

        Args:
            model: The target.
            tokens: The prompt.
            store: Where its longest usable prefix is looked for, and where its own end is put.
            boundaries: Further lengths of the prompt to put there; those within what was restored are there already.
            sink: As in ``feed``.
            stable: As in ``feed``; at the prompt's end where what was restored is as long or longer.
            options: As of a session, like the rest.
            policy: Replaces the policy the options describe.
            proposer: Replaces the MTP head.
            capacity: Longest text, tokens.
            grammar: What the generated text must match.
            clock: As of a session.

        Returns:
            The session; its ``reuse`` tells how many tokens were restored and computed, and what was refused.

        Raises:
            UserError: As ``feed``.
        """
        own: dict[str, Any] = dict(policy=policy, proposer=proposer, capacity=capacity, grammar=grammar, clock=clock)
        session = cls(model, options=options, **own)
        session.reuse = restored(session, tokens, store, boundaries=boundaries, sink=sink, stable=stable)
        return session

    @property
    def tokens(self) -> list[int]:
        """The whole text so far, the pending token last."""
        return list(self.state.tokens)

    @property
    def capacity(self) -> int:
        """Longest text, tokens."""
        return self.state.cache.capacity

    @property
    def telemetry(self) -> Telemetry:
        """Counters of every round that stands; rounds rewound are not among them."""
        return Telemetry.of(self.state.records)

    @property
    def summary(self) -> dict[str, Any]:
        """Text, acceptance (pooled over the rounds that stand), bytes and seconds of the whole session."""
        return turns.summary(self)

    def check(self) -> None:
        """Assert what holds between calls: the cache holds the rows of every token but the pending one."""
        state = self.state
        rows, known = state.cache.lengths[0], len(state.tokens)
        if self.placing:  # an entry is in place, and what follows it not yet fed
            return
        assert rows == max(known - 1, 0), f"the cache holds {rows} rows of a text of {known} tokens"
        assert state.cache.idle, "a transaction of the cache was left open"
        seen = state.proposer.position if isinstance(state.proposer, MTPProposer) else rows
        assert seen == rows, f"the drafter has seen {seen} of {rows} rows"

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Run a public call, and ``check`` after it, however it ends."""
        try:
            yield
        finally:
            self.check()

    def generate(
        self,
        suffix: str | Sequence[int] | None = None,
        *,
        max_new_tokens: int = 128,
        cancel: Callable[[], bool] | None = None,
        policy: Policy | None = None,
        **given: object,
    ) -> Generation:
        """Continue the text, after a suffix if one is given.

        A pending token that was chosen stays chosen, whatever options follow: the next ones are drawn after it, with
        the noise of their own positions, so that bursts do not move a draw (under ``accept="ratio"``, where rounds
        begin does, and the same calls give the same text). Penalties see the whole text.

        Args:
            suffix: Text or ids of the user's to add first; None, or none of it, goes on from the pending token. Text is
                encoded by itself.
            max_new_tokens: Tokens to generate at most.
            cancel: Asked after every chunk of the suffix and every committed token whether to end here.
            policy: Replaces the session's policy for this burst.
            **given: Options by name, for this burst alone, see ``GenerateOptions``; all but those which caches and
                drafter were made by. A burst under other draft lengths leaves the session's policy where it was.

        Returns:
            The burst: its tokens, records and times; its prompt is the whole text before it. Its text, and stop
            strings, begin with its own first token.

        Raises:
            UserError: An option or the suffix is not valid, nothing was fed yet, or a draft is asked of a session
                without a drafter.
        """
        with self.checked():
            return bursts.generate(self, suffix, max_new_tokens, cancel, policy, given)

    def checkpoint(self) -> turns.Turn:
        """The present place, for ``rewind(to=...)``; it holds references and copies no row.

        Raises:
            UserError: Nothing was fed yet.
        """
        return turns.checkpoint(self)

    def rewind(self, *, to: turns.Turn | None = None, capacity: int | None = None) -> None:
        """Return to a checkpoint: every plane, text, counters and policy. Times are kept.

        The checkpoint stands, so that a second rewind returns to the same place; those of later places are gone.

        Args:
            to: From ``checkpoint``, taken on the present text or an earlier part of it; None for the last turn's.
            capacity: Grow to this as well; None keeps it.

        Raises:
            UserError: Nothing was fed yet, the place is gone (cut back below, or lapped by a window's ring), or the
                capacity is not valid. As after any exception, the session is as it was.
        """
        with self.checked():
            turns.rewind(self, to, capacity)

    def reset(self, *, options: GenerateOptions | None = None) -> None:
        """Empty the session: from here on it is a fresh one of these options, in the memory that it has.

        Text, state, records, times, policy and random stream begin anew, and the drafter is there again after
        ``demote``; checkpoints taken before are gone. Planes keep their memory, and rounds on the device their CUDA
        graphs, as long as nothing that shapes them changes: seed, sequence, budget and text do not.

        Args:
            options: How to decode from now on, but for what caches and drafter were made by; None for the session's
                own.

        Raises:
            UserError: An option cannot change or is not valid, or a burst's rounds are still being drawn. As after any
                exception, the session is as it was.
        """
        began, state, opts = perf_counter(), self.state, options or self.options
        if state.sink is not None or self.lent is not None:
            raise UserError("a burst of this session has not come to its end: close its rounds before a reset")
        bursts.check_fixed(self.options, opts)
        chosen, stops = self._policy_of(opts), bursts.stop_ids_of(state.model, opts, self.grammar)
        proposer = state.proposer if self.parked is None else self.parked.proposer
        if (chosen is None) != (proposer is None):
            made = "without a drafter (k=0)" if proposer is None else f"with one (k={self.options.k})"
            raise UserError(f"k={opts.k} is not valid for a session that was made {made}: make another session")
        self._begin(state.model, opts, chosen, stops, state.cache, proposer)
        state.cache.clear()
        if proposer is not None:
            proposer.clear()
        if self.probe is not None:
            self.probe.clear()
        self.times = SetupTimes(init=perf_counter() - began)
        self.check()

    def grow(self, capacity: int) -> None:
        """Make room for a longer text, and allocate it at once.

        Args:
            capacity: Longest text, tokens; at least the present one.

        Raises:
            UserError: The capacity is less than the present one, or beyond the model's context. As after any
                exception, the session is as it was.
        """
        with self.checked():
            turns.grow(self, capacity)

    def fork(self) -> Session:
        """An independent session in the same state; what one does later does not touch the other.

        Raises:
            CapabilityError: The drafter or the grammar cannot be copied.
        """
        with self.checked():
            return turns.fork(self)

    def demote(self) -> None:
        """Go on by plain decode: let go of the drafter and its rows. Text and target stay; again does nothing.

        ``generate(k=0)`` is the other way, for a while: it drafts nothing and keeps the drafter's rows up to date.
        """
        with self.checked():
            turns.demote(self)

    def promote(self) -> None:
        """Draft again after ``demote``: runs the text through target and drafter once more, for the drafter's rows.

        Raises:
            CapabilityError: The session was made without a drafter.
        """
        with self.checked():
            turns.promote(self)

    @property
    def stopped(self) -> bool:
        """Whether the text ends in a stop token that is not the user's."""
        tokens = self.state.tokens
        return bool(tokens) and tokens[-1] in self.state.stop_ids and self.given != len(tokens)

    def sink(self, max_new_tokens: int, *, cancel: Callable[[], bool] | None = None, text: bool = False) -> Sink:
        """A fresh sink for this many tokens, with this session's stops; it decodes text if asked or needed."""
        opts, state = self.options, self.state
        return Sink(
            tokenizer=state.model.tokenizer if text or opts.stop else None,
            stop_ids=state.stop_ids,
            stop_strings=opts.stop,
            max_new_tokens=max_new_tokens,
            cancel=cancel,
        )

    @torch.inference_mode()
    def feed(
        self,
        tokens: Sequence[int],
        *,
        force: int | None = None,
        sink: Sink | None = None,
        stable: int | None = None,
        boundaries: Sequence[int] = (),
    ) -> None:
        """Add the user's tokens and choose the one after them, which becomes pending.

        Args:
            tokens: Ids; at least one.
            force: The token that is to follow, instead of the target's own.
            sink: Asked between chunks of the prompt whether to go on, and given the token chosen; None for neither.
            stable: Keep the turn checkpoint after this many of the tokens, the last of them pending, such as before a
                template's generation tail; None keeps it at the end, with the chosen token pending.
            boundaries: Lengths of the whole text, counted from its start, at which to capture prefix entries on the
                way; ``captured`` holds them afterwards.

        Raises:
            UserError: No tokens, ids or ``stable`` out of range, or no room. As after any exception, the session is as
                it was.
            Cancelled: The sink was cancelled.
        """
        state, model = self.state, self.state.model
        given = token_ids("the prompt", tokens, model.config.vocab_size)
        if force is not None:
            (force,) = token_ids("force", [force], model.config.vocab_size)
        unfed = state.tokens[state.cache.lengths[0] :]  # the pending token; none right after a restore
        anchor = state.boundary if state.tokens and not unfed else None
        if not given and anchor is None:
            raise UserError("the prompt is empty: give text, or at least one token id")
        room = state.cache.capacity - len(state.tokens)
        if len(given) + 1 > room:
            raise UserError(
                f"{len(given)} tokens and the one after them do not fit: this session holds {len(state.tokens)} of at "
                f"most {state.cache.capacity} tokens; feed at most {max(room - 1, 0)}, or make a session of a larger "
                "capacity"
            )
        if stable is not None:
            check_int("stable", stable, low=1, high=len(given), hint="it counts the tokens fed")
        held = state.cache.lengths[0]
        for at in boundaries:
            last, hint = held + len(unfed) + len(given), "a length of the text within what is fed"
            check_int("a boundary", at, low=held + 1, high=last, hint=hint)
        with self.checked():
            priming.feed(self, given, force, sink, stable, boundaries)

    def burst(self, max_new_tokens: int, *, force: Sequence[int] | None = None, sink: Sink | None = None) -> str:
        """Run rounds until this many tokens more are known, a stop is, or the text is as long as it may be.

        Args:
            max_new_tokens: Tokens to add after the pending one.
            force: Text to commit instead of the target's own, after the pending token; at least that many ids.
            sink: Takes the tokens, and may end the text; None for one of this burst's own.

        Returns:
            "length", "stop", "stop_string", "cancel", or "context" when the session's capacity came first.

        Raises:
            UserError: Nothing was fed yet, or an argument is not valid.
        """
        rounds = self.rounds(max_new_tokens, force=force, sink=sink)
        while True:
            try:
                next(rounds)
            except StopIteration as end:
                return str(end.value)

    def rounds(
        self, max_new_tokens: int, *, force: Sequence[int] | None = None, sink: Sink | None = None
    ) -> Generator[RoundRecord, None, str]:
        """The rounds of a burst, one at a time; its value is why the burst ended. See ``burst``."""
        return bursts.rounds(self, max_new_tokens, force, sink)
