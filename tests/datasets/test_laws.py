"""Laws in full and through kept ids: divergence with a tail bucket, acceptance and its bounds, for any two laws."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.datasets import bucket_divergence
from workbench.datasets.laws import compare_laws

EPS = 1e-12


def pairs(size: int = 23):
    """Logits of two laws: near each other or far apart, with ties, with ids that neither can draw."""

    @st.composite
    def draw(draw):
        generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
        spread = draw(st.sampled_from([0.01, 1.0, 8.0, 300.0]))
        p = generator.normal(size=(3, size)) * spread
        q = p + generator.normal(size=p.shape) * draw(st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 50.0]))
        if draw(st.booleans()):
            p, q = p.round(), q.round()
        return torch.tensor(p, dtype=torch.float32), torch.tensor(q, dtype=torch.float32)

    return draw()


KS = st.lists(st.integers(1, 23), min_size=1, max_size=5, unique=True).map(sorted)


@settings(max_examples=200)
@given(pairs(), KS, st.sampled_from([0.7, 1.0, 2.0]))
def test_divergence_with_a_bucket_is_never_negative_nor_above_the_full_one(laws, ks, temperature):
    c = compare_laws(*laws, ks=ks, temperature=temperature)
    assert (c["kl_bucket"] >= 0).all() and (c["kl"] >= 0).all()
    assert (c["kl_bucket"] <= c["kl"] * (1 + EPS) + EPS).all()
    finer = c["kl_bucket"]
    assert (finer[:, 1:] >= finer[:, :-1] * (1 - EPS) - EPS).all(), "more ids, a finer view"


@settings(max_examples=200)
@given(pairs(), KS, st.sampled_from([0.7, 1.0, 2.0]))
def test_acceptance_through_kept_ids_is_within_its_bounds(laws, ks, temperature):
    c = compare_laws(*laws, ks=ks, temperature=temperature)
    assert (c["accept_kept"] <= c["accept"] + EPS).all()
    assert (c["accept"] <= c["accept_bucket"] + EPS).all()
    assert (c["accept_bucket"] - c["accept"] <= c["bound"] + EPS).all()
    assert (c["accept"] - c["accept_kept"] <= c["bound"] + EPS).all()
    assert ((c["accept_renorm"] - c["accept"]).abs() <= c["tail"] + EPS).all()
    assert (c["bound"] <= c["tail"]).all() and (c["accept"] <= 1 + EPS).all()
    assert torch.allclose(c["mass"] + c["tail"], torch.ones(()).double(), atol=1e-12)


@settings(max_examples=100)
@given(pairs(), KS)
def test_distances_of_the_laws_made_of_kept_ids(laws, ks):
    c = compare_laws(laws[0], None, ks=ks, temperature=1.0)
    assert set(c) == {"mass", "tail", "tv", "tv_spread"}
    assert torch.allclose(c["tv"], c["tail"], atol=1e-12), "renormalising moves just the tail"
    assert (c["tv_spread"] <= c["tail"] + EPS).all() and (c["tv_spread"] >= 0).all()


@settings(max_examples=50)
@given(pairs(), KS, st.sampled_from([0.7, 1.0]))
def test_columns_equal_a_plain_computation(laws, ks, temperature):
    c = compare_laws(*laws, ks=ks, temperature=temperature)
    for r in range(3):
        logits = [x[r].double().numpy() / temperature for x in laws]
        p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in logits)
        order = sorted(range(23), key=lambda i: (-float(laws[0][r, i]), i))

        def close(name: str, n: int, value: float, r: int = r) -> bool:
            return math.isclose(float(c[name][r, n]), value, rel_tol=1e-9, abs_tol=1e-12)

        for n, k in enumerate(ks):
            kept, rest = order[:k], order[k:]
            assert close("mass", n, p[kept].sum()) and close("tail", n, p[rest].sum())
            assert close("accept", n, np.minimum(p, q).sum())
            renormalised = np.zeros(23)
            renormalised[kept] = p[kept] / p[kept].sum()
            assert close("accept_renorm", n, np.minimum(renormalised, q).sum())
            assert close("tv", n, np.abs(renormalised - p).sum() / 2)
            spread = p.copy()
            spread[rest] = p[rest].sum() / max(len(rest), 1)
            assert close("tv_spread", n, np.abs(spread - p).sum() / 2)
            coarse = [np.append(x[kept], x[rest].sum()) for x in (p, q)]
            assert close("accept_bucket", n, np.minimum(*coarse).sum())
            if min(p.min(), q.min()) > 1e-12:
                assert close("kl", n, (p * np.log(p / q)).sum())
                a, b = (x[: k + bool(rest)] for x in coarse)
                assert close("kl_bucket", n, (a * np.log(a / b)).sum())


# ---------------------------------------------------------------- controls: what the bucket is for


def example() -> tuple[torch.Tensor, torch.Tensor]:
    p = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]])
    q = torch.tensor([[0.6, 0.3, 0.05, 0.03, 0.02]])
    return p.log(), q.log()


def test_control_without_the_bucket_divergence_is_negative():
    p, q = (x.exp().double() for x in example())
    assert float((p[:, :2] * (p / q)[:, :2].log()).sum()) < 0
    assert float(compare_laws(*example(), ks=[2], temperature=1.0)["kl_bucket"]) > 0


def test_control_renormalised_divergence_passes_the_full_one():
    p, q = torch.tensor([[0.5, 0.01, 0.49]]).double(), torch.tensor([[0.01, 0.5, 0.49]]).double()
    a, b = (x[:, :2] / x[:, :2].sum() for x in (p, q))
    full, renormalised = (float((x * (x / y).log()).sum()) for x, y in ((p, q), (a, b)))
    assert renormalised > full
    assert 0 < float(bucket_divergence(p[:, :2], q[:, :2], p[:, 2], q[:, 2])) <= full + EPS


def test_control_a_bucket_of_another_law_breaks_the_bound():
    c = compare_laws(*example(), ks=[2], temperature=1.0)
    kept = float(c["accept_kept"])
    assert kept + float(c["tail"]) > float(c["accept"]) + float(c["bound"]), "the target's tail alone is too much"


# ---------------------------------------------------------------- edges


def test_ids_that_the_drafter_lacks_make_the_divergence_infinite_and_nothing_else():
    target = torch.tensor([[2.0, 1.0, 0.0]])
    drafter = torch.tensor([[2.0, -math.inf, 0.0]])
    c = compare_laws(target, drafter, ks=[1, 3], temperature=1.0)
    assert c["kl"].isinf().all() and c["kl_bucket"].isinf().tolist() == [[False, True]]
    finite = [name for name in c if not name.startswith("kl")]
    assert all(c[name].isfinite().all() for name in finite)


def test_all_ids_kept_is_the_truth():
    c = compare_laws(*example(), ks=[5], temperature=1.0)
    assert float(c["tail"]) == float(c["bound"]) == float(c["tv_spread"]) == 0
    assert float(c["accept_bucket"]) == float(c["accept"]) and float(c["kl_bucket"]) == float(c["kl"])


def test_small_tails_are_sums_of_their_own():
    c = compare_laws(torch.tensor([[0.0, -200.0, -300.0]]), None, ks=[1, 2], temperature=1.0)
    assert math.isclose(float(c["tail"][0, 0]), math.exp(-200) + math.exp(-300), rel_tol=1e-9)
    assert math.isclose(float(c["tail"][0, 1]), math.exp(-300), rel_tol=1e-9), "one minus a sum would be 0"
