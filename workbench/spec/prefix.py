"""Prefix entries: all that a session holds after the first n tokens of a text, to be put into a fresh session.

An entry holds the rows of every token of its prefix, none pending: recurrent windows and states, K/V rows, the
drafter's plane and the target's last row, from which the token after the prefix is chosen. In exact mode a session
restored from one equals, in every bit, a session fed the same text. How entries are kept is the store's business.
Legend: N key/value heads, D head width, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.errors import CapabilityError, UserError
from workbench.core.manifest import machine
from workbench.model.fingerprint import fingerprint
from workbench.spec.prompt import token_ids
from workbench.spec.proposers import MTPProposer
from workbench.spec.round import Boundary, DecodeState

if TYPE_CHECKING:
    from workbench.spec.session import Session
    from workbench.spec.sink import Sink
    from workbench.spec.store import PrefixStore


@dataclass(frozen=True)
class Terms:
    """What two sessions must agree in for a state to pass between them.

    Args:
        model: Fingerprint of the target.
        exact: Numerical class.
        dtype: Type of the weights.
        layout: Format of every plane.
        machine: Processor, device, threads and torch that exact bits belong to; "" when not exact.
        drafter: Kind and pairing of the drafter; "" for none.
    """

    model: str
    exact: bool
    dtype: str
    layout: str
    machine: str
    drafter: str


NAMES = {
    "model": "model",
    "exact": "exactness",
    "dtype": "dtype",
    "layout": "cache layout",
    "machine": "machine, thread count or torch",
    "drafter": "drafter",
}
LAYER, DRAFTER, ROW = "layer.", "drafter.", "boundary."


@dataclass(frozen=True, eq=False)
class PrefixEntry:
    """The state after a prefix.

    Args:
        terms: Where it can be restored.
        tokens: The prefix; the rows of all of them are held.
        tensors: "layer.I.conv" and ".state", or ".k" and ".v" [N, tokens, D], of every layer I; "drafter.0.k", ".v"
            [N, held, D] and "drafter.tail" where there is a drafter; "boundary.trunk", ".normed" [H], ".logits" [V].
        drafter: The drafter's (tokens observed, pairs skipped, rows held); None without one.
    """

    terms: Terms
    tokens: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    drafter: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"PrefixEntry({len(self)} tokens, {self.nbytes:,} bytes, model {self.terms.model})"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, and 8 per token: exactly the data of its file."""
        return 8 * len(self.tokens) + sum(x.numel() * x.element_size() for x in self.tensors.values())

    @property
    def boundary(self) -> Boundary | None:
        """The target's row of the last token; None where the entry lacks it."""
        if any(ROW + name not in self.tensors for name in ("trunk", "normed", "logits")):
            return None
        trunk, normed, logits = (self.tensors[ROW + name] for name in ("trunk", "normed", "logits"))
        return Boundary(len(self), trunk, normed, logits)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of one part, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Reuse:
    """How a session came by its prompt.

    Args:
        reused: Tokens whose rows were restored.
        recomputed: Tokens of the prompt that were fed.
        refused: Why entries that hold a prefix of the prompt were not used.
    """

    reused: int
    recomputed: int
    refused: tuple[str, ...] = ()


def capture(session: Session) -> PrefixEntry:
    """The state of a session up to its pending token, which the entry leaves out.

    Args:
        session: Fed at least once, between bursts.

    Returns:
        An entry of its own memory.

    Raises:
        UserError: The session holds no row yet.
        CapabilityError: Its drafter's state is not one that an entry holds.
    """
    state = session.state
    rows = state.cache.lengths[0]
    if not rows or state.boundary is None or state.boundary.position != rows:
        raise UserError("this session holds no row to capture at: feed a prompt before a capture")
    return capture_at(session, state.tokens[:rows], state.boundary)


@torch.inference_mode()
def capture_at(session: Session, tokens: Sequence[int], boundary: Boundary) -> PrefixEntry:
    """The state of a session whose cache holds exactly the rows of these tokens, also inside a prefill."""
    state = session.state
    assert len(tokens) == boundary.position == state.cache.lengths[0]
    terms, drafter = terms_of(state), _drafter(state)
    counts = None
    tensors = {LAYER + name: x for name, x in state.cache.export().items()}
    if drafter is not None:
        if state.records and not (drafter.primed and drafter.refresh):
            raise CapabilityError(
                "a drafter with refresh=False or primed=False keeps rows that the text alone does not give, so no "
                "entry can be taken after a burst: capture at the prompt, or use the defaults"
            )
        held, counts = drafter.export()
        tensors |= {DRAFTER + name: x for name, x in held.items()}
    for name, row in (("trunk", boundary.trunk_H), ("normed", boundary.normed_H), ("logits", boundary.logits_V)):
        tensors[ROW + name] = row.clone()
    return PrefixEntry(terms, tuple(tokens), tensors, counts)


