"""Inputs and shapes of acceptance; every output is exact."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.shape_draw.cases import FLOAT32, KEY, _residual


def _greedy(make: Maker, b: int, k: int, base: int, ids: int = 2, stops: bool = False) -> dict[str, Any]:
    t = k + 1
    made: dict[str, Any] = {"verify_BT": make.ints(b, t, high=ids)}
    picks = make.ints(b, t, high=ids)
    agrees = make.uniform(b, t) < 0.75
    at = 1 if base else 0
    if k:
        picks[:, : t - 1] = torch.where(agrees[:, : t - 1], made["verify_BT"][:, 1:], picks[:, : t - 1])
    counts = torch.stack([make.ints(b, low=max(0, k - 1), high=k + 1), torch.full((b,), at, device=make.device)], 1)
    made |= {"picks_BT": picks, "counts_B2": counts.int(), "last_B": made["verify_BT"][:, 0].clone()}
    if stops:
        made["stops_S"] = torch.tensor([1, 90], device=make.device)
    return made


def _ratio(make: Maker, b: int, t: int, v: int, dense: bool = True, stops: bool = False) -> dict[str, Any]:
    made = _residual(make, b, t, v, dense)
    del made["accepted_B3"]
    if stops:
        made["stops_S"] = made["drafts_BT"][0, :1].clone()
    return made


def _coupled(make: Maker, **sizes: Any) -> dict[str, Any]:
    made = _greedy(make, **sizes)
    return {**{k: v for k, v in made.items() if k != "picks_BT"}, "draws_BT": made["picks_BT"]}


assert KEY[0] > 1 << 31, "a key word past int32 must be among the cases"
ODD = (
    Case(dict(b=0, k=2, base=1)),
    Case(dict(b=1, k=0, base=1)),
    Case(dict(b=37, k=5, base=1)),
    Case(dict(b=37, k=5, base=0)),
    Case(dict(b=41, k=15, base=1, ids=3, stops=True)),
)
LAWS = (
    Case(dict(b=0, t=2, v=10)),
    Case(dict(b=13, t=6, v=61)),
    Case(dict(b=9, t=4, v=37, dense=False)),
    Case(dict(b=11, t=5, v=97, stops=True)),
)
ONE = (Case(dict(b=1, k=3, base=1)),)

OPS = (
    Op(name="accept_greedy", module="accept", make=_greedy, odd=ODD, real=ONE, exact=True, dtypes=FLOAT32),
    Op(name="accept_coupled", module="accept", make=_coupled, odd=ODD[:3], real=ONE, exact=True, dtypes=FLOAT32),
    Op(
        name="accept_ratio", module="accept", make=_ratio, odd=LAWS, real=(Case(dict(b=1, t=4, v=248320)),), exact=True,
        prepare=dict, dtypes=FLOAT32,
    ),
)  # fmt: skip
