"""Products of one to eight bfloat16 rows with a weight that the GPU's registers hold.

Every program loads all its outputs' weights while what runs before it ends, and only then waits for its rows. Each row
is summed on its own, so that its bits do not depend on the others; they are not those of ``skinny_linear``.
Legend: M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_shape
from workbench_kernels.direct_linear import ref
from workbench_kernels.dispatch import by_triton

__all__ = ["MOST", "direct_linear", "takes"]

MOST = 8  # rows
LEAST, LONGEST, LOADS = 64, 1024, 32  # inputs of one load, a power of two that divides K; loads of a row


def takes(rows: int, w_NK: Tensor) -> bool:
    """Whether the op takes this many rows and this weight."""
    return rows <= MOST and w_NK.dtype == torch.bfloat16 and _fits(w_NK.shape[1])


def _fits(k: int) -> bool:
    return k > 0 and k % LEAST == 0 and k // min(k & -k, LONGEST) <= LOADS


def direct_linear(
    x_MK: Tensor, w_NK: Tensor, *, swiglu: bool = False, out_MN: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """x @ w.T of a few rows, with the gated activation after it if asked for.

    Args:
        x_MK: Rows, bfloat16, at most 8.
        w_NK: Weight, bfloat16, K a multiple of 64 and at most 32 times the power of two, up to 1,024, that divides it.
        swiglu: The weight stacks N/2 gate rows and N/2 up rows, and the result is silu(gate) * up; default False.
        out_MN: Where the result goes; default None, a new tensor.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [M, N], or [M, N/2] with ``swiglu``, in the type of the rows, summed in float32.

    Raises:
        KernelError: A tensor is strided, or shapes, types or sizes do not fit.
    """
    check_dense("direct_linear", x=x_MK, w=w_NK, out=out_MN)
    check_shape("direct_linear", "x", x_MK, (None, None))
    m, k = x_MK.shape
    check_shape("direct_linear", "w", w_NK, (None, k))
    check_dtype("direct_linear", "w", w_NK, x_MK.dtype)
    if m > MOST or not _fits(k):
        raise KernelError(
            f"direct_linear: {m} rows of {k} inputs are not valid: give at most {MOST} rows, and inputs in multiples "
            f"of {LEAST} that a power of two up to {LONGEST} parts into at most {LOADS}; skinny_linear takes others"
        )
    if swiglu and len(w_NK) % 2:
        raise KernelError(f"direct_linear: swiglu needs an even number of weight rows, not {len(w_NK)}")
    width = len(w_NK) // 2 if swiglu else len(w_NK)
    if out_MN is not None:
        check_shape("direct_linear", "out", out_MN, (m, width))
        check_dtype("direct_linear", "out", out_MN, x_MK.dtype)
    if not by_triton("direct_linear", impl, x_MK):
        made = ref.direct_linear(x_MK, w_NK, swiglu)
        return made if out_MN is None else out_MN.copy_(made)
    check_dtype("direct_linear", "x", x_MK, torch.bfloat16)
    from workbench_kernels.direct_linear import kernel

    out = torch.empty(m, width, dtype=x_MK.dtype, device=x_MK.device) if out_MN is None else out_MN
    kernel.direct_linear(x_MK, w_NK, swiglu, out)
    return out
