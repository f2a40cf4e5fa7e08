"""Laws against transformers' chain, a slow reference of all three orders, vectors by hand, and hostile rows."""

from __future__ import annotations

from itertools import product
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import NonFiniteError, UserError
from workbench.sampling import shaping as module
from workbench.sampling.law import Law
from workbench.sampling.options import ORDERS, Shaping
from workbench.sampling.shaping import law, laws

PROBS = (0.30, 0.20, 0.15, 0.10, 0.08, 0.07, 0.06, 0.04)


def slowly(row: list[float], s: Shaping) -> dict[int, float]:
    """The law by the definitions, id by id."""
    peak = max(row)
    heat = 1.0 if s.order == "temperature_last" else s.temperature
    e = {i: float(np.exp((v - peak) / heat)) for i, v in enumerate(row) if v > -inf}
    by_rank = sorted(row, reverse=True)
    alive = {i for i in e if not s.top_k or s.top_k > len(row) or row[i] >= by_rank[s.top_k - 1]}
    judged = alive if s.order == "chain" else set(e)
    total = sum(e[i] for i in judged)
    if s.top_p < 1:
        alive &= {i for i in judged if sum(e[j] for j in judged if row[j] > row[i]) < s.top_p * total}
    alive = {i for i in alive if e[i] >= s.min_p}
    last = {i: float(np.exp((row[i] - peak) / s.temperature)) for i in alive}
    return {i: w / sum(last.values()) for i, w in last.items()}


def check(found: Law, vocab: int) -> None:
    assert len(found) >= 1 and found.ids.dtype == torch.int64 and found.probs.dtype == torch.float64
    assert (found.ids[1:] > found.ids[:-1]).all() and int(found.ids[0]) >= 0 and int(found.ids[-1]) < vocab
    assert (found.probs >= 0).all() and abs(float(found.probs.sum()) - 1) < 1e-12


@pytest.mark.parametrize("sort", [0, module.SORT])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_equals_the_definitions(order, sort, monkeypatch):
    monkeypatch.setattr(module, "SORT", sort)  # 0: top-p by a histogram of the row
    draw = np.random.default_rng(ORDERS.index(order))
    for _ in range(150):
        row = np.round(draw.normal(0, 2, int(draw.integers(1, 12))), int(draw.integers(0, 4))).astype(np.float32)
        s = Shaping(
            temperature=float(draw.choice([0.3, 0.7, 1.0, 1.7])),
            top_k=int(draw.choice([0, 0, 1, 2, 4, 11])),
            top_p=float(draw.choice([1.0, 0.999, 0.83, 0.47, 0.01])),
            min_p=float(draw.choice([0.0, 0.0, 0.051, 0.31])),
            order=order,
        )
        expected, found = slowly(row.astype(float).tolist(), s), law(torch.from_numpy(row), s)
        check(found, len(row))
        assert found.ids.tolist() == sorted(expected), (row, s)
        assert found.probs.tolist() == pytest.approx([expected[i] for i in sorted(expected)], abs=1e-13)


def test_the_chain_is_that_of_transformers_on_rows_without_ties():
    generation = pytest.importorskip("transformers").generation.logits_process
    draw, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    cut = 0
    for _ in range(1000):
        row = torch.randn(200, generator=generator) * float(draw.choice([1.0, 3.0, 8.0]))
        assert len(row.unique()) == 200
        s = Shaping(
            temperature=float(draw.uniform(0.2, 2.0)),
            top_k=int(draw.choice([0, 1, 5, 20, 150, 500])),
            top_p=float(draw.choice([1.0, draw.uniform(0.05, 1.0)])),
            min_p=float(draw.choice([0.0, draw.uniform(0.0, 0.5)])),
        )
        scores = generation.TemperatureLogitsWarper(s.temperature)(None, row[None])
        scores = generation.TopKLogitsWarper(s.top_k)(None, scores) if s.top_k else scores
        scores = generation.TopPLogitsWarper(s.top_p)(None, scores) if s.top_p < 1 else scores
        scores = generation.MinPLogitsWarper(s.min_p)(None, scores) if s.min_p else scores
        expected, found = scores[0].double().softmax(-1), law(row, s)
        assert float((found.dense(200) - expected).abs().max()) < 1e-6, s
        cut += len(found) < 200
    assert cut > 700


