"""Inputs, shapes and tolerances of the pass from projections to stored rows."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.rope_store import row_bytes


def _make(
    make: Maker, b: int, t: int, h: int, n: int, d: int, r: int, s: int, held: int, k: str = "dense", v: str = "dense",
    ragged: bool = False,
) -> dict[str, Any]:  # fmt: skip
    angle = torch.arange(held + t + 1, device=make.device)[:, None] * (0.1 ** torch.arange(r // 2, device=make.device))
    cos, sin = angle.cos(), angle.sin()

    def store(kind: str) -> torch.Tensor:
        if kind == "dense":
            return make.normal(b, n, s, d)
        return make.ints(b, n, s, row_bytes(kind, d), high=60, dtype=torch.uint8)

    made: dict[str, Any] = {
        "packed_BTW": make.normal(b, t, 2 * (h + n) * d),
        "k_BNSX": store(k),
        "v_BNSX": store(v),
        "lengths_B": make.ints(b, low=max(0, held - 3), high=held + 1, dtype=torch.int32),
        "cos_LR": torch.cat([cos, cos], 1),
        "sin_LR": torch.cat([-sin, sin], 1),
        "q_scale_D": make.uniform(d, low=0.5, high=1.5),
        "k_scale_D": make.uniform(d, low=0.5, high=1.5),
        "heads": h,
        "k_format": k,
        "v_format": v,
    }
    if ragged:
        made["counts_B"] = make.ints(b, high=t + 1, dtype=torch.int32)
    return made


ODD = (
    Case(dict(b=0, t=1, h=1, n=1, d=8, r=2, s=4, held=0)),
    Case(dict(b=1, t=1, h=2, n=1, d=10, r=2, s=3, held=0)),
    Case(dict(b=2, t=5, h=6, n=2, d=37, r=8, s=20, held=9, ragged=True)),
    Case(dict(b=2, t=3, h=2, n=2, d=24, r=24, s=7, held=17), dict(ring=True)),
)
QWEN = dict(h=16, n=4, d=256, r=64)
REAL = (Case(dict(b=1, t=1, s=2048, held=1024, **QWEN)), Case(dict(b=1, t=4, s=2048, held=1024, **QWEN)))
LOOSE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}

OPS = (Op(name="rope_store", module="rope_store", make=_make, odd=ODD, real=REAL, loose=LOOSE),)
