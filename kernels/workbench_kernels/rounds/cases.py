"""Inputs and shapes of a round's bookkeeping; every output is exact."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.shape_draw.cases import FLOAT32


def _outcome(make: Maker, b: int, k: int, base: int | None) -> dict[str, Any]:
    n = make.ints(b, high=k + 1)
    bonus = make.ints(b, low=-1, high=50)
    bases = make.ints(b, high=2) if base is None else torch.full((b,), base, device=make.device)
    accepted = torch.stack([n, bonus, (bonus < 0).long()], 1)
    counts = torch.stack([torch.full((b,), k, device=make.device), bases], 1)
    return {"accepted_B3": accepted, "counts_B2": counts.int()}


def _assemble(make: Maker, b: int, k: int, trimmed: bool = False, most: bool = False) -> dict[str, Any]:
    made = {
        "drafts_BK": make.ints(b, k, low=-1, high=40), "probs_BK": make.uniform(b, k),
        "pending_B": make.ints(b, low=-1, high=3),
    }  # fmt: skip
    if most:
        made["most_B"] = make.ints(b, high=k + 3, dtype=torch.int32)
        made["probs_BK"][make.uniform(b, k) < 0.1] = float("nan")
    if trimmed:
        made["map_D"] = torch.arange(40, device=make.device) * 7 + 3
    return made


def _seed(make: Maker, b: int, k: int, d: int) -> dict[str, Any]:
    return {"rows_BTD": make.normal(b, k + 1, d), "before_BD": make.normal(b, d), **_outcome(make, b, k, None)}


def _lengths(make: Maker, n: int, b: int, k: int = 4) -> dict[str, Any]:
    saved = make.ints(b, high=1000, dtype=torch.int32)
    held = torch.full((n, b), 7, dtype=torch.int32, device=make.device)
    return {"lengths_LB": held, "saved_B": saved, **_outcome(make, b, k, None)}


def _ring(make: Maker, b: int, k: int, r: int) -> dict[str, Any]:
    ring = make.ints(b, r, high=max(1, r - 2))
    return {
        "verify_BT": make.ints(b, k + 1, high=99), "ring_BR": ring, "pending_B": make.ints(b, high=9),
        **_outcome(make, b, k, None),
    }  # fmt: skip


ODD = (
    Case(dict(b=0, k=3)), Case(dict(b=1, k=1)), Case(dict(b=37, k=5), dict(p_min=0.3)),
    Case(dict(b=37, k=7, trimmed=True), dict(p_min=0.4, first=True)), Case(dict(b=41, k=6, most=True), dict(p_min=0.2)),
)  # fmt: skip
SEEDS = (Case(dict(b=0, k=2, d=5)), Case(dict(b=1, k=0, d=1)), Case(dict(b=17, k=4, d=1037)))
LENGTHS = (Case(dict(n=3, b=0)), Case(dict(n=1, b=1)), Case(dict(n=17, b=15)))
RINGS = (Case(dict(b=0, k=2, r=9)), Case(dict(b=1, k=0, r=3)), Case(dict(b=41, k=6, r=19)))
EXACT = dict(module="rounds", exact=True, prepare=dict, dtypes=FLOAT32)

OPS = (
    Op(name="assemble_verify", make=_assemble, odd=ODD, real=(Case(dict(b=1, k=3)),), **EXACT),  # type: ignore[arg-type]
    Op(name="gather_seed", make=_seed, odd=SEEDS, real=(Case(dict(b=1, k=3, d=2560)),), **EXACT),  # type: ignore[arg-type]
    Op(name="rollback_lengths", make=_lengths, odd=LENGTHS, real=(Case(dict(n=9, b=1)),), **EXACT),  # type: ignore[arg-type]
    Op(name="ring_commit", make=_ring, odd=RINGS, real=(Case(dict(b=1, k=3, r=65)),), **EXACT),  # type: ignore[arg-type]
)
