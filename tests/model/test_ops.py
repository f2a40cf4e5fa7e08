"""Row-wise products, maps and norms: right in both classes, and in exact mode a function of the row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.cache.hybrid import same_bits
from workbench.model import ops
from workbench.model.ops import SERIAL, Numerics, linear, mapped, pad_rows, rms_norm
from workbench.model.rotary import Rotary

EXACT, FAST = Numerics(exact=True), Numerics(exact=False)
MAPS = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
}


def rows(n: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num", [EXACT, FAST, Numerics(True, 16)], ids=["exact", "fast", "block 16"])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 16, 17, 40, 64, 201])
def test_linear_is_the_product(num, n):
    x, w = rows(n, 31), rows(53, 31, 1)
    out = linear(x, w, num)
    assert out.shape == (n, 53)
    torch.testing.assert_close(out.double(), x.double() @ w.double().T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [17, 64, 201])
def test_fast_products_take_views(n):
    x, w = rows(n, 50)[:, 7:38], rows(31, 60, 1).t()[3:56]
    assert not x.is_contiguous() and not w.is_contiguous()
    torch.testing.assert_close(linear(x, w, FAST).double(), x.double() @ w.double().T, rtol=0, atol=1e-5)


def gradients(n: int) -> bool:
    """True when the product of n rows passes on the gradients of its rows and its weight."""
    x, w = rows(n, 31).requires_grad_(), rows(53, 31, 1).requires_grad_()
    with torch.enable_grad():
        linear(x, w, FAST).sum().backward()
    if x.grad is None or w.grad is None:
        return False
    return torch.allclose(x.grad, w.sum(0).expand_as(x)) and torch.allclose(w.grad, x.sum(0).expand_as(w), atol=1e-4)


needs_wide = pytest.mark.skipif(not ops._has_wide_products(), reason="this machine has no oneDNN with 512-bit vectors")


@pytest.mark.parametrize("n", [40, 64, 201])
def test_fast_products_pass_gradients_on(n):
    assert gradients(n)


@needs_wide
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_wide_products_would_lose_gradients(monkeypatch):
    monkeypatch.setattr(ops, "_wide_products", lambda x, w: True)
    assert not gradients(64)


@needs_wide
def test_wide_products_serve_float32_without_gradients_and_autocast():
    x, w = rows(64, 31), rows(53, 31, 1)
    with torch.inference_mode():
        assert ops._wide_products(x, w)
        assert not ops._wide_products(x.double(), w.double())
        assert not ops._wide_products(x.bfloat16(), w.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert not ops._wide_products(x, w)
            assert linear(x, w, FAST).dtype == torch.bfloat16
    with torch.enable_grad():
        assert not ops._wide_products(x, w)


def test_pad_rows_adds_zeros_to_the_block():
    x = rows(5, 3)
    assert pad_rows(x, 5) is x
    assert torch.equal(pad_rows(x, 4), torch.cat([x, torch.zeros(3, 3)]))


def check_rows(product, w: torch.Tensor, x: torch.Tensor, picks: list[int], spare: int) -> bool:
    """True when rows of a shuffled, shortened, shifted batch have the bits that they have in the whole one."""
    full = product(x, w)
    chosen = x[picks]
    moved = torch.cat([rows(spare, x.shape[1], 7), chosen]) if spare else chosen
    return same_bits(product(moved, w)[spare:], full[picks])


@settings(max_examples=30)
@given(
    shape=st.sampled_from([(31, 53), (30, 46), (320, 41), (64, 64), (46, 31)]),
    picks=st.lists(st.integers(0, 39), min_size=1, max_size=24),
    spare=st.integers(0, 5),
)
def test_exact_rows_depend_on_the_row_alone(shape, picks, spare):
    x, w = rows(40, shape[0]), rows(shape[1], shape[0], 1)
    assert check_rows(lambda a, b: linear(a, b, EXACT), w, x, picks, spare)


def test_exact_rows_depend_on_the_row_alone_on_two_threads(threads):
    x, w = rows(40, 320), rows(1024, 320, 1)
    with threads(2):
        for n, spare in ((1, 0), (2, 3), (5, 2), (23, 1)):
            assert check_rows(lambda a, b: linear(a, b, EXACT), w, x, list(range(3, 3 + n)), spare)


def test_fast_and_stock_products_depend_on_the_number_of_rows():
    w, x = rows(1024, 320, 1), rows(40, 320)
    for product in (lambda a, b: linear(a, b, FAST), torch.nn.functional.linear):
        assert not all(check_rows(product, w, x, list(range(n)), 0) for n in range(1, 40)), "the check has no teeth"


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("n", [1, 2])
def test_exact_maps_do_not_depend_on_the_place(threads, name, n):
    with threads(n):
        x = rows(1, 2 * SERIAL + 77)[0] * 4
        whole = mapped(MAPS[name], x, EXACT)
        torch.testing.assert_close(whole, MAPS[name](x))
        for lo, hi in [(0, 1), (3, 20), (61, 130), (SERIAL - 5, SERIAL + 9), (7, 2 * SERIAL + 77)]:
            assert same_bits(mapped(MAPS[name], x[lo:hi], EXACT), whole[lo:hi])
        strided = x[: 60 * 50].view(60, 50)[:, 3:21]
        assert same_bits(mapped(MAPS[name], strided, EXACT), whole[: 60 * 50].view(60, 50)[:, 3:21])


def test_plain_maps_depend_on_the_place():
    x = rows(1, 200)[0] * 4
    found = [name for name, fn in MAPS.items() if any(not same_bits(fn(x[i:]), fn(x)[i:]) for i in range(1, 64))]
    assert found, "no scalar tail on this machine differs from its vector unit: the check has no teeth"
    assert all(same_bits(mapped(fn, x[i:], EXACT), mapped(fn, x, EXACT)[i:]) for fn in MAPS.values() for i in range(64))


@settings(max_examples=30)
@given(width=st.sampled_from([10, 18, 24, 30, 31, 320]), n=st.integers(1, 40), spare=st.integers(0, 5))
def test_norm_is_right_and_row_wise(width, n, spare):
    x, scale = rows(40, width), 1 + 0.2 * rows(1, width, 3)[0]
    out = rms_norm(x, scale, 1e-6)
    y = x.double()
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert same_bits(rms_norm(torch.cat([rows(spare, width, 5), x[:n]]), scale, 1e-6)[spare:], out[:n])


def test_norm_keeps_the_type_and_computes_in_float32():
    x = rows(3, 32).to(torch.bfloat16)
    out = rms_norm(x, torch.ones(32), 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rms_norm(x.float(), torch.ones(32), 1e-6).to(torch.bfloat16))


def test_rotary_table_does_not_depend_on_how_it_grew():
    step, once = Rotary(6, 1e4), Rotary(6, 1e4)
    for n in (1, 200, 257, 1000):
        step.table(n, torch.device("cpu"))
    for a, b in zip(step.table(1000, torch.device("cpu")), once.table(1000, torch.device("cpu"))):
        assert same_bits(a[:1000], b[:1000])
