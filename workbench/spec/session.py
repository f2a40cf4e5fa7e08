"""A session: caches, drafter and policy of one text, through any number of bursts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.core.records import RoundRecord, SetupTimes
from workbench.model.hybrid import HybridModel, check_finite
from workbench.sampling.pick import picks
from workbench.spec.choose import Walk
from workbench.spec.options import GenerateOptions, refuse_anticipating
from workbench.spec.policies import Policy
from workbench.spec.prefix import PrefixEntry, Reuse, capture_at, restored
from workbench.spec.prompt import token_ids
from workbench.spec.proposers import MTPProposer, Proposer
from workbench.spec.round import Boundary, DecodeState, run_round
from workbench.spec.sink import Sink
from workbench.spec.telemetry import StepProbe

if TYPE_CHECKING:
    from workbench.spec.grammars import Grammar
    from workbench.spec.store import PrefixStore


VERIFY = 128  # rows that a window's ring leaves for a verify, whatever the policy


class Cancelled(Exception):
    """The caller's ``cancel`` ended a prefill; the session is as it was before it."""


class Session:
    """State of one text.

    The cache holds the rows of every token but the last, which is pending. A burst continues the text; ``feed`` adds
    text of the user's first.

    Args:
        model: The target.
        options: How to decode; ``max_new_tokens`` is given per burst.
        policy: Replaces the policy the options describe.
        proposer: Replaces the MTP head; None uses it when k > 0.
        capacity: Longest text, tokens; None for the model's longest context.
        grammar: What the generated text must match; None for anything.

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
    ) -> None:
        began = perf_counter()
        self.options = opts = options or GenerateOptions()
        if grammar is not None and opts.ignore_eos:
            raise UserError(
                "ignore_eos=True with a grammar is not valid: only the end of text may follow a whole match"
            )
        limit = model.config.max_position_embeddings
        room = limit if capacity is None else check_int("capacity", capacity, low=1, high=limit)
        chosen = policy or (opts.policy() if opts.k else None)
        chooser = opts.chooser()
        if chooser.by_ratio and chosen is not None:
            refuse_anticipating(chosen)
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
        strategy = opts.strategy or ("columns" if model.device.type == "cpu" else "tape")
        more = token_ids("stop_token_ids", opts.stop_token_ids, model.config.vocab_size)
        stops = frozenset(more) | (frozenset() if opts.ignore_eos else frozenset(model.config.eos_token_id))
        if grammar is not None:
            stops |= frozenset(grammar.eos_ids)
        if opts.stop and model.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this checkpoint has none: give stop_token_ids instead")
        self.state = DecodeState(
            model,
            model.new_cache(
                capacity=room,
                strategy=strategy,
                k_format=opts.k_format,
                v_format=opts.v_format,
                window=opts.window,
                widest=max(opts.chunk, VERIFY),
            ),
            [],
            proposer if chosen is not None else None,
            chosen.start(width=model.config.hidden_size) if chosen is not None else None,
            carry=opts.carry,
            rowwise=opts.rowwise,
            stop_ids=stops,
            chooser=chooser,
            constraint=None if grammar is None else grammar.start(),
            logprobs=opts.logprobs,
        )
        self.captured: tuple[PrefixEntry, ...] = ()  # by the last ``feed``
        self.reuse: Reuse | None = None  # how ``from_prefix`` came by its text
        self.first_logprobs: list[float] = []  # of the tokens that ``feed`` chose
        self.times = SetupTimes(init=perf_counter() - began)

    @classmethod
    def from_prefix(
        cls,
        model: HybridModel,
        tokens: Sequence[int],
        store: PrefixStore,
        *,
        boundaries: Sequence[int] = (),
        sink: Sink | None = None,
        options: GenerateOptions | None = None,
        policy: Policy | None = None,
        proposer: Proposer | None = None,
        capacity: int | None = None,
        grammar: Grammar | None = None,
    ) -> Session:
        """A session fed a prompt, with as much of it as a store holds restored instead of computed.

        Args:
            model: The target.
            tokens: The prompt.
            store: Where its longest usable prefix is looked for, and where its own end is put.
            boundaries: Further lengths of the prompt to put there; those within what was restored are there already.
            sink: As in ``feed``.
            options: As of a session, like the rest.
            policy: Replaces the policy the options describe.
            proposer: Replaces the MTP head.
            capacity: Longest text, tokens.
            grammar: What the generated text must match.

        Returns:
            The session; its ``reuse`` tells how many tokens were restored and computed, and what was refused.

        Raises:
            UserError: As ``feed``.
        """
        session = cls(model, options=options, policy=policy, proposer=proposer, capacity=capacity, grammar=grammar)
        session.reuse = restored(session, tokens, store, boundaries=boundaries, sink=sink)
        return session

    @property
    def tokens(self) -> list[int]:
        """The whole text so far, the pending token last."""
        return list(self.state.tokens)

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
        boundaries: Sequence[int] = (),
    ) -> None:
        """Add the user's tokens and choose the one after them, which becomes pending.

        Args:
            tokens: Ids; at least one.
            force: The token that is to follow, instead of the target's own.
            sink: Asked between chunks of the prompt whether to go on, and given the token chosen; None for neither.
            boundaries: Lengths of the whole text, counted from its start, at which to capture prefix entries on the
                way; ``captured`` holds them afterwards.

        Raises:
            UserError: No tokens, ids out of range, or no room. As after any exception, the session is as it was.
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
        new = torch.tensor([*unfed, *given], dtype=torch.int64, device=model.device)
        first, last = state.cache.lengths[0] + 1, state.cache.lengths[0] + len(new)
        for at in boundaries:
            check_int("a boundary", at, low=first, high=last, hint="a length of the text within what is fed")
        text = [*state.tokens, *given]
        mark = state.proposer.mark() if state.proposer is not None else None
        walk = Walk(state.constraint) if state.constraint is not None else None
        sunk = sink.mark() if sink is not None else None
        ckpt = state.cache.checkpoint(cut=False)
        try:
            end, captured = (
                (anchor, []) if anchor is not None and not len(new) else self._prefill(new, text, boundaries, sink)
            )
            logits_V = end.logits_V
            if force is None:
                mask = None if walk is None else walk.mask(()).to(logits_V.device)
                force = state.chooser.pick(logits_V, text, mask)
            if walk is not None:
                walk.goto([force])
            if sink is not None:
                sink.commit(force)
            state.cache.commit(ckpt, keep=len(new))
        except BaseException:
            state.cache.rollback(ckpt)
            if state.proposer is not None:
                state.proposer.rewind(mark)
            if walk is not None:
                walk.undo()
            if sink is not None and sunk is not None:
                sink.rewind(sunk)
            raise
        if state.logprobs:
            lse = picks(logits_V.unsqueeze(0)).logsumexp[0]
            self.first_logprobs.append(float(logits_V[force].double() - lse.double()))
        state.tokens.extend(given)
        state.tokens.append(force)
        state.boundary, self.captured = end, tuple(captured)

    def _prefill(
        self, new_T: torch.Tensor, text: Sequence[int], boundaries: Sequence[int], sink: Sink | None
    ) -> tuple[Boundary, list[PrefixEntry]]:
        """Run tokens through target and drafter, in chunks parted at the boundaries; the last row, and entries."""
        state, model, opts = self.state, self.state.model, self.options
        wanted, begin = set(boundaries), state.cache.lengths[0]
        cuts = sorted(at - begin for at in wanted)
        parts = [part for part in new_T.tensor_split(cuts) if len(part)] if cuts else [new_T]
        captured: list[PrefixEntry] = []
        for chunk in (chunk for part in parts for chunk in part.split(opts.chunk)):
            began = perf_counter()
            first = state.cache.lengths[0]
            rows = model.forward(chunk.unsqueeze(0), state.cache, logits="last")
            assert rows.logits_BTV is not None
            check_finite(rows.logits_BTV[0], first + len(chunk) - 1)
            primed = perf_counter()
            if state.proposer is not None:
                state.proposer.prime(chunk.unsqueeze(0), rows)
                state.proposer.flush()
            filled = perf_counter()
            self.times = replace(
                self.times,
                prime=self.times.prime + primed - began,
                drafter_fill=self.times.drafter_fill + filled - primed,
            )
            end = Boundary.of(first + len(chunk), rows, -1, rows.logits_BTV[0, -1])
            if end.position in wanted:
                captured.append(capture_at(self, text[: end.position], end))
            if sink is not None and sink.poll():
                raise Cancelled
        return end, captured

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
        state = self.state
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
        first = len(state.tokens)
        own = self.sink(max_new_tokens) if sink is None and max_new_tokens else sink
        left = max_new_tokens if own is None else min(max_new_tokens, own.max_new_tokens - own.generated)
        goal = first + left
        end = min(goal, state.cache.capacity)
        ended = state.tokens[-1] in state.stop_ids or (own is not None and own.finish is not None)
        state.sink = own
        try:
            while len(state.tokens) < end and not ended:
                began = perf_counter()
                rest = None if script is None else script[len(state.tokens) - first :]
                with torch.inference_mode():
                    record = run_round(state, goal - len(state.tokens), rest)
                assert own is not None
                ended = own.finish is not None
                self.times = replace(self.times, rounds=self.times.rounds + perf_counter() - began)
                yield record
        finally:
            state.sink = None
        began = perf_counter()
        if state.proposer is not None:
            with torch.inference_mode():
                state.proposer.flush()
        self.times = replace(self.times, rounds=self.times.rounds + perf_counter() - began)
        if own is not None and own.finish is not None:
            return own.finish
        if state.tokens[-1] in state.stop_ids:
            return "stop"
        return "length" if len(state.tokens) >= goal else "context"
