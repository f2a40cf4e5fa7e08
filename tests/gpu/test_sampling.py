"""Laws, noise and draws on a GPU are those of the CPU: the same ids, numbers equal up to the logarithm's last bits."""

from __future__ import annotations

import pytest
import torch

from workbench.sampling.draw import draw, inverse_cdf
from workbench.sampling.options import ORDERS, Shaping
from workbench.sampling.philox import DRAFT, Noise, philox
from workbench.sampling.residual import overlap, residual
from workbench.sampling.shaping import law, laws

pytestmark = pytest.mark.gpu


def test_words_are_bit_equal(device):
    counter = torch.randint(0, 2**32, (4, 1000), generator=torch.Generator().manual_seed(0))
    key = Noise(3).key
    assert torch.equal(torch.stack(philox(counter.to(device), key)).cpu(), torch.stack(philox(counter, key)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_laws_and_draws_are_those_of_the_cpu(device, order, scale):
    rows = torch.randn(3, 50_257, generator=torch.Generator().manual_seed(1)) * scale
    there, noise, history, drafted = rows.to(device), Noise(5, 1), [4, 5, 6, 5], [7, 4]
    masks = [None, torch.rand(50_257, generator=torch.Generator().manual_seed(2)) < 0.5, None]
    masks_there = [None if m is None else m.to(device) for m in masks]
    for fields in (
        dict(), dict(temperature=0.8), dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.02),
        dict(temperature=0.8, top_p=0.9), dict(temperature=0.8, min_p=0.05, presence_penalty=1.0, logit_bias={3: 2.0}),
    ):  # fmt: skip
        s = Shaping(order=order, **fields)
        ours = laws(there, s, history=history, drafted=drafted, masks=masks_there)
        for r, (a, b) in enumerate(zip(ours, laws(rows, s, history=history, drafted=drafted, masks=masks))):
            assert torch.equal(a.ids.cpu(), b.ids) and torch.allclose(a.probs.cpu(), b.probs, atol=1e-14)
            assert a.pick == b.pick and a.prob(b.pick) == pytest.approx(b.prob(b.pick), abs=1e-14)
            assert draw(a, noise, r) == draw(b, noise, r) and draw(a, noise, r, DRAFT, 2) == draw(b, noise, r, DRAFT, 2)
            assert inverse_cdf(a, 0.37) == inverse_cdf(b, 0.37)


def test_residuals_are_those_of_the_cpu(device):
    rows, s = torch.randn(2, 500, generator=torch.Generator().manual_seed(1)), Shaping(temperature=0.8, top_p=0.9)
    p, q = (law(row, s) for row in rows)
    there = [law(row.to(device), s) for row in rows]
    a, b = residual(*there), residual(p, q)
    assert a is not None and b is not None and torch.equal(a.ids.cpu(), b.ids)
    assert torch.allclose(a.probs.cpu(), b.probs, atol=1e-12) and overlap(*there) == pytest.approx(overlap(p, q))
