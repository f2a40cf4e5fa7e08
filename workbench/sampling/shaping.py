"""From logits to a law: penalties, bias, mask, then temperature and filters in the order asked for.

The same for target, drafter and plain decode; rows of a trimmed vocabulary are mapped to the target's ids before they
come here. Legend: R rows, V vocabulary, N largest logits of a row, S ids of a support.

Every filter keeps the ids above some logit, ties included. So a support is a prefix of the logits in descending
order, the shortest of those that the filters leave, and N largest logits settle it as soon as it ends before the N-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import NonFiniteError, UserError
from workbench.sampling.law import Law, point_mass
from workbench.sampling.options import Shaping
from workbench.sampling.penalties import penalise_rows

SIZES = (64, 1024)  # N, growing until a support is settled; then the whole row
SORT = 32_768  # longer rows are not sorted on a CPU for top-p alone; a histogram finds where it cuts
BINS = 4096


def law(
    logits_V: Tensor,
    shaping: Shaping,
    *,
    history: Sequence[int] | np.ndarray = (),
    mask: Tensor | None = None,
    position: int | None = None,
) -> Law:
    """The law of the next token after ``history``.

    Args:
        logits_V: One row; minus infinity forbids an id.
        shaping: What to do to it.
        history: The committed text, prompt included; only penalties read it.
        mask: Bool [V], True where an id is allowed; applied before the filters. Default None allows all.
        position: Absolute position of the row, for errors; default None.

    Returns:
        The law. Where nothing filters, its support is every allowed id of finite logit.

    Raises:
        NonFiniteError: A row of known position holds NaN or plus infinity, or no finite logit.
        UserError: The same for a row of unknown position; a mask of another size or that allows no id of finite
            logit; a bias of an id that the vocabulary lacks.
    """
    masks = None if mask is None else [mask]
    return laws(logits_V[None], shaping, history=history, masks=masks, position=position)[0]


def laws(
    logits_RV: Tensor,
    shaping: Shaping,
    *,
    history: Sequence[int] | np.ndarray = (),
    drafted: Sequence[int] | np.ndarray = (),
    masks: Sequence[Tensor | None] | Tensor | None = None,
    position: int | None = None,
) -> list[Law]:
    """The laws of the rows of one verify: row r follows the history and the first r drafted tokens.

    Args:
        logits_RV: Rows; row 0 follows the history.
        shaping: What to do to them.
        history: The committed text, prompt included; only penalties read it.
        drafted: Tokens that follow it; at least R - 1 where penalties apply.
        masks: One mask or None per row, as ``law`` takes them; None allows all.
        position: Absolute position of row 0, for errors; default None.

    Returns:
        R laws, each equal to what ``law`` makes of its row and its own history.

    Raises:
        NonFiniteError: As ``law``.
        UserError: As ``law``.
    """
    wide_RV = logits_RV.detach() if logits_RV.dtype == torch.float64 else logits_RV.detach().float()
    shaped_RV = penalise_rows(wide_RV, history, drafted, shaping).contiguous()
    made = []
    for r, x_V in enumerate(shaped_RV):
        made.append(_law(x_V, shaping, None if masks is None else masks[r], None if position is None else position + r))
    return made


def _law(x_V: Tensor, shaping: Shaping, mask_V: Tensor | None, position: int | None) -> Law:
    peak = float(x_V.max())  # NaN, when the row holds one
    if not -inf < peak < inf:
        raise _not_finite(peak, position)
    if mask_V is not None:
        if mask_V.shape != x_V.shape or mask_V.dtype != torch.bool:
            raise UserError(
                f"a mask of {tuple(mask_V.shape)} {mask_V.dtype} is not valid here: give a bool mask of "
                f"({len(x_V)},), True where an id is allowed"
            )
        x_V = torch.where(mask_V, x_V, -inf)
        peak = float(x_V.max())
        if peak == -inf:
            raise UserError(
                f"the mask allows {int(mask_V.sum())} of {len(x_V)} ids and none of them has a finite logit; "
                "allow at least one id that the model and logit_bias do not forbid"
            )
    if shaping.greedy:
        return point_mass(int(x_V.argmax()), x_V)
    ids_S = _support(x_V, peak, shaping)
    if len(ids_S) == 1:
        return point_mass(int(ids_S[0]), x_V)
    values_S = x_V if len(ids_S) == len(x_V) else x_V[ids_S]
    weights_S = _weights(values_S, peak, shaping.temperature)
    return Law(ids=ids_S, probs=weights_S / weights_S.sum())


def _not_finite(peak: float, position: int | None) -> UserError:
    kind = "NaN" if peak != peak else "infinity" if peak > 0 else "no finite value"
    if position is not None:
        return NonFiniteError(position, kind)
    return UserError(
        f"a row of logits holds {kind}; give finite logits, with -inf for forbidden ids only: "
        "check the checkpoint's weights, its dtype, and logit_bias"
    )


def _weights(x_N: Tensor, peak: float, temperature: float) -> Tensor:
    """exp((x - peak) / temperature) in float64; 1 at the peak, so that nothing overflows."""
    return (x_N.double() - peak).div_(temperature).exp_()


def _support(x_V: Tensor, peak: float, shaping: Shaping) -> Tensor:
    """Ids that pass every filter, ascending."""
    top_k = shaping.top_k if shaping.top_k < len(x_V) else 0
    heat = 1.0 if shaping.order == "temperature_last" else shaping.temperature
    whole_mass = shaping.top_p < 1 and not (top_k and shaping.order == "chain")
    weights_V = _weights(x_V, peak, heat) if whole_mass else None
    mass = None if weights_V is None else float(weights_V.sum())
    if not top_k and shaping.top_p == 1:
        return _above(x_V, peak, shaping.min_p, heat)
    by_bins = not top_k and len(x_V) > SORT and x_V.device.type == "cpu"
    sizes = [n for n in SIZES if top_k < n < len(x_V)]
    for n in sizes if by_bins else [*sizes, len(x_V)]:
        values_N, ids_N = x_V.topk(n) if n < len(x_V) else x_V.sort(descending=True)
        kept = _prefix(values_N, _weights(values_N, peak, heat), top_k, mass, shaping, whole=n == len(x_V))
        if kept < n or n == len(x_V):
            return ids_N[:kept].sort().values
    assert weights_V is not None and mass is not None
    cut = _cut(x_V.numpy(), weights_V.numpy(), peak, shaping.top_p * mass)
    return ((x_V >= cut) & (x_V > -inf) & (weights_V >= shaping.min_p)).nonzero()[:, 0]


def _cut(x_V: np.ndarray, weights_V: np.ndarray, peak: float, target: float) -> float:
    """The least logit such that strictly larger ones weigh less than ``target``: the last that top-p keeps."""
    low = float(x_V.min(where=x_V > -inf, initial=peak))
    if low == peak:
        return low
    share_V = (peak - x_V.astype(np.float64)) / (peak - low)
    bin_V = np.minimum(share_V * BINS, BINS - 1).astype(np.int64)  # rises as the logit falls; equal logits share a bin
    upto = np.bincount(bin_V, weights=weights_V, minlength=BINS).cumsum()
    cut = int(np.searchsorted(upto, target))
    if cut == BINS:
        return low
    inside = bin_V == cut
    order = np.argsort(-x_V[inside])
    larger = (upto[cut - 1] if cut else 0.0) + np.concatenate([[0.0], weights_V[inside][order].cumsum()[:-1]])
    return float(x_V[inside][order][int((larger < target).sum()) - 1])


def _above(x_V: Tensor, peak: float, min_p: float, heat: float) -> Tensor:
    """Ids that pass min-p alone, or all of finite logit."""
    if min_p == 0 and float(x_V.min()) > -inf:
        return torch.arange(len(x_V), device=x_V.device)
    if min_p == 0:
        return (x_V > -inf).nonzero()[:, 0]
    cut = heat * float(np.log(min_p))
    ids_S = (x_V >= peak + cut - 1e-5 * (1 + abs(peak) + abs(cut))).nonzero()[:, 0]  # a little below; then exactly
    values_S = x_V[ids_S]
    return ids_S[(values_S > -inf) & (_weights(values_S, peak, heat) >= min_p)]


def _prefix(
    values_N: Tensor, weights_N: Tensor, top_k: int, mass: float | None, shaping: Shaping, *, whole: bool
) -> int:
    """How many of the largest logits pass every filter; N when more of the row must be seen.

    Args:
        values_N: The N largest logits, descending.
        weights_N: Their weights, 1 at the peak.
        top_k: Ids top-k keeps, without ties; 0 for no top-k.
        mass: Weight of the whole row, where top-p is judged on it; None where it is judged on what top-k leaves.
        shaping: The filters.
        whole: The row has no more than these N.

    Returns:
        The count, ties at the boundary included.
    """
    kept = int((values_N > -inf).sum())
    if top_k:
        kept = min(kept, int((values_N >= values_N[top_k - 1]).sum()))
        if kept == len(values_N) and not whole:  # more ties may follow, and count in what top-p is judged on
            return kept
    if shaping.min_p > 0:
        within = int((weights_N >= shaping.min_p).sum())
    else:
        within = kept
    if shaping.top_p < 1:
        total = float(weights_N[:kept].sum()) if mass is None else mass
        more_probable_N = weights_N.cumsum(0)[:-1]
        last = int((more_probable_N < shaping.top_p * total).sum())
        kept = min(kept, int((values_N >= values_N[last]).sum()))
    return min(kept, within)
