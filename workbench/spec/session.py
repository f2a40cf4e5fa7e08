"""A session: caches, drafter and policy of one text, through any number of bursts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch

from workbench.core.errors import CapabilityError, UserError
from workbench.core.records import RoundRecord, SetupTimes
from workbench.core.tape import Tape
from workbench.model.hybrid import HybridModel, check_finite
from workbench.sampling.pick import greedy
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import Policy
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
        capacity: Longest text; None for the model's longest context.
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
        room = limit if capacity is None else min(capacity, limit)
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
            UserError: No tokens, ids out of range, or no room.
        """
        state, model = self.state, self.state.model
        new = torch.tensor([*state.tokens[-1:], *tokens], dtype=torch.int64, device=model.device)
        if not len(tokens):
            raise UserError("the prompt is empty: give text, or at least one token id")
        model.check_ids(new)
        if len(new) + 1 > state.cache.room() + 1:
            raise UserError(
                f"{len(new)} tokens do not fit: the text holds {len(state.tokens)} of at most {state.cache.capacity}"
            )
        picks = torch.empty(0)
        for chunk in new.split(self.options.chunk):
            began = perf_counter()
            first = state.cache.lengths[0]
            rows = model.forward(chunk.unsqueeze(0), state.cache, logits="last")
            assert rows.logits_BTV is not None
            check_finite(rows.logits_BTV[0], first + len(chunk) - 1)
            picks = greedy(rows.logits_BTV[0])
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
        state.tokens.extend(int(t) for t in tokens)
        state.tokens.append(int(picks[-1]) if force is None else force)

    @torch.inference_mode()
    def burst(self, max_new_tokens: int, *, force: Sequence[int] | None = None) -> str:
        """Run rounds until this many tokens more are known, or a stop token is.

        Args:
            max_new_tokens: Tokens to add after the pending one.
            force: Text to commit instead of the target's own, after the pending token.

        Returns:
            "length" or "stop".
        """
        state, began = self.state, perf_counter()
        goal = len(state.tokens) + max_new_tokens
        script = list(force) if force is not None else None
        finish = "length"
        while len(state.tokens) < goal:
            if state.tokens[-1] in state.stop_ids:
                finish = "stop"
                break
            done = len(state.tokens) - goal + max_new_tokens
            run_round(state, goal - len(state.tokens), None if script is None else script[done:])
        else:
            finish = "stop" if state.tokens[-1] in state.stop_ids else "length"
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
    ids, doc_id, source = _prompt_ids(model, prompt if not (force is not None and isinstance(force, Tape)) else force)
    script = None
    if force is not None:
        script = [int(t) for t in (force.tokens[len(ids) :] if isinstance(force, Tape) else force)]
        if not script:
            raise UserError("force holds no token after the prompt; give a longer text")
        model.check_ids(torch.tensor(script))
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


def _prompt_ids(model: HybridModel, prompt: str | Sequence[int] | Tape) -> tuple[list[int], str, str]:
    if isinstance(prompt, Tape):
        return prompt.tokens[: max(prompt.prompt_len, 1)].tolist(), prompt.doc_id, prompt.source
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer: give token ids instead of text")
        ids = model.tokenizer.encode(prompt)
    else:
        ids = [int(t) for t in prompt]
    if not ids:
        raise UserError("the prompt is empty: give text, or at least one token id")
    return ids, "prompt", ""
