"""What is kept of a row of logits: order, ties, full-vocabulary mass, and checks that can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import NonFiniteError, UserError
from workbench.datasets import topk
from workbench.datasets.bfloat import from_bfloat16_bits, to_bfloat16_bits
from workbench.datasets.heads import extremes
from workbench.datasets.topk import check_mass, check_rows, largest, sparse_rows


def test_unit_vector():
    rows = sparse_rows(torch.tensor([[1.0, 3.0, 3.0, -2.0]]), top_k=2, temperature=1.0)
    total = math.exp(1) + 2 * math.exp(3) + math.exp(-2)
    assert rows.ids.tolist() == [[1, 2]] and rows.logits.tolist() == [[3.0, 3.0]]
    assert rows.probs[0] == pytest.approx([math.exp(3) / total] * 2, rel=1e-6)
    assert rows.tail[0] == pytest.approx((math.exp(1) + math.exp(-2)) / total, rel=1e-6)
    assert rows.logsumexp[0] == rows.logsumexp_t[0] == pytest.approx(math.log(total), rel=1e-6)
    assert abs(rows.probs.astype(np.float64).sum() + rows.tail[0] - 1) < 1e-6


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=24), st.data())
def test_order_is_by_logit_then_by_id(values, data):
    k = data.draw(st.integers(1, len(values)))
    logits = torch.tensor([values, values[::-1]], dtype=torch.float32)
    kept, ids = largest(logits, k)
    for row, got, at in zip(logits.tolist(), kept.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        assert at == expected and got == [row[i] for i in expected]


def test_the_softmax_is_over_the_whole_vocabulary_at_the_temperature(monkeypatch):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 5
    rows = sparse_rows(logits, top_k=8, temperature=0.7)
    x = logits.double().numpy()
    full = np.exp(x / 0.7) / np.exp(x / 0.7).sum(-1, keepdims=True)
    kept = np.take_along_axis(full, rows.ids, -1)
    np.testing.assert_allclose(rows.probs, kept, rtol=1e-6)
    np.testing.assert_allclose(rows.tail, full.sum(-1) - kept.sum(-1), atol=1e-7)
    np.testing.assert_allclose(rows.logsumexp, np.log(np.exp(x).sum(-1)), rtol=1e-6)
    np.testing.assert_allclose(rows.logsumexp_t, np.log(np.exp(x / 0.7).sum(-1)), rtol=1e-6)
    monkeypatch.setattr(topk, "BLOCK_VALUES", 100)  # two rows at a time
    again = sparse_rows(logits, top_k=8, temperature=0.7)
    assert all(np.array_equal(getattr(rows, n), getattr(again, n)) for n in ("ids", "probs", "tail", "logsumexp_t"))


@pytest.mark.parametrize("temperature", [1e-4, 1e3])
@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_extremes_stay_finite(temperature, scale):
    rows = sparse_rows(torch.tensor([[-1.0, 0.5, 0.25, 0.5]]) * scale, top_k=4, temperature=temperature)
    assert all(np.isfinite(getattr(rows, n)).all() for n in ("probs", "tail", "logsumexp", "logsumexp_t"))
    assert rows.ids.tolist() == [[1, 3, 2, 0]] and rows.tail[0] == 0
    check_mass(rows.probs, rows.tail, [0])


def test_a_mass_that_is_off_stops_with_its_position():
    rows = sparse_rows(torch.randn(4, 30, generator=torch.Generator().manual_seed(1)), top_k=3, temperature=1.0)
    check_mass(rows.probs, rows.tail, [5, 6, 9, 10])
    rows.tail[2] += 1e-4
    with pytest.raises(UserError, match=r"position 9 .* miss 1 by 0.0001"):
        check_mass(rows.probs, rows.tail, [5, 6, 9, 10])
    rows.tail[2] = np.nan
    with pytest.raises(UserError, match="position 9"):
        check_mass(rows.probs, rows.tail, [5, 6, 9, 10])


@pytest.mark.parametrize(("bad", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_non_finite_rows_are_named_by_their_own_position(bad, kind):
    logits = torch.zeros(3, 5)
    check_rows(extremes(logits).numpy(), np.array([4, 8, 15]))
    logits[1, 2] = bad
    with pytest.raises(NonFiniteError, match=f"position 8 hold {kind}") as caught:
        check_rows(extremes(logits).numpy(), np.array([4, 8, 15]))
    assert caught.value.position == 8


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_rounds_to_nearest_even(values):
    x = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(to_bfloat16_bits(x), expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(from_bfloat16_bits(to_bfloat16_bits(x)), expected.float().numpy())
