"""Inputs, shapes and tolerances of the products of few rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench_kernels.registry import Case, Maker, Op, nbytes
from workbench_kernels.skinny_linear.ref import quantise_weight


def _make(
    make: Maker, m: int, n: int, k: int, norm: bool = False, kind: str = "", group: int | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"x_MK": make.normal(m, k), "w_NK": make.normal(n, k, scale=k**-0.5)}
    if kind:
        made["w_NK"], made["scales_NS"] = quantise_weight(made["w_NK"], kind=kind, group=group)
    if norm:
        made["norm_K"] = make.uniform(k, low=0.5, high=1.5)
    return made


def _wide(inputs: dict[str, Any]) -> dict[str, Any]:
    packed = ("w_NK",) if "scales_NS" in inputs else ()
    return {k: v if k in packed else v.double() for k, v in inputs.items()}


def stock(x_MK: Tensor, w_NK: Tensor, **options: Any) -> Tensor:
    """The library's product alone, without norm, scales or activation."""
    return torch.nn.functional.linear(x_MK, w_NK if w_NK.dtype == x_MK.dtype else w_NK.to(x_MK.dtype))


ODD = (
    Case(dict(m=0, n=33, k=40)),
    Case(dict(m=1, n=1, k=7)),
    Case(dict(m=15, n=97, k=131)),
    Case(dict(m=17, n=64, k=96, norm=True)),
    Case(dict(m=5, n=62, k=128, kind="int8", group=32), dict(swiglu=True)),
    Case(dict(m=3, n=40, k=64, kind="int8")),
    Case(dict(m=7, n=94, k=521, norm=True), dict(swiglu=True)),
    Case(dict(m=4, n=31, k=1040, norm=True)),
)
REAL = tuple(
    Case(dict(m=m, n=n, k=k, norm=norm), options)
    for n, k, norm, options in [
        (18432, 2560, False, dict(swiglu=True)),
        (18432, 2560, True, dict(swiglu=True)),
        (248320, 2560, False, {}),
        (2560, 9216, False, {}),
        (2560, 4096, False, {}),
        (12352, 2560, True, {}),
        (7168, 1024, False, dict(swiglu=True)),
        (1024, 3584, False, {}),
    ]
    for m in (1, 4, 8)
) + (
    Case(dict(m=4, n=18432, k=2560, kind="int8"), dict(swiglu=True)),
    Case(dict(m=4, n=18432, k=2560, kind="fp8", group=128), dict(swiglu=True)),
    Case(dict(m=37, n=2560, k=4096)),
)


def flops(sizes: Mapping[str, Any]) -> float:
    """Multiplications and additions of a product."""
    return 2.0 * sizes["m"] * sizes["n"] * sizes["k"]


OPS = (
    Op(
        name="skinny_linear", module="skinny_linear", make=_make, odd=ODD, real=REAL, moved=nbytes, rows="x_MK",
        prepare=_wide, baseline=stock,
        loose={torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},
    ),
)  # fmt: skip
