"""The gated activation of a feed-forward block over many rows. Legend: R rows, N width."""

from __future__ import annotations

from torch import Tensor

from workbench_kernels.checks import check_dense, check_shape
from workbench_kernels.dispatch import by_triton
from workbench_kernels.swiglu import ref

__all__ = ["swiglu"]


def swiglu(packed_RM: Tensor, *, impl: str | None = None) -> Tensor:
    """silu(gate) * up of stacked rows [gate | up], in one reading; each factor rounded to their type.

    Args:
        packed_RM: M = 2 N columns: gate, then up.
        impl: "ref" or "triton"; default by context and device.

    Returns:
        [R, N] in the type of the rows.

    Raises:
        KernelError: The rows are strided.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    check_dense("swiglu", packed=packed_RM)
    check_shape("swiglu", "packed", packed_RM, (None, packed_RM.shape[-1] // 2 * 2))
    if not by_triton("swiglu", impl, packed_RM):
        return ref.swiglu(packed_RM)
    from workbench_kernels.swiglu import kernel

    return kernel.swiglu(packed_RM)
