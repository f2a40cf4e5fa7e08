"""Row-wise products and maps in two numerical classes.

``fast`` uses whatever is quickest for the number of rows. ``exact`` makes the bits of a row a function of that row
alone: products run over a fixed block of rows, and transcendental maps run over flat lengths that the vector units
divide evenly, so that no element is ever computed by a scalar tail. Both are row-parallel and differ only in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.errors import CapabilityError

LANES = 64  # a flat length that is a multiple of this leaves no scalar tail in any vector width in use
SERIAL = 32_768  # elementwise maps up to this length run on one thread, so threads cannot move a tail


@dataclass(frozen=True)
class Numerics:
    """Which numerical class a forward runs in.

    Args:
        exact: Bits of a row depend on the row alone.
        row_block: Rows per product in exact mode.
    """

    exact: bool
    row_block: int = 4

    @classmethod
    def of(cls, exact: bool, device: torch.device) -> Numerics:
        """The class on a device; exact runs on a CPU.

        Raises:
            CapabilityError: Exact numerics were asked for on a GPU, where stock products and reductions choose their
                order by the number of rows.
        """
        if exact and device.type != "cpu":
            raise CapabilityError(
                f"exact=True runs on a CPU only, and this model is on {device.type}: use exact=False, or device='cpu'"
            )
        return cls(exact)


def pad_rows(x_RK: Tensor, block: int) -> Tensor:
    """Zero rows appended until the number of rows is a multiple of ``block``."""
    short = -x_RK.shape[0] % block
    return torch.nn.functional.pad(x_RK, (0, 0, 0, short)) if short else x_RK


def linear(x_RK: Tensor, weight_NK: Tensor, num: Numerics) -> Tensor:
    """Rows times a weight, ``x @ weight.T``, in the numerical class asked for.

    On a CPU, few rows go through the product of the weight with the transposed rows: with four columns it reads the
    weight once at full bandwidth, where the usual orientation is slower even for a single row.

    Args:
        x_RK: Rows.
        weight_NK: Weight, one output per row.
        num: The numerical class.

    Returns:
        [R, N], contiguous.
    """
    rows = x_RK.shape[0]
    on_cpu = x_RK.device.type == "cpu"
    if not num.exact:
        if not on_cpu or rows > 16:
            return torch.nn.functional.linear(x_RK, weight_NK)
        x = pad_rows(x_RK, 4)
        return torch.mm(weight_NK, x.t()).t()[:rows].contiguous()
    block = num.row_block
    x = pad_rows(x_RK, block)
    if x.shape[0] == block:
        return torch.mm(weight_NK, x.t()).t()[:rows].contiguous()
    blocks = x.view(-1, block, x.shape[1]).transpose(1, 2)
    out_BNR = torch.empty(blocks.shape[0], weight_NK.shape[0], block, dtype=x.dtype)
    for i, x_KR in enumerate(blocks.unbind(0)):
        torch.mm(weight_NK, x_KR, out=out_BNR[i])
    return out_BNR.transpose(1, 2).reshape(-1, weight_NK.shape[0])[:rows]


def mapped(fn: Callable[[Tensor], Tensor], x: Tensor, num: Numerics) -> Tensor:
    """Apply an elementwise map so that, in exact mode on a CPU, an element's bits do not depend on its place.

    Args:
        fn: Elementwise map, such as torch.exp.
        x: Any shape.
        num: The numerical class.

    Returns:
        fn(x), same shape.
    """
    if not num.exact or x.device.type != "cpu":
        return fn(x)
    n = x.numel()
    if n % LANES == 0 and n <= SERIAL and x.is_contiguous():
        return fn(x)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, -n % LANES))
    parts = [fn(part) for part in flat.split(SERIAL)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[:n].view(x.shape)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation in float32, times ``scale``, cast back to the input's type.

    Args:
        x: [..., D].
        scale: [D] or broadcastable; already 1 + weight where the layer says so.
        eps: Added to the mean square.

    Returns:
        Same shape and type as ``x``.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True).add(eps)) * scale
    return y.to(x.dtype)
