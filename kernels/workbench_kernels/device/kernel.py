"""Rounding, dots, order-preserving keys and Philox words on the device, and the launch of a kernel.

Under the interpreter bfloat16 is a plain 16-bit integer: loads are widened to float32 at once, dots run in float32,
and stores round by hand.
"""

from __future__ import annotations

import struct
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.runtime.JITFunction))


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """A float32 value in a narrower type, to nearest even."""
    if INTERPRETED and TYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b with float32 sums; operands keep their type on a GPU and are float32 under the interpreter."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def as_operand(x, TYPE: tl.constexpr):
    """A float32 value as an operand of ``dot``: rounded to the type, or kept wide but rounded under the interpreter."""
    if INTERPRETED:
        return narrow(x, TYPE).to(tl.float32)
    else:
        return x.to(TYPE)


@triton.jit
def order_key(x):
    """Float32 as int32 in the same order; a negative zero equals a positive one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """The float32 that has this order key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def kth_between(key, low, high, k):
    """A number from low to high that just k of int32 keys reach; the largest that more do where keys are equal.

    Low where fewer than k reach it. Few steps are taken: the search ends at the first number that parts the k largest
    from the rest.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    reached = tl.full((), -1, tl.int32)
    while (low < high) & (reached != k):
        middle = (low + high + 1) >> 1
        count = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0)
        if count >= k:
            low = middle
            reached = count
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit
def philox4(k0, k1, c0, c1, c2, c3):
    """Four words of Philox4x32-10 for uint32 counters and a two-word key.

    Source: Salmon et al. 2011; the words of ``tl.philox``, whose key is one 64-bit seed.
    """
    for _ in tl.static_range(10):
        a0 = c0
        a2 = c2
        c0 = tl.umulhi(a2, 0xCD9E8D57) ^ c1 ^ k0
        c2 = tl.umulhi(a0, 0xD2511F53) ^ c3 ^ k1
        c1 = a2 * 0xCD9E8D57
        c3 = a0 * 0xD2511F53
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def word_of(ids, k0, k1, position, purpose, start):
    """The Philox word that belongs to each id: lane id % 4 of block id // 4."""
    block = (ids >> 2).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = philox4(
        k0.to(tl.uint32) + zero,
        k1.to(tl.uint32) + zero,
        block,
        position.to(tl.uint32) + zero,
        purpose.to(tl.uint32) + zero,
        start.to(tl.uint32) + zero,
    )
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def real(bits):
    """The float64 whose bits a launch passed as an integer; a float argument would be rounded to float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def uniform_of(word):
    """A word as a float64 number strictly inside (0, 1)."""
    return (word.to(tl.float64) + 0.5) * 2.3283064365386962890625e-10


@triton.jit
def begin(EARLY: tl.constexpr):
    """In a kernel that starts early: let the next one start, and wait for all that was launched before to end.

    Any number of early kernels may wait side by side, so that before this a kernel reads only what none writes that was
    launched since the last one that was not early: weights. It writes nothing.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@lru_cache(maxsize=64)
def starts_early(device: torch.device) -> bool:
    """Whether kernels may start there before the one in front has ended: GPUs of capability 9 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch(
    kernel: Any, grid: tuple[int, ...], first: torch.Tensor, *args: Any, early: bool = False, **options: Any
) -> None:
    """Run a kernel on the device of its first tensor; an empty grid runs nothing.

    Args:
        kernel: The kernel.
        grid: Programs.
        first: Its first tensor.
        *args: Its other arguments.
        early: It has a flag EARLY, and waits itself for what runs before it.
        **options: Its constants and how it is launched.
    """
    if 0 in grid:
        return
    here = first.device
    if early:
        options["EARLY"] = starts_early(here)
        if options["EARLY"]:
            options["launch_pdl"] = True
    on_it = here.type != "cuda" or here.index == torch.cuda.current_device()
    with nullcontext() if on_it else torch.cuda.device(here):
        kernel[grid](first, *args, **options)


def counted(counts_B: torch.Tensor | None, b: int) -> int:
    """How a kernel finds a sequence's count: 0 there are none, 1 one for each, 2 one for all."""
    if counts_B is None:
        return 0
    return 1 if len(counts_B) == b else 2


def bits(value: float) -> int:
    """The bits of a float64 as a signed integer: see ``real``."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def power(n: int, low: int = 1) -> int:
    """The least power of two that is at least n and ``low``."""
    return max(low, 1 << max(0, n - 1).bit_length())
