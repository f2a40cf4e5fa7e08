"""A burst whose rounds run on the device: state in, rounds, records and state out."""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from workbench.core.errors import CapabilityError, NonFiniteError, UserError
from workbench.core.records import PhaseTimes, RoundRecord
from workbench.model import kernel_path
from workbench.spec.device.law import DeviceLaw
from workbench.spec.device.rounds import DeviceRounds, Stand
from workbench.spec.policies import FixedK, RoundView
from workbench.spec.proposers import MTPProposer, SyntheticProposer
from workbench.spec.round import Boundary
from workbench.spec.sink import Sink
from workbench_kernels.settle import FAULTS

if TYPE_CHECKING:
    from workbench.spec.session import Session


def check(session: Session, *, forced: bool) -> None:
    """Refuse what rounds on the device cannot do.

    Raises:
        CapabilityError: The model is not on a GPU, or not below float64.
        UserError: A policy, proposer, grammar or text to force needs the host in every round.
    """
    state, model = session.state, session.state.model
    if not model.through_kernels:
        raise CapabilityError(
            f"graphs and stream_rounds run on a CUDA GPU below float64, and this model is {model.dtype} on "
            f"{model.device.type}: leave them out, or load the model with device='cuda'"
        )
    needs = None
    if forced:
        needs = "a text to force"
    elif state.constraint is not None:
        needs = "a grammar"
    elif state.proposer is not None and type(state.proposer) not in (MTPProposer, SyntheticProposer):
        needs = f"the proposer {state.proposer.name!r}"
    elif session.acting is not None and type(session.acting) is not FixedK:
        needs = f"the policy {type(session.acting).__name__}"
    if needs:
        raise UserError(
            f"{needs} needs the host in every round, and graphs or stream_rounds keep rounds on the device: leave one "
            "of them out"
        )


def program(session: Session) -> DeviceRounds:
    """The rounds of a session, made anew when what shapes them has changed; text and random stream do not."""
    state, opts, policy = session.state, session.options, session.acting
    proposer = state.proposer if isinstance(state.proposer, MTPProposer) else None
    policy = policy if isinstance(policy, FixedK) and proposer is not None else FixedK(k=0)
    cache, chooser = state.cache, state.chooser
    shape = (
        policy, id(cache), id(proposer), cache.capacity, opts.graphs, opts.stream_rounds, state.stop_ids,
        chooser.shaping, state.model.exact,
    )  # fmt: skip
    if session.program is None or session.program[0] != shape:
        made = DeviceRounds(
            state.model,
            cache,
            None if proposer is None else proposer.cache,
            k=policy.k,
            law=DeviceLaw(chooser.shaping, chooser.noise.key, state.model.device),
            capacity=cache.capacity,
            p_min=policy.p_min,
            pmin0=policy.pmin0,
            reads_top=policy.statistic == "top",
            carrier=opts.carrier,
            stop_ids=sorted(state.stop_ids),
            stream=opts.stream_rounds,
            graphs=opts.graphs,
            override_LK=_override(proposer, cache.capacity + 1),
        )
        session.program = (shape, made)
    return session.program[1]


def _override(proposer: MTPProposer | None, rows: int) -> torch.Tensor | None:
    """A scripted drafter's picks by position, on the device, for every position that a round may begin at."""
    if not isinstance(proposer, SyntheticProposer):
        return None
    table = proposer.override_LK
    return torch.nn.functional.pad(table, (0, 0, 0, max(0, rows - len(table)))).to(proposer.model.device)


@torch.inference_mode()
def enter(session: Session, made: DeviceRounds, budget: int) -> None:
    """Take the session's state to where the rounds find it."""
    state, proposer = session.state, session.state.proposer
    pairs, slots = torch.tensor([state.tokens[-1]], device=state.model.device), 0
    assert state.boundary is not None
    own = state.boundary.normed_H if made.carrier == "normed" else state.boundary.trunk_H
    carriers = own.unsqueeze(0)
    if isinstance(proposer, MTPProposer):
        if sum(tokens.shape[1] for tokens, _ in proposer.queue) > made.k:
            proposer.flush()
        assert proposer.tail is not None
        pairs = torch.cat([*(tokens[0] for tokens, _ in proposer.queue), pairs])
        carriers = torch.cat([*(rows[0] for _, rows in proposer.queue), proposer.tail[0, -1:]])
        slots = proposer.held
        proposer.cache.truncate(slots)
    made.rebind(state.cache, proposer.cache if isinstance(proposer, MTPProposer) else None)
    made.law.take(state.chooser.noise.key)
    made.load(state.tokens, pairs, carriers, slots, budget)
    made.graphs.resume()


@torch.inference_mode()
def leave(session: Session, made: DeviceRounds, stand: Stand) -> None:
    """Give the session the state that its own rounds would have left."""
    state, proposer, model = session.state, session.state.proposer, session.state.model
    made.planes.store(stand.length, stand.slots)
    if stand.fault[0]:
        made.planes.scrub(stand.length, stand.slots)
    last = stand.queued - 1
    trunk, normed = made.old_trunk_TH[last].clone(), made.old_normed_TH[last].clone()
    head = model.embed if model.head is None else model.head
    logits = kernel_path.logits_of(normed.unsqueeze(0), head, True)[0]
    state.boundary = Boundary(stand.length, trunk, normed, logits)
    if isinstance(proposer, MTPProposer):
        carriers = made.carriers()[: stand.queued].clone().unsqueeze(0)
        proposer.position, proposer.held = stand.length, stand.slots
        proposer.tail = carriers[:, -1:]
        proposer.queue = [(made.books.queue_BT[:, :last].clone(), carriers[:, :-1])] if last else []


