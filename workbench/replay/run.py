"""Tapes through the target and, from every start at once, through the drafter.

The row of position p holds what the target says after x_p, and the chain that the drafter proposes when x_p is
pending: a function of the tokens up to p alone, since true rows do not depend on where rounds begin. Under sampling it
is one of the noise too, which belongs to positions. The forced chain is fed the tape's tokens instead of its own.
Documents may run together, each from its own position; a chunk's columns are read from the device by whoever asks for
them, so that the next chunk can be issued before.
Legend: B documents of a group, T rows of a chunk, R rows of all of them, P starts, H hidden, K slots, S tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.cache.kv import KVPlane
from workbench.core.errors import UserError
from workbench.core.tape import Tape, first_pending
from workbench.datasets.groups import chunk_counts
from workbench.datasets.heads import head_slices, row_error
from workbench.datasets.passes import flat_places, padded_tokens, reserve
from workbench.model.checks import check_ids
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies, Landing, upload
from workbench.replay.chains import Job, forced_chains, own_chains, score_rows
from workbench.replay.draws import TapeDraws
from workbench.replay.groups import Ranks
from workbench.replay.options import ReplayOptions


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows first..first+T-1 of one tape; a row that has no next token is not among them.

    Args:
        first: Position of row 0.
        target_id: The target's pick or draw for the next place, int32 [T].
        target_margin: Its lead, in logits, float32 [T]: the top-2 margin of a pick, see ``TapeDraws.picks`` for a draw.
        nll: -ln p of the tape's next token, softmax at T = 1, float32 [T], nats.
        columns: The columns of chains, and the optional ones of rows, by their name in the table: [T] or [T, width],
            -1 or NaN where a slot has no draft. Empty without chains.
        normed: The target's final-normed rows [T, H] on its device.
        trunk: Its trunk rows [T, H] on its device.
    """

    first: int
    target_id: np.ndarray
    target_margin: np.ndarray
    nll: np.ndarray
    columns: dict[str, np.ndarray]
    normed: Tensor
    trunk: Tensor


@dataclass(frozen=True, eq=False)
class Passed:
    """One chunk of a group, its columns still on their way.

    Args:
        documents: Index of every document, [B].
        lengths: Tokens of every document, [B].
        first: Position of the chunk.
        counts: Rows of every document, [B].
        starts: Where its chains start, [B].
        row_names: Columns that belong to rows; the others belong to starts.
        landing: Columns of all rows and of all starts, document after document.
        normed_RH: Final-normed rows.
        trunk_RH: Trunk rows.
        options: What is recorded.
        chains: Whether chains are.
    """

    documents: Sequence[int]
    lengths: Sequence[int]
    first: int
    counts: Sequence[int]
    starts: Sequence[Sequence[int]]
    row_names: Sequence[str]
    landing: Landing
    normed_RH: Tensor
    trunk_RH: Tensor
    options: ReplayOptions
    chains: bool

    def chunks(self) -> Iterator[tuple[int, Chunk, bool]]:
        """Wait for the columns.

        Yields:
            Index of a document, its rows, and whether they are its last.

        Raises:
            NonFiniteError: A row of logits holds NaN or infinity.
        """
        columns = self.landing.arrays()
        r = p = 0
        for document, length, count, starts in zip(self.documents, self.lengths, self.counts, self.starts, strict=True):
            rows, chains = slice(r, r + count), slice(p, p + len(starts))
            r, p = rows.stop, chains.stop
            if not count:
                continue
            scored = {name: columns[name][rows] for name in self.row_names}
            _check(scored.pop("extremes"), range(self.first, self.first + count))
            if self.chains:
                found = {name: x[chains] for name, x in columns.items() if name not in self.row_names}
                scored |= _placed(self.first, count, length, starts, found, self.options)
            target_id, margin, nll = (scored.pop(name) for name in ("target_id", "target_margin", "nll"))
            chunk = Chunk(
                self.first, target_id, margin, nll, scored, normed=self.normed_RH[rows], trunk=self.trunk_RH[rows]
            )
            yield document, chunk, self.first + count == length - 1


