"""Triton convolution: a program holds some rows of some channels; the window's cut is a gather of W rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import begin, counted, launch, narrow, power


@triton.jit
def _fed(u_ptr, window_ptr, b, place, col, live, T, P, C, W: tl.constexpr):
    """Row ``place`` of [window | inputs], float32."""
    old = tl.load(window_ptr + (b * W + place) * C + col, mask=live & (place < W), other=0)
    new = tl.load(u_ptr + (b * T + place - W) * P + col, mask=live & (place >= W), other=0)
    return tl.where(place < W, old.to(tl.float32), new.to(tl.float32))


@triton.jit(do_not_specialize=["T"])
def conv_kernel(
    u_ptr, window_ptr, taps_ptr, out_ptr, T, P, C, W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    b = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (t < T) & (col < C)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for i in tl.static_range(W + 1):
        tap = tl.load(taps_ptr + i * C + col, mask=col < C, other=0).to(tl.float32)
        acc += _fed(u_ptr, window_ptr, b, (t + i).to(tl.int64), col, live, T, P, C, W) * tap
    out = narrow(acc * tl.sigmoid(acc), out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * T + t) * C + col, out, mask=live)


@triton.jit(do_not_specialize=["T"])
def window_kernel(
    u_ptr, window_ptr, count_ptr, out_ptr, T, P, C, COUNTED: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    b = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, SLOTS)[:, None]
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (slot < W) & (col < C)
    kept = T
    if COUNTED > 0:
        kept = tl.load(count_ptr + (b if COUNTED == 1 else 0))
    row = _fed(u_ptr, window_ptr, b, (slot + kept).to(tl.int64), col, live, T, P, C, W)
    # the window may be written where it was read: no store before every load
    tl.debug_barrier()
    tl.store(out_ptr + (b * W + slot) * C + col, narrow(row, out_ptr.dtype.element_ty), mask=live)


BLOCK = 256


def _window(u_BTP: Tensor, window_BWC: Tensor, counts_B: Tensor | None, out_BWC: Tensor) -> None:
    b, w, c = window_BWC.shape
    t, p = u_BTP.shape[1:]
    if w:
        launch(
            window_kernel, (-(-c // BLOCK), b), u_BTP, window_BWC, window_BWC if counts_B is None else counts_B,
            out_BWC, t, p, c, COUNTED=counted(counts_B, b), W=w,
            SLOTS=power(w), BLOCK=BLOCK, num_warps=2, early=True,
        )  # fmt: skip


def causal_conv(
    u_BTP: Tensor, window_BWC: Tensor, taps_LC: Tensor, counts_B: Tensor | None, after: bool
) -> tuple[Tensor, Tensor | None]:
    """See ``workbench_kernels.causal_conv.causal_conv``."""
    b, w, c = window_BWC.shape
    t, p = u_BTP.shape[1:]
    out = torch.empty(b, t, c, dtype=u_BTP.dtype, device=u_BTP.device)
    rows = min(power(max(t, 1)), 16)
    launch(
        conv_kernel, (-(-c // BLOCK), -(-t // rows), b), u_BTP, window_BWC, taps_LC, out, t, p, c,
        W=w, ROWS=rows, BLOCK=BLOCK, num_warps=4 if rows > 1 else 2, enable_fp_fusion=False,
        early=True,
    )  # fmt: skip
    if not after:
        return out, None
    window = torch.empty_like(window_BWC)
    _window(u_BTP, window_BWC, counts_B, window)
    return out, window


def conv_commit(u_BTP: Tensor, window_BWC: Tensor, keep_B: Tensor) -> Tensor:
    """See ``workbench_kernels.causal_conv.conv_commit``."""
    _window(u_BTP, window_BWC, keep_B, window_BWC)
    return window_BWC
