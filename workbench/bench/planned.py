"""Rounds of the live engine whose draft lengths and acceptances are planned, so that each kind of round is measured.

The drafter runs its whole chain, as in any round; then its tokens are replaced by those of a known text, so that as
many stand as planned. Forward, acceptance, commit and everything around them are the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.core.records import RoundRecord
from workbench.model.hybrid import HybridModel
from workbench.sampling.pick import greedy, picks
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import RoundView
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal
from workbench.spec.session import Session


class PlannedPolicy:
    """Drafts as many tokens as it was last told to; frozen state and run in one."""

    anticipating = False

    def __init__(self, k_max: int) -> None:
        self.k_max, self.k = k_max, 0

    def start(self, *, width: int) -> PlannedPolicy:
        """A run of its own."""
        return PlannedPolicy(self.k_max)

    def next_k(self, committed: int) -> int:
        """The planned length."""
        return self.k

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """Nothing is dropped."""
        return None

    def observe(self, view: RoundView) -> None:
        """Nothing to learn."""


class PlannedDrafts(MTPProposer):
    """The MTP head, whose chain is run and timed, and then replaced by tokens of which a planned number stands.

    Args:
        model: The target with its head.
        text: The tokens that will be committed, from the first position of the session on.
        capacity: Slots of its cache.
    """

    def __init__(self, model: HybridModel, text: Sequence[int], *, capacity: int) -> None:
        super().__init__(model, capacity=capacity)
        self.text, self.accept = list(text), 0
        self.first_rows = 0  # of the first step of the last chain
        self.later = 0.0  # seconds of its other steps
        self._marks: list[float] = []

    def _run(self, tokens_BT: Tensor, carrier_BTH: Tensor) -> Tensor:
        self._marks.append(perf_counter())
        return super()._run(tokens_BT, carrier_BTH)

    def propose(self, ctx: DraftContext) -> Proposal:
        """The chain's length and probabilities, with the planned tokens."""
        self._marks = []
        self.first_rows = 1 + sum(tokens.shape[1] for tokens, _ in self.queue)
        made = super().propose(ctx)
        self.later = perf_counter() - self._marks[1] if len(self._marks) > 1 else 0.0
        right = self.text[ctx.position + 1 : ctx.position + 1 + len(made.tokens)]
        vocab = self.model.config.vocab_size
        wrong = [(token + 1) % vocab for token in right[self.accept :]]
        return replace(made, tokens=tuple(right[: self.accept] + wrong))


@dataclass(frozen=True)
class Measured:
    """One measured phase of one round.

    Args:
        phase: Which: "plain", "draft first", "draft step", "verify", "accept", "commit part", "commit whole", "other".
        rows: Rows it worked on; None where that makes no difference.
        context: Tokens known when the round began.
        seconds: Its time.
    """

    phase: str
    rows: int | None
    context: int
    seconds: float


