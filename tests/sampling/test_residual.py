"""Rejection and residual give the target's law exactly, by enumeration; wrong variants do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.sampling.law import Law
from workbench.sampling.residual import overlap, ratio_test, residual

VOCAB = 7


def random_law(draw: np.random.Generator) -> Law:
    ids = np.sort(draw.choice(VOCAB, int(draw.integers(1, VOCAB + 1)), replace=False))
    return Law(ids=torch.from_numpy(ids), probs=torch.from_numpy(draw.dirichlet(np.full(len(ids), 0.7))))


def acceptance(p: Law, q: Law, token: int, inverted: bool = False) -> float:
    """Share of uniform numbers under which the test passes: its threshold is found by bisection."""
    if inverted:
        return 1 - acceptance(p, q, token)
    low, high = 0.0, 1.0
    if ratio_test(p, q, token, 1 - 2.0**-53):
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio_test(p, q, token, middle) else (low, middle)
    return low


def emitted(p: Law, q: Law, *, wrong: str = "") -> torch.Tensor:
    """Law of the token that drafting from q, testing and replacing emits."""
    out, rejected = torch.zeros(VOCAB, dtype=torch.float64), 0.0
    for token in q.ids.tolist():
        passed = acceptance(p, q, token, inverted=wrong == "inverted")
        out[token] += q.prob(token) * passed
        rejected += q.prob(token) * (1 - passed)
    rest = p if wrong == "p" else residual(p, q) or p
    return out + rejected * rest.dense(VOCAB)


def test_the_emitted_token_has_the_targets_law():
    draw, distances = np.random.default_rng(0), {"p": 0.0, "inverted": 0.0}
    for _ in range(60):
        p, q = random_law(draw), random_law(draw)
        assert float((emitted(p, q) - p.dense(VOCAB)).abs().max()) < 1e-12
        assert overlap(p, q) == pytest.approx(float(p.dense(VOCAB).minimum(q.dense(VOCAB)).sum()), abs=1e-15)
        for wrong in distances:
            distances[wrong] += float((emitted(p, q, wrong=wrong) - p.dense(VOCAB)).abs().sum()) / 2 / 60
    assert min(distances.values()) > 0.05


def test_the_residual_by_hand():
    p = Law(ids=torch.tensor([1, 3, 5]), probs=torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    q = Law(ids=torch.tensor([0, 3, 5]), probs=torch.tensor([0.6, 0.1, 0.3], dtype=torch.float64))
    rest = residual(p, q)
    assert rest is not None and rest.ids.tolist() == [1, 3]
    assert rest.probs.tolist() == pytest.approx([0.5 / 0.7, 0.2 / 0.7], abs=1e-15)
    assert overlap(p, q) == pytest.approx(0.3)


def test_equal_laws_leave_no_residual():
    p = random_law(np.random.default_rng(5))
    nearly = Law(ids=p.ids, probs=p.probs * (1 - 1e-14))
    assert residual(p, p) is None and residual(p, nearly) is None and overlap(p, p) == pytest.approx(1)


def test_the_test_is_strict_and_rejects_what_the_target_forbids():
    p = Law(ids=torch.tensor([0, 1]), probs=torch.tensor([0.25, 0.75], dtype=torch.float64))
    q = Law(ids=torch.tensor([0, 2]), probs=torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert ratio_test(p, q, 0, 0.4999) and not ratio_test(p, q, 0, 0.5)
    assert not ratio_test(p, q, 2, 2.0**-33) and not ratio_test(p, q, 2, 0.0)
    assert ratio_test(p, p, 0, 1 - 2.0**-33)


def test_a_point_mass_drafter_is_exact_too():
    p = random_law(np.random.default_rng(2))
    for token in range(VOCAB):
        q = Law(ids=torch.tensor([token]), probs=torch.ones(1, dtype=torch.float64))
        assert float((emitted(p, q) - p.dense(VOCAB)).abs().max()) < 1e-12
