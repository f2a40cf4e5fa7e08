"""Inputs, shapes and tolerances of the products of rows with weights held in registers."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op, nbytes
from workbench_kernels.skinny_linear.cases import stock


def _make(make: Maker, m: int, n: int, k: int) -> dict[str, Any]:
    return {"x_MK": make.normal(m, k), "w_NK": make.normal(n, k, scale=k**-0.5)}


ODD = (
    Case(dict(m=0, n=33, k=64)),
    Case(dict(m=1, n=1, k=64)),
    Case(dict(m=3, n=62, k=192), dict(swiglu=True)),
    Case(dict(m=5, n=41, k=448)),
    Case(dict(m=7, n=97, k=320)),
)
REAL = tuple(
    Case(dict(m=m, n=n, k=k), options)
    for n, k, options in [
        (1024, 2048, {}),
        (1024, 3584, {}),
        (2560, 4096, {}),
        (2560, 9216, {}),
        (5120, 1024, {}),
        (8224, 1024, {}),
        (7168, 1024, dict(swiglu=True)),
    ]
    for m in (1, 4, 8)
)

OPS = (
    Op(
        name="direct_linear", module="direct_linear", make=_make, odd=ODD, real=REAL, moved=nbytes, rows="x_MK",
        baseline=stock, dtypes=(torch.bfloat16,), loose={torch.bfloat16: 1e-2},
    ),
)  # fmt: skip
