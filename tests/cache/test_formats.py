"""Formats of K/V rows: byte for byte a slow reference and ggml; within their bounds; the bits of a row alone."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.cache.formats import FORMATS, cache_format
from workbench.core.errors import UserError

PACKED = ("q8_0", "q5_1", "fp8")
F = np.float32


def samples(dim: int = 64, rows: int = 60, seed: int = 0) -> Tensor:
    """Rows of many sizes, and the awkward ones: zeros, constants, ties, one outlier, subnormal scales, -0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, dim, generator=generator) * 10.0 ** torch.linspace(-9, 4, rows)[:, None]
    ties = torch.arange(dim) % 32 - 15.5
    ties[::32] = 127.0  # so that q8_0's scale is 1
    odd = [torch.zeros(dim), -torch.zeros(dim), torch.full((dim,), 0.3), torch.full((dim,), -2e-7), ties]
    odd += [torch.eye(dim)[3] * 50, torch.arange(dim) % 32 / 2.0, torch.full((dim,), 1e-40), torch.eye(dim)[1] * 3e-39]
    return torch.cat([x, torch.stack(odd)])


def half(value: np.float32) -> bytes:
    return struct.pack("<e", float(value))


def slow_q8_0(row: list[float]) -> bytes:
    out = b""
    for i in range(0, len(row), 32):
        x = [F(v) for v in row[i : i + 32]]
        d = F(max(abs(v) for v in x) / F(127))
        with np.errstate(over="ignore", divide="ignore"):
            inverse = F(1) / d if d else F(0)
        inverse = F(0) if np.isinf(inverse) else inverse
        out += half(d)
        for v in x:
            y = float(v * inverse)
            q = int(abs(y)) + (abs(y) - int(abs(y)) >= 0.5)  # halves away from zero
            out += struct.pack("<b", -q if y < 0 else q)
    return out


def slow_q5_1(row: list[float]) -> bytes:
    out = b""
    for i in range(0, len(row), 32):
        x = [F(v) for v in row[i : i + 32]]
        m = min(x)
        d = F((max(x) - m) / F(31))
        with np.errstate(over="ignore", divide="ignore"):
            inverse = F(1) / d if d else F(0)
        inverse = F(0) if np.isinf(inverse) else inverse
        q = [int(F(F(v - m) * inverse) + F(0.5)) for v in x]
        high = sum((v >> 4) << j for j, v in enumerate(q))
        nibbles = bytes((q[j] & 15) | (q[j + 16] & 15) << 4 for j in range(16))
        out += half(d) + half(m) + struct.pack("<I", high) + nibbles
    return out


E4M3 = [(s, (-1) ** s * (2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8)))
        for s in (0, 1) for e in range(16) for m in range(8) if (e, m) != (15, 7)]  # fmt: skip
CODES = [s << 7 | e << 3 | m for s in (0, 1) for e in range(16) for m in range(8) if (e, m) != (15, 7)]


def slow_fp8(row: list[float]) -> bytes:
    x = [F(v) for v in row]
    s = F(max(abs(v) for v in x) / F(448))
    out = struct.pack("<f", s)
    for v in x:
        y = float(F(v / s)) if s else 0.0
        y = min(max(y, -448.0), 448.0)
        sign = int(np.signbit(y))
        near = min((abs(value - y), code & 1, code) for (side, value), code in zip(E4M3, CODES) if side == sign)
        out += bytes([near[2]])  # a tie goes to the even mantissa
    return out


SLOW = {"q8_0": slow_q8_0, "q5_1": slow_q5_1, "fp8": slow_fp8}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("dim", [32, 64])
def test_bytes_are_those_of_the_slow_reference(name, dim):
    x = samples(dim)
    packed = FORMATS[name].encode(x)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == FORMATS[name].row_bytes(dim, torch.float32)
    for i, row in enumerate(x.tolist()):
        assert bytes(packed[i].tolist()) == SLOW[name](row), i