def rounds(session: Session, budget: int, sink: Sink) -> Generator[RoundRecord, None, None]:
    """The rounds of a burst that may emit ``budget`` tokens; see ``Session.rounds``.

    The caller's ``cancel`` is asked after every reading.
    """
    state, opts = session.state, session.options
    began, goal = perf_counter(), len(state.tokens) + budget
    made = program(session)
    first = made.graphs.seconds
    left = min(budget, state.cache.capacity - len(state.tokens))
    stand = Stand(state.cache.lengths[0], 0, 1, left, 0, [], (0, 0))
    enter(session, made, left)
    took, ended, torn = perf_counter() - began, False, False
    try:
        while not ended:
            began, captured, torn = perf_counter(), made.graphs.seconds, True
            with torch.inference_mode():
                count = min(opts.stream_rounds, max(1, -(-stand.left // (made.k + 1))))
                made.reach(stand.length, count)
                parts = None
                if opts.stream_rounds == 1:
                    parts = made.run_parts()
                else:
                    made.run(count)
                issued = perf_counter() - began
                stand = made.read(stand.done)
            torn = False
            capture = made.graphs.seconds - captured
            seconds = perf_counter() - began - capture
            parts = None if capture else parts  # the device's marks would count a capture between them
            phases = _phases(parts, issued - capture, seconds, sum(row[7] for row in stand.log))
            fresh = _take(session, made, stand, phases, goal, sink)
            ended = sink.finish is not None or stand.left <= 0 or sink.poll() is not None
            yield from fresh
            if stand.fault[0]:
                raise NonFiniteError(stand.fault[1], "NaN or infinity", phase=FAULTS[stand.fault[0]])
    finally:
        if torn:  # rounds may have run that were not read
            with torch.inference_mode():
                stand = made.read(stand.done)
            _take(session, made, stand, PhaseTimes(), goal, sink)
        if stand.done:
            leave(session, made, stand)
        times = session.times
        capture = times.capture + made.graphs.seconds - first
        session.times = replace(times, init=times.init + took, capture=capture)


def _phases(parts: tuple[float, float, float] | None, issued: float, seconds: float, live: int) -> PhaseTimes:
    """Phases of a round by its parts on the device; of a streamed round, its share of the stream."""
    if parts is None:
        return PhaseTimes(other=seconds / max(1, live))
    draft, verify, settle = parts
    issue = min(max(0.0, issued), verify)
    return PhaseTimes(
        draft=draft,
        verify_issue=issue,
        verify_wait=verify - issue,
        commit=settle,
        other=max(0.0, seconds - draft - verify - settle),
    )


def _take(
    session: Session, made: DeviceRounds, stand: Stand, phases: PhaseTimes, goal: int, sink: Sink
) -> list[RoundRecord]:
    """Add the text of rounds that were read to the session; their records."""
    state, records = session.state, []
    cancel, sink.cancel = sink.cancel, None  # a round that ran stands whole
    try:
        for row in stand.log:
            if not row[7]:
                continue
            record, tokens = _record(session, made, row, phases, goal)
            state.tokens.extend(tokens)
            state.records.append(record)
            records.append(record)
            sink.scan(tokens)
            session.times = replace(session.times, rounds=session.times.rounds + phases.total)
            if state.policy is not None:
                seconds = phases.total
                state.policy.observe(
                    RoundView(record.drafted, record.accepted, len(state.tokens), record.steps, seconds)
                )
    finally:
        sink.cancel = cancel
    return records


def _record(
    session: Session, made: DeviceRounds, row: list[int], phases: PhaseTimes, goal: int
) -> tuple[RoundRecord, list[int]]:
    """The record of a logged round, and the tokens it emitted."""
    start, allowed, drafted, accepted, emitted, bonus, stopped, _ = row[:8]
    drafts, bits = row[8 : 8 + made.k], row[8 + made.k : 8 + 2 * made.k]
    shown = drafted if bonus >= 0 else accepted
    tokens = [*drafts[:accepted], *([bonus] if bonus >= 0 else [])]
    bound = ""
    if allowed < made.k:
        bound = "budget" if goal <= session.state.cache.capacity else "context"
    record = RoundRecord(
        index=len(session.state.records),
        start=start,
        base=1,
        k=allowed,
        draft_ids=tuple(drafts[:shown]),
        draft_top1=tuple(struct.unpack("<f", struct.pack("<i", x))[0] for x in bits[:shown]),
        accepted=accepted,
        emitted=emitted,
        bonus=bonus if bonus >= 0 else None,
        chain_stop="none" if not allowed else "k" if drafted == allowed else "p_min",
        round_stop="stop" if stopped and bonus < 0 else bound,
        phases=phases,
        steps=made.k,
    )
    return record, tokens
