"""Inputs, shapes and tolerances of edits and draws."""

from __future__ import annotations

from typing import Any

import torch

from workbench_kernels.registry import Case, Maker, Op
from workbench_kernels.shape_draw import ref

KEY = (0x9C2F11AB, 0x0000F00D)


def _rows(
    make: Maker,
    r: int,
    v: int,
    scale: float = 3.0,
    ties: bool = False,
    bad: bool = False,
    crowded: bool = False,
    keyed: bool = False,
) -> dict[str, Any]:
    x = make.normal(r, v, scale=scale)
    if ties:
        x = x.round()
    if crowded:  # no interval of a search holds few of them, and they are not equal
        x = x.round() + make.normal(r, v, scale=1e-5)
    if bad:  # NaN, infinity, nothing finite, one finite
        x[0, v // 2], x[1, 0], x[2], x[3] = float("nan"), float("inf"), float("-inf"), float("-inf")
        x[3, v - 1] = 1.5
    positions = torch.arange(r, device=make.device) + 1000
    key = torch.tensor(KEY, device=make.device) if keyed else KEY
    return {"logits_RV": x, "positions_R": positions, "starts_R": torch.full_like(positions, 999), "key": key}


def _edits(make: Maker, r: int, v: int, length: int, u: int = 0, mask: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {
        "logits_RV": make.normal(r, v, scale=3.0),
        "tokens_L": make.ints(length + max(r, 1) - 1, low=-2, high=max(4, min(v + 3, length // 2))),
        "length_1": torch.tensor([length], dtype=torch.int32, device=make.device),
    }
    if u:
        made["bias_ids_U"] = torch.randperm(v, generator=make.generator, device=make.device)[:u]
        made["bias_U"] = make.normal(u, dtype=torch.float32)
    if mask:
        made["mask_RV"] = make.uniform(r, v) < 0.5
    return made


def _residual(make: Maker, b: int, t: int, v: int, dense: bool = True, same: bool = False) -> dict[str, Any]:
    p = make.normal(b, t, v, scale=2.0)
    q = p[:, : t - 1].clone() if same else p[:, : t - 1] + make.normal(b, t - 1, v)
    at = torch.arange(b * t, device=make.device)
    options: dict[str, Any] = dict(key=KEY, temperature=0.8, top_k=0, top_p=0.9, min_p=0.0, order="chain")
    p_law = ref.shape_draw(p.view(b * t, v), at + 100, at * 0 + 99, purpose=0, **options)
    short = torch.arange(b * (t - 1), device=make.device)
    q_law = ref.shape_draw(q.reshape(b * (t - 1), v), short + 100, short * 0 + 99, purpose=1, **options)
    accepted = torch.zeros(b, 3, dtype=torch.int64, device=make.device)
    accepted[:, 0] = make.ints(b, high=t)
    if b > 2:
        accepted[b - 1, 2] = 1
    return {
        "p_logits_BTV": p, "p_BT": p_law, "q_logits_BTV": q.contiguous() if dense else None,
        "q_BT": q_law if dense else None, "drafts_BT": q_law.tokens_R.view(b, t - 1), "accepted_B3": accepted,
        "counts_B": torch.full((b,), t - 1, dtype=torch.int32, device=make.device),
        "starts_B": torch.full((b,), 99, device=make.device), "key": KEY, "temperature": 0.8,
    }  # fmt: skip


ODD = (
    Case(dict(r=0, v=10)),
    Case(dict(r=2, v=1), dict(temperature=0.7)),
    Case(dict(r=3, v=97), dict(temperature=0.0)),
    Case(dict(r=5, v=451, bad=True), dict(top_p=0.9)),
    Case(dict(r=3, v=701, ties=True), dict(top_k=7, temperature=0.8)),
    Case(dict(r=3, v=701, ties=True), dict(top_k=20, top_p=0.7, min_p=0.02, temperature=0.8)),
    Case(dict(r=2, v=1531), dict(top_k=20, top_p=0.95, temperature=1.2, order="joint", purpose=1)),
    Case(dict(r=2, v=1531), dict(top_p=0.8, min_p=0.01, temperature=0.6, order="temperature_last")),
    Case(dict(r=2, v=2503, scale=0.1), dict(top_p=0.95, temperature=0.9)),
    Case(dict(r=2, v=2503, ties=True), dict(top_p=0.95, temperature=1.3)),
    Case(dict(r=2, v=2503, crowded=True), dict(top_p=0.9, temperature=1.3)),
    Case(dict(r=2, v=701, ties=True), dict(top_k=300, top_p=0.9, temperature=1.0)),
    Case(dict(r=2, v=2503), dict(temperature=1.1)),
    Case(dict(r=3, v=331), dict(temperature=0.9, top_k=30, top_p=0.9)),
    Case(dict(r=3, v=331, keyed=True), dict(temperature=0.9, top_k=30, top_p=0.9)),
)
TWENTY = dict(top_k=20, top_p=0.95, temperature=0.8)
REAL = (
    Case(dict(r=8, v=248320), TWENTY),
    Case(dict(r=1, v=248320), TWENTY),
    Case(dict(r=8, v=248320), dict(temperature=0.8)),
    Case(dict(r=8, v=248320), dict(top_p=0.95, temperature=0.8)),
    Case(dict(r=8, v=248320, scale=0.1), dict(top_p=0.95, temperature=0.8)),
    Case(dict(r=8, v=248320), dict(temperature=0.0)),
)
PENALTIES = dict(repetition=1.3, frequency=0.2, presence=0.7)
EDITS = (
    Case(dict(r=0, v=20, length=5), PENALTIES),
    Case(dict(r=1, v=50, length=1), PENALTIES),
    Case(dict(r=3, v=97, length=211, u=5, mask=True), PENALTIES),
    Case(dict(r=5, v=301, length=150, u=7), dict(last_n=64, frequency=0.3)),
)
LONG_TEXT = (Case(dict(r=8, v=248320, length=4096, u=16), PENALTIES),)
CUTS = (
    Case(dict(b=0, t=2, v=10)),
    Case(dict(b=1, t=2, v=13)),
    Case(dict(b=5, t=4, v=2501)),
    Case(dict(b=4, t=3, v=97, dense=False)),
    Case(dict(b=3, t=3, v=301, same=True)),
)
FLOAT32 = (torch.float32,)

OPS = (
    Op(
        name="edit_logits", module="shape_draw", make=_edits, odd=EDITS, real=LONG_TEXT, prepare=dict, exact=True,
        dtypes=FLOAT32,
    ),
    Op(
        name="shape_draw", module="shape_draw", make=_rows, odd=ODD, real=REAL, prepare=dict, dtypes=FLOAT32,
        loose={torch.float32: 1e-7}, baseline=ref.stock, rows="logits_RV positions_R starts_R",
    ),
    Op(
        name="residual_draw", module="shape_draw", make=_residual, odd=CUTS, real=(Case(dict(b=1, t=4, v=248320)),),
        prepare=dict, exact=True, dtypes=FLOAT32,
    ),
)  # fmt: skip
