"""Compiles every kernel launch of the registry's odd cases for GPUs that are not here, and prints what went wrong.

Ops run as they would on a GPU, but a launch only notes its kernel and the types of its arguments; each distinct one is
then compiled to machine code. Run as a program, in a process without the interpreter.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workbench_kernels import dispatch
from workbench_kernels.device import kernel as device_kernel
from workbench_kernels.registry import Op, copied, ops

SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes of shared memory a program may have
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64", torch.int32: "i32",
    torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(chosen: list[Op]) -> dict[str, Launch]:
    """Distinct launches of these ops."""
    found: dict[str, Launch] = {}

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        kinds = [str(TYPES[a.dtype]) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args]
        found.setdefault(f"{kernel.fn.__name__} {kinds} {sorted(options.items())}", (kernel, args, options))

    dispatch.interpreting = lambda: True
    for module in [
        m for name, m in sys.modules.items() if name.startswith("workbench_kernels.") and hasattr(m, "launch")
    ]:
        module.launch = note
    for op in chosen:
        for case in op.odd[1:]:
            for dtype in op.dtypes:
                given = op.inputs(case, dtype=dtype, device="cpu")
                op.call(**copied(given), **case.options, impl="triton")
    return found


def compiled(launch: Launch, capability: int) -> str | None:
    """What is wrong with a launch on GPUs of this capability; None when it compiles and fits."""
    kernel, args, options = launch
    options = dict(options)
    if options.pop("early", False):
        options["EARLY"] = capability >= 90
        options["launch_pdl"] = options["EARLY"]
    signature, constants, attributes = {}, {}, {}
    free = [p for p in kernel.params if not p.is_constexpr]
    for p, value in zip(free, args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[p.name] = "*" + TYPES[value.dtype]
            attributes[(p.num,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[p.name] = "i64" if value >= 1 << 31 else "i32"
        else:
            signature[p.name] = "fp32"
    for p in kernel.params:
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            constants[(p.num,)] = options[p.name]
    settings = {k: v for k, v in options.items() if k not in signature}
    if "fp8e4nv" in str(signature) and capability < 89:
        return None  # no such type there
    try:
        made = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options=settings,
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-400:]}"
    return (
        None if made.metadata.shared <= SHARED[capability] else f"needs {made.metadata.shared} bytes of shared memory"
    )


def check(names: list[str], *, once: bool) -> dict[str, Any]:
    """Compile for sm_80 and sm_90 every launch of these ops, or of all; ``once``: one launch per kernel."""
    table = ops()
    import workbench_kernels.registry as registry

    for folder in registry.FOLDERS:
        __import__(f"workbench_kernels.{folder}.kernel")
    __import__("workbench_kernels.gated_delta.chunks.kernel")
    __import__("workbench_kernels.shape_draw.residual.kernel")
    found = launches([op for name, op in table.items() if not names or name in names])
    if once:
        found = {launch[0].fn.__name__: launch for launch in found.values()}
    failures, seconds = [], {}
    for name, launch in found.items():
        for capability in SHARED:
            began = time.perf_counter()
            fault = compiled(launch, capability)
            seconds[f"sm_{capability} {name.split()[0]}"] = round(time.perf_counter() - began, 2)
            if fault:
                failures.append(f"sm_{capability} {name}: {fault}")
    slowest = dict(sorted(seconds.items(), key=lambda item: -item[1])[:8])
    return {
        "failures": failures,
        "launches": len(found),
        "slowest": slowest,
        "triton": triton.__version__,
        "interpreted": bool(device_kernel.INTERPRETED.value),
    }


if __name__ == "__main__":
    print(json.dumps(check([a for a in sys.argv[1:] if a != "--once"], once="--once" in sys.argv)))
