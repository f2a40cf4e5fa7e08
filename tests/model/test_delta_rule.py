"""The delta rule: scan and chunked form against a float64 loop, initial states, ragged ends, gradients, invariance."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.cache.hybrid import same_bits
from workbench_kernels.gated_delta import chunk, ref, scan, scan_states


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    state: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in self))


def inputs(b: int, t: int, h: int, dk: int, dv: int, seed: int = 0, rate: float = 0.1) -> Inputs:
    """Random inputs with unit keys, log decays of mean -rate and a non-zero state."""
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(b, t, h, dk, generator=g), dim=-1) for _ in range(2))
    v, beta = torch.randn(b, t, h, dv, generator=g), torch.rand(b, t, h, generator=g)
    decay = -rate * torch.empty(b, t, h).exponential_(generator=g)
    return Inputs(q * dk**-0.5, k, v, beta, decay, torch.randn(b, h, dk, dv, generator=g))


def loop(x: Inputs, *, write_first: bool = False) -> tuple[Tensor, Tensor]:
    """The recurrence as written, for every sequence and head on its own; differentiable."""
    b, t, h, _ = x.k.shape
    out = []
    last = []
    for i in range(b):
        for n in range(h):
            s, rows = x.state[i, n], []
            for j in range(t):
                s = s * x.g[i, j, n].exp()
                seen = s
                s = s + torch.outer(x.k[i, j, n], x.beta[i, j, n] * (x.v[i, j, n] - x.k[i, j, n] @ s))
                rows.append(x.q[i, j, n] @ (seen if write_first else s))
            out.append(torch.stack(rows))
            last.append(s)
    return torch.stack(out).view(b, h, t, -1).transpose(1, 2), torch.stack(last).view_as(x.state)


def run_scan(x: Inputs) -> tuple[Tensor, Tensor]:
    out, states = scan(x.q, x.k, x.v, x.beta, x.g.exp(), x.state)
    return out, states[-1]


SHAPES = [(1, 1, 1, 4, 3), (2, 7, 3, 10, 18), (1, 64, 2, 16, 16), (2, 65, 1, 20, 33), (1, 150, 2, 12, 20)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rate", [0.02, 5.0], ids=["slow decay", "fast decay"])
def test_scan_and_chunk_equal_a_float64_loop(shape, rate):
    x = inputs(*shape, rate=rate)
    out, state = loop(x.to(torch.float64))
    for got, end in (run_scan(x), chunk(*x), chunk(*x, size=16)):
        assert got.shape == out.shape and end.shape == state.shape
        torch.testing.assert_close(got.double(), out, rtol=0, atol=2e-5)
        torch.testing.assert_close(end.double(), state, rtol=0, atol=2e-5)
    wrong, _ = loop(x.to(torch.float64), write_first=True)
    assert float((wrong - out).abs().max()) > 1e-2, "reading before the write must be another function"


def test_a_missing_state_is_zeros():
    x = inputs(2, 30, 2, 8, 12)._replace(state=torch.zeros(2, 2, 8, 12))
    for a, b in zip(chunk(*x[:5], None), chunk(*x)):
        assert torch.equal(a, b)


def test_strong_decay_neither_overflows_nor_loses_the_chunk():
    """Cumulative decays of -3,000 inside a chunk: factors of the form exp(-cum) would overflow."""
    x = inputs(1, 64, 1, 8, 8, rate=50.0)
    out, state = loop(x.to(torch.float64))
    got, end = chunk(*x)
    torch.testing.assert_close(got.double(), out, rtol=0, atol=2e-5)
    torch.testing.assert_close(end.double(), state, rtol=0, atol=2e-5)


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 79), max_size=3, unique=True), seed=st.integers(0, 3))
def test_pieces_carry_the_state(cuts, seed):
    x = inputs(2, 80, 2, 10, 6, seed)
    edges = [0, *sorted(cuts), 80]
    for rule, tolerance in ((run_scan, 0.0), (lambda y: chunk(*y), 2e-5)):
        out, end = rule(x)
        state, parts = x.state, []
        for a, b in pairwise(edges):
            part, state = rule(Inputs(*(y[:, a:b] for y in x[:5]), state))
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts, 1), out, rtol=0, atol=tolerance)
        torch.testing.assert_close(state, end, rtol=0, atol=tolerance)


def test_gradients_of_chunk_equal_those_of_the_loop():
    x = inputs(1, 70, 2, 6, 5, rate=0.05)
    weight = torch.randn(1, 70, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(9))

    def gradients(rule, dtype: torch.dtype) -> list[Tensor]:
        leaves = Inputs(*(y.detach().clone().requires_grad_() for y in x.to(dtype)))
        out, state = rule(leaves)
        ((out * weight.to(dtype)).sum() + state.square().sum()).backward()
        return [y.grad for y in leaves]

    expected = gradients(loop, torch.float64)
    got = gradients(lambda y: chunk(*y), torch.float32)
    for name, a, b in zip(Inputs._fields, got, expected):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-5 * float(b.abs().max()), msg=name)
    fast_decay = [y.detach().clone().requires_grad_() for y in inputs(1, 70, 2, 6, 5, rate=50.0)]
    out, state = chunk(*fast_decay)
    (out.sum() + state.sum()).backward()
    assert all(torch.isfinite(y.grad).all() for y in fast_decay), "masked decays must not leak NaN into gradients"


def test_states_are_tensors_of_their_own_and_the_input_stays():
    x = inputs(2, 5, 2, 8, 8)
    before = x.state.clone()
    _, states = scan(*x[:4], x.g.exp(), x.state)
    assert len(states) == 5
    assert torch.equal(x.state, before)
    kept = [s.clone() for s in states]
    for s in states[1:]:
        s.zero_()
    assert torch.equal(states[0], kept[0])
    out, last = scan(*x[:4], x.g.exp(), x.state, every=False)
    assert len(last) == 1 and same_bits(last[0], kept[-1])
    assert same_bits(out, scan(*x[:4], x.g.exp(), x.state)[0])
    again = scan_states(x.k, x.v, x.beta, x.g.exp(), x.state)
    assert all(same_bits(a, b) for a, b in zip(again, kept))


# ------------------------------------------------------------------------------------------------ invariance

WIDTHS = [(17, 33), (20, 33), (64, 17), (10, 50), (64, 64), (16, 48), (12, 20), (65, 50)]


def scan_of_each(x: Inputs) -> list[tuple[Tensor, Tensor]]:
    """Every sequence scanned alone."""
    return [run_scan(Inputs(*(y[b : b + 1].clone() for y in x))) for b in range(len(x.state))]


def differs(x: Inputs) -> bool:
    out, state = run_scan(x)
    return any(
        not same_bits(out[b : b + 1], alone) or not same_bits(state[b : b + 1], end)
        for b, (alone, end) in enumerate(scan_of_each(x))
    )


@pytest.mark.parametrize("n", [1, 2])
def test_bits_of_a_sequence_do_not_depend_on_the_batch(threads, n):
    shapes = [(3, heads, dk, dv) for dk, dv in WIDTHS for heads in (1, 3)] if n == 1 else []
    shapes += [(3, 1, 17, 33), (2, 4, 65, 66)]  # the last passes the size from which elementwise work is split
    with threads(n):
        for b, heads, dk, dv in shapes:
            assert not differs(inputs(b, 2, heads, dk, dv)), (dk, dv, heads)


def test_stock_row_times_matrix_would_depend_on_it(monkeypatch):
    monkeypatch.setattr(ref, "state_rows", torch.bmm)
    found = [(dk, dv) for dk, dv in WIDTHS if differs(inputs(3, 3, 1, dk, dv))]
    if not found:
        pytest.skip("this machine's stock product is invariant at these widths; the guard is not needed here")
    assert all(dv % 16 for _, dv in found), f"the guard leaves {found} to the stock product"