def _check(extremes_R2: np.ndarray, positions: Sequence[int]) -> None:
    """Refuse rows that hold NaN or infinity."""
    for i in np.flatnonzero(~np.isfinite(extremes_R2).all(-1)).tolist():
        raise row_error(float(extremes_R2[i, 0]), positions[i])


def _placed(
    first: int, t: int, length: int, starts: Sequence[int], found: dict[str, np.ndarray], options: ReplayOptions
) -> dict[str, np.ndarray]:
    """Columns of chains in the rows of their starts, empty elsewhere; slots past the end of the tape stay empty."""
    kinds = {column.name: column for column in options.columns() if column.per != "row"}
    columns = {name: column.empty(t) for name, column in kinds.items()}
    if not starts:
        return columns
    at = np.array(starts)
    for name in ("draft_extremes", "forced_extremes"):
        if (extremes_PW := found.pop(name, None)) is not None:
            for slot in range(options.k_max):
                _check(extremes_PW[:, 2 * slot : 2 * slot + 2], (at + slot).tolist())
    known_PK = at[:, None] + 1 + np.arange(options.k_max) < length
    for name, values_PW in found.items():
        column, kind = columns[name], kinds[name]
        known_PW = known_PK.repeat(kind.width // options.k_max, 1) if kind.per == "slot" else known_PK[:, :1]
        column[at - first] = np.where(known_PW, values_PW, column[at - first])
    return columns


@torch.inference_mode()
def run_group(
    model: HybridModel,
    tapes: Sequence[Tape],
    options: ReplayOptions,
    copies: HostCopies,
    *,
    documents: Sequence[int] = (0,),
    sequence: int = 0,
    chains: bool = True,
    cache: Mapping[str, Any] | None = None,
) -> Iterator[Passed]:
    """Run documents together in chunks, waiting for nothing but what draws and optional columns read.

    Args:
        model: The target with its head.
        tapes: The documents, of at least two tokens and ids of the vocabulary; one when tokens are drawn.
        options: Slots, stride, chunk, carrier, shaping and seed.
        copies: Brings columns to the host.
        documents: Their indices; default (0,).
        sequence: The tape's random stream under the seed; default 0.
        chains: Draft; False only scores.
        cache: How the target keeps its rows, as arguments of ``new_cache``; None for dense and all of them.

    Yields:
        Chunks in order, covering positions 0..len-2 of every document.
    """
    lengths, b = [len(tape) for tape in tapes], len(tapes)
    assert b == 1 or options.plain, "draws go document by document"
    draws = None if options.plain else TapeDraws(tapes[0].tokens, options, sequence)
    state = model.new_cache(batch=b, capacity=max(lengths), widest=options.chunk, **(cache or {}))
    draft_cache = model.new_draft_cache(batch=b, capacity=max(lengths)) if chains else None
    for made in (state, draft_cache):
        reserve(made.planes if made is not None else (), max(lengths))
    tokens_BS = upload(padded_tokens(tapes, lengths), model.device)
    fed = [n - 1 for n in lengths]
    last: Tensor | None = None
    for lo in range(0, max(fed), options.chunk):
        counts = chunk_counts(fed, lo, options.chunk)
        t = max(counts)
        rows = model.forward(tokens_BS[:, lo : lo + t], state, counts=counts, logits="none", checked=True)
        every = [np.arange(n) for n in counts]
        normed, trunk = (_picked(x, every) for x in (rows.normed_BTH, rows.trunk_BTH))
        following = _picked(tokens_BS[:, lo + 1 : lo + 1 + t].unsqueeze(-1), every)[:, 0]
        if draws is not None:
            draws.prepare(lo + 1, t + options.k_max, model.config.vocab_size, model.device)
        columns = score_rows(model, normed, following, lo, draws, options)
        names, starts = (
            tuple(columns),
            [[] for _ in tapes] if draft_cache is None else _starts(tapes, lo, counts, options),
        )
        if draft_cache is not None:
            carriers = model.carrier(rows, options.carrier)
            known = carriers if last is None else torch.cat([last, carriers], 1)
            last = carriers[:, -1:]  # of a document that ended earlier it means nothing, and is not used
            begin = max(lo, 1)  # the pair of position p needs the row before it
            pairs = [max(lo + n - begin, 0) for n in counts]
            if max(pairs):
                end = begin + max(pairs)
                hidden = model.draft(
                    tokens_BS[:, begin:end], known[:, : end - begin], draft_cache, counts=pairs, checked=True
                )
                if any(starts):
                    plane = draft_cache.planes[0]
                    assert isinstance(plane, KVPlane)
                    flat = [p for each in starts for p in each]
                    of = [i for i, each in enumerate(starts) for _ in each]
                    carrier = _picked(hidden, [np.array(each, np.int64) - begin for each in starts])
                    at = _picked(rows.normed_BTH, [np.array(each, np.int64) - lo for each in starts])
                    job = Job(model, plane, carrier, at, flat, of, options, draws)
                    columns |= own_chains(job)
                    if options.forced:
                        columns |= forced_chains(job, [tape.tokens for tape in tapes])
        landing = copies.send(columns)
        yield Passed(documents, lengths, lo, counts, starts, names, landing, normed, trunk, options, chains)


def _picked(x_BTH: Tensor, places: Sequence[np.ndarray]) -> Tensor:
    """Rows of every document, document after document; a view where they are all rows of the only one."""
    if len(places) == 1 and len(places[0]) == x_BTH.shape[1]:
        return x_BTH[0]
    return x_BTH.flatten(0, 1)[upload(flat_places(places, x_BTH.shape[1]), x_BTH.device)]


def _starts(tapes: Sequence[Tape], lo: int, counts: Sequence[int], options: ReplayOptions) -> list[list[int]]:
    """Where chains start among the rows of a chunk."""
    found = []
    for tape, n in zip(tapes, counts, strict=True):
        base = first_pending(tape.prompt_len)
        begin = max(lo, 1, base)
        begin += -(begin - base) % options.stride
        found.append(list(range(begin, lo + n, options.stride)))
    return found


@torch.inference_mode()
def chain_tape(
    model: HybridModel,
    tape: Tape,
    options: ReplayOptions,
    *,
    sequence: int = 0,
    chains: bool = True,
    cache: Mapping[str, Any] | None = None,
) -> Iterator[Chunk]:
    """Run one tape in chunks, reading each before the next is run.

    Args:
        model: The target with its head.
        tape: The document, of at least two tokens.
        options: Slots, stride, chunk, carrier, shaping and seed.
        sequence: The tape's random stream under the seed; default 0.
        chains: Draft; False only scores.
        cache: How the target keeps its rows, as arguments of ``new_cache``; None for dense and all of them.

    Yields:
        Chunks in order, covering positions 0..len-2. With ranks a chunk comes once the rows are known in which its last
        drafts stand, up to ``k_max - 1`` past its end.

    Raises:
        UserError: The tape has one token only.
        NonFiniteError: A row of logits holds NaN or infinity.
    """
    n = len(tape)
    if n < 2:
        raise UserError(f"tape {tape.doc_id!r} has {n} token; at least 2 are needed to score one")
    check_ids(torch.from_numpy(tape.tokens), model.config.vocab_size)
    ranks = Ranks(n - 1, options.k_max) if chains and options.ranks else None
    held: list[Chunk] = []
    copies = HostCopies(model.device)
    for passed in run_group(model, [tape], options, copies, sequence=sequence, chains=chains, cache=cache):
        ((_, chunk, done),) = passed.chunks()
        lo, hi = chunk.first, chunk.first + len(chunk.nll)
        if ranks is not None:
            ranks.ids[lo:hi] = chunk.columns["draft_ids"]
            chunk.columns.update(draft_rank=ranks.rank[lo:hi], draft_target_logp=ranks.logp[lo:hi])
            for part, logits in head_slices(model, chunk.normed):
                ranks.judge(logits, lo + part.start)
        held.append(chunk)
        reach = options.k_max - 1 if ranks is not None else 0
        while held and (done or held[0].first + len(held[0].nll) + reach <= hi):
            yield held.pop(0)
