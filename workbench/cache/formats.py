"""How the values of a K or V row are kept: dense, in blocks of 32 with a scale (q8_0, q5_1), or as scaled fp8.

A format packs the last axis, one head's D values, into bytes and unpacks them again. Packing looks at one row of one
head alone, by operations that IEEE rounds correctly, so its bits depend on nothing else. Layout and rounding of the
block formats are ggml's (``quantize_row_q8_0_ref``, ``quantize_row_q5_1_ref``), byte for byte.

Scales and minima of blocks are kept in half precision: a block whose scale or minimum passes 65,504 unpacks to values
that are not finite, and the check of the logits then names the position.

Legend: D head width, P bytes of a packed row, M blocks of 32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from workbench.core.errors import UserError, check_choice

GROUP = 32  # values per block
FP8_TOP = 448.0  # largest e4m3
_HALF, _TINY = 2.0**-11, 2.0**-25  # half a unit of half precision: relative, and in its subnormal range
_SLACK = 2.0**-21  # float32 rounding along the way, relative


class Format(ABC):
    """One way to keep rows."""

    name: ClassVar[str]
    group: ClassVar[int] = 1  # a head's width must be a multiple

    @abstractmethod
    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Bytes that one head's row of ``dim`` values takes, for a model of type ``dtype``."""

    @abstractmethod
    def encode(self, x_D: Tensor) -> Tensor:
        """Pack values [..., D] into bytes [..., P], uint8."""

    @abstractmethod
    def decode(self, packed_P: Tensor, dtype: torch.dtype) -> Tensor:
        """Values [..., D] of packed bytes [..., P]; computed in float32, then rounded to ``dtype``."""

    @abstractmethod
    def bound(self, x_D: Tensor) -> Tensor:
        """For each value, the most by which unpacking to float32 may miss it."""

    def value_bytes(self, dim: int, dtype: torch.dtype) -> float:
        """Bytes per value."""
        return self.row_bytes(dim, dtype) / dim


