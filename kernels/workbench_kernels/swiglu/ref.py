"""Plain PyTorch form: the specification."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def swiglu(packed_RM: Tensor) -> Tensor:
    """See ``workbench_kernels.swiglu.swiglu``."""
    gate, up = packed_RM.chunk(2, 1)
    return silu(gate) * up