def terms_of(state: DecodeState) -> Terms:
    """The terms of a session's state.

    Raises:
        CapabilityError: Its drafter's state is not one that an entry holds.
    """
    model, drafter = state.model, _drafter(state)
    return Terms(
        model=fingerprint(model),
        exact=model.exact,
        dtype=str(model.dtype).removeprefix("torch."),
        layout=state.cache.layout,
        machine=_machine(model.device.type, torch.get_num_threads()) if model.exact else "",
        drafter="" if drafter is None else drafter.terms,
    )


def _drafter(state: DecodeState) -> MTPProposer | None:
    if state.proposer is None or isinstance(state.proposer, MTPProposer):
        return state.proposer
    raise CapabilityError(
        f"proposer {state.proposer.name!r} keeps a state that prefix entries do not hold: use the MTP head, or k=0"
    )


@lru_cache
def _machine(device: str, threads: int) -> str:
    facts = machine(device=device, threads=threads)
    return f"{facts['cpu']}, {facts['system']}, {device}, {threads} threads, torch {torch.__version__}"


def check_entry(session: Session, entry: PrefixEntry, tokens: Sequence[int]) -> None:
    """Refuse an entry that cannot become the beginning of a session on these tokens.

    Args:
        session: Without text.
        entry: The entry.
        tokens: The prompt.

    Raises:
        UserError: Why not: text, model, exactness, dtype, layout, machine, drafter, planes, room or last row.
    """
    state, n = session.state, len(entry)
    if state.tokens or state.cache.lengths[0]:
        raise UserError(
            f"this session holds {len(state.tokens)} tokens already: restore an entry into a session without text"
        )
    if n == 0:
        raise UserError("the entry is of no tokens: capture after at least one")
    if n > len(tokens):
        raise UserError(
            f"the entry is of {n} tokens and the prompt of {len(tokens)}: use one no longer than the prompt"
        )
    if tuple(tokens[:n]) != entry.tokens:
        at = next(i for i, (a, b) in enumerate(zip(tokens, entry.tokens)) if a != b)
        raise UserError(
            f"the entry is not a prefix of the prompt: token {at} is {entry.tokens[at]} there and {tokens[at]} in the "
            "prompt; use an entry of the same text"
        )
    drafter, mine = _drafter(state), terms_of(state)
    for field in fields(Terms):
        there, here = getattr(entry.terms, field.name), getattr(mine, field.name)
        if there == here or (field.name == "drafter" and drafter is None):
            continue
        if field.name == "drafter" and not there:
            raise UserError("the entry has no drafter rows, and this session drafts: prime again, or use k=0")
        raise UserError(
            f"the entry is of another {NAMES[field.name]} ({there!r}; this session's is {here!r}): prime again"
        )
    if n + 1 > state.cache.capacity:
        raise UserError(
            f"there is no room for the entry's {n} tokens and the one after them in a session of capacity "
            f"{state.cache.capacity}: make one of a larger capacity"
        )
    _check_planes(entry.part(LAYER), state.cache.shapes(n), "the entry")
    if drafter is not None:
        position, skipped, held = entry.drafter or (0, 0, 0)
        if position != n or skipped + held != n - 1 or (drafter.primed and skipped):
            raise UserError(
                f"the entry's drafter has observed {position} tokens and holds {held} rows, where {n} tokens and "
                f"{n - 1} rows belong to its prefix: prime again"
            )
        if held > drafter.cache.capacity:
            raise UserError(
                f"there is no room for the entry's {held} drafter rows in a drafter of capacity "
                f"{drafter.cache.capacity}: give a proposer of a larger capacity"
            )
        _check_planes(entry.part(DRAFTER), drafter.shapes(n, held), "the entry's drafter")
    config = state.model.config
    row = {"trunk": (config.hidden_size,), "normed": (config.hidden_size,), "logits": (config.vocab_size,)}
    _check_planes(entry.part(ROW), row, "the entry's boundary row")


