"""Draws from a law: by Gumbel noise tied to ids and positions, or by a uniform number. Legend: S ids of the support."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.sampling.law import Law
from workbench.sampling.philox import TARGET, Noise, gumbel_of

MANY, STRIDE = 4096, 64  # a larger support is searched; by one id in 64, and the best, for a bound


def draw(law: Law, noise: Noise, position: int, purpose: int = TARGET, start: int = 0) -> int:
    """The id with the largest log p + Gumbel noise, which has the law given.

    The noise belongs to an id and a position, not to a law. Two laws that draw at one position under one purpose
    therefore compare the same noise, and agree wherever they are alike: an id that wins under the drafter's law loses
    under the target's only where the log-probabilities of two contenders differ by more than their scores do. Equal
    laws always agree, and nothing about the drafter enters the target's draw.

    Args:
        law: What to draw from.
        noise: Streams of this sequence.
        position: Absolute position of the token drawn.
        purpose: TARGET for plain, coupled, bonus and boundary draws alike, DRAFT for drafts tested by ratio, RESIDUAL;
            default TARGET.
        start: Absolute position at which the round began; TARGET does not depend on it.

    Returns:
        The id; on equal scores the lowest. Noise is evaluated for the support alone; a point mass draws nothing.

    Raises:
        UserError: A counter word is out of range.

    Source: Gumbel-max, Maddison et al. 2014; shared between drafter and target as in Daliri et al. 2024,
    "Coupling without communication and drafter-invariant speculative decoding".
    """
    if len(law) == 1:
        return int(law.ids[0])
    if len(law) > MANY and law.ids.device.type == "cpu":
        return _draw_of_many(law, noise.uniforms(law.ids, position, purpose, start))
    scores_S = law.probs.log() + noise.gumbel(law.ids, position, purpose, start)
    return int(law.ids[scores_S.argmax()])


def _draw_of_many(law: Law, u_S: Tensor) -> int:
    """The same id, with logarithms of contenders only.

    The winner has the least -log u / p. As -log u >= 1 - u, an id whose (1 - u) / p exceeds the -log u / p of some
    other id has lost to it; a hundredth beyond any rounding is left as room.
    """
    some = torch.cat([law.probs.argmax()[None], torch.arange(0, len(law), STRIDE)])
    bound = float((-u_S[some].log() / law.probs[some]).min()) * 1.01
    at = ((1.0 - u_S) <= bound * law.probs).nonzero()[:, 0]
    scores = law.probs[at].log() + torch.from_numpy(gumbel_of(u_S[at].numpy()))
    return int(law.ids[at[scores.argmax()]])


def inverse_cdf(law: Law, u: float) -> int:
    """The first id, in the order of ids, whose cumulative probability exceeds ``u``.

    Args:
        law: What to draw from.
        u: Uniform number in [0, 1).

    Returns:
        The id; never one of probability 0.
    """
    cumulative_S = law.probs.cumsum(0)
    at = int(torch.searchsorted(cumulative_S, u * float(cumulative_S[-1]), right=True))
    if at == len(law):  # u times the sum was rounded up to the sum
        at = int(law.probs.nonzero()[-1])
    return int(law.ids[at])
