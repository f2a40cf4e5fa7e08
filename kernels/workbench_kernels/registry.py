"""Every op with its inputs, odd and real shapes and tolerances: what tests and benchmarks are driven by.

An op's folder holds ``cases.py`` with its entries; this file says what an entry is and finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

FOLDERS = (
    "rmsnorm", "skinny_linear", "causal_conv", "gated_delta", "sparse_topk", "verify_attention", "rope_store",
    "shape_draw", "accept", "rounds", "settle", "swiglu", "direct_linear",
)  # fmt: skip
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """One set of sizes.

    Args:
        sizes: Keyword arguments of the op's input maker.
        options: Keyword arguments of the op itself, not tensors.
        tag: Extra words for the case's name.
    """

    sizes: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    tag: str = ""

    @property
    def name(self) -> str:
        """Sizes and options in one word."""
        parts = [f"{k}{v}" for k, v in self.sizes.items()] + [f"{k}={v}" for k, v in self.options.items()]
        return self.tag or "-".join(str(p).replace(" ", "") for p in parts)


class Maker:
    """Random inputs of one seed, type and device.

    Args:
        seed: Of the generator.
        dtype: Of values that come in the model's type.
        device: Where they go.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers."""
        x = torch.randn(*shape, generator=self.generator, device=self.device)
        return x.mul_(scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Float32 numbers in [low, high)."""
        return torch.rand(*shape, generator=self.generator, device=self.device) * (high - low) + low

    def ints(self, *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op.

    Args:
        name: Its function's name.
        module: The folder that holds it.
        make: Inputs of sizes, from a ``Maker``.
        odd: Small sizes for the interpreter: empty, 1, 15, 17, primes.
        real: Sizes of published models, for the GPU and the benchmark.
        moved: Least bytes that a call must move, from its inputs and outputs.
        flops: Floating-point operations of a call; None where bytes bound it.
        rows: Inputs whose first dimension is rows of which each output row is a function; "" for none.
        loose: Relative error allowed by type.
        exact: Integer outputs only, or ones equal bit for bit.
        dtypes: Types the maker may be asked for.
        prepare: Turns the inputs of the reference into float64; None for every floating tensor.
        baseline: The plain PyTorch way that a speed-up is counted against; None for the reference.
    """

    name: str
    module: str
    make: Callable[..., dict[str, Any]]
    odd: tuple[Case, ...]
    real: tuple[Case, ...]
    moved: Callable[[Mapping[str, Any], Any], int] | None = None
    flops: Callable[[Mapping[str, Any]], float] | None = None
    rows: str = ""
    loose: Mapping[torch.dtype, float] = field(default_factory=lambda: LOOSE)
    exact: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    baseline: Callable[..., Any] | None = None

    @property
    def call(self) -> Callable[..., Any]:
        """The op's function."""
        found: Callable[..., Any] = getattr(import_module(f"workbench_kernels.{self.module}"), self.name)
        return found

    def inputs(self, case: Case, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        """Tensors of a case."""
        return self.make(Maker(seed, dtype, device), **case.sizes)

    def reference(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> list[Tensor]:
        """What the specification makes of copies of the inputs, in float64 where it can."""
        copies = copied(inputs)
        wide = self.prepare(copies) if self.prepare is not None else widened(copies)
        return outputs(self.call(**wide, **options, impl="ref"))


def ops() -> dict[str, Op]:
    """All ops by name."""
    found: dict[str, Op] = {}
    for folder in FOLDERS:
        for op in import_module(f"workbench_kernels.{folder}.cases").OPS:
            assert op.name not in found, f"two ops are called {op.name}"
            found[op.name] = op
    return found


def outputs(made: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(made, Tensor):
        return [made]
    return [x for part in made if part is not None for x in outputs(part)]


def copied(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs whose tensors an op may write."""
    return {k: _each(v, torch.clone) for k, v in inputs.items()}


def widened(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with floating tensors in float64."""
    return {k: _each(v, lambda x: x.double() if x.is_floating_point() else x) for k, v in inputs.items()}


def _each(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(x, fn) for x in value))
    return value


def nbytes(inputs: Mapping[str, Any], made: Any) -> int:
    """Bytes of all inputs read once and all outputs written once."""
    tensors = [x for v in inputs.values() if v is not None for x in ([v] if isinstance(v, Tensor) else [])]
    return sum(x.numel() * x.element_size() for x in [*tensors, *outputs(made)])


def misses(op: Op, made: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> Iterator[str]:
    """A sentence for every output that is not what the reference gives.

    Args:
        op: The op, for its tolerance.
        made: Its outputs.
        truth: The reference's.
        dtype: Type of the inputs.

    Returns:
        Sentences; none when all agree. A float output must be within the tolerance of the reference in norm, and each
        value within 32 of it times the reference's root mean square; NaN only where the reference has NaN.
    """
    if len(made) != len(truth):
        yield f"{op.name}: {len(made)} outputs, and the reference has {len(truth)}"
        return
    for i, (x, y) in enumerate(zip(made, truth)):
        if x.shape != y.shape:
            yield f"{op.name}: output {i} has shape {tuple(x.shape)}, the reference {tuple(y.shape)}"
        elif x.numel() == 0:
            continue
        elif op.exact or not x.is_floating_point():
            if not torch.equal(x.to(y.dtype), y.to(x.device)):
                at = (x.to(y.dtype) != y.to(x.device)).nonzero()[:1].tolist()
                yield f"{op.name}: output {i} differs from the reference, first at {at}"
        else:
            yield from _far(op.name, i, x.double(), y.double().to(x.device), op.loose[dtype])


def _far(name: str, i: int, x: Tensor, y: Tensor, loose: float) -> Iterator[str]:
    odd = ~torch.isfinite(y)
    if not torch.equal(torch.isfinite(x), ~odd) or not torch.equal(x[odd].nan_to_num(), y[odd].nan_to_num()):
        yield f"{name}: output {i} is not finite where the reference is, or the reverse"
        return
    x, y = x[~odd], y[~odd]
    size = float(y.norm()) or 1.0
    off, worst = float((x - y).norm()) / size, float((x - y).abs().max()) if len(x) else 0.0
    each = 32 * loose * max(size / max(1, len(y)) ** 0.5, float(y.abs().max()) / 32 if len(y) else 0.0)
    if not (off <= loose and worst <= each):
        yield f"{name}: output {i} is off by {off:.2e} in norm (allowed {loose:.0e}) and {worst:.2e} at worst"