class Dense(Format):
    """The model's own type: 2 or 4 bytes per value, nothing lost."""

    name = "dense"

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """D values of the model's type."""
        return dim * dtype.itemsize

    def encode(self, x_D: Tensor) -> Tensor:
        """The values' own bytes."""
        return x_D.contiguous().view(torch.uint8)

    def decode(self, packed_P: Tensor, dtype: torch.dtype) -> Tensor:
        """The bytes as values of the model's type."""
        return packed_P.view(dtype)

    def bound(self, x_D: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(x_D)


class Q8_0(Format):
    """Blocks of 32: a half-precision scale d, then 32 signed bytes q; a value is d q. 34 bytes."""

    name = "q8_0"
    group = GROUP

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """34 per 32 values."""
        return dim // GROUP * 34

    def encode(self, x_D: Tensor) -> Tensor:
        """d = max |x| / 127; q = x / d, halves away from zero; d is rounded only after that."""
        x = _blocks(x_D)
        d = _over(x.abs().amax(-1, keepdim=True), 127)
        scaled = x * _inverse(d)
        size = scaled.abs()
        whole = size.floor()
        q = torch.where(size - whole >= 0.5, whole + 1, whole) * scaled.sign()
        return torch.cat([_half(d), q.to(torch.int8).view(torch.uint8)], -1).flatten(-2)

    def decode(self, packed_P: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale times the signed bytes."""
        blocks = packed_P.unflatten(-1, (-1, 34))
        q = blocks[..., 2:].contiguous().view(torch.int8).float()
        return (q * _read_half(blocks[..., :2])).flatten(-2).to(dtype)

    def bound(self, x_D: Tensor) -> Tensor:
        """Half a step, and 127 times the rounding of the scale."""
        d = _blocks(x_D).abs().amax(-1, keepdim=True) / 127
        return (d / 2 + 127 * (_half_error(d) + d * _SLACK)).expand(*d.shape[:-1], GROUP).flatten(-2)


class Q5_1(Format):
    """Blocks of 32: half-precision d and m, 32 high bits, 32 nibbles; a value is d q + m, q in 0..31. 24 bytes."""

    name = "q5_1"
    group = GROUP

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """24 per 32 values."""
        return dim // GROUP * 24

    def encode(self, x_D: Tensor) -> Tensor:
        """m = min x, d = (max x - m) / 31, q = (x - m) / d + 1/2 cut to an integer; d, m rounded only after that."""
        x = _blocks(x_D)
        m = x.amin(-1, keepdim=True)
        d = _over(x.amax(-1, keepdim=True) - m, 31)
        q = ((x - m) * _inverse(d) + 0.5).clamp(0, 31).to(torch.uint8)
        low = q & 15
        nibbles = low[..., :16] | low[..., 16:] << 4
        bits = (q >> 4).unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8, device=q.device)
        return torch.cat([_half(d), _half(m), bits.sum(-1, dtype=torch.uint8), nibbles], -1).flatten(-2)

    def decode(self, packed_P: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale times the five bits, plus the minimum."""
        blocks = packed_P.unflatten(-1, (-1, 24))
        shifts = torch.arange(8, dtype=torch.uint8, device=packed_P.device)
        high = (blocks[..., 4:8].unsqueeze(-1) >> shifts & 1).flatten(-2)
        low = torch.cat([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], -1)
        scaled = (low | high << 4).float() * _read_half(blocks[..., :2])
        return (scaled + _read_half(blocks[..., 2:4])).flatten(-2).to(dtype)

    def bound(self, x_D: Tensor) -> Tensor:
        """Half a step, 31 times the rounding of the scale, and the rounding of the minimum."""
        x = _blocks(x_D)
        m, top = x.amin(-1, keepdim=True), x.abs().amax(-1, keepdim=True)
        d = (x.amax(-1, keepdim=True) - m) / 31
        miss = d / 2 + 31 * (_half_error(d) + d * _SLACK) + _half_error(m) + top * _SLACK
        return miss.expand(*d.shape[:-1], GROUP).flatten(-2)


class FP8(Format):
    """A float32 scale s per row and head, then D values in e4m3; a value is s q. D + 4 bytes, for any head width."""

    name = "fp8"

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """One per value, and 4."""
        return dim + 4

    def encode(self, x_D: Tensor) -> Tensor:
        """s = max |x| / 448; q = x / s to the nearest e4m3, ties to even."""
        x = x_D.float()
        s = _over(x.abs().amax(-1, keepdim=True), FP8_TOP)
        q = torch.where(s == 0, 0.0, x / s).clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn)
        return torch.cat([s.contiguous().view(torch.uint8), q.view(torch.uint8)], -1)

    def decode(self, packed_P: Tensor, dtype: torch.dtype) -> Tensor:
        """The scale times the e4m3 values."""
        scale = packed_P[..., :4].clone(memory_format=torch.contiguous_format)  # a row may begin at any byte
        s = scale.view(torch.float32)
        return (packed_P[..., 4:].contiguous().view(torch.float8_e4m3fn).float() * s).to(dtype)

    def bound(self, x_D: Tensor) -> Tensor:
        """A sixteenth of the value (three bits of mantissa), at least half of the smallest step, 2^-9 of the scale."""
        x = x_D.float()
        s = x.abs().amax(-1, keepdim=True) / FP8_TOP
        return torch.maximum(x.abs() / 16, s * 2.0**-10) + (x.abs() + s) * _SLACK + 2.0**-140


FORMATS: dict[str, Format] = {f.name: f for f in (Dense(), Q8_0(), Q5_1(), FP8())}


def cache_format(option: str, name: str, dim: int) -> Format:
    """The format of this name, for heads of this width.

    Args:
        option: What the user calls the choice, such as "k_format".
        name: One of ``FORMATS``.
        dim: Head width D.

    Returns:
        The format.

    Raises:
        UserError: There is no such format, or the heads do not divide into its blocks.
    """
    chosen = FORMATS[check_choice(option, name, FORMATS)]
    if dim % chosen.group:
        whole = ", ".join(repr(f.name) for f in FORMATS.values() if f.group == 1)
        raise UserError(
            f"{option}={name!r} is not valid for heads {dim} wide: it packs blocks of {chosen.group} values, so the "
            f"width must be a multiple of {chosen.group}; choose one of {whole}"
        )
    return chosen


def _blocks(x_D: Tensor) -> Tensor:
    return x_D.float().unflatten(-1, (-1, GROUP))


def _over(x: Tensor, n: float) -> Tensor:
    """x / n, rounded once. By a plain number a GPU multiplies with the rounded inverse, and packs other bytes."""
    return x / torch.full_like(x, n)


def _inverse(d: Tensor) -> Tensor:
    """1 / d; 0 for a block without spread, also where d is so small that its inverse overflows and d rounds to 0."""
    inverse = 1 / d
    return torch.where(inverse.isinf(), 0.0, inverse)


def _half(x: Tensor) -> Tensor:
    return x.to(torch.float16).view(torch.uint8)


def _read_half(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.float16).float()


def _half_error(x: Tensor) -> Tensor:
    return (x.abs() * _HALF).clamp(min=_TINY)
