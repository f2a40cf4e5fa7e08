"""Inputs, shapes and tolerances of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op, nbytes


def _rows(
    make: Maker, b: int, t: int, n: int, g: int, d: int, held: int, gate: bool = True, tree: bool = False
) -> dict[str, Any]:
    s = held + t
    lengths = make.ints(b, low=max(0, held - 7), high=held + 1, dtype=torch.int32)
    made: dict[str, Any] = {
        "q_BTNGD": make.normal(b, t, n, g, d),
        "k_BNSD": make.normal(b, n, s, d),
        "v_BNSD": make.normal(b, n, s, d),
        "lengths_B": lengths,
    }
    if gate:
        made["gate_BTQ"] = make.normal(b, t, n * g * d)
    if tree:
        kin = make.uniform(t, t) < 0.5
        made["tree_TT"] = kin.tril() | torch.eye(t, dtype=torch.bool, device=make.device)
    return made


def _chains(make: Maker, p: int, n: int, g: int, d: int, s: int, j: int, every: bool = False) -> dict[str, Any]:
    starts = (
        torch.arange(p, dtype=torch.int32, device=make.device) if every else make.ints(p, high=s + 1, dtype=torch.int32)
    )
    return {
        "q_PNGD": make.normal(p, n, g, d), "k_NSD": make.normal(n, s, d), "v_NSD": make.normal(n, s, d),
        "starts_P": starts, "own_k_PJND": make.normal(p, j, n, d), "own_v_PJND": make.normal(p, j, n, d),
        "gate_PQ": make.normal(p, n * g * d),
    }  # fmt: skip


ODD = (
    Case(dict(b=0, t=2, n=1, g=1, d=8, held=3)),
    Case(dict(b=1, t=1, n=1, g=1, d=10, held=0, gate=False)),
    Case(dict(b=2, t=5, n=2, g=3, d=24, held=131)),
    Case(dict(b=1, t=7, n=1, g=2, d=16, held=65, tree=True)),
    Case(dict(b=2, t=15, n=1, g=4, d=20, held=97), dict(window=33)),
)
LONG = (
    ODD[0],
    ODD[1],
    Case(dict(b=2, t=37, n=2, g=3, d=24, held=40)),
    Case(dict(b=1, t=70, n=1, g=2, d=18, held=33), dict(window=29)),
)
STARTS = (
    Case(dict(p=0, n=1, g=1, d=8, s=5, j=2), dict(steps=1)),
    Case(dict(p=1, n=1, g=1, d=10, s=1, j=1), dict(steps=1)),
    Case(dict(p=23, n=2, g=3, d=24, s=97, j=4), dict(steps=3)),
)
FOUR = dict(n=4, g=4, d=256)
REAL = tuple(Case(dict(b=1, t=t, held=held, **FOUR)) for t, held in [(1, 1024), (4, 1024), (16, 1024), (4, 16384)])
PROMPT = (Case(dict(b=1, t=2048, held=0, **FOUR)), Case(dict(b=1, t=2048, held=6144, **FOUR)))
EVERY = (Case(dict(p=2048, s=2048, j=8, every=True, **FOUR), dict(steps=8)),)


def multiplied(sizes: Mapping[str, Any]) -> float:
    """Multiplications and additions of causal attention."""
    t, heads, d = sizes["t"], sizes["n"] * sizes["g"], sizes["d"]
    return 4.0 * sizes["b"] * heads * d * t * (sizes["held"] + (t + 1) / 2)


LOOSE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2}

OPS = (
    Op(name="verify_attention", module="verify_attention", make=_rows, odd=ODD, real=REAL, loose=LOOSE, moved=nbytes),
    Op(
        name="prefill_attention",
        module="verify_attention",
        make=_rows,
        odd=LONG,
        real=PROMPT,
        loose=LOOSE,
        flops=multiplied,
    ),
    Op(name="replay_attention", module="verify_attention", make=_chains, odd=STARTS, real=EVERY, loose=LOOSE),
)
