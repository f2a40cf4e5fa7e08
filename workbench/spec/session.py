"""A session: caches, drafter and policy of one text, through any number of bursts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from workbench.core.errors import CapabilityError, UserError, check_flag, check_int
from workbench.core.records import RoundRecord, SetupTimes
from workbench.core.tape import Tape
from workbench.model.hybrid import HybridModel, check_finite
from workbench.sampling.pick import greedy
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import Policy
from workbench.spec.prompt import prompt_ids, token_ids
from workbench.spec.proposers import MTPProposer, Proposer
from workbench.spec.result import Generation
from workbench.spec.round import DecodeState, run_round
from workbench.spec.telemetry import StepProbe


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

    Raises:
        UserError: The capacity is not within the model's context.
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
    ) -> None:
        began = perf_counter()
        self.options = opts = options or GenerateOptions()
        limit = model.config.max_position_embeddings
        room = limit if capacity is None else check_int("capacity", capacity, low=1, high=limit)
        chosen = policy or (opts.policy() if opts.k else None)
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
            )
        elif proposer is not None:
            proposer.reset()
        strategy = opts.strategy or ("columns" if model.device.type == "cpu" else "tape")
        stops = frozenset() if opts.ignore_eos else frozenset(model.config.eos_token_id)
        self.state = DecodeState(
            model,
            model.new_cache(capacity=room, strategy=strategy),
            [],
            proposer if chosen is not None else None,
            chosen.start(width=model.config.hidden_size) if chosen is not None else None,
            carry=opts.carry,
            rowwise=opts.rowwise,
            stop_ids=stops,
        )
        self.times = SetupTimes(init=perf_counter() - began)

    @property
    def tokens(self) -> list[int]:
        """The whole text so far, the pending token last."""
        return list(self.state.tokens)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], *, force: int | None = None) -> None:
        """Add the user's tokens and choose the one after them, which becomes pending.

        Args:
            tokens: Ids; at least one.
            force: The token that is to follow, instead of the target's pick.

        Raises:
            UserError: No tokens, ids out of range, or no room. As after any exception, the session is as it was.
        """
        state, model = self.state, self.state.model
        given = token_ids("the prompt", tokens, model.config.vocab_size)
        if force is not None:
            (force,) = token_ids("force", [force], model.config.vocab_size)
        if not given:
            raise UserError("the prompt is empty: give text, or at least one token id")
        room = state.cache.capacity - len(state.tokens)
        if len(given) + 1 > room:
            raise UserError(
                f"{len(given)} tokens and the one after them do not fit: this session holds {len(state.tokens)} of at "
                f"most {state.cache.capacity} tokens; feed at most {max(room - 1, 0)}, or make a session of a larger "
                "capacity"
            )
        new = torch.tensor([*state.tokens[-1:], *given], device=model.device)
        mark = state.proposer.mark() if state.proposer is not None else None
        ckpt = state.cache.checkpoint(cut=False)
        try:
            pick = self._prefill(new)
            state.cache.commit(ckpt, keep=len(new))
        except BaseException:
            state.cache.rollback(ckpt)
            if state.proposer is not None:
                state.proposer.rewind(mark)
            raise
        state.tokens.extend(given)
        state.tokens.append(pick if force is None else force)

    def _prefill(self, new_T: torch.Tensor) -> int:
        """Run tokens through target and drafter, chunk by chunk; the target's pick after the last."""
        state, model = self.state, self.state.model
        pick = -1
        for chunk in new_T.split(self.options.chunk):
            began = perf_counter()
            first = state.cache.lengths[0]
            rows = model.forward(chunk.unsqueeze(0), state.cache, logits="last")
            assert rows.logits_BTV is not None
            check_finite(rows.logits_BTV[0], first + len(chunk) - 1)
            pick = int(greedy(rows.logits_BTV[0])[-1])
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
        return pick

    @torch.inference_mode()
    def burst(self, max_new_tokens: int, *, force: Sequence[int] | None = None) -> str:
        """Run rounds until this many tokens more are known, a stop token is, or the text is as long as it may be.

        Args:
            max_new_tokens: Tokens to add after the pending one.
            force: Text to commit instead of the target's own, after the pending token; at least that many ids.

        Returns:
            "length", "stop", or "context" when the session's capacity came first.

        Raises:
            UserError: Nothing was fed yet, or an argument is not valid.
        """
        state, began = self.state, perf_counter()
        check_int("max_new_tokens", max_new_tokens, low=0)
        script = None if force is None else token_ids("force", force, state.model.config.vocab_size)
        if not state.tokens:
            raise UserError("this session holds no text yet: feed a prompt before a burst")
        if script is not None and len(script) < max_new_tokens:
            raise UserError(
                f"force holds {len(script)} tokens, but max_new_tokens={max_new_tokens}: give a text at least that "
                "long, or ask for fewer"
            )
        first = len(state.tokens)
        goal = first + max_new_tokens
        end = min(goal, state.cache.capacity)
        while len(state.tokens) < end and state.tokens[-1] not in state.stop_ids:
            run_round(state, goal - len(state.tokens), None if script is None else script[len(state.tokens) - first :])
        if state.tokens[-1] in state.stop_ids:
            finish = "stop"
        else:
            finish = "length" if len(state.tokens) >= goal else "context"
        if state.proposer is not None:
            state.proposer.flush()
        self.times = replace(self.times, rounds=self.times.rounds + perf_counter() - began)
        return finish


