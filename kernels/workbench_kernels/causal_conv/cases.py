"""Inputs, shapes and tolerances of the convolution."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op, nbytes


def _make(make: Maker, b: int, t: int, c: int, extra: int = 0, ragged: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {
        "u_BTP": make.normal(b, t, c + extra),
        "window_BWC": make.normal(b, 3, c),
        "taps_LC": make.normal(4, c, scale=0.5),
    }
    if ragged:
        made["counts_B"] = make.ints(b, high=t + 1, dtype=torch.int32)
    return made


def _cut(make: Maker, b: int, t: int, c: int, extra: int = 0, shared: bool = False) -> dict[str, Any]:
    made = _make(make, b, t, c, extra)
    return {
        "u_BTP": made["u_BTP"],
        "window_BWC": made["window_BWC"],
        "keep_B": make.ints(1 if shared else b, high=t + 1, dtype=torch.int32),
    }


ODD = (
    Case(dict(b=0, t=3, c=8)),
    Case(dict(b=1, t=1, c=5)),
    Case(dict(b=2, t=15, c=37, extra=11)),
    Case(dict(b=3, t=17, c=261, ragged=True)),
)
REAL = (Case(dict(b=1, t=1, c=8192, extra=4160)), Case(dict(b=1, t=4, c=8192)), Case(dict(b=1, t=2048, c=8192)))
CUT = (
    Case(dict(b=0, t=3, c=8)),
    Case(dict(b=4, t=5, c=19, shared=True)),
    Case(dict(b=5, t=4, c=37, extra=3)),
    Case(dict(b=9, t=2, c=300)),
)

OPS = (
    Op(name="causal_conv", module="causal_conv", make=_make, odd=ODD, real=REAL, moved=nbytes),
    Op(name="conv_commit", module="causal_conv", make=_cut, odd=CUT, real=(Case(dict(b=1, t=4, c=8192)),)),
)