@pytest.mark.parametrize(
    ("order", "top_p", "kept"),
    [("joint", 0.7, 4), ("chain", 0.7, 3), ("joint", 0.6, 3), ("chain", 0.6, 2), ("temperature_last", 0.7, 4)],
)
def test_top_p_is_judged_on_the_rest_or_on_all_mass(order, top_p, kept):
    row = torch.tensor(PROBS, dtype=torch.float64).log()
    before = row.clone()
    found = law(row, Shaping(temperature=1, top_k=4, top_p=top_p, order=order))
    assert torch.equal(row, before)
    assert found.ids.tolist() == list(range(kept))
    exact = torch.tensor(PROBS[:kept], dtype=torch.float64)
    assert torch.allclose(found.probs, exact / exact.sum(), atol=1e-14)


@pytest.mark.parametrize("order", ORDERS)
def test_ties_at_a_boundary_are_all_kept(order):
    row = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0])
    assert len(law(row, Shaping(temperature=1, top_k=2, order=order))) == 4
    assert len(law(row, Shaping(temperature=1, top_p=0.5, order=order))) == 4
    assert len(law(row, Shaping(temperature=1, top_k=1, order=order))) == 1
    assert law(torch.zeros(300), Shaping(temperature=1, top_k=3, top_p=0.1, order=order)).ids.tolist() == list(
        range(300)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_ties_beyond_the_first_view_of_a_row_count_in_what_top_k_leaves(order):
    row = torch.cat([torch.full((300,), -4.6), torch.zeros(1), torch.full((1200,), -9.0)])
    for top_p in (0.1, 0.5, 0.9):
        s = Shaping(temperature=1, top_k=3, top_p=top_p, order=order)
        assert law(row, s).ids.tolist() == sorted(slowly(row.double().tolist(), s))


def test_temperature_last_judges_at_one_and_heats_the_survivors():
    row = torch.tensor(PROBS, dtype=torch.float64).log()
    found = law(row, Shaping(temperature=0.5, top_p=0.6, order="temperature_last"))
    squares = torch.tensor(PROBS[:3], dtype=torch.float64) ** 2
    assert found.ids.tolist() == [0, 1, 2] and torch.allclose(found.probs, squares / squares.sum(), atol=1e-14)


@pytest.mark.parametrize("order", ORDERS)
def test_growing_the_view_of_a_row_does_not_change_its_law(order, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(6000, generator=generator) * scale for scale in (0.1, 1, 6)] + [torch.zeros(6000)]
    for row, (k, p, m) in product(rows, [(0, 0.9, 0.0), (600, 1.0, 0.0), (100, 0.5, 0.01), (0, 0.3, 0.2), (0, 1, 0.3)]):
        s = Shaping(temperature=0.8, top_k=k, top_p=p, min_p=m, order=order)
        found = law(row, s)
        for name, value in (("SIZES", ()), ("SORT", 0)):
            monkeypatch.setattr(module, name, value)
            other = law(row, s)
            assert torch.equal(found.ids, other.ids) and torch.allclose(found.probs, other.probs, atol=1e-15)
        monkeypatch.undo()


def test_a_mask_comes_before_the_filters():
    row, mask = torch.tensor([5.0, 4.0, 3.0, 2.0]), torch.tensor([False, True, False, True])
    assert law(row, Shaping(temperature=1, top_k=2), mask=mask).ids.tolist() == [1, 3]
    assert law(row, Shaping(), mask=mask).pick == 1
    with pytest.raises(UserError, match="the mask allows 0 of 4 ids"):
        law(row, Shaping(), mask=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(UserError, match="the mask allows 1 of 4 ids"):
        law(row, Shaping(temperature=1, logit_bias={3: -inf}), mask=torch.tensor([False, False, False, True]))
    for wrong in (torch.ones(3, dtype=torch.bool), torch.ones(4)):
        with pytest.raises(UserError, match="give a bool mask"):
            law(row, Shaping(), mask=wrong)


@pytest.mark.parametrize("s", [Shaping(), Shaping(temperature=0.7, top_k=2), Shaping(temperature=1)])
@pytest.mark.parametrize("row", [[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf] * 3])
def test_rows_that_hold_no_law_are_sentences(row, s):
    with pytest.raises(UserError, match="a row of logits holds") as caught:
        law(torch.tensor(row), s)
    assert not isinstance(caught.value, NonFiniteError)
    rows = torch.stack([torch.zeros(3), torch.tensor(row)])
    with pytest.raises(NonFiniteError, match="the logits of position 8 hold"):
        laws(rows, s, position=7)


def test_greedy_is_the_penalised_biased_masked_pick_and_the_lower_id_wins():
    row, s = torch.tensor([3.0, 3.0, 2.9, 1.0]), Shaping(presence_penalty=0.2, top_k=1, min_p=0.5)
    assert [law(row, s, history=h).pick for h in ([], [0], [0, 1], [0, 1, 2])] == [0, 1, 2, 0]
    found = law(row, Shaping(logit_bias={3: 5.0}))
    assert (found.pick, len(found), found.prob(3), found.prob(0), found.prob(99)) == (3, 1, 1.0, 0.0, 0.0)


def test_rows_of_a_verify_equal_rows_one_by_one():
    generator = torch.Generator().manual_seed(2)
    rows, history, drafted = torch.randn(4, 90, generator=generator) * 3, [1, 2, 3, 2], [5, 6, 5]
    masks = [None, torch.rand(90, generator=generator) < 0.5, None, torch.ones(90, dtype=torch.bool)]
    for s in (
        Shaping(presence_penalty=1.0),
        Shaping(temperature=0.9, repetition_penalty=1.5, penalty_last_n=4, top_p=0.8),
        Shaping(temperature=0.9, frequency_penalty=0.5, logit_bias={4: 2.0}, order="joint", top_k=7, min_p=0.02),
    ):
        found = laws(rows, s, history=history, drafted=drafted, masks=masks)
        for r in range(4):
            alone = law(rows[r], s, history=history + drafted[:r], mask=masks[r])
            assert torch.equal(found[r].ids, alone.ids) and torch.equal(found[r].probs, alone.probs)


def test_half_precision_rows_are_widened_first():
    row = (torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    s = Shaping(temperature=0.7, top_p=0.9)
    assert torch.equal(law(row, s).probs, law(row.float(), s).probs)


EXTREME = st.one_of(
    st.floats(-1e4, 1e4, width=32), st.sampled_from([0.0, -0.0, 1.0, 1e4, -1e4, -inf, -103.0, -745.1, 1e-40, 3.0])
)


@given(
    row=st.lists(EXTREME, min_size=1, max_size=24),
    temperature=st.sampled_from([5e-324, 1e-30, 1e-3, 0.5, 1.0, 7.0, 1e30, 1.7e308]),
    top_k=st.sampled_from([0, 1, 2, 5, 24, 10**9]),
    top_p=st.sampled_from([5e-324, 1e-9, 0.5, 0.9, 1 - 2**-53, 1.0]),
    min_p=st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 1 - 2**-53]),
    order=st.sampled_from(ORDERS),
)
@settings(max_examples=150)
def test_hostile_rows_and_settings_at_their_bounds_still_give_a_law(row, temperature, top_k, top_p, min_p, order):
    s = Shaping(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, order=order)
    x = torch.tensor(row, dtype=torch.float32)
    if x.max() == -inf:
        with pytest.raises(UserError):
            law(x, s)
        return
    found = law(x, s)
    check(found, len(row))
    best = int(x.argmax())
    assert found.prob(best) == found.prob(found.pick) == float(found.probs.max()) > 0
    assert found.pick <= best == law(x, Shaping()).pick  # lower only where rounding made another as probable
    if top_k == 0 and top_p == 1 and min_p == 0:
        assert found.ids.tolist() == (x > -inf).nonzero()[:, 0].tolist()
    cold = law(x, Shaping(temperature=5e-324, order=order))
    assert sum(cold.prob(int(i)) for i in (x == x.max()).nonzero()[:, 0]) == pytest.approx(1)


def test_temperature_approaching_zero_approaches_greedy():
    row = torch.randn(60, generator=torch.Generator().manual_seed(4))
    shares = [law(row, Shaping(temperature=t)).prob(int(row.argmax())) for t in (1.0, 0.3, 0.1, 0.01, 0.001)]
    assert shares == sorted(shares) and shares[-1] > 1 - 1e-12
