"""Products of few rows with a wide weight, near the speed at which the weight can be read.

Rows are padded to blocks of 16 and K is walked in a fixed order, in a number of parts that depends on the weight's
shape alone; the parts are summed in order. So a row's bits depend on the row and the weight, never on how many rows
come together. Legend: M rows, K inputs, N outputs, S scales per output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.skinny_linear import ref

__all__ = ["skinny_linear", "quantise_weight", "ROWS"]

ROWS = 16  # rows per block: the least that the matrix units take
quantise_weight = ref.quantise_weight


def skinny_linear(
    x_MK: Tensor,
    w_NK: Tensor,
    *,
    scales_NS: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 1e-6,
    swiglu: bool = False,
    sizes: Sequence[int] | None = None,
    wide: bool = False,
    out_MN: Tensor | None = None,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """x @ w.T, with the norm before it, the gated activation after it and the cut into parts, each if asked for.

    Args:
        x_MK: Rows, bfloat16, float16 or float32.
        w_NK: Weight in the type of the rows; or int8 or float8_e4m3fn with scales.
        scales_NS: Float32 scale of each of S equal groups of K in every output; default None, for none.
        norm_K: Float32 scale of a root-mean-square norm over the row, applied first (1 + weight where the layer says
            so) and rounded to their type, in a launch of its own; default None.
        eps: Of that norm; default 1e-6.
        swiglu: The weight stacks N/2 gate rows and N/2 up rows, and the result is silu(gate) * up; default False.
        sizes: Widths of stacked projections; the result is then a tuple of column views. Default None.
        wide: The result is float32 whatever the rows' type; default False.
        out_MN: Where the result goes; default None, a new tensor.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [M, N], or [M, N/2] with ``swiglu``, in the type of the rows unless ``wide``, summed in float32.

    Raises:
        KernelError: A tensor is strided, or shapes, types or sizes do not fit.

    On a GPU the call uses counters of the current stream: two graphs captured on one stream must not run at once.
    """
    check_dense("skinny_linear", x=x_MK, w=w_NK, scales=scales_NS, norm=norm_K, out=out_MN)
    check_shape("skinny_linear", "x", x_MK, (None, None))
    k = x_MK.shape[1]
    check_shape("skinny_linear", "w", w_NK, (None, k))
    n = w_NK.shape[0]
    if norm_K is not None:
        check_shape("skinny_linear", "norm", norm_K, (k,))
    if scales_NS is None:
        check_dtype("skinny_linear", "w", w_NK, x_MK.dtype)
    else:
        check_shape("skinny_linear", "scales", scales_NS, (n, None))
        check_dtype("skinny_linear", "w", w_NK, torch.int8, torch.float8_e4m3fn)
        groups = scales_NS.shape[1]
        if k % groups or (groups > 1 and (k // groups) % 32):
            raise KernelError(
                f"skinny_linear: {groups} scales for {k} inputs is not valid: groups must be equal and multiples of 32"
            )
    if swiglu and n % 2:
        raise KernelError(f"skinny_linear: swiglu needs an even number of weight rows, not {n}")
    width = n // 2 if swiglu else n
    if sizes is not None and sum(sizes) != width:
        raise KernelError(f"skinny_linear: sizes {list(sizes)} sum to {sum(sizes)} and the result is {width} wide")
    made = torch.float32 if wide and x_MK.dtype != torch.float64 else x_MK.dtype
    if out_MN is not None:
        check_shape("skinny_linear", "out", out_MN, (len(x_MK), width))
        check_dtype("skinny_linear", "out", out_MN, made)
    if by_triton("skinny_linear", impl, x_MK):
        from workbench_kernels.skinny_linear import kernel

        out = torch.empty(len(x_MK), width, dtype=made, device=x_MK.device) if out_MN is None else out_MN
        kernel.skinny_linear(x_MK, w_NK, scales_NS, norm_K, eps, swiglu, out)
    else:
        out = ref.skinny_linear(x_MK, w_NK, scales_NS, norm_K, eps, swiglu).to(made)
        if out_MN is not None:
            out = out_MN.copy_(out)
    return out if sizes is None else out.split(list(sizes), 1)
