"""Decode one prompt, whole or as a stream of text, speculatively when k > 0."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError, check_flag
from workbench.core.tape import Tape
from workbench.model.hybrid import HybridModel
from workbench.spec.options import GenerateOptions, named_options
from workbench.spec.policies import Policy
from workbench.spec.prompt import prompt_ids, token_ids
from workbench.spec.proposers import Proposer
from workbench.spec.result import Generation
from workbench.spec.session import Session
from workbench.spec.sink import Cancelled

if TYPE_CHECKING:
    from workbench.spec.grammars import Grammar


@dataclass(frozen=True, eq=False)
class Chunk:
    """One piece of a stream.

    Args:
        text: Text that became certain; never taken back.
        tokens: Tokens committed since the last chunk.
        generation: The finished generation, on the last chunk alone.
    """

    text: str
    tokens: tuple[int, ...]
    generation: Generation | None = None


def generate(
    model: HybridModel,
    prompt: str | Sequence[int] | Tape,
    *,
    options: GenerateOptions | None = None,
    policy: Policy | None = None,
    proposer: Proposer | None = None,
    force: Tape | Sequence[int] | None = None,
    grammar: Grammar | None = None,
    cancel: Callable[[], bool] | None = None,
    clock: Callable[[], float] | None = None,
    session: Session | None = None,
    exact: bool | None = None,
    **given: object,
) -> Generation:
    """Decode one prompt, speculatively when k > 0.

    In exact mode, greedy and under sampling with the default ``accept="coupled"``, the text is plain decode's, token
    for token, for any drafter, k and policy; in fast mode a near tie may fall the other way. With ``accept="ratio"`` it
    follows the same law.

    Args:
        model: The target.
        prompt: Text, token ids, or a tape (its prompt, or its first token when it has none).
        options: All options at once; else give them by name, see ``GenerateOptions``.
        policy: Replaces the policy the options describe.
        proposer: Replaces the MTP head.
        force: Commit this text (a whole tape, or the ids after the prompt) whatever the target picks; drafts are
            judged against both. ``max_new_tokens`` then bounds it from above.
        grammar: What the text must match; see ``workbench.spec.grammars``.
        cancel: Asked after every chunk of the prompt and every committed token whether to end here.
        clock: Seconds, for the phases of rounds and for policies that read time; None for ``time.perf_counter``.
        session: One to decode in, of this model, which is emptied first (see ``Session.reset``) and holds the text
            afterwards; what is made is equal to a fresh one's, and its memory and graphs are used again. Policy,
            proposer, grammar and clock are then its own, options those given here. None makes one.
        exact: Numerical class; None for the model's own.
        **given: Options by name.

    Returns:
        The generation.

    Raises:
        UserError: An option, the prompt or the length is not valid.
        CapabilityError: The checkpoint cannot draft and k > 0.
    """
    own = (options, policy, proposer, force, grammar, cancel, clock, session, exact, given)
    for chunk in _run(model, prompt, *own, streamed=False):
        if chunk.generation is not None:
            return chunk.generation
    raise AssertionError("a run ends with its generation")


def stream(
    model: HybridModel,
    prompt: str | Sequence[int] | Tape,
    *,
    options: GenerateOptions | None = None,
    policy: Policy | None = None,
    proposer: Proposer | None = None,
    grammar: Grammar | None = None,
    cancel: Callable[[], bool] | None = None,
    clock: Callable[[], float] | None = None,
    exact: bool | None = None,
    **given: object,
) -> Iterator[Chunk]:
    """Decode one prompt and yield text as it becomes certain; arguments as of ``generate``, force and session apart.

    Yields:
        A chunk per round; the last holds the generation. The texts joined are its text.

    Raises:
        UserError: An option, the prompt or the length is not valid; before the first chunk.
    """
    own = (options, policy, proposer, None, grammar, cancel, clock, None, exact, given)
    run = _run(model, prompt, *own, streamed=True)
    first = next(run)
    return _chain(first, run)


def _chain(first: Chunk, rest: Iterator[Chunk]) -> Iterator[Chunk]:
    yield first
    yield from rest


def _run(
    model: HybridModel,
    prompt: str | Sequence[int] | Tape,
    options: GenerateOptions | None,
    policy: Policy | None,
    proposer: Proposer | None,
    force: Tape | Sequence[int] | None,
    grammar: Grammar | None,
    cancel: Callable[[], bool] | None,
    clock: Callable[[], float] | None,
    session: Session | None,
    exact: bool | None,
    given: dict[str, object],
    *,
    streamed: bool,
) -> Generator[Chunk, None, None]:
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
    kind = model.exact if exact is None else exact
    parts: dict[str, Any] = {"policy": policy, "proposer": proposer, "grammar": grammar, "clock": clock}
    if session is not None:
        _check_session(session, model, len(ids) + opts.max_new_tokens, parts)
    with numerics(model, kind):
        if session is None:
            session = Session(model, options=opts, capacity=len(ids) + opts.max_new_tokens, **parts)
        else:
            session.reset(options=opts)
        sink = session.sink(opts.max_new_tokens, cancel=cancel, text=streamed)
        try:
            session.feed(ids, force=None if script is None else script[0], sink=sink)
            session.turn = None  # nothing returns to it, and it would hold a second state of every layer
            finish = ""
        except Cancelled:
            finish = "cancel"
    shown = 0
    if not finish:
        if streamed and sink.finish is None:
            yield Chunk(sink.take(), sink.tokens)
            shown = sink.generated
        rounds = session.rounds(opts.max_new_tokens - 1, force=None if script is None else script[1:], sink=sink)
        while True:
            try:
                with numerics(model, kind):
                    next(rounds)
            except StopIteration as end:
                finish = str(end.value)
                break
            if streamed and sink.finish is None:
                yield Chunk(sink.take(), sink.tokens[shown:])
                shown = sink.generated
    began = perf_counter()
    generation = Generation(
        prompt=tuple(ids),
        tokens=sink.tokens,
        records=tuple(session.state.records),
        finish="forced" if script is not None and finish == "length" else finish,
        setup=replace(session.times, tail=perf_counter() - began),
        draft_steps=session.probe.times() if session.probe else None,
        exact=kind,
        tokenizer=model.tokenizer,
        doc_id=doc_id,
        source=source,
        first_logprob=session.first_logprobs[0] if session.first_logprobs else None,
        cut_text=sink.text if opts.stop else None,
    )
    yield Chunk(sink.take(), sink.tokens[shown:], generation)


def _check_session(session: Session, model: HybridModel, tokens: int, parts: dict[str, Any]) -> None:
    """Refuse a session that cannot hold this text, or parts that it was not made with."""
    if session.state.model is not model:
        raise UserError("session is of another model: give the model it was made of, or leave session out")
    if named := [name for name, part in parts.items() if part is not None]:
        raise UserError(f"{named[0]} and session exclude each other: make the session with this {named[0]}")
    if tokens > session.capacity:
        raise UserError(
            f"prompt and max_new_tokens come to {tokens} tokens, and this session holds at most {session.capacity}: "
            "shorten them, or call session.grow"
        )


@contextmanager
def numerics(model: HybridModel, exact: bool) -> Iterator[None]:
    """Run in a numerical class, and return to the model's own."""
    was, model.exact = model.exact, exact
    try:
        yield
    finally:
        model.exact = was


def make_options(options: GenerateOptions | None, given: dict[str, object], *, full_force: bool) -> GenerateOptions:
    """Options from one object or by name; unknown names are a sentence that lists the valid ones."""
    if options is None and full_force and "max_new_tokens" not in given:
        given = {**given, "max_new_tokens": 1 << 30}
    return named_options(options, given)
