"""The drafter's half of a round: the chain it proposes within what policy and constraint allow, and its judgement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.errors import UserError
from workbench.sampling.law import Law, point_mass
from workbench.spec.accept import Verdict, accept_greedy, accept_ratio
from workbench.spec.choose import Choice, TargetRows, Walk
from workbench.spec.constraint import Constraint
from workbench.spec.policies import trimmed
from workbench.spec.proposers import DraftContext, Proposal

if TYPE_CHECKING:
    from workbench.spec.round import DecodeState


def propose(state: DecodeState, k: int, base: int, walk: Walk | None = None) -> Proposal:
    """Ask the proposer for up to ``k`` tokens after the pending one; none that policy or constraint forbids.

    Under the ratio rule the first token that the constraint forbids stays if it was drawn: it is rejected for certain,
    and what replaces it then has the right law. To leave it out would give the target a fresh draw exactly where the
    drafter erred.

    Args:
        state: The sequence.
        k: Tokens wanted, at least 1.
        base: 1 when the pending token rides in the verify, 0 when it was fed alone.
        walk: The constraint, led along drafts; None without one.

    Returns:
        The chain, and the drafter steps run for it.

    Raises:
        UserError: The proposer or the policy did not do what it was asked for.
    """
    proposer, policy, chooser = state.proposer, state.policy, state.chooser
    assert proposer is not None and policy is not None
    position = len(state.tokens) - 1
    reads_top = getattr(policy, "statistic", "drawn") == "top"
    tested = chosen = 0  # a drafter that draws through ``choose`` runs a step for each, another tests each token

    def drops(slot: int, p: float, top: float | None = None) -> str | None:
        nonlocal tested
        tested += 1
        return policy.drops(slot, top if reads_top and top is not None else p, base)

    guide = state.constraint
    if guide is not None:
        guide.draft_begin()
    ended = False

    def choose(logits_V: Tensor, drafted: Sequence[int]) -> Choice | None:
        nonlocal ended, chosen
        chosen += 1
        if ended:
            return None
        mask = None if guide is None or chooser.plain else drafter_mask(guide, logits_V)
        if not chooser.can_draft(logits_V, mask):
            return None
        choice = chooser.draft(logits_V, [*state.tokens, *drafted], mask, position)
        if guide is None or guide.draft_advance(choice.token):
            return choice
        ended = True
        return choice if chooser.by_ratio else None  # the ratio rule must judge every token drawn, allowed or not

    context = DraftContext(k, state.tokens[-1], position, drops, choose)
    proposal = proposer.propose(context)
    n = offered = len(proposal.tokens)
    if n > k or len(proposal.top1) != n or len(proposal.q or proposal.tokens) != n:
        raise UserError(
            f"proposer {proposer.name!r} gave {n} tokens with {len(proposal.top1)} probabilities where {k} were asked "
            "for: a proposal holds at most ctx.k tokens, and one probability and one law, if any, for each"
        )
    stays = trimmed(policy, n, base)
    if stays < n:
        proposal, n = proposal.first(stays, "policy"), stays
    if walk is not None:
        legal = walk.legal(proposal.tokens)
        if legal < n:
            drawn = chooser.by_ratio and proposal.q is not None and proposal.q[legal] is not None
            proposal = proposal.first(legal + drawn, "constraint")
    return replace(proposal, steps=max(tested, chosen, offered))


def drafter_mask(guide: Constraint, logits_V: Tensor) -> Tensor | None:
    """Ids the drafter may draw next; None where it has none of them, or the constraint leaves it unmasked."""
    mask = guide.draft_mask()
    if mask is None:
        return None
    here = mask.to(logits_V.device)
    return here if bool(torch.isfinite(logits_V[here]).any()) else None


def judge(
    state: DecodeState, proposal: Proposal, own: Sequence[int], start: int, force: Sequence[int] | None
) -> Verdict:
    """Which drafts stand: by equality with the target's own tokens, or by the ratio of the two laws.

    Args:
        state: The sequence.
        proposal: The drafts.
        own: The target's own token for every place after the pending one, read only as far as needed.
        start: Position of the pending token.
        force: Text to commit; None for the target's own.

    Returns:
        The verdict.
    """
    if not state.chooser.by_ratio:
        return accept_greedy(proposal.tokens, own, stop_ids=state.stop_ids, force=force)
    assert isinstance(own, TargetRows) and force is None
    drafts, chooser = proposal.tokens, state.chooser
    given = proposal.q or (None,) * len(drafts)
    qs = [point_mass(token, own.logits_TV) if q is None else q for token, q in zip(drafts, given, strict=True)]
    ps: dict[int, Law] = {}

    def accepts(n: int) -> bool:
        ps[n] = own.law(n)
        return chooser.accepts(ps[n], qs[n], drafts[n], start + 1 + n, start)

    return accept_ratio(
        drafts,
        accepts=accepts,
        redraw=lambda n: chooser.redraw(ps[n], qs[n], start + 1 + n, start),
        bonus=lambda: own[len(drafts)],
        stop_ids=state.stop_ids,
    )
