"""Resampled ratios: their quantiles are the intervals, and calls over the same documents are paired draw by draw."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.core.bootstrap import bootstrap_by, bootstrap_difference, ratio_draws
from workbench.core.errors import UserError

RANDOM = np.random.default_rng(5)
GROUPS = RANDOM.integers(0, 12, 80).astype(str)
TOP, BOTTOM = RANDOM.integers(0, 5, (80, 3)), RANDOM.integers(1, 4, (80, 3))


def test_the_intervals_are_quantiles_of_the_draws():
    drawn = ratio_draws(GROUPS, TOP, BOTTOM, draws=300, seed=4)
    intervals = bootstrap_by(GROUPS, TOP, BOTTOM, draws=300, seed=4, level=0.8)
    assert drawn.shape == (300, 3)
    for column, one in zip(drawn.T, intervals, strict=True):
        assert np.quantile(column, [0.1, 0.9]) == pytest.approx([one.low, one.high])


def test_draws_of_separate_calls_are_paired_and_of_other_seeds_are_not():
    a, b = (ratio_draws(GROUPS, TOP[:, i], BOTTOM[:, i], draws=300, seed=4)[:, 0] for i in (0, 1))
    sides = [(GROUPS, TOP[:, i], BOTTOM[:, i]) for i in (0, 1)]
    one = bootstrap_difference(*sides, draws=300, seed=4)[0]
    assert np.quantile(a - b, [0.025, 0.975]) == pytest.approx([one.low, one.high])
    other = ratio_draws(GROUPS, TOP[:, 1], BOTTOM[:, 1], draws=300, seed=5)[:, 0]
    assert np.quantile(a - other, [0.025, 0.975]) != pytest.approx([one.low, one.high])


def test_draws_follow_a_plain_loop():
    names, index = np.unique(GROUPS, return_inverse=True)
    weights = np.random.default_rng(4).multinomial(len(names), np.full(len(names), 1 / len(names)), size=20)
    expected = [
        (weights[d][index] * TOP[:, 2]).sum() / (weights[d][index] * BOTTOM[:, 2]).sum() for d in range(len(weights))
    ]
    np.testing.assert_allclose(ratio_draws(GROUPS, TOP[:, 2], BOTTOM[:, 2], draws=20, seed=4)[:, 0], expected)


def test_undefined_draws_are_nan_and_odd_shapes_are_refused():
    drawn = ratio_draws(["a", "b"], [1, 1], [0, 1], draws=200)
    assert np.isnan(drawn).any() and (drawn[~np.isnan(drawn)] >= 1).all()
    with pytest.raises(UserError, match="do not match"):
        ratio_draws(["a"], [1, 2])
