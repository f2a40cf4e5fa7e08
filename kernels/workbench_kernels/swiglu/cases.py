"""Inputs and shapes of the gated activation."""

from __future__ import annotations

from typing import Any

from workbench_kernels.registry import Case, Maker, Op, nbytes
from workbench_kernels.swiglu import ref


def _make(make: Maker, r: int, n: int) -> dict[str, Any]:
    return {"packed_RM": make.normal(r, 2 * n, scale=2.0)}


ODD = (Case(dict(r=0, n=5)), Case(dict(r=1, n=1)), Case(dict(r=3, n=2063)), Case(dict(r=17, n=97)))
OPS = (
    Op(
        name="swiglu", module="swiglu", make=_make, odd=ODD, real=(Case(dict(r=8192, n=9216)),), moved=nbytes,
        rows="packed_RM", baseline=ref.swiglu,
    ),
)  # fmt: skip
