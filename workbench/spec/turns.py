"""What acts on a session between its bursts: turn checkpoints, growth, copies, demotion.

Every function here either succeeds or leaves the session as it was. A turn checkpoint costs references: K/V rows are
only ever appended, and windows and states are replaced rather than written to, so a rewind copies nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from workbench.cache.hybrid import HybridCache, Saved
from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.core.metrics import acceptance
from workbench.model.hybrid import HybridModel
from workbench.spec.constraint import Constraint
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import PolicyRun
from workbench.spec.proposers import MTPProposer, Proposer
from workbench.spec.round import Boundary

if TYPE_CHECKING:
    from workbench.spec.session import Session

VERIFY = 128  # rows that a window's ring leaves for a verify, whatever the policy


def new_cache(model: HybridModel, options: GenerateOptions, capacity: int) -> HybridCache:
    """An empty cache of a session's strategy, formats and window."""
    return model.new_cache(
        capacity=capacity,
        strategy=options.strategy or ("columns" if model.device.type == "cpu" else "tape"),
        k_format=options.k_format,
        v_format=options.v_format,
        window=options.window,
        widest=max(options.chunk, VERIFY),
    )


@dataclass(frozen=True, eq=False)
class Parked:
    """Drafter and policy that a session does not use at present."""

    proposer: Proposer | None
    policy: PolicyRun | None


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn checkpoint.

    Args:
        saved: The target's planes, by reference.
        known: Tokens of the text, the pending one last.
        given: Whether the pending one is the user's.
        boundary: The last row the cache holds, copied; None before any.
        demoted: Whether the session had let go of its drafter.
        mark: The drafter's; None while demoted.
        policy: The session's own, copied.
        constraint: Where the grammar stood, copied; None also when it cannot be.
        records: Rounds.
        logprobs: First tokens with a log-probability.
    """

    saved: Saved
    known: int
    given: bool
    boundary: Boundary | None
    demoted: bool
    mark: Any
    policy: PolicyRun | None
    constraint: Constraint | None
    records: int
    logprobs: int

    @property
    def nbytes(self) -> int:
        """Bytes of the windows, states and last row that it keeps from being freed; K/V rows are the session's own."""
        row = self.boundary
        rows = () if row is None else (row.trunk_H, row.normed_H, row.logits_V)
        return sum(x.numel() * x.element_size() for x in (*rows, *(x for pair in self.saved.recurrent for x in pair)))


def own_policy(session: Session) -> PolicyRun | None:
    """The session's own policy run, in use or not."""
    aside = session.lent or session.parked
    return session.state.policy if aside is None else aside.policy


# --- turn checkpoints ------------------------------------------------------------------------------------------------


def keep(session: Session, known: int, boundary: Boundary | None, *, given: bool, choosing: bool = False) -> Turn:
    """A checkpoint of a session, also in the middle of ``feed``.

    Args:
        session: Its caches hold the rows of the text's first ``known - 1`` tokens.
        known: Tokens of the text at the checkpoint, the pending one last.
        boundary: The last of those rows; None before any.
        given: Whether the pending token is the user's, and not chosen.
        choosing: Whether it was chosen just now, and is not yet noted.

    Returns:
        The checkpoint.
    """
    state = session.state
    return Turn(
        state.cache.save(),
        known,
        given,
        None if boundary is None else _owned(boundary),
        session.parked is not None,
        None if state.proposer is None else state.proposer.mark(),
        copy.deepcopy(own_policy(session)),
        _forked(state.constraint) if hasattr(state.constraint, "fork") else None,
        len(state.records),
        len(session.first_logprobs) + (choosing and state.logprobs),
    )


def _owned(row: Boundary) -> Boundary:
    """The row in memory of its own, so that the forward it came from can be freed."""
    return replace(row, **{name: getattr(row, name).clone() for name in ("trunk_H", "normed_H", "logits_V")})


def checkpoint(session: Session) -> Turn:
    """The present place; see ``Session.checkpoint``."""
    known = len(session.state.tokens)
    if not known:
        raise UserError("this session holds no text yet: feed a prompt before a checkpoint")
    return keep(session, known, session.state.boundary, given=session.given == known)


def _forked(constraint: Constraint | None) -> Constraint | None:
    """An independent constraint at the same place.

    Raises:
        CapabilityError: This kind cannot be copied.
    """
    if constraint is None:
        return None
    fork = getattr(constraint, "fork", None)
    if fork is None:
        raise CapabilityError(
            f"{type(constraint).__name__} does not define fork, so its session can neither be rewound nor forked"
        )
    return fork()  # type: ignore[no-any-return]


