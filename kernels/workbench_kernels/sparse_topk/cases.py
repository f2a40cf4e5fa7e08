"""Inputs, shapes and tolerances of the sparse largest k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.sparse_topk.ref import stock


def _make(make: Maker, r: int, v: int, ties: bool = False) -> dict[str, Any]:
    x = make.normal(r, v, scale=3.0)
    return {"logits_RV": x.round() if ties else x}


def _head(make: Maker, r: int, v: int, k: int, crowded: bool = False) -> dict[str, Any]:
    # small whole numbers over powers of two: every sum is exact in float32, so that ids can be compared
    w = make.ints(v, k, low=-128, high=128) / 4096
    if crowded:  # twenty neighbours hold every row's largest
        w[:20] *= 8
    return {"x_RK": make.ints(r, k, low=-4, high=5).to(make.dtype), "w_VK": w.to(make.dtype)}


def _read(given: Mapping[str, Any], made: Any) -> int:
    return sum(x.numel() * x.element_size() for x in given.values())


ODD = (
    Case(dict(r=0, v=100), dict(k=3)),
    Case(dict(r=1, v=1), dict(k=1)),
    Case(dict(r=5, v=1021, ties=True), dict(k=1, temperature=0.6)),
    Case(dict(r=3, v=333), dict(k=1)),
    Case(dict(r=2, v=97), dict(k=5, temperature=0.7)),
    Case(dict(r=3, v=2311), dict(k=64, temperature=1.3)),
    Case(dict(r=4, v=1021, ties=True), dict(k=17)),
)
HEAD = (
    Case(dict(r=0, v=200, k=16), dict(k=3)),
    Case(dict(r=3, v=1021, k=40), dict(k=5, temperature=0.7)),
    Case(dict(r=17, v=651, k=31, crowded=True), dict(k=12)),
)
REAL = (
    Case(dict(r=512, v=248320), dict(k=64)),
    Case(dict(r=512, v=248320), dict(k=64, temperature=0.7)),
    Case(dict(r=8, v=248320), dict(k=64)),
    Case(dict(r=1, v=248320), dict(k=64)),
    Case(dict(r=4, v=248320), dict(k=1)),
)
BIG = tuple(Case(dict(r=r, v=248320, k=2560), dict(k=64, settle=False)) for r in (8, 512))
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-5}

OPS = (
    Op(
        name="sparse_topk", module="sparse_topk", make=_make, odd=ODD, real=REAL, moved=_read, rows="logits_RV",
        loose=CLOSE, baseline=stock, prepare=dict,
    ),
    Op(name="head_topk", module="sparse_topk", make=_head, odd=HEAD, real=BIG, moved=_read, loose=CLOSE),
)  # fmt: skip
