"""Draws have the law they are drawn from, and a wrong law is told apart; equal laws agree under shared noise."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

from workbench.sampling.draw import draw, inverse_cdf
from workbench.sampling.law import Law
from workbench.sampling.options import Shaping
from workbench.sampling.philox import DRAFT, TARGET, Noise
from workbench.sampling.residual import overlap
from workbench.sampling.shaping import law

DRAWS = 20_000
ROW = torch.randn(83, generator=torch.Generator().manual_seed(0)) * 2.0
SHAPED = Shaping(temperature=0.9, top_k=20, top_p=0.95)


def variation(counts: np.ndarray, probs: np.ndarray) -> np.ndarray:
    return np.abs(counts / counts.sum(-1, keepdims=True) - probs).sum(-1) / 2


def threshold(probs: np.ndarray) -> float:
    """The 99.9 % quantile of the distance of as many draws of the law itself."""
    return float(np.quantile(variation(np.random.default_rng(1).multinomial(DRAWS, probs, 2000), probs), 0.999))


def counts_of(made: Law, noise: Noise, purpose: int) -> np.ndarray:
    scores = made.probs.log() + noise.gumbel_rows(made.ids, range(DRAWS), purpose)
    chosen = scores.argmax(-1)
    for position in range(0, DRAWS, 1000):  # the many at once are the draws one by one
        assert int(made.ids[chosen[position]]) == draw(made, noise, position, purpose)
    return np.bincount(chosen.numpy(), minlength=len(made))


@pytest.mark.parametrize("purpose", [TARGET, DRAFT])
def test_draws_have_their_law_and_a_wrong_law_is_told_apart(purpose):
    made = law(ROW, SHAPED)
    probs, counts = made.probs.numpy(), counts_of(made, Noise(3, 1), purpose)
    limit = threshold(probs)
    assert variation(counts, probs) < limit
    wrong = law(ROW, Shaping(temperature=1.2, top_k=20, top_p=0.95)).at(made.ids).numpy()
    assert variation(counts, wrong / wrong.sum()) > 3 * limit


def test_uniforms_turned_into_ids_have_their_law():
    made = law(ROW, SHAPED)
    u = (np.arange(DRAWS) + 0.5) / DRAWS
    counts = np.bincount(np.searchsorted(made.ids.numpy(), [inverse_cdf(made, float(v)) for v in u[::10]]))
    assert np.abs(counts / counts.sum() - made.probs.numpy()).max() < 1 / (DRAWS / 10)


def test_a_uniform_never_gives_an_id_of_probability_zero():
    made = Law(ids=torch.tensor([2, 4, 6, 8]), probs=torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64))
    ids = [inverse_cdf(made, u) for u in (0.0, 2.0**-33, 0.4999, 0.5, 1 - 2.0**-33, 1 - 2.0**-53)]
    assert ids == [4, 4, 4, 6, 6, 6] and made.prob(2) == 0


def test_the_draw_is_gumbel_max_over_the_support():
    made, noise = law(ROW, SHAPED), Noise(8)
    dense = made.dense(83).log() + noise.gumbel_rows(83, [5])[0]
    assert draw(made, noise, 5) == int(dense.argmax())


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_large_supports_are_drawn_from_as_if_every_score_were_compared(scale):
    row = torch.randn(20_003, generator=torch.Generator().manual_seed(5)) * scale
    for s in (
        Shaping(temperature=1),
        Shaping(temperature=0.8, top_p=0.99),
        Shaping(temperature=1, logit_bias={0: -inf}),
    ):
        made, noise = law(row, s), Noise(6)
        for position in range(12):
            scores = made.probs.log() + noise.gumbel(made.ids, position)
            assert draw(made, noise, position) == int(made.ids[scores.argmax()])


def test_a_point_mass_draws_nothing():
    class Silent(Noise):
        def gumbel(self, *args, **kwargs):
            raise AssertionError("noise was evaluated")

    assert draw(law(ROW, Shaping()), Silent(0), 0) == int(ROW.argmax())
    assert draw(law(ROW, Shaping(temperature=2, top_k=1)), Silent(0), 0) == int(ROW.argmax())


def test_shared_noise_makes_like_laws_agree_more_often_than_separate_noise():
    flat = Shaping(temperature=3.0, top_k=20, top_p=0.95)
    p, q = law(ROW, flat), law(ROW + 0.3 * torch.randn(83, generator=torch.Generator().manual_seed(9)), flat)
    noise, both, apart_law = Noise(4), overlap(p, q), float((p.probs * q.at(p.ids)).sum())
    shared = np.mean([draw(p, noise, t) == draw(q, noise, t) for t in range(400)])
    apart = np.mean([draw(p, noise, t) == draw(q, noise, t, DRAFT) for t in range(400)])
    assert shared > both / (2 - both) - 0.08  # Daliri et al.: at least (1 - TV) / (1 + TV); 0.08 is 3 deviations
    assert abs(apart - apart_law) < 0.08 < shared - apart
    assert all(draw(p, noise, t) == draw(law(ROW, flat), noise, t, TARGET, start=t // 3) for t in range(50))
