"""Row-wise products and maps in two numerical classes.

``fast`` uses whatever is quickest for the number of rows. ``exact`` makes the bits of a row a function of that row
alone: products run over a fixed block of rows, and transcendental maps run over flat lengths that the vector units
divide evenly, so that no element is ever computed by a scalar tail. Both are row-parallel and differ only in rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from workbench.core.errors import CapabilityError
from workbench.core.lanes import LANES, SERIAL

FEW = 16  # rows up to this many go through the product of the weight with the transposed rows
MANY = 64  # rows from which a product repays oneDNN's first call with that number of rows, a few milliseconds
WIDE = 512  # rows of one such product at most


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
    def of(cls, exact: bool, device: torch.device, dtype: torch.dtype = torch.float32) -> Numerics:
        """The class on a device; exact holds below float64, on a CPU and, through the kernels, on a CUDA GPU.

        Raises:
            CapabilityError: Exact numerics were asked for elsewhere or in float64, where stock products and reductions
                choose their order by the number of rows.
        """
        if exact and dtype == torch.float64:
            raise CapabilityError(
                "exact=True does not hold in float64, whose stock products change a row's bits with its place: use "
                "exact=False, or dtype='float32'"
            )
        if exact and device.type not in ("cpu", "cuda"):
            raise CapabilityError(
                f"exact=True runs on a CPU or a CUDA GPU, and this model is on {device.type}: use exact=False, or "
                "device='cpu'"
            )
        return cls(exact)

    def rows(self, n: int) -> int:
        """Rows a product of n rows takes on a CPU: what to widen to before a chain of products."""
        if self.exact:
            return n + -n % self.row_block
        return n if n > FEW else 2 if n <= 2 else n + -n % 4


T = TypeVar("T")
_ADDRESS, _VERSION = Tensor.data_ptr, attrgetter("_version")


class Derived(Generic[T]):
    """What is computed from parameters alone, kept until one of them changes.

    While gradients are wanted it is computed anew each time, so that they flow.

    Args:
        make: Called with the parameters.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self.make = make
        self._of: tuple[Tensor, ...] = ()  # held, so that no other tensor takes their place in memory
        self._key: list[int] = []
        self._kept: tuple[T, ...] = ()

    def __call__(self, *parameters: Tensor) -> T:
        """The value for these parameters."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.make(*parameters)
        try:
            key = [*map(_ADDRESS, parameters), *map(_VERSION, parameters)]
        except RuntimeError:  # tensors made in inference mode count no versions
            key = [*map(_ADDRESS, parameters)]
        if key != self._key:
            self._of, self._key, self._kept = parameters, key, (self.make(*parameters),)
        return self._kept[0]


def plus_one(*weights: Tensor) -> tuple[Tensor, ...]:
    """Scales 1 + weight in float32 of norms that store their scale so."""
    return tuple(1.0 + w.float() for w in weights)


def pad_rows(x_RK: Tensor, block: int) -> Tensor:
    """Zero rows appended until the number of rows is a multiple of ``block``."""
    short = -x_RK.shape[0] % block
    return torch.nn.functional.pad(x_RK, (0, 0, 0, short)) if short else x_RK


def linear(x_RK: Tensor, weight_NK: Tensor, num: Numerics) -> Tensor:
    """Rows times a weight, ``x @ weight.T``, in the numerical class asked for.

    On a CPU, few rows go through the product of the weight with the transposed rows: with four columns it reads the
    weight once at full bandwidth, where the usual orientation is slower even for a single row. Many rows of float32 go
    through oneDNN where no gradient is wanted: it uses 512-bit vectors on any maker's processor, and stock products do
    not.

    Args:
        x_RK: Rows.
        weight_NK: Weight, one output per row.
        num: The numerical class.

    Returns:
        [R, N], in any memory order.
    """
    rows = x_RK.shape[0]
    if x_RK.device.type != "cpu" or (not num.exact and rows > FEW):
        if rows >= MANY and _wide_products(x_RK, weight_NK):
            parts = [_wide_product(part, weight_NK) for part in x_RK.split(WIDE)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        return torch.nn.functional.linear(x_RK, weight_NK)
    x = widen(x_RK, num.rows(rows))
    if not num.exact or x.shape[0] == num.row_block:
        out = torch.mm(weight_NK, x.t()).t()
        return out if x.shape[0] == rows else out[:rows]
    blocks = x.view(-1, num.row_block, x.shape[1]).transpose(1, 2)
    out_BNR = torch.empty(blocks.shape[0], weight_NK.shape[0], num.row_block, dtype=x.dtype)
    for i, x_KR in enumerate(blocks.unbind(0)):
        torch.mm(weight_NK, x_KR, out=out_BNR[i])
    return out_BNR.transpose(1, 2).reshape(-1, weight_NK.shape[0])[:rows]


def _wide_product(x_RK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product by oneDNN, over rows filled up to a whole number of 64: it keeps code for every number it has met."""
    rows = x_RK.shape[0]
    filled = pad_rows(x_RK, MANY)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(filled, weight_NK, None, "none", [], "")
    return out if len(filled) == rows else out[:rows]


def _wide_products(x_RK: Tensor, weight_NK: Tensor) -> bool:
    """True where oneDNN's product serves: it knows neither gradients nor autocast."""
    return (
        x_RK.device.type == "cpu"
        and x_RK.dtype == weight_NK.dtype == torch.float32
        and _has_wide_products()
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


@lru_cache(maxsize=1)
def _has_wide_products() -> bool:
    """True for 512-bit vectors and a build with oneDNN's dense product, the one that compiled graphs call."""
    wide = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def widen(x_RK: Tensor, rows: int) -> Tensor:
    """Rows repeated at the end until there are ``rows``; for products, where a row's bits are its own."""
    n = x_RK.shape[0]
    if n == rows:
        return x_RK.contiguous()
    if n == 1:
        return torch.cat([x_RK] * rows)
    return torch.cat([x_RK, x_RK[: rows - n]]) if rows <= 2 * n else pad_rows(x_RK, rows)


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
    if n <= SERIAL:
        whole = x.shape[-1] % LANES == 0 and x.stride(-1) == 1  # no row of it leaves a tail
        dense = x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())
        if whole or (n % LANES == 0 and dense):
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
    y = y * inverse_norm(y, eps, 1.0 / y.shape[-1]) * scale
    return y if y.dtype is x.dtype else y.to(x.dtype)


def inverse_norm(x: Tensor, eps: float, share: float = 1.0) -> Tensor:
    """1 / sqrt(share * sum of squares + eps) over the last dimension.

    Args:
        x: [..., D], float32; the last dimension contiguous.
        eps: Added under the root.
        share: Of the sum of squares: 1, or 1/D for their mean.

    Returns:
        [..., 1].
    """
    if torch.is_grad_enabled():
        return torch.rsqrt(x.square().sum(-1, keepdim=True) * share + eps)
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_scalar(eps, x.device), norm, norm, value=share).rsqrt_()


@lru_cache(maxsize=64)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
