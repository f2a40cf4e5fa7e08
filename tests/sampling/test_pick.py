"""Greedy picks: the lower id on ties, numbers close to float64, and bits that do not depend on the rows beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench.sampling import pick
from workbench.sampling.pick import Picks, greedy, margins, picks, top1

SIZES = (2, 7, 63, 64, 65, 83, 1000, 4096, 4097, 32_768, 32_769, 50_257)
LARGE = (65_553, 151_936)


def rows_of(vocab: int, rows: int = 40, scale: float = 4.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale


def dependence(fn: Callable[[Tensor], Picks], vocab: int, counts: range | tuple[int, ...], rows: int = 40) -> int:
    """In how many of the groups of 1..rows rows some bit differs from that of the whole."""
    x = rows_of(vocab, rows)
    whole, found = fn(x), 0
    for n in counts:
        for at in {0, (rows - n) // 2, rows - n}:
            part = fn(x[at : at + n])
            same = all(
                torch.equal(getattr(part, name), getattr(whole, name)[at : at + n])
                for name in ("ids", "top1", "logsumexp")
            )
            found += not same
    return found


@pytest.mark.parametrize("vocab", SIZES)
def test_bits_do_not_depend_on_the_number_of_rows(vocab):
    assert dependence(picks, vocab, range(1, 41) if vocab < 10_000 else (1, 2, 3, 5, 8, 17, 39, 40)) == 0


@pytest.mark.parametrize("count", [2, 3, 5])
def test_bits_do_not_depend_on_the_number_of_rows_with_threads(threads, count):
    with threads(count):
        for vocab in (83, 32_769):
            assert dependence(picks, vocab, (1, 2, 7, 16), rows=16) == 0, vocab


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8])
def test_bits_do_not_depend_on_the_number_of_rows_in_large_vocabularies(threads, count):
    with threads(count):
        for vocab in (*SIZES, *LARGE):
            assert dependence(picks, vocab, range(1, 14), rows=13) == 0, vocab


def plainly(logits: Tensor) -> Picks:
    """The same by stock operations."""
    best, ids = logits.max(-1)
    return Picks(ids, 1.0 / (logits - best[:, None]).exp().sum(-1), logits.logsumexp(-1))


def test_stock_operations_would_depend_on_it(threads):
    """The control: a long row alone is summed by another route where threads share the work, and the check sees it."""
    with threads(2):
        assert dependence(plainly, 50_257, (1,)) > 0 and dependence(picks, 50_257, (1,)) == 0


def test_the_row_that_is_doubled_matters(threads, monkeypatch):
    monkeypatch.setattr(pick, "_alone", lambda part: part.exp().sum(-1))
    with threads(2):
        assert dependence(picks, 50_257, (1, 3, 5)) > 0


@pytest.mark.parametrize("vocab", [*SIZES, *LARGE])
@pytest.mark.parametrize("scale", [0.01, 4.0, 30.0])
def test_numbers_are_those_of_float64(vocab, scale):
    x = rows_of(vocab, 5, scale) + 7
    got, wide = picks(x), x.double()
    expected = wide.logsumexp(-1)
    assert torch.equal(got.ids, wide.argmax(-1)) and torch.equal(greedy(x), got.ids)
    torch.testing.assert_close(got.logsumexp.double(), expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(got.top1.double(), (wide.amax(-1) - expected).exp(), rtol=5e-6, atol=0)
    best = wide.sort(-1, descending=True).values
    torch.testing.assert_close(margins(x).double(), best[:, 0] - best[:, 1], rtol=1e-6, atol=1e-6)
    assert got.ids.dtype == torch.int64 and got.top1.dtype == got.logsumexp.dtype == torch.float32


@pytest.mark.parametrize("vocab", SIZES)
def test_ties_go_to_the_lower_id(vocab, threads):
    x = rows_of(vocab, 6).clamp(max=1.0)
    at = torch.randint(0, vocab, (6, 3), generator=torch.Generator().manual_seed(0))
    x.scatter_(1, at, 5.0)
    for count in (1, 3):
        with threads(count):
            for part, lowest in ((x, at.amin(-1)), (x[2:3], at.amin(-1)[2:3])):
                assert torch.equal(picks(part).ids, lowest) and torch.equal(greedy(part), lowest)
    flat = torch.zeros(4, vocab)
    assert picks(flat).ids.tolist() == [0] * 4 and margins(flat).tolist() == [0.0] * 4
    torch.testing.assert_close(picks(flat).top1, torch.full((4,), 1 / vocab), rtol=3e-7, atol=0)


def test_a_single_row_is_the_same_pick():
    x = rows_of(83, 9)
    whole = picks(x)
    for i, row in enumerate(x):
        assert top1(row) == (int(whole.ids[i]), float(whole.top1[i]))


def test_extremes_stay_finite():
    x = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1e4, 1e4, 1e4], [88.0, -1e30, 87.0]])
    got = picks(x)
    assert got.ids.tolist() == [0, 0, 0, 0] and bool(torch.isfinite(got.top1).all() & got.logsumexp.isfinite().all())
    torch.testing.assert_close(got.top1[:3], torch.tensor([1.0, 1 / 3, 1 / 3]))
    torch.testing.assert_close(margins(x)[2:], torch.tensor([0.0, 1.0]))
