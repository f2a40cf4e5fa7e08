"""The truth beside records: full laws of target and drafter at some positions, and what keeping k ids does to them.

Nothing is written: rows of logits live for one block, so that a vocabulary of any size fits.

Legend: S tokens of a document, P positions, R rows of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError, check_int, check_real
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.datasets.anchors import Anchors, anchor_positions, check_anchors
from workbench.datasets.extract import numerical_class
from workbench.datasets.heads import extremes
from workbench.datasets.laws import compare_laws
from workbench.datasets.options import LEAST_TEMPERATURE, ExtractOptions
from workbench.datasets.passes import padded_tokens
from workbench.datasets.provenance import as_corpus, check_tapes
from workbench.datasets.topk import check_rows
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import upload

if TYPE_CHECKING:
    import polars as pl

KS = (1, 2, 4, 8, 16, 32, 64, 128)
BLOCK_VALUES = 1 << 21  # logits compared at a time, each some tens of bytes in float64
LEAST_TOKENS = 3  # position 1 and the token after it
OF_TARGET = ("mass", "tail", "tv", "tv_spread")
OF_DRAFTER = ("kl", "kl_bucket", "accept", "accept_kept", "accept_bucket", "accept_renorm", "bound")
COLUMNS = (*OF_TARGET, *OF_DRAFTER)


def topk_rows(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    ks: Sequence[int] | None = None,
    anchors: Anchors = 64,
    temperature: float = ExtractOptions.temperature,
    seed: int = ExtractOptions.seed,
    chunk: int = ExtractOptions.chunk,
    exact: bool | None = None,
) -> pl.DataFrame:
    """What keeping k ids hides at every position, against the full laws of the target and of its drafter.

    The drafter's law at position p is that of its first step: the pair (x_p, h_{p-1}) after true rows.

    Args:
        model: The target; without an MTP head the columns of a drafter are null.
        tapes: The documents.
        ks: Numbers of kept ids; None for powers of two from 1 to 128 that the vocabulary has.
        anchors: Positions: a count per document (one per equal bucket, drawn by the seed), "all", a list, or a mapping
            from document id to its list; default 64.
        temperature: Of both laws; default 0.7, that of records.
        seed: Seed of the choice of positions; default 20260811.
        chunk: Tokens per forward; default 512.
        exact: Numerical class; None for the model's own.

    Returns:
        A row per position and k: doc_id, source, position, temperature, k, and what ``compare_laws`` gives: mass, tail,
        tv, tv_spread, kl, kl_bucket, accept, accept_kept, accept_bucket, accept_renorm, bound. ``topk_cost`` sums up.

    Raises:
        UserError: An option or a tape is not valid.
        NonFiniteError: A row of logits holds NaN or infinity.
    """
    import polars as pl

    vocab = model.config.vocab_size
    chosen = check_ks(ks if ks is not None else [k for k in KS if k <= vocab], vocab)
    temperature = check_real("temperature", temperature, low=LEAST_TEMPERATURE)
    chunk, seed = check_int("chunk", chunk, low=1), check_int("seed", seed, low=0)
    anchors, corpus = check_anchors(anchors), as_corpus(tapes)
    check_tapes(model, corpus)
    short = next((tape for tape in corpus if len(tape) < LEAST_TOKENS), None)
    if short is not None:
        raise UserError(
            f"document {short.doc_id!r} has {len(short)} tokens; the report needs at least {LEAST_TOKENS}: leave "
            f"shorter documents out with corpus(..., min_tokens={LEAST_TOKENS})"
        )
    places = [anchor_positions(tape, anchors=anchors, gamma=1, seed=seed) for tape in corpus]
    parts = []
    with numerical_class(model, exact), progress(corpus.n_tokens, desc="laws", unit="tok") as bar:
        for tape, at in zip(corpus, places, strict=True):
            for positions, columns in _blocks(model, tape, at, chosen, temperature, chunk):
                parts.append(_frame(tape, positions, columns, chosen, temperature))
            bar.update(len(tape))
    return pl.concat(parts)


def check_ks(ks: Any, most: int) -> list[int]:
    """Numbers of kept ids, ascending.

    Args:
        ks: One number, or several.
        most: The largest that is valid.

    Returns:
        The numbers.

    Raises:
        UserError: There are none, or one is out of range.
    """
    listed = [ks] if isinstance(ks, int) else ks
    if isinstance(listed, str) or not isinstance(listed, (Sequence, range)) or not len(listed):
        raise UserError(f"ks={ks!r} is not valid: give numbers of kept ids from 1 to {most}")
    return sorted({check_int("ks", k, low=1, high=most, hint="no more ids are there to keep") for k in listed})


@torch.inference_mode()
def _blocks(
    model: HybridModel, tape: Tape, at_P: np.ndarray, ks: list[int], temperature: float, chunk: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Positions and columns of a document, some rows at a time."""
    target_PH, drafter_PH = _rows(model, tape, at_P, chunk)
    step = max(1, BLOCK_VALUES // model.config.vocab_size)
    for lo in range(0, len(at_P), step):
        part, positions = slice(lo, lo + step), at_P[lo : lo + step]
        logits_RV = model.unembed(target_PH[None, part])[0]
        try:
            check_rows(extremes(logits_RV).cpu().numpy(), positions)
        except UserError as error:
            error.args = (f"document {tape.doc_id!r}: {error}",)
            raise
        draft_RV = None if drafter_PH is None else model.unembed_draft(drafter_PH[None, part])[0]
        made = compare_laws(logits_RV, draft_RV, ks=ks, temperature=temperature)
        yield positions, {name: x.cpu().numpy() for name, x in made.items()}


def _rows(model: HybridModel, tape: Tape, at_P: np.ndarray, chunk: int) -> tuple[Tensor, Tensor | None]:
    """Rows of the target at some positions, and what the drafter gives there; either goes to its head as it is."""
    n = int(at_P[-1]) + 1
    tokens_BS = upload(padded_tokens([tape], [n]), model.device)
    cache = model.new_cache(capacity=n)
    drafts = model.new_draft_cache(capacity=n) if model.can_draft else None
    target, drafter = [], []
    for start in range(0, n, chunk):
        end = min(start + chunk, n)
        rows = model.forward(tokens_BS[:, start:end], cache, logits="none", checked=True)
        here = at_P[(at_P >= start) & (at_P < end)]
        target.append(rows.normed_BTH[0][upload(here - start, model.device)])
        last = min(end + 1, n)  # pairs (x_p, h_{p-1}) for p in [start + 1, last)
        if drafts is None or last == start + 1:
            continue
        carriers = model.carrier(rows)[:, : last - start - 1]
        out = model.draft(tokens_BS[:, start + 1 : last], carriers, drafts, checked=True)
        here = at_P[(at_P > start) & (at_P < last)]
        drafter.append(out[0][upload(here - start - 1, model.device)])
    return torch.cat(target), torch.cat(drafter) if drafter else None


def _frame(
    tape: Tape, positions: np.ndarray, columns: dict[str, np.ndarray], ks: list[int], temperature: float
) -> pl.DataFrame:
    import polars as pl

    n, rows = len(ks), len(positions) * len(ks)
    frame = pl.DataFrame(
        {
            "doc_id": [tape.doc_id] * rows,
            "source": [tape.source] * rows,
            "position": np.repeat(positions.astype(np.int32), n),
            "temperature": [temperature] * rows,
            "k": np.tile(np.asarray(ks, np.int32), len(positions)),
        }
    )
    full = {name: columns[name].reshape(-1) if name in columns else None for name in COLUMNS}
    return frame.with_columns(
        pl.lit(None, pl.Float64).alias(name) if x is None else pl.Series(name, x, pl.Float64)
        for name, x in full.items()
    )
