"""Rejection of a draft by the ratio of two laws, and what is drawn in its place.

Source: Leviathan et al. 2023, "Fast inference from transformers via speculative decoding"; Chen et al. 2023.
"""

from __future__ import annotations

from workbench.sampling.law import Law

LEAST_MASS = 1e-12  # below this p - q is rounding


def ratio_test(p: Law, q: Law, token: int, u: float) -> bool:
    """Whether a token drawn from ``q`` stands under ``p``.

    Args:
        p: The target's law.
        q: The law the token was drawn from.
        token: The token.
        u: Uniform number in (0, 1).

    Returns:
        u * q(token) < p(token), strictly, in float64; never where p(token) is 0.
    """
    return u * q.prob(token) < p.prob(token)


def residual(p: Law, q: Law) -> Law | None:
    """The law of the token that replaces a rejected draft: max(p - q, 0), normalised.

    Args:
        p: The target's law.
        q: The drafter's law, on the same device.

    Returns:
        The law, over the ids where p exceeds q; None when less than 1e-12 of mass is left, where p itself is drawn.
    """
    rest_S = (p.probs - q.at(p.ids)).clamp_(min=0.0)
    mass = float(rest_S.sum())
    if mass < LEAST_MASS:
        return None
    some_S = rest_S > 0
    return Law(ids=p.ids[some_S], probs=rest_S[some_S] / mass)


def overlap(p: Law, q: Law) -> float:
    """Probability that a token drawn from ``q`` stands under ``p``: the sum of min(p, q)."""
    return float(p.probs.minimum(q.at(p.ids)).sum())
