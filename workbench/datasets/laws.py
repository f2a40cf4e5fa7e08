"""Two laws compared in full and through the k ids that are kept: the mass left out, divergence, acceptance.

The target's k most probable ids are kept, the others are one bucket. By the log-sum inequality the divergence of the
laws so coarsened is at least 0 and at most the full one. Acceptance sum(min(p, q)) lies between the sum over the kept
ids and that sum plus min(tail of p, tail of q); with p renormalised over the kept ids it is off by at most the tail.
Tails are sums over the ids left out, not one minus a sum, so that small ones are right.

Legend: R rows, V vocabulary, K largest k, N number of ks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.datasets.topk import largest


def divergence_terms(p: Tensor, q: Tensor, logp: Tensor, logq: Tensor) -> Tensor:
    """p ln(p / q) - p + q, elementwise: never negative, and summed over laws it is their divergence.

    Args:
        p: Probabilities, float64.
        q: Probabilities, same shape.
        logp: Their logarithms; -inf for 0.
        logq: Likewise.

    Returns:
        The terms, nats; infinity where q is 0 and p is not.
    """
    d = logp - logq
    near = p * (d + torch.expm1(-d))  # of two numbers that nearly cancel, expm1 is never below -d
    term = torch.where(d < -1, p * d + (q - p), near)
    return torch.where(p == 0, q, term)


def bucket_divergence(p_Rk: Tensor, q_Rk: Tensor, p_tail_R: Tensor, q_tail_R: Tensor) -> Tensor:
    """Divergence of a target from a drafter that both keep k ids and one bucket for the rest.

    Args:
        p_Rk: The target's probabilities of the kept ids, of the full vocabulary.
        q_Rk: The drafter's, of the same ids.
        p_tail_R: The target's probability of all other ids.
        q_tail_R: The drafter's.

    Returns:
        Float64 [R], nats; at least 0, and at most the divergence of the full laws.

    Source: the log-sum inequality (Cover and Thomas, Elements of Information Theory, Theorem 2.7.1).
    """
    p = torch.cat([p_Rk.double(), p_tail_R.double().unsqueeze(-1)], -1)
    q = torch.cat([q_Rk.double(), q_tail_R.double().unsqueeze(-1)], -1)
    return divergence_terms(p, q, p.log(), q.log()).sum(-1)


class Split:
    """Sums over the first k of the kept ids and over all others, for every k.

    Args:
        values_RV: Values of every id.
        ids_RK: The kept ids, most probable first.
    """

    def __init__(self, values_RV: Tensor, ids_RK: Tensor) -> None:
        self.kept_RK = values_RV.gather(-1, ids_RK)
        rest_R1 = values_RV.scatter(-1, ids_RK, 0.0).sum(-1, keepdim=True)
        self.inside_RK = self.kept_RK.cumsum(-1)
        later_RK = self.kept_RK.flip(-1).cumsum(-1).flip(-1)[:, 1:]
        self.outside_RK = torch.cat([later_RK + rest_R1, rest_R1], -1)
        self.total_R = self.inside_RK[:, -1] + rest_R1[:, 0]


def log_outside(logs_RV: Tensor, ids_RK: Tensor) -> Tensor:
    """Logarithms of the probability outside the first k kept ids, for every k; right where the sum itself is 0.

    Args:
        logs_RV: Logarithms of probabilities.
        ids_RK: The kept ids, most probable first.

    Returns:
        Float64 [R, K]; -inf where nothing is left.
    """
    rest_R1 = logs_RV.scatter(-1, ids_RK, -torch.inf).logsumexp(-1, keepdim=True)
    later_RK = logs_RV.gather(-1, ids_RK).flip(-1).logcumsumexp(-1).flip(-1)[:, 1:]
    return torch.cat([torch.logaddexp(later_RK, rest_R1.expand_as(later_RK)), rest_R1], -1)


def compare_laws(
    target_RV: Tensor, drafter_RV: Tensor | None, *, ks: Sequence[int], temperature: float
) -> dict[str, Tensor]:
    """What keeping k ids of the target's rows hides, against both laws in full.

    Args:
        target_RV: The target's logits, finite.
        drafter_RV: The drafter's logits of the same rows, -inf for ids it lacks; None for no drafter.
        ks: Numbers of kept ids, ascending, each at most V.
        temperature: Of both laws.

    Returns:
        Float64 [R, N] each: ``mass`` and ``tail`` of the target; ``tv`` of the renormalised kept law from the full one
        and ``tv_spread`` of the law that spreads the tail evenly over the ids left out. With a drafter also ``kl`` and
        ``accept`` of the full laws (the same for every k), ``kl_bucket``, ``accept_kept`` (kept ids alone),
        ``accept_bucket`` (the tails as one more id), ``accept_renorm`` (the kept law renormalised) and ``bound``, by
        which ``accept_bucket`` may be too high and ``accept_kept`` too low.
    """
    logp, at = _log_law(target_RV, temperature), [k - 1 for k in ks]
    p = logp.exp()
    _, ids_RK = largest(target_RV, max(ks))
    mass = Split(p, ids_RK)
    inside, tail = mass.inside_RK[:, at], mass.outside_RK[:, at]
    out = {"mass": inside, "tail": tail}
    out["tv"] = torch.stack([_renormalised_tv(mass, k) for k in ks], -1)
    out["tv_spread"] = torch.stack([_spread_tv(p, ids_RK[:, :k], tail[:, n]) for n, k in enumerate(ks)], -1)
    if drafter_RV is None:
        return out
    logq = _log_law(drafter_RV, temperature)
    q = logq.exp()
    theirs, shared = Split(q, ids_RK), Split(torch.minimum(p, q), ids_RK)
    terms = Split(divergence_terms(p, q, logp, logq), ids_RK)
    theirs_tail = theirs.outside_RK[:, at]
    logs = [log_outside(x, ids_RK)[:, at] for x in (logp, logq)]
    bucket = divergence_terms(tail, theirs_tail, *logs)
    bound, kept = torch.minimum(tail, theirs_tail), shared.inside_RK[:, at]
    renormalised = [
        torch.minimum(mass.kept_RK[:, :k] / inside[:, n, None], theirs.kept_RK[:, :k]).sum(-1) for n, k in enumerate(ks)
    ]
    return out | {
        "kl": terms.total_R[:, None].expand_as(tail),
        "kl_bucket": terms.inside_RK[:, at] + bucket,
        "accept": shared.total_R[:, None].expand_as(tail),
        "accept_kept": kept,
        "accept_bucket": kept + bound,
        "accept_renorm": torch.stack(renormalised, -1),
        "bound": bound,
    }


def _log_law(logits_RV: Tensor, temperature: float) -> Tensor:
    return (logits_RV.double() / temperature).log_softmax(-1)


def _renormalised_tv(mass: Split, k: int) -> Tensor:
    """Half of what the kept ids gain and the others lose."""
    kept, inside = mass.kept_RK[:, :k], mass.inside_RK[:, k - 1 : k]
    return ((kept / inside - kept).sum(-1) + mass.outside_RK[:, k - 1]) / 2


def _spread_tv(p_RV: Tensor, ids_Rk: Tensor, tail_R: Tensor) -> Tensor:
    """Half of the distance of the ids left out from their mean."""
    others = max(p_RV.shape[-1] - ids_Rk.shape[-1], 1)
    away = (p_RV - tail_R[:, None] / others).abs()
    return away.scatter(-1, ids_Rk, 0.0).sum(-1) / 2