def rewind(session: Session, to: Turn | None, capacity: int | None) -> None:
    """Return to a checkpoint; see ``Session.rewind``."""
    state, turn = session.state, to or session.turn
    if turn is None:
        raise UserError("this session has no turn to return to: feed a prompt first")
    if turn.demoted and session.parked is None:
        raise UserError(
            "this checkpoint was taken while the session was demoted, and has no place for the drafter: call demote() "
            "first, and promote() after the rewind"
        )
    state.cache.check_saved(turn.saved)
    policy = copy.deepcopy(turn.policy)
    constraint = None
    if state.constraint is not None:
        constraint = _forked(turn.constraint if turn.constraint is not None else state.constraint)
    if capacity is not None:
        grow(session, capacity)
    if state.proposer is not None:
        state.proposer.rewind(turn.mark)
    state.cache.restore(turn.saved)
    state.boundary, session.turn = turn.boundary, turn
    del state.tokens[turn.known :]
    del state.records[turn.records :]
    del session.first_logprobs[turn.logprobs :]
    state.constraint = constraint
    session.given = turn.known if turn.given else 0
    if session.parked is not None:
        session.parked = replace(session.parked, policy=policy)
    else:
        state.policy = policy


def grow(session: Session, capacity: int) -> None:
    """Make room for a longer text; see ``Session.grow``."""
    state = session.state
    limit = state.model.config.max_position_embeddings
    check_int("capacity", capacity, low=state.cache.capacity, high=limit, hint="a session grows, up to the context")
    undo = state.cache.grow(capacity)
    try:
        proposer = state.proposer if session.parked is None else session.parked.proposer
        if proposer is not None:
            proposer.grow(capacity)
    except BaseException:
        undo()
        raise


def fork(session: Session) -> Session:
    """An independent copy; see ``Session.fork``."""
    state = session.state
    twin = copy.copy(session)
    twin.probe, twin.program = copy.deepcopy(session.probe), None

    def copied(proposer: Proposer | None) -> Proposer | None:
        out = None if proposer is None else proposer.fork()
        if isinstance(out, MTPProposer) and out.probe is session.probe:
            out.probe = twin.probe
        return out

    twin.state = replace(
        state,
        cache=state.cache.fork(),
        tokens=list(state.tokens),
        records=list(state.records),
        proposer=copied(state.proposer),
        policy=copy.deepcopy(state.policy),
        constraint=_forked(state.constraint),
        sink=None,
    )
    twin.first_logprobs = list(session.first_logprobs)
    if session.parked is not None:
        twin.parked = Parked(copied(session.parked.proposer), copy.deepcopy(session.parked.policy))
    if session.turn is not None:
        twin.turn = replace(session.turn, saved=twin.state.cache.adopt_saved(session.turn.saved))
    return twin


# --- demotion --------------------------------------------------------------------------------------------------------


def demote(session: Session) -> None:
    """Let go of the drafter; see ``Session.demote``."""
    state = session.state
    if state.proposer is None:
        return
    state.proposer.reset()
    session.parked = Parked(state.proposer, state.policy)
    state.proposer = state.policy = None


@torch.inference_mode()
def promote(session: Session) -> None:
    """Take the drafter back, its rows made from the text; see ``Session.promote``."""
    state, parked, turn = session.state, session.parked, session.turn
    if parked is None:
        if state.proposer is None:
            raise CapabilityError("this session was made without a drafter (k=0): make one with k > 0")
        return
    began = perf_counter()
    proposer, model = parked.proposer, state.model
    assert proposer is not None
    text = torch.tensor(state.tokens[:-1], dtype=torch.long, device=model.device)
    first = 0 if turn is None else turn.saved.lengths[0]
    cache = new_cache(model, session.options, max(len(text), 1))
    mark = None
    try:
        proposer.reset()
        for piece in (text[:first], text[first:]):
            for chunk in piece.split(session.options.chunk):
                if len(chunk):
                    rows = model.forward(chunk.unsqueeze(0), cache, logits="none")
                    proposer.prime(chunk.unsqueeze(0), rows)
                    proposer.flush()
            mark = mark or (proposer.mark(),)
    except BaseException:
        proposer.reset()
        raise
    state.proposer, state.policy, session.parked = proposer, parked.policy, None
    if turn is not None and mark is not None:
        session.turn = replace(turn, mark=mark[0], demoted=False)
    times = session.times
    session.times = replace(times, drafter_fill=times.drafter_fill + perf_counter() - began)


def summary(session: Session) -> dict[str, Any]:
    """What a session holds and did; see ``Session.summary``."""
    state, spent = session.state, session.times
    drafter = None if state.proposer is None else state.proposer.cache
    return {
        "tokens": len(state.tokens),
        "capacity": state.cache.capacity,
        "drafting": state.proposer is not None,
        **acceptance(state.records).row(),
        "cache_bytes": state.cache.nbytes,
        "drafter_bytes": 0 if drafter is None else drafter.nbytes,
        "prime_seconds": spent.prime + spent.drafter_fill,
        "round_seconds": spent.rounds,
    }