def generate(
    model: HybridModel,
    prompt: str | Sequence[int] | Tape,
    *,
    options: GenerateOptions | None = None,
    policy: Policy | None = None,
    proposer: Proposer | None = None,
    force: Tape | Sequence[int] | None = None,
    exact: bool | None = None,
    **given: object,
) -> Generation:
    """Decode one prompt greedily, speculatively when k > 0; the text is plain decode's, token for token.

    Args:
        model: The target.
        prompt: Text, token ids, or a tape (its prompt, or its first token when it has none).
        options: All options at once; else give them by name, see ``GenerateOptions``.
        policy: Replaces the policy the options describe.
        proposer: Replaces the MTP head.
        force: Commit this text (a whole tape, or the ids after the prompt) whatever the target picks; drafts are
            judged against both. ``max_new_tokens`` then bounds it from above.
        exact: Numerical class; None for the model's own.
        **given: Options by name.

    Returns:
        The generation.

    Raises:
        UserError: An option, the prompt or the length is not valid.
        CapabilityError: The checkpoint cannot draft and k > 0.
    """
    opts = make_options(options, given, full_force=force is not None)
    if exact is not None:
        check_flag("exact", exact)
    ids, doc_id, source = prompt_ids(model, force if isinstance(force, Tape) else prompt)
    script = None
    if force is not None:
        text = force.tokens[len(ids) :] if isinstance(force, Tape) else force
        script = token_ids("force", text, model.config.vocab_size)
        if not script:
            raise UserError("force holds no token after the prompt: give a longer text")
        opts = replace(opts, max_new_tokens=min(opts.max_new_tokens, len(script)), ignore_eos=True)
    limit = model.config.max_position_embeddings
    if len(ids) + opts.max_new_tokens > limit:
        raise UserError(
            f"prompt of {len(ids)} tokens + max_new_tokens={opts.max_new_tokens} is over this model's context of "
            f"{limit}: shorten the prompt, or use max_new_tokens of at most {max(limit - len(ids), 0)}"
        )
    was = model.exact
    model.exact = was if exact is None else exact
    try:
        session = Session(
            model, options=opts, policy=policy, proposer=proposer, capacity=len(ids) + opts.max_new_tokens
        )
        session.feed(ids, force=None if script is None else script[0])
        finish = session.burst(opts.max_new_tokens - 1, force=None if script is None else script[1:])
        began = perf_counter()
        records: tuple[RoundRecord, ...] = tuple(session.state.records)
        tokens = tuple(session.tokens[len(ids) :])
        return Generation(
            prompt=tuple(ids),
            tokens=tokens,
            records=records,
            finish=finish if script is None else "forced",
            setup=replace(session.times, tail=perf_counter() - began),
            draft_steps=session.probe.times() if session.probe else None,
            exact=model.exact,
            tokenizer=model.tokenizer,
            doc_id=doc_id,
            source=source,
        )
    finally:
        model.exact = was


def make_options(options: GenerateOptions | None, given: dict[str, object], *, full_force: bool) -> GenerateOptions:
    """Options from one object or by name; unknown names are a sentence that lists the valid ones."""
    valid = GenerateOptions.__dataclass_fields__
    unknown = sorted(set(given) - set(valid))
    if unknown:
        raise UserError(f"unknown option {', '.join(map(repr, unknown))}: valid options are {', '.join(valid)}")
    if options is None and full_force and "max_new_tokens" not in given:
        given = {**given, "max_new_tokens": 1 << 30}
    return replace(options, **given) if options is not None else GenerateOptions(**given)  # type: ignore[arg-type]
