"""What every op asks of its arguments before a kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class KernelError(ValueError):
    """An argument that an op does not take: what was given, what is valid, what to do."""


def check_dense(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors whose elements do not lie in row-major order without gaps, or on different devices.

    Raises:
        KernelError: A tensor is strided, or lies elsewhere than the first one.
    """
    device = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not x.is_contiguous():
            raise KernelError(
                f"{op}: {name} of shape {tuple(x.shape)} has strides {x.stride()}, and only row-major tensors without "
                "gaps are read: call .contiguous() on it"
            )
        device = device or x.device
        if x.device != device:
            raise KernelError(f"{op}: {name} is on {x.device} and the first tensor on {device}: move it there")


def check_columns(op: str, name: str, x: Tensor) -> int:
    """Refuse a tensor that is not dense, nor some columns of a dense one.

    Returns:
        Elements from one row to the next.

    Raises:
        KernelError: Elements of a row do not lie side by side, or rows are not evenly spaced.
    """
    row = next((x.stride(i) for i in range(x.dim() - 2, -1, -1) if x.shape[i] > 1), x.shape[-1])
    want = [row] * (x.dim() - 1)
    for i in range(x.dim() - 3, -1, -1):
        want[i] = want[i + 1] * x.shape[i + 1]
    even = all(n <= 1 or s == w for n, s, w in zip(x.shape, x.stride(), want))
    if x.numel() and not (even and (x.stride(-1) == 1 or x.shape[-1] == 1)):
        raise KernelError(
            f"{op}: {name} of shape {tuple(x.shape)} has strides {x.stride()}, and only columns of a row-major tensor "
            "are read: call .contiguous() on it"
        )
    return row


def check_shape(op: str, name: str, x: Tensor, want: Sequence[int | None]) -> None:
    """Refuse a tensor of another shape; None stands for any size.

    Raises:
        KernelError: The shape differs.
    """
    if x.dim() != len(want) or any(w is not None and n != w for n, w in zip(x.shape, want)):
        shown = ", ".join("any" if w is None else str(w) for w in want)
        raise KernelError(f"{op}: {name} has shape {tuple(x.shape)} and ({shown}) is needed: reshape it")


def check_dtype(op: str, name: str, x: Tensor, *allowed: torch.dtype) -> None:
    """Refuse a tensor of another type.

    Raises:
        KernelError: The type is not among the allowed ones.
    """
    if x.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise KernelError(f"{op}: {name} is {str(x.dtype).removeprefix('torch.')} and must be one of {names}: cast it")


def check_range(op: str, name: str, value: Any, low: int, high: int) -> None:
    """Refuse a whole number outside [low, high].

    Raises:
        KernelError: The value is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise KernelError(f"{op}: {name}={value!r} is not valid: give a whole number from {low} to {high}")