def _check_planes(found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
    for name, shape in shapes.items():
        if name not in found:
            raise UserError(f"{whose} is truncated: it has no {name!r}; prime again")
        if tuple(found[name].shape) != shape:
            raise UserError(
                f"{whose} is truncated or of another shape: {name!r} is {tuple(found[name].shape)} where {shape} "
                "belongs to its prefix; prime again"
            )


def restore(
    session: Session,
    entry: PrefixEntry,
    tokens: Sequence[int] | None = None,
    *,
    force: int | None = None,
    sink: Sink | None = None,
    boundaries: Sequence[int] = (),
    stable: int | None = None,
) -> None:
    """Give a fresh session a prompt whose beginning an entry holds; only the rest is computed.

    Args:
        session: Without text; as it was after any exception.
        entry: Of a prefix of the prompt.
        tokens: The prompt; None for the entry's tokens alone. The token after it becomes pending: chosen by the
            session's own chooser, from the entry's last row where nothing is left to feed.
        force: As in ``Session.feed``, like the rest.
        sink: Asked between chunks, and given the token chosen.
        boundaries: Lengths past the entry's at which to capture.
        stable: Keep the turn checkpoint after this many tokens of the prompt; at the prompt's end where the entry holds
            as many or more, or for None.

    Raises:
        UserError: The entry does not fit, or the rest cannot be fed; the sentence says why.
        Cancelled: The sink was cancelled.
    """
    text = (
        list(entry.tokens) if tokens is None else token_ids("the prompt", tokens, session.state.model.config.vocab_size)
    )
    check_entry(session, entry, text)
    place(session, entry)
    session.placing = True
    try:
        within = stable - len(entry) if stable is not None and stable > len(entry) else None
        session.feed(text[len(entry) :], force=force, sink=sink, stable=within, boundaries=boundaries)
    except BaseException:
        _empty(session.state)
        raise
    finally:
        session.placing = False


@torch.inference_mode()
def place(session: Session, entry: PrefixEntry) -> None:
    """Put a checked entry's state into a session, which then has no pending token until it is fed the rest."""
    state, drafter = session.state, _drafter(session.state)
    try:
        state.cache.adopt(entry.part(LAYER), len(entry))
        if drafter is not None:
            assert entry.drafter is not None
            drafter.adopt(entry.part(DRAFTER), entry.drafter)
    except BaseException:
        _empty(state)
        raise
    row, device = entry.boundary, state.model.device
    assert row is not None
    state.boundary = Boundary(row.position, *(x.to(device) for x in (row.trunk_H, row.normed_H, row.logits_V)))
    state.tokens[:] = entry.tokens


def _empty(state: DecodeState) -> None:
    """Without text, as when new."""
    state.cache.clear()
    state.tokens.clear()
    state.boundary = None
    if state.proposer is not None:
        state.proposer.reset()


def restored(
    session: Session,
    tokens: Sequence[int],
    store: PrefixStore,
    *,
    boundaries: Sequence[int] = (),
    sink: Sink | None = None,
    stable: int | None = None,
) -> Reuse:
    """Feed a fresh session a prompt by the longest usable entry of a store, and publish the prompt's end there.

    Args:
        session: Without text.
        tokens: The prompt.
        store: Entries.
        boundaries: Further lengths to publish.
        sink: As in ``Session.feed``.
        stable: As in ``restore``.

    Returns:
        What was reused, recomputed and refused.
    """
    model = session.state.model
    text = token_ids("the prompt", tokens, model.config.vocab_size)
    terms_of(session.state)  # refuses a drafter that entries do not hold
    refused: list[str] = []
    used: PrefixEntry | None = None
    for entry in store.candidates(text, fingerprint(model)):
        try:
            check_entry(session, entry, text)
        except UserError as error:
            refused.append(str(error))
            continue
        used = entry
        break
    held = 0 if used is None else len(used)
    wanted = [at for at in sorted({*boundaries, len(text)}) if at > held]
    if used is None:
        session.feed(text, sink=sink, stable=stable, boundaries=wanted)
    else:
        restore(session, used, text, sink=sink, boundaries=wanted, stable=stable)
    for entry in session.captured:
        store.put(entry)
    return Reuse(held, len(text) - held, tuple(refused))
