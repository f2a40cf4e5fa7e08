"""Triton form: a program holds a piece of one row of gates and of the values they pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench_kernels.device.kernel import launch, narrow

BLOCK = 2048


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < N
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * N + at, mask=live, other=0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + at, mask=live, other=0).to(tl.float32)
    passed = narrow(gate * tl.sigmoid(gate), TYPE).to(tl.float32)
    tl.store(out_ptr + row * N + at, narrow(passed * up, TYPE), mask=live)


def swiglu(packed_RM: Tensor) -> Tensor:
    """See ``workbench_kernels.swiglu.swiglu``."""
    rows, m = packed_RM.shape
    n = m // 2
    out = torch.empty(rows, n, dtype=packed_RM.dtype, device=packed_RM.device)
    launch(swiglu_kernel, (-(-n // BLOCK), rows), packed_RM, out, n, BLOCK=BLOCK, num_warps=4)
    return out
