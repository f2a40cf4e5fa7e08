"""One round of speculative decoding. Read this file first.

A text is known up to a *pending* token x_P: the target has chosen it but has not been fed it. A round

1. **proposes**: the drafter chains up to k tokens after x_P;
2. **verifies**: the target is fed [x_P, d_1 .. d_k] in one forward; row i holds its own pick for the place of d_{i+1};
3. **accepts**: drafts stand while they are the target's own picks; the pick after the last of them is the bonus;
4. **commits**: caches are cut back to the rows that stand, the drafter sees their true rows, the bonus is pending.

So every round emits accepted + 1 tokens, all of them the target's own picks: greedy output is exactly plain decode's,
whatever the drafter does. With ``carry=False`` x_P is fed alone first and the verify holds only drafts (base 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from workbench.cache.hybrid import HybridCache
from workbench.core.errors import UserError
from workbench.core.records import PhaseTimes, RoundRecord
from workbench.model.hybrid import HybridModel, Rows, check_finite
from workbench.sampling.pick import greedy
from workbench.spec.accept import accept_greedy
from workbench.spec.policies import PolicyRun, RoundView
from workbench.spec.proposers import DraftContext, Proposal, Proposer
from workbench.spec.verify import verify

NOTHING = Proposal((), (), "none")


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
        UserError: The proposer did not do what it was asked for.
    """
    began = perf_counter()
    k, bound = draft_length(state, budget)
    proposer, start, base = state.proposer, len(state.tokens) - 1, 1 if state.carry else 0
    mark = proposer.mark() if proposer is not None else None
    ckpt = state.cache.checkpoint()
    try:
        proposal = propose(state, k, base) if k else NOTHING
        drafted_at = perf_counter()
        rows, picks, issued_at = _verify(state, proposal, start)
        read_at = perf_counter()
        drafts = proposal.tokens
        verdict = accept_greedy(drafts, picks, stop_ids=state.stop_ids, force=force)
        accepted_at = perf_counter()
        keep = len(verdict.emitted)  # the pending row and every emitted draft but the new pending token
        if proposer is not None:
            fed = [state.tokens[-1], *drafts][:keep]
            proposer.observe(torch.tensor([fed], device=state.model.device), rows.first(keep))
        state.cache.commit(ckpt, keep=keep)
    except BaseException:
        if ckpt.open:
            state.cache.rollback(ckpt)
        if proposer is not None:
            proposer.rewind(mark)
        raise
    state.tokens.extend(verdict.emitted)
    committed_at = perf_counter()
    record = RoundRecord(
        index=len(state.records),
        start=start,
        base=base,
        k=k,
        draft_ids=drafts,
        draft_top1=proposal.top1,
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
    )
    state.records.append(record)
    if state.policy is not None:
        state.policy.observe(RoundView(len(drafts), verdict.accepted, len(state.tokens)))
    return record


def propose(state: DecodeState, k: int, base: int) -> Proposal:
    """Ask the proposer for up to ``k`` tokens after the pending one."""
    proposer, policy = state.proposer, state.policy
    assert proposer is not None and policy is not None
    position = len(state.tokens) - 1
    context = DraftContext(k, state.tokens[-1], position, lambda slot, p: policy.drops(slot, p, base))
    proposal = proposer.propose(context)
    n = len(proposal.tokens)
    if n > k or len(proposal.top1) != n:
        raise UserError(
            f"proposer {proposer.name!r} gave {n} tokens with {len(proposal.top1)} probabilities where {k} were asked "
            "for: a proposal holds at most ctx.k tokens and one probability for each"
        )
    return proposal


def _verify(state: DecodeState, proposal: Proposal, start: int) -> tuple[Rows, list[int], float]:
    """Rows fed, the target's picks for every place after the pending token, and when the forward was issued."""
    model, device = state.model, state.model.device
    pending = [state.tokens[-1]]
    feeds = [[*pending, *proposal.tokens]] if state.carry or not proposal.tokens else [pending, list(proposal.tokens)]
    parts = [verify(model, state.cache, torch.tensor([feed], device=device), rowwise=state.rowwise) for feed in feeds]
    rows = parts[0] if len(parts) == 1 else parts[0].joined(parts[1])
    issued_at = perf_counter()
    assert rows.logits_BTV is not None
    check_finite(rows.logits_BTV[0], start)
    return rows, greedy(rows.logits_BTV[0]).tolist(), issued_at
