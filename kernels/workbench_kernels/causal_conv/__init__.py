"""The causal depthwise convolution before the delta rule, and the cut of its window.

Legend: B sequences, T rows, P columns of a stacked projection, C channels (its first columns), W window rows
(taps - 1), oldest first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.causal_conv import ref
from workbench_kernels.checks import check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton

__all__ = ["causal_conv", "conv_commit"]


def causal_conv(
    u_BTP: Tensor,
    window_BWC: Tensor,
    taps_LC: Tensor,
    *,
    counts_B: Tensor | None = None,
    after: bool = True,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """silu of the convolution of every channel with its own taps, and the window after the valid rows.

    Args:
        u_BTP: Inputs; channels are the first C of P columns.
        window_BWC: The W rows before.
        taps_LC: W + 1 taps, oldest input first.
        counts_B: Valid rows per sequence, int32, 0 to T; default None, all.
        after: Give the window after them; default True. A verify cuts its own by ``conv_commit``.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [B, T, C] in the type of the inputs, summed in float32 from the oldest tap on; and the new window [B, W, C],
        None where it is not asked for.

    Raises:
        KernelError: A tensor is strided or of another shape or type.

    Source: the convolution of transformers' Qwen3.5.
    """
    b, w, c = window_BWC.shape
    check_dense("causal_conv", u=u_BTP, window=window_BWC, taps=taps_LC, counts=counts_B)
    check_shape("causal_conv", "u", u_BTP, (b, None, None))
    check_shape("causal_conv", "taps", taps_LC, (w + 1, c))
    check_dtype("causal_conv", "window", window_BWC, u_BTP.dtype)
    if counts_B is not None:
        check_shape("causal_conv", "counts", counts_B, (b,))
        check_dtype("causal_conv", "counts", counts_B, torch.int32)
    if not by_triton("causal_conv", impl, u_BTP):
        return ref.causal_conv(u_BTP, window_BWC, taps_LC, counts_B, after)
    from workbench_kernels.causal_conv import kernel

    return kernel.causal_conv(u_BTP, window_BWC, taps_LC, counts_B, after)


def conv_commit(u_BTP: Tensor, window_BWC: Tensor, keep_B: Tensor, *, impl: str | None = None) -> Tensor:
    """Leave in the window the W rows that come last once ``keep`` rows were fed.

    Args:
        u_BTP: Inputs of a verify; channels are the first C columns.
        window_BWC: The window before it; written in place.
        keep_B: Rows to keep per sequence, or one number for all, int32, 0 to T.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The window.

    Raises:
        KernelError: A tensor is strided or of another shape or type.
    """
    b, w, c = window_BWC.shape
    check_dense("conv_commit", u=u_BTP, window=window_BWC, keep=keep_B)
    check_shape("conv_commit", "u", u_BTP, (b, None, None))
    check_shape("conv_commit", "keep", keep_B, (1 if keep_B.numel() == 1 else b,))
    check_dtype("conv_commit", "window", window_BWC, u_BTP.dtype)
    check_dtype("conv_commit", "keep", keep_B, torch.int32)
    if not by_triton("conv_commit", impl, u_BTP):
        window_BWC.copy_(ref.window_after(u_BTP, window_BWC, keep_B.expand(b)))
        return window_BWC
    from workbench_kernels.causal_conv import kernel

    return kernel.conv_commit(u_BTP, window_BWC, keep_B)