@pytest.mark.parametrize("name", ["q8_0", "q5_1"])
def test_bytes_and_values_are_those_of_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    x = samples(96, rows=200, seed=3)
    packed = FORMATS[name].encode(x)
    usual = x.abs().amax(-1) > 1e-30  # below, its inverse of the scale overflows
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(x[usual].numpy(), kind)
    assert np.array_equal(packed[usual].numpy(), theirs)
    ours = FORMATS[name].decode(packed[usual], torch.float32).numpy()
    assert np.array_equal(ours.view(np.int32), gguf.quants.dequantize(theirs, kind).view(np.int32))


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_within_the_bound_and_the_bound_is_near_it(name):
    x, form = samples(64, rows=2000, seed=1), FORMATS[name]
    miss = (form.decode(form.encode(x), torch.float32).double() - x.double()).abs()
    bound = form.bound(x).double()
    assert bool((miss <= bound).all())
    if name == "dense":
        assert not bool(miss.any())
        return
    sizable = x.abs().amax(-1) > 1e-2  # where half precision's subnormals are no part of it
    assert float((miss / bound)[sizable].max()) > 0.8
    halved = bound * 0.75
    assert bool((miss > halved)[sizable].any())  # the bound could not be much smaller


def test_bounds_in_the_terms_of_the_formats():
    x = samples(64, rows=500, seed=2)[200:500]
    blocks = x.unflatten(-1, (-1, 32))
    step8 = blocks.abs().amax(-1, keepdim=True) / 127
    miss = (FORMATS["q8_0"].decode(FORMATS["q8_0"].encode(x), torch.float32) - x).abs().unflatten(-1, (-1, 32))
    assert bool((miss <= step8 * (0.5 + 127 * 2.0**-11 + 1e-4) + 127 * 2.0**-25).all())
    step5 = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 31
    miss = (FORMATS["q5_1"].decode(FORMATS["q5_1"].encode(x), torch.float32) - x).abs().unflatten(-1, (-1, 32))
    slack = blocks.abs().amax(-1, keepdim=True) * 2.0**-11
    assert bool((miss <= step5 * (0.5 + 31 * 2.0**-11 + 1e-4) + slack + 32 * 2.0**-25).all())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_packs_alike_in_any_company(name, dtype):
    x, form = samples(64).to(dtype).view(3, 23, 64), FORMATS[name]
    whole = form.encode(x)
    values = form.decode(whole, dtype)
    assert values.dtype == dtype and values.shape == x.shape
    for i in range(3):
        for j in range(23):
            alone = form.encode(x[i, j])
            assert torch.equal(alone, whole[i, j])
            assert torch.equal(form.decode(alone, dtype), values[i, j])
    spread = form.encode(x.transpose(0, 1))  # not contiguous
    assert torch.equal(spread, whole.transpose(0, 1))


@pytest.mark.parametrize("dim", [9, 10, 11, 12])
def test_one_row_unpacks_alike_wherever_it_lies(dim):
    form, x = FORMATS["fp8"], samples(dim, rows=6, seed=4)
    packed = form.encode(x)
    values = form.decode(packed, torch.float32)
    for i in range(len(x)):
        assert torch.equal(form.decode(packed[i], torch.float32), values[i])
        assert torch.equal(form.decode(packed[i : i + 1], torch.float32), values[i : i + 1])


def test_bytes_per_value():
    assert [FORMATS[n].row_bytes(256, torch.bfloat16) for n in ("dense", "q8_0", "q5_1", "fp8")] == [512, 272, 192, 260]
    assert [FORMATS[n].value_bytes(32, torch.float32) for n in ("dense", "q8_0", "q5_1", "fp8")] == [
        4, 34 / 32, 24 / 32, 36 / 32]  # fmt: skip


def test_a_block_past_half_precision_is_not_finite_and_so_cannot_go_unseen():
    x = torch.linspace(-1e5, 1e5, 32)[None]
    assert not bool(FORMATS["q5_1"].decode(FORMATS["q5_1"].encode(x), torch.float32).isfinite().any())
    assert bool(FORMATS["q8_0"].decode(FORMATS["q8_0"].encode(x), torch.float32).isfinite().all())  # its scale is 787
    assert bool(FORMATS["fp8"].decode(FORMATS["fp8"].encode(x * 1e9), torch.float32).isfinite().all())


def test_zero_bytes_are_finite_values():
    for name, form in FORMATS.items():
        zeros = torch.zeros(3, form.row_bytes(32, torch.float32), dtype=torch.uint8)
        assert torch.equal(form.decode(zeros, torch.float32), torch.zeros(3, 32)), name


def test_refusals():
    for name in ("q8_0", "q5_1"):
        with pytest.raises(
            UserError, match=rf"k_format='{name}' is not valid for heads 24 wide.*multiple of 32; choose one of 'dense'"
        ):
            cache_format("k_format", name, 24)
    assert cache_format("k_format", "fp8", 24).name == "fp8"
    with pytest.raises(UserError, match=r"v_format='q4_0' is not valid.*'dense', 'q8_0', 'q5_1', 'fp8'"):
        cache_format("v_format", "q4_0", 32)
