"""How a session takes in given tokens: prefill of target and drafter, captures, the turn checkpoint, the token after.

Anything that fails on the way leaves the session as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from workbench.model.checks import check_finite
from workbench.sampling.pick import picks
from workbench.spec import turns
from workbench.spec.choose import Walk
from workbench.spec.prefix import PrefixEntry, capture_at
from workbench.spec.round import Boundary
from workbench.spec.sink import Cancelled, Sink

if TYPE_CHECKING:
    from workbench.spec.session import Session


def feed(
    session: Session,
    given: list[int],
    force: int | None,
    sink: Sink | None,
    stable: int | None,
    boundaries: Sequence[int],
) -> None:
    """Run checked tokens through target and drafter and choose the one after them; see ``Session.feed``."""
    state, model = session.state, session.state.model
    unfed = state.tokens[state.cache.lengths[0] :]
    anchor = state.boundary if state.tokens and not unfed else None
    new = torch.tensor([*unfed, *given], dtype=torch.int64, device=model.device)
    text = [*state.tokens, *given]
    turn: turns.Turn | None = None
    captured: list[PrefixEntry] = []
    mark = state.proposer.mark() if state.proposer is not None else None
    walk = Walk(state.constraint) if state.constraint is not None else None
    sunk = sink.mark() if sink is not None else None
    ckpt = state.cache.checkpoint(cut=False)
    try:
        if stable is not None:
            before, row = len(unfed) + stable - 1, anchor  # rows without that of the last stable token
            if before:
                cut = state.cache.lengths[0] + before
                row, early = prefill(session, new[:before], text, [at for at in boundaries if at <= cut], sink)
                captured += early
                boundaries = [at for at in boundaries if at > cut]
            turn, new = turns.keep(session, len(state.tokens) + stable, row, given=True), new[before:]
        if anchor is not None and not len(new):
            end = anchor
        else:
            end, late = prefill(session, new, text, boundaries, sink)
            captured += late
        logits_V = end.logits_V
        if force is None:
            mask = None if walk is None else walk.mask(()).to(logits_V.device)
            force = state.chooser.pick(logits_V, text, mask)
        if walk is not None:
            walk.goto([force])
        if sink is not None:
            sink.commit(force)
        turn = turn or turns.keep(session, len(state.tokens) + len(given) + 1, end, given=False, choosing=True)
        state.cache.commit(ckpt, keep=state.cache.lengths[0] - ckpt.lengths[0])
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
        session.first_logprobs.append(float(logits_V[force].double() - lse.double()))
    state.tokens.extend(given)
    state.tokens.append(force)
    state.boundary, session.captured = end, tuple(captured)
    session.turn = turn


def prefill(
    session: Session, new_T: torch.Tensor, text: Sequence[int], boundaries: Sequence[int], sink: Sink | None
) -> tuple[Boundary, list[PrefixEntry]]:
    """Run tokens through target and drafter, in chunks parted at the boundaries; the last row, and entries."""
    state, model, opts = session.state, session.state.model, session.options
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
        session.times = replace(
            session.times,
            prime=session.times.prime + primed - began,
            drafter_fill=session.times.drafter_fill + filled - primed,
        )
        end = Boundary.of(first + len(chunk), rows, -1, rows.logits_BTV[0, -1])
        if end.position in wanted:
            captured.append(capture_at(session, text[: end.position], end))
        if sink is not None and sink.poll():
            raise Cancelled
    return end, captured
