"""One round of speculative decoding. Read this file first.

A text is known up to a *pending* token x_P: the target has chosen it but has not been fed it. A round

1. **proposes**: the drafter chains up to k tokens after x_P;
2. **verifies**: the target is fed [x_P, d_1 .. d_k] in one forward; row i holds its own pick for the place of d_{i+1};
3. **accepts**: drafts stand while they are the target's own picks; the pick after the last of them is the bonus;
4. **commits**: caches are cut back to the rows that stand, the drafter sees their true rows, the bonus is pending.

So every round emits accepted + 1 tokens, all of them the target's own picks: the output is exactly plain decode's,
whatever the drafter does. That holds greedy, and under sampling too where target and drafter draw with the noise of a
token's position (``coupled``); by the ``ratio`` rule the tokens only follow the target's law. With ``carry=False`` x_P
is fed alone first and the verify holds only drafts (base 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.core.records import PhaseTimes, RoundRecord
from workbench.model.checks import check_finite
from workbench.model.hybrid import HybridModel, Rows
from workbench.sampling.pick import greedy, picks
from workbench.spec.accept import Verdict, cut
from workbench.spec.choose import Chooser, TargetRows, Walk
from workbench.spec.constraint import Constraint
from workbench.spec.policies import PolicyRun, RoundView
from workbench.spec.propose import judge, propose
from workbench.spec.proposers import Proposal, Proposer
from workbench.spec.sink import Sink
from workbench.spec.verify import verify

NOTHING = Proposal((), (), "none")


@dataclass(frozen=True, eq=False)
class Boundary:
    """The target's last row: what chooses the token after it.

    Args:
        position: Rows up to and with this one.
        trunk_H: Before the final norm.
        normed_H: After it.
        logits_V: In float32.
    """

    position: int
    trunk_H: Tensor
    normed_H: Tensor
    logits_V: Tensor

    @classmethod
    def of(cls, position: int, rows: Rows, row: int, logits_V: Tensor) -> Boundary:
        """The boundary after one row of a forward."""
        return cls(position, rows.trunk_BTH[0, row], rows.normed_BTH[0, row], logits_V)


@dataclass(eq=False)
class DecodeState:
    """One sequence being decoded.

    Invariant between rounds: the cache holds the rows of ``tokens[:-1]``; the last token is pending.

    Args:
        model: The target.
        cache: Its state.
        tokens: Prompt and text so far, the pending token last.
        proposer: The drafter; None for plain decode.
        policy: Decides draft lengths; None for plain decode.
        carry: Feed the pending token as row 0 of the verify; False feeds it alone first.
        rowwise: Verify one row at a time, as an oracle.
        stop_ids: Tokens that end the text.
        records: Rounds so far.
        chooser: How rows become tokens.
        constraint: Which tokens may follow; it stands after ``tokens``.
        sink: Where tokens are committed to, which may end the text; None takes them all.
        logprobs: Note the target's log-probability of every token.
        boundary: The last row the cache holds; None before any.
        clock: Seconds, for phases and for policies that read time; None for ``time.perf_counter``.
    """

    model: HybridModel
    cache: HybridCache
    tokens: list[int]
    proposer: Proposer | None
    policy: PolicyRun | None
    carry: bool = True
    rowwise: bool = False
    stop_ids: frozenset[int] = frozenset()
    records: list[RoundRecord] = field(default_factory=list)
    chooser: Chooser = field(default_factory=Chooser)
    constraint: Constraint | None = None
    sink: Sink | None = None
    logprobs: bool = False
    boundary: Boundary | None = None
    clock: Callable[[], float] | None = None


def draft_length(state: DecodeState, budget: int) -> tuple[int, str]:
    """Draft length of the next round, and what bounded it below the policy's wish.

    Args:
        state: The sequence.
        budget: Tokens that may still be emitted, at least 1.

    Returns:
        (k, "" | "budget" | "context").
    """
    if state.proposer is None or state.policy is None:
        return 0, ""
    wish = max(0, state.policy.next_k(len(state.tokens)))
    room = state.cache.capacity - len(state.tokens)
    k = max(0, min(wish, budget - 1, room - 1))
    if k == wish:
        return k, ""
    return k, "budget" if budget <= room else "context"


def run_round(state: DecodeState, budget: int, force: Sequence[int] | None = None) -> RoundRecord:
    """Propose, verify, accept, commit.

    Args:
        state: The sequence; updated. An exception leaves it, its cache and its proposer as they were; only one out
            of ``policy.observe``, which comes last, leaves a whole round behind.
        budget: Tokens that may still be emitted, at least 1.
        force: Text to commit, from the place after the pending token on; None for the target's own.

    Returns:
        The record of the round, also appended to ``state.records``.

    Raises:
        NonFiniteError: The target's logits hold NaN or infinity.
        UserError: The proposer or the policy did not do what it was asked for.
    """
    clock = state.clock or perf_counter
    began = clock()
    k, bound = draft_length(state, budget)
    proposer, sink, start, base = state.proposer, state.sink, len(state.tokens) - 1, 1 if state.carry else 0
    walk = Walk(state.constraint) if state.constraint is not None else None
    mark = proposer.mark() if proposer is not None else None
    sunk = sink.mark() if sink is not None else None
    ckpt = state.cache.checkpoint()
    try:
        proposal = propose(state, k, base, walk) if k else NOTHING
        drafted_at = clock()
        rows, logits_TV, issued_at = _verify(state, proposal, start, clock)
        own = _own_tokens(state, logits_TV, proposal, walk)
        read_at = clock()
        verdict = judge(state, proposal, own, start, force)
        if sink is not None:
            verdict = cut(verdict, *sink.scan(verdict.emitted))
        drafts = proposal.tokens if verdict.bonus is not None else proposal.tokens[: verdict.accepted]
        keep = len(verdict.emitted)  # the pending row and every emitted draft but the new pending token
        said = _logprobs(logits_TV, verdict) if state.logprobs else ()
        accepted_at = clock()
        if proposer is not None:
            fed = [state.tokens[-1], *drafts][:keep]
            proposer.observe(torch.tensor([fed], device=state.model.device), rows.first(keep))
        if walk is not None:
            walk.goto(verdict.emitted)
        state.cache.commit(ckpt, keep=keep)
    except BaseException:
        if ckpt.open:
            state.cache.rollback(ckpt)
        if proposer is not None:
            proposer.rewind(mark)
        if walk is not None:
            walk.undo()
        if sink is not None and sunk is not None:
            sink.rewind(sunk)
        raise
    state.tokens.extend(verdict.emitted)
    state.boundary = Boundary.of(start + keep, rows, keep - 1, logits_TV[keep - 1])
    committed_at = clock()
    record = RoundRecord(
        index=len(state.records),
        start=start,
        base=base,
        k=k,
        draft_ids=drafts,
        draft_top1=proposal.top1[: len(drafts)],
        accepted=verdict.accepted,
        emitted=len(verdict.emitted),
        bonus=verdict.bonus,
        chain_stop=proposal.stop_cause,
        round_stop=verdict.round_stop or bound,
        phases=PhaseTimes(
            draft=drafted_at - began,
            verify_issue=issued_at - drafted_at,
            verify_wait=read_at - issued_at,
            accept=accepted_at - read_at,
            commit=committed_at - accepted_at,
        ),
        logprobs=said,
        steps=proposal.steps,
    )
    state.records.append(record)
    if state.policy is not None:
        seconds = committed_at - began
        state.policy.observe(RoundView(len(drafts), verdict.accepted, len(state.tokens), proposal.steps, seconds))
    return record


def _own_tokens(state: DecodeState, logits_TV: Tensor, proposal: Proposal, walk: Walk | None) -> Sequence[int]:
    """The target's own token for every place after the pending one."""
    if state.chooser.plain and walk is None:
        return greedy(logits_TV).tolist()
    return TargetRows(state.chooser, logits_TV, state.tokens, proposal.tokens, walk)


def _logprobs(logits_TV: Tensor, verdict: Verdict) -> tuple[float, ...]:
    rows = picks(logits_TV[: len(verdict.emitted)])
    chosen = logits_TV[range(len(verdict.emitted)), list(verdict.emitted)]
    return tuple((chosen.double() - rows.logsumexp.double()).tolist())


def _verify(
    state: DecodeState, proposal: Proposal, start: int, clock: Callable[[], float]
) -> tuple[Rows, Tensor, float]:
    """Rows fed, their logits for every place after the pending token, and when the forward was issued."""
    model, device = state.model, state.model.device
    pending = [state.tokens[-1]]
    feeds = [[*pending, *proposal.tokens]] if state.carry or not proposal.tokens else [pending, list(proposal.tokens)]
    parts = [verify(model, state.cache, torch.tensor([feed], device=device), rowwise=state.rowwise) for feed in feeds]
    rows = parts[0] if len(parts) == 1 else parts[0].joined(parts[1])
    issued_at = clock()
    assert rows.logits_BTV is not None
    check_finite(rows.logits_BTV[0], start)
    return rows, rows.logits_BTV[0], issued_at
