"""Plain PyTorch forms: the specification. Rows are sorted whole and noise is made by Python integers."""

from __future__ import annotations

from math import inf, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

TAG = 0xFFFFFFFF  # first counter word of a draw that belongs to no id
LEAST_MASS = 1e-12
WORD = 0xFFFFFFFF


class Draws(NamedTuple):
    """Drawn tokens and the laws they were drawn from: see ``shape_draw``."""

    tokens_R: Tensor
    cut_R: Tensor
    peak_R: Tensor
    mass_R: Tensor


def philox(c0: Tensor, c1: int, c2: int, c3: int, key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of Philox4x32-10 for counters whose first word is a tensor of int64.

    Source: Salmon et al. 2011.
    """
    w = [c0, torch.full_like(c0, c1), torch.full_like(c0, c2), torch.full_like(c0, c3)]
    k0, k1 = key
    for _ in range(10):
        a, b = w[0] * 0xD2511F53, w[2] * 0xCD9E8D57
        high_a, high_b = (a >> 32) & WORD, (b >> 32) & WORD
        w = [high_b ^ w[1] ^ k0, b & WORD, high_a ^ w[3] ^ k1, a & WORD]
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return w[0], w[1], w[2], w[3]


def uniform(words: Tensor) -> Tensor:
    """Words as float64 numbers strictly inside (0, 1)."""
    return (words.double() + 0.5) * 2.0**-32


def one_uniform(position: int, purpose: int, start: int, key: tuple[int, int]) -> float:
    """The uniform number of a position that belongs to no id."""
    return float(uniform(philox(torch.tensor([TAG]), position, purpose, start, key)[0])[0])


def edit(
    logits_RV: Tensor,
    tokens_L: Tensor | None,
    length_1: Tensor | None,
    last_n: int | None,
    repetition: float,
    frequency: float,
    presence: float,
    bias_ids_U: Tensor | None,
    bias_U: Tensor | None,
    mask_RV: Tensor | None,
) -> Tensor:
    """See ``workbench_kernels.shape_draw.edit_logits``: id by id."""
    vocab = logits_RV.shape[1]
    for r, row in enumerate(logits_RV):
        if tokens_L is not None and length_1 is not None:
            end = int(length_1[0]) + r
            window = tokens_L[max(0, end - last_n) if last_n is not None else 0 : end]
            ids, counts = window.unique(return_counts=True)
            known = (ids >= 0) & (ids < vocab)
            ids, counts = ids[known], counts[known]
            v = row[ids]
            if repetition != 1:
                divisor = torch.full_like(v, repetition)
                v = torch.where(v > 0, v / divisor, v * divisor)
            v = v - counts.to(v.dtype) * torch.tensor(frequency, dtype=v.dtype)
            row[ids] = v - torch.tensor(presence, dtype=v.dtype)
        if bias_ids_U is not None and bias_U is not None:
            row[bias_ids_U] += bias_U.to(row.dtype)
        if mask_RV is not None:
            row[~mask_RV[r]] = -inf
    return logits_RV


def shape_draw(
    logits_RV: Tensor,
    positions_R: Tensor,
    starts_R: Tensor,
    key: tuple[int, int] | Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    order: str,
    purpose: int,
) -> Draws:
    """See ``workbench_kernels.shape_draw.shape_draw``: row by row, each sorted."""
    if isinstance(key, Tensor):
        first, second = key.tolist()
        key = first, second
    rows = [
        _draw(row, int(at), 0 if purpose == 0 else int(start), key, temperature, top_k, top_p, min_p, order, purpose)
        for row, at, start in zip(logits_RV, positions_R, starts_R)
    ]
    device = logits_RV.device
    columns = list(zip(*rows)) if rows else [(), (), (), ()]
    kinds = (torch.int64, torch.float32, torch.float32, torch.float64)
    return Draws(*(torch.tensor(c, dtype=kind, device=device) for c, kind in zip(columns, kinds)))


def _draw(
    row_V: Tensor, position: int, start: int, key: tuple[int, int], temperature: float, top_k: int, top_p: float,
    min_p: float, order: str, purpose: int,
) -> tuple[int, float, float, float]:  # fmt: skip
    peak = float(row_V.max())
    if not isfinite(peak):
        return -1, float("nan"), float("nan"), float("nan")
    if temperature == 0:
        return int((row_V == peak).nonzero()[0]), peak, peak, float((row_V == peak).sum())
    x, ids = row_V.double().sort(descending=True, stable=True)
    heat = 1.0 if order == "temperature_last" else temperature
    weight = ((x - peak) / heat).exp()
    kept = x > -inf
    if top_k and top_k < len(x):
        kept &= x >= x[top_k - 1]
    judged = weight * kept if order == "chain" else weight
    if top_p < 1:
        upto = torch.cat([judged.new_zeros(1), judged.cumsum(0)])
        larger = upto[torch.searchsorted(-x, -x)]  # mass of strictly larger logits
        kept &= larger < top_p * judged.sum()
    kept &= weight >= min_p
    cut = float(x[kept][-1])
    x, ids = x[kept], ids[kept]
    words = torch.stack(philox((ids >> 2).cpu(), position, purpose, start, key))
    noise = -(-uniform(words.gather(0, (ids & 3).cpu()[None])[0]).log()).log()
    score = (x - peak) / temperature + noise.to(x.device)
    best = ids[score == score.max()].min()
    return int(best), cut, peak, float(((x - peak) / temperature).exp().sum())


def probability(x: Tensor, cut: Tensor, peak: Tensor, mass: Tensor, temperature: float) -> Tensor:
    """Probabilities of logits under a law, float64."""
    return torch.where(x >= cut, ((x.double() - peak.double()) / temperature).exp() / mass, 0.0)


def residual_draw(
    p_logits_BTV: Tensor,
    p_BT: Draws,
    q_logits_BTV: Tensor | None,
    q_BT: Draws | None,
    drafts_BT: Tensor,
    accepted_B3: Tensor,
    counts_B: Tensor,
    starts_B: Tensor,
    key: tuple[int, int],
    temperature: float,
) -> Tensor:
    """See ``workbench_kernels.shape_draw.residual_draw``: sequence by sequence."""
    t = p_logits_BTV.shape[1]
    for b, (n, _, stopped) in enumerate(accepted_B3.tolist()):
        if stopped:
            accepted_B3[b, 1] = -1
            continue
        row = b * t + n
        if n == int(counts_B[b]):
            accepted_B3[b, 1] = p_BT.tokens_R[row]
            continue
        p = probability(p_logits_BTV[b, n], p_BT.cut_R[row], p_BT.peak_R[row], p_BT.mass_R[row], temperature)
        if q_logits_BTV is None or q_BT is None:
            q = torch.zeros_like(p)
            q[drafts_BT[b, n]] = 1.0
        else:
            at = b * (t - 1) + n
            q = probability(q_logits_BTV[b, n], q_BT.cut_R[at], q_BT.peak_R[at], q_BT.mass_R[at], temperature)
        rest = (p - q).clamp(min=0)
        if float(rest.sum()) < LEAST_MASS:
            rest = p
        start = int(starts_B[b])
        u = one_uniform(start + 1 + n, 3, start, key)
        cumulative = rest.cumsum(0)
        at = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
        accepted_B3[b, 1] = at if at < len(rest) else int(rest.nonzero()[-1])
    return accepted_B3


def stock(logits_RV: Tensor, positions_R: Tensor, starts_R: Tensor, **options: object) -> Tensor:
    """Softmax, whole sort and cumulative sum: what filters take the plain way, without a draw."""
    values, _ = torch.softmax(logits_RV, -1).sort(dim=-1, descending=True)
    return values.cumsum(-1)
