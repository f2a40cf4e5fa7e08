"""Inputs, shapes and tolerances of the norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op, nbytes


def _rows(make: Maker, rows: int, width: int) -> dict[str, Any]:
    return {"x_RD": make.normal(rows, width), "scale_D": make.normal(width, dtype=torch.float32)}


def _added(make: Maker, rows: int, width: int) -> dict[str, Any]:
    return {**_rows(make, rows, width), "residual_RD": make.normal(rows, width)}


def _embedded(make: Maker, rows: int, width: int, vocab: int = 50) -> dict[str, Any]:
    ids = make.ints(rows, high=vocab)
    return {"ids_R": ids, "table_VD": make.normal(vocab, width), "scale_D": make.normal(width, dtype=torch.float32)}


def _gated(make: Maker, rows: int, width: int) -> dict[str, Any]:
    o = make.normal(rows, width, dtype=torch.float32)
    return {"o_RD": o, "z_RD": make.normal(rows, width), "weight_D": make.normal(width)}


def _once(inputs: Mapping[str, Any], made: Any) -> int:
    """Bytes of the rows, read once and written twice."""
    return 3 * made[0].numel() * made[0].element_size()


ODD = tuple(Case(dict(rows=r, width=w)) for r, w in [(0, 30), (1, 1), (1, 30), (15, 97), (17, 64), (3, 1021)])
REAL = (Case(dict(rows=4, width=2560)), Case(dict(rows=8192, width=2560)))
HEADS = (Case(dict(rows=32, width=128)), Case(dict(rows=8192 * 32, width=128)))

OPS = (
    Op(name="rmsnorm", module="rmsnorm", make=_rows, odd=ODD, real=REAL, moved=nbytes, rows="x_RD"),
    Op(name="embed_rmsnorm", module="rmsnorm", make=_embedded, odd=ODD, real=REAL[:1], moved=_once, rows="ids_R"),
    Op(name="add_rmsnorm", module="rmsnorm", make=_added, odd=ODD, real=REAL, moved=nbytes, rows="x_RD residual_RD"),
    Op(name="gated_rmsnorm", module="rmsnorm", make=_gated, odd=ODD, real=HEADS, moved=nbytes, rows="o_RD z_RD"),
)
