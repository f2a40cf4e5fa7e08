"""Penalties over the committed text, and logit bias. Legend: R rows, V vocabulary, U distinct ids of all windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError
from workbench.sampling.options import Shaping


def penalise(logits_V: Tensor, history: Sequence[int] | np.ndarray, shaping: Shaping) -> Tensor:
    """Logits after penalties and bias.

    Each distinct id of the last ``penalty_last_n`` tokens is penalised once: repetition (v / r above zero, v * r
    below), then minus count times frequency, then minus presence, each rounded to the dtype of the logits. Ids the
    vocabulary lacks are ignored. The bias is added after.

    Args:
        logits_V: One row.
        history: The committed text, prompt included.
        shaping: Penalties, window and bias.

    Returns:
        A new row, or the row given when nothing applies to it.

    Raises:
        UserError: The bias names an id that the vocabulary lacks.

    Source: seed 002, penalize_logits; the repetition penalty is that of Keskar et al. 2019 (CTRL), as transformers
    applies it.
    """
    return penalise_rows(logits_V[None], history, (), shaping)[0]


def penalise_rows(
    logits_RV: Tensor, history: Sequence[int] | np.ndarray, drafted: Sequence[int] | np.ndarray, shaping: Shaping
) -> Tensor:
    """Rows of one verify after penalties and bias: row r sees the history and the first r drafted tokens.

    Args:
        logits_RV: Rows; row 0 follows the history.
        history: The committed text, prompt included.
        drafted: Tokens that follow it, at least R - 1 of them.
        shaping: Penalties, window and bias.

    Returns:
        New rows, bit for bit those of R calls of ``penalise``; or the rows given when nothing applies to any.

    Raises:
        UserError: The bias names an id that the vocabulary lacks.
    """
    rows, vocab = logits_RV.shape
    out_RV = logits_RV
    if shaping.penalised:
        ids, counts = window_counts(history, drafted, rows, shaping.penalty_last_n, vocab)
        if len(ids):
            ids_U = torch.from_numpy(ids).to(logits_RV.device)
            counts_RU = torch.from_numpy(counts).to(logits_RV.device)
            out_RV = logits_RV.clone()
            v_RU = logits_RV[:, ids_U]
            r = shaping.repetition_penalty
            changed_RU = torch.where(v_RU > 0, v_RU / r, v_RU * r) if r != 1 else v_RU
            changed_RU = changed_RU - counts_RU.to(v_RU.dtype) * shaping.frequency_penalty
            changed_RU = changed_RU - shaping.presence_penalty
            out_RV[:, ids_U] = torch.where(counts_RU > 0, changed_RU, v_RU)
    pairs = shaping.bias
    if pairs:
        if pairs[-1][0] >= vocab:
            raise UserError(
                f"logit_bias names id {pairs[-1][0]}, but the vocabulary has {vocab} ids; name ids below {vocab}"
            )
        out_RV = out_RV.clone() if out_RV is logits_RV else out_RV
        ids_B = torch.tensor([i for i, _ in pairs], device=out_RV.device)
        out_RV[:, ids_B] += torch.tensor([bias for _, bias in pairs], dtype=out_RV.dtype, device=out_RV.device)
    return out_RV


def window_counts(
    history: Sequence[int] | np.ndarray,
    drafted: Sequence[int] | np.ndarray,
    rows: int,
    last_n: int | None,
    vocab: int,
) -> tuple[np.ndarray, np.ndarray]:
    """How often each id stands in each row's window.

    Args:
        history: Tokens before row 0's place.
        drafted: Tokens after it, at least ``rows`` - 1.
        rows: Rows; row r's window ends with drafted token r - 1.
        last_n: Tokens in a window; None for all.
        vocab: Ids at or above it, and negative ones, are left out.

    Returns:
        Distinct ids, ascending, int64 [U]; counts, int64 [R, U].
    """
    assert len(drafted) >= rows - 1, f"{rows} rows need {rows - 1} drafted tokens, not {len(drafted)}"
    first = 0 if last_n is None else max(0, len(history) - last_n)
    before = np.asarray(history[first:], dtype=np.int64)
    tokens = np.concatenate([before, np.asarray(drafted[: rows - 1], dtype=np.int64)])
    ids, place = np.unique(tokens, return_inverse=True)
    counts = np.empty((rows, len(ids)), np.int64)
    counts[0] = np.bincount(place[: len(before)], minlength=len(ids))
    for r in range(1, rows):
        end = len(before) + r
        counts[r] = counts[r - 1]
        counts[r, place[end - 1]] += 1
        if last_n is not None and end > last_n:
            counts[r, place[end - 1 - last_n]] -= 1
    valid = (ids >= 0) & (ids < vocab)
    return ids[valid], np.ascontiguousarray(counts[:, valid])
