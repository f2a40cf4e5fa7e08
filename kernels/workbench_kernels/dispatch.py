"""Which implementation of an op runs, and a record of which one did.

In order: the ``impl`` argument, the innermost ``use`` context, the device of the first tensor (a GPU takes Triton, all
else the reference). Float64 has the reference alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from workbench_kernels.checks import KernelError

if TYPE_CHECKING:
    from torch import Tensor

IMPLS = ("ref", "triton")
_chosen: ContextVar[str | None] = ContextVar("workbench_kernels_impl", default=None)
_listeners: ContextVar[tuple[list[tuple[str, str]], ...]] = ContextVar("workbench_kernels_ran", default=())


@contextmanager
def use(impl: str) -> Iterator[None]:
    """Run every op inside by this implementation, unless its own argument says otherwise.

    Args:
        impl: "ref" or "triton".

    Raises:
        KernelError: There is no such implementation.
    """
    token = _chosen.set(_checked(impl))
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen() -> str | None:
    """The implementation of the innermost ``use``; None outside of any."""
    return _chosen.get()


@contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """Collect (op, implementation) of every op that runs inside, in order."""
    ran: list[tuple[str, str]] = []
    token = _listeners.set((*_listeners.get(), ran))
    try:
        yield ran
    finally:
        _listeners.reset(token)


def by_triton(op: str, impl: str | None, first: Tensor) -> bool:
    """Choose the implementation of one call, note it, and say whether it is Triton.

    Args:
        op: Name of the op.
        impl: The call's own choice; None leaves it to the context and the device.
        first: The tensor whose device and type decide.

    Returns:
        True for Triton.

    Raises:
        KernelError: Triton was asked for where it cannot run, or there is no such implementation.
    """
    import torch

    taken = _checked(impl) if impl is not None else _chosen.get()
    if taken is None:
        taken = "triton" if first.device.type == "cuda" and first.dtype != torch.float64 else "ref"
    if taken == "triton":
        if first.dtype == torch.float64:
            raise KernelError(f"{op}: impl='triton' does not run in float64: use impl='ref', or float32")
        if first.device.type != "cuda" and not interpreting():
            raise KernelError(
                f"{op}: impl='triton' needs tensors on a GPU and these are on {first.device.type}: use impl='ref', or "
                "set TRITON_INTERPRET=1 before Python starts to interpret the kernels"
            )
    for ran in _listeners.get():
        ran.append((op, taken))
    return taken == "triton"


def interpreting() -> bool:
    """True when Triton's kernels are interpreted on the CPU."""
    from workbench_kernels.device.kernel import INTERPRETED

    return bool(INTERPRETED.value)


def _checked(impl: str) -> str:
    if impl not in IMPLS:
        raise KernelError(f"impl={impl!r} is not valid: choose 'ref' or 'triton', or leave it out to go by the device")
    return impl