def continuation(model: HybridModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """The model's own greedy text after a prompt, in its present numerical class."""
    made = generate(model, prompt, k=0, max_new_tokens=tokens, ignore_eos=True, exact=model.exact)
    return list(made.tokens)


def speculative(model: HybridModel, prompt: Sequence[int], text: Sequence[int], strategy: str, k_max: int) -> Session:
    """A session that has been fed a prompt and will be given planned rounds over its known continuation."""
    whole = [*prompt, *text]
    session = Session(
        model,
        options=GenerateOptions(k=k_max, strategy=strategy, ignore_eos=True),
        policy=PlannedPolicy(k_max),
        proposer=PlannedDrafts(model, whole, capacity=len(whole)),
        capacity=len(whole),
    )
    session.feed(prompt, force=text[0])
    return session


def plain(model: HybridModel, prompt: Sequence[int], text: Sequence[int], strategy: str) -> Session:
    """A session without a drafter, fed a prompt."""
    options = GenerateOptions(k=0, strategy=strategy, ignore_eos=True)
    session = Session(model, options=options, capacity=len(prompt) + len(text))
    session.feed(prompt, force=text[0])
    return session


def run_plan(session: Session, plan: Sequence[tuple[int, int]]) -> Iterator[Measured]:
    """Measure planned rounds.

    Args:
        session: From ``speculative``, or a fork; used up.
        plan: Draft length and acceptance of every round; the first round only warms up.

    Yields:
        The phases of every round after the first.
    """
    state = session.state
    policy, proposer = state.policy, state.proposer
    assert isinstance(policy, PlannedPolicy) and isinstance(proposer, PlannedDrafts)
    script = proposer.text[len(state.tokens) :]
    rounds = session.rounds(len(script), force=script)
    for i, (k, accept) in enumerate(plan):
        policy.k, proposer.accept = k, accept
        context, before = len(state.tokens), session.times.rounds
        record = next(rounds)
        if i:
            yield from _phases(record, proposer, context, session.times.rounds - before)
    rounds.close()


def _phases(record: RoundRecord, proposer: PlannedDrafts, context: int, wall: float) -> Iterator[Measured]:
    times, rows = record.phases, 1 + record.drafted
    if record.drafted:
        yield Measured("draft first", proposer.first_rows, context, times.draft - proposer.later)
    if record.drafted > 1:
        yield Measured("draft step", None, context, proposer.later / (record.drafted - 1))
    yield Measured("verify", rows, context, times.verify_issue + times.verify_wait)
    yield Measured("accept", rows, context, times.accept)
    whole = record.emitted == rows
    yield Measured("commit whole" if whole else "commit part", None if whole else record.emitted, context, times.commit)
    draft = 0.0 if record.drafted else times.draft  # without a chain, what it takes to see that there is none
    yield Measured("other", None, context, wall - times.total + draft)


def run_plain(session: Session, steps: int) -> Iterator[Measured]:
    """Measure steps of plain decode; the first only warms up.

    Args:
        session: From ``plain``, or a fork; used up.
        steps: How many.

    Yields:
        The time of every step after the first.
    """
    rounds = session.rounds(session.capacity - len(session.state.tokens))
    for i in range(steps + 1):
        context, before = len(session.state.tokens), session.times.rounds
        next(rounds)
        if i:
            yield Measured("plain", None, context, session.times.rounds - before)
    rounds.close()


@torch.inference_mode()
def batched(
    model: HybridModel, prompts_BT: Tensor, strategy: str, rows: Sequence[int], *, repeats: int, chunk: int = 512
) -> Iterator[Measured]:
    """Measure forwards, commits and drafter steps of several sequences together; the first turn only warms up.

    Args:
        model: The target with its head.
        prompts_BT: Their texts; the last ``max(rows)`` tokens of each are what is fed again and again.
        strategy: How commits cut.
        rows: Rows per sequence to verify, and to run through the drafter at once.
        repeats: Turns.
        chunk: Tokens per forward of the prompt.

    Yields:
        Phases without what the host does per sequence.
    """
    b, length = prompts_BT.shape
    at = length - max(rows)
    cache = model.new_cache(batch=b, capacity=length, strategy=strategy)
    drafter = model.new_draft_cache(batch=b, capacity=length)
    last = torch.zeros(b, 0, model.config.hidden_size)
    for lo in range(0, at, chunk):
        tokens_BT = prompts_BT[:, lo : min(lo + chunk, at)]
        normed = model.forward(tokens_BT, cache, logits="none").normed_BTH
        carriers = torch.cat([last, normed], 1)
        begin = 0 if lo else 1
        model.draft(tokens_BT[:, begin:], carriers[:, : tokens_BT.shape[1] - begin], drafter)
        last = normed[:, -1:]
    saved, held = cache.save(), drafter.lengths[0]
    carrier = last.expand(-1, max(rows), -1)
    for turn in range(repeats + 1):
        for t in rows:
            fed = prompts_BT[:, at : at + t]
            for keep in sorted({n for n in (*rows, t - 1) if 0 < n < t} | {t}):
                seconds = _verify(model, cache, fed, keep)
                cache.restore(saved)
                began = perf_counter()
                hidden = model.draft(fed, carrier[:, :t], drafter)
                found = picks(model.unembed_draft(hidden[:, -1:])[:, 0])
                found.ids.tolist(), found.top1.tolist()
                drafted = perf_counter() - began
                drafter.truncate(held)
                if turn:
                    yield Measured("verify", t, at, seconds[0])
                    whole = keep == t
                    yield Measured("commit whole" if whole else "commit part", None if whole else keep, at, seconds[1])
                    yield Measured("draft first", t, at, drafted)
                    if t == 1:
                        yield Measured("draft step", None, at, drafted)
                        yield Measured("plain", None, at, sum(seconds))


def _verify(model: HybridModel, cache: HybridCache, fed_BT: Tensor, keep: int) -> tuple[float, float]:
    """Seconds of a forward with its picks, and of the commit."""
    ckpt, began = cache.checkpoint(), perf_counter()
    logits = model.forward(fed_BT, cache).logits_BTV
    assert logits is not None
    greedy(logits).tolist()
    verified = perf_counter()
    cache.commit(ckpt, keep=keep)
    return verified - began, perf_counter() - verified
