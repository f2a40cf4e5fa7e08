"""Root-mean-square norms of rows: alone, after a residual sum, and gated.

Legend: R rows, D width. A row's bits depend on the row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError, check_columns, check_dense, check_dtype, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.rmsnorm import ref

__all__ = ["rmsnorm", "embed_rmsnorm", "add_rmsnorm", "gated_rmsnorm"]


def rmsnorm(x_RD: Tensor, scale_D: Tensor, *, eps: float = 1e-6, impl: str | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale, computed in float32.

    Args:
        x_RD: Rows, bfloat16, float16 or float32.
        scale_D: Float32; already 1 + weight where the layer says so.
        eps: Added to the mean square; default 1e-6.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [R, D] in the type of the rows.

    Raises:
        KernelError: A tensor is strided or of another shape.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    _check("rmsnorm", x_RD, scale_D)
    if not by_triton("rmsnorm", impl, x_RD):
        return ref.rmsnorm(x_RD, scale_D, eps=eps)
    from workbench_kernels.rmsnorm import kernel

    return kernel.rmsnorm(x_RD, scale_D, eps)


def embed_rmsnorm(
    ids_R: Tensor, table_VD: Tensor, scale_D: Tensor, *, eps: float = 1e-6, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of a table and their norms.

    Args:
        ids_R: Places in the table, int32 or int64; NaN comes of one that is not there.
        table_VD: The table, bfloat16, float16 or float32.
        scale_D: Float32, as in ``rmsnorm``.
        eps: Added to the mean square; default 1e-6.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The rows and their norms, [R, D] each in the type of the table.

    Raises:
        KernelError: A tensor is strided or of another shape or type.
    """
    _check("embed_rmsnorm", table_VD, scale_D)
    check_dense("embed_rmsnorm", table=table_VD, ids=ids_R)
    check_shape("embed_rmsnorm", "ids", ids_R, (None,))
    check_dtype("embed_rmsnorm", "ids", ids_R, torch.int32, torch.int64)
    if not by_triton("embed_rmsnorm", impl, table_VD):
        return ref.embed_rmsnorm(ids_R, table_VD, scale_D, eps=eps)
    from workbench_kernels.rmsnorm import kernel

    return kernel.embed_rmsnorm(ids_R, table_VD, scale_D, eps)


def add_rmsnorm(
    x_RD: Tensor, residual_RD: Tensor, scale_D: Tensor, *, eps: float = 1e-6, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of two rows, rounded to their type, and its norm.

    Args:
        x_RD: Rows.
        residual_RD: Rows of the same type.
        scale_D: Float32, as in ``rmsnorm``.
        eps: Added to the mean square; default 1e-6.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        The sum and its norm, [R, D] each in the type of the rows.

    Raises:
        KernelError: A tensor is strided or of another shape or type.
    """
    _check("add_rmsnorm", x_RD, scale_D)
    check_dense("add_rmsnorm", x=x_RD, residual=residual_RD)
    check_shape("add_rmsnorm", "residual", residual_RD, x_RD.shape)
    check_dtype("add_rmsnorm", "residual", residual_RD, x_RD.dtype)
    if not by_triton("add_rmsnorm", impl, x_RD):
        return ref.add_rmsnorm(x_RD, residual_RD, scale_D, eps=eps)
    from workbench_kernels.rmsnorm import kernel

    return kernel.add_rmsnorm(x_RD, residual_RD, scale_D, eps)


def gated_rmsnorm(
    o_RD: Tensor, z_RD: Tensor, weight_D: Tensor, *, eps: float = 1e-6, impl: str | None = None
) -> Tensor:
    """The norm of a delta rule's output times its weight times silu(z).

    Args:
        o_RD: Outputs, one row per value head.
        z_RD: Input of the gate; its type is the result's. It may be columns of a wider tensor, with the heads of a row
            side by side, [R / heads, heads D]. In a narrow type the norm, its product with the weight and
            the result are each rounded, as the model does.
        weight_D: The norm's plain weight, in float32 or in the type of the gate.
        eps: Added to the mean square; default 1e-6.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [R, D] in the type of the gate, dense.

    Raises:
        KernelError: A tensor is strided or of another shape.

    Source: Yang et al. 2024 (arXiv 2412.06464), with the order of transformers' Qwen3.5.
    """
    _check("gated_rmsnorm", o_RD, weight_D)
    r, d = o_RD.shape
    heads = max(1, z_RD.shape[-1] // max(1, d))
    check_columns("gated_rmsnorm", "z", z_RD)
    check_shape("gated_rmsnorm", "z", z_RD, (r // heads, heads * d))
    if r % heads:
        raise KernelError(f"gated_rmsnorm: {heads} heads of z in a row do not divide the {r} rows of o: give all heads")
    if not by_triton("gated_rmsnorm", impl, o_RD):
        return ref.gated_rmsnorm(o_RD, z_RD, weight_D, eps=eps)
    from workbench_kernels.rmsnorm import kernel

    return kernel.gated_rmsnorm(o_RD, z_RD, weight_D, eps)


def _check(op: str, x_RD: Tensor, scale_D: Tensor) -> None:
    check_dense(op, x=x_RD, scale=scale_D)
    check_shape(op, "x", x_RD, (None, None))
    check_shape(op, "scale", scale_D, (x_RD.shape[1],))
