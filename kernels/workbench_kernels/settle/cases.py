"""Inputs and shapes of the end of a round; every output is exact."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.settle import LOGGED, Books
from workbench_kernels.shape_draw.cases import FLOAT32


def _make(make: Maker, b: int, k: int, m: int = 3, faulty: bool = False) -> dict[str, Any]:
    t, device = k + 1, make.device
    length = make.ints(b, low=1, high=40, dtype=torch.int32)
    left = make.ints(b, low=0, high=9, dtype=torch.int32)
    ints = torch.stack([
        length, make.ints(b, high=30, dtype=torch.int32), make.ints(b, low=1, high=t + 1, dtype=torch.int32), left,
        torch.zeros_like(left), (left > 0).int(), make.ints(b, high=7, dtype=torch.int32), length + 1,
    ])  # fmt: skip
    picks, fed = make.ints(b, t, high=3), make.ints(b, t, high=3)
    agrees = make.uniform(b, t) < 0.7
    fed[:, 1:] = torch.where(agrees[:, :-1], picks[:, :-1], fed[:, 1:])
    drafts = torch.minimum(make.ints(b, high=k + 1), (left.long() - 1).clamp(min=0)).int()
    sound, probs = make.uniform(b, t).float(), make.uniform(b, k).float()
    if faulty and b:
        sound[make.uniform(b, t) < 0.2] = float("nan")
        probs[make.uniform(b, k) < 0.2] = float("nan")
    books = Books(
        ints, torch.full((k, b), -1, dtype=torch.int32, device=device), torch.full((b, t), -1, device=device),
        torch.full((b,), -1, device=device), make.ints(b, high=9), make.ints(b, t, high=9),
        torch.full((b, 45), -1, device=device),
        torch.full((m, b, len(LOGGED) + 2 * k), -1, device=device), torch.zeros(b, 2, dtype=torch.int64, device=device),
    )  # fmt: skip
    return {
        "books": books, "picks_BT": picks, "sound_BT": sound, "fed_BT": fed,
        "counts_B2": torch.stack([drafts, torch.ones_like(drafts)], 1), "probs_BK": probs,
        "stops_S": torch.tensor([2, 77], device=device),
    }  # fmt: skip


ODD = (
    Case(dict(b=1, k=0)), Case(dict(b=19, k=1)), Case(dict(b=23, k=5)), Case(dict(b=31, k=4, faulty=True)),
    Case(dict(b=7, k=8, m=1)),
)  # fmt: skip

REAL = (Case(dict(b=1, k=3)),)
OPS = (
    Op(name="settle_round", module="settle", make=_make, odd=ODD, real=REAL, exact=True, prepare=dict, dtypes=FLOAT32),
)
