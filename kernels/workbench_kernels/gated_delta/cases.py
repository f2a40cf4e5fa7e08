"""Inputs, shapes and tolerances of the gated delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench_kernels.gated_delta.ref import Tape, inputs
from workbench_kernels.registry import Case, Maker, Op, nbytes, outputs


def _raw(make: Maker, b: int, t: int, n: int, h: int, k: int, v: int, ragged: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {
        "mixed_BTC": make.normal(b, t, 2 * n * k + h * v),
        "gates_BTM": make.normal(b, t, 2 * h),
        "a_log_H": make.uniform(h, low=-2.0, high=1.0),
        "dt_bias_H": make.uniform(h, low=-3.0, high=0.5),
        "state_BHKV": make.normal(b, h, k, v, scale=0.3, dtype=torch.float32),
        "key_heads": n,
    }
    if ragged:
        made["counts_B"] = make.ints(b, low=t, high=t + 1, dtype=torch.int32)
    return made


def _prepared(make: Maker, b: int, t: int, n: int, h: int, k: int, v: int) -> dict[str, Any]:
    raw = _raw(make, b, t, n, h, k, v)
    q, k_, v_, beta, decay, log = inputs(raw["mixed_BTC"], raw["gates_BTM"], raw["a_log_H"], raw["dt_bias_H"], n, k)
    return {"q": q, "k": k_, "v": v_, "beta": beta, "decay": decay, "log": log, "state": raw["state_BHKV"]}


def _scan(make: Maker, **sizes: int) -> dict[str, Any]:
    x = _prepared(make, **sizes)
    return {
        "q_BTNK": x["q"], "k_BTNK": x["k"], "v_BTHV": x["v"], "beta_BTH": x["beta"], "decay_BTH": x["decay"],
        "state_BHKV": x["state"],
    }  # fmt: skip


def _chunk(make: Maker, kind: str = "", **sizes: int) -> dict[str, Any]:
    x = _prepared(make, **sizes)
    if kind == "hard":  # nearly one key, written whole, hardly forgotten: powers of A grow like binomials
        x["k"] = torch.nn.functional.normalize(x["k"] * 0.05 + 1.0, dim=-1)
        x["beta"] = 1.0 - 0.01 * x["beta"]
        x["log"] = 0.001 * x["log"]
    elif kind == "steep":  # next to nothing is left of the row before, and e^(G_j - G_i) overflows
        x["log"] = x["log"] - 30.0
    elif kind == "idle":  # nothing is written
        x["beta"] = torch.zeros_like(x["beta"])
    made = {
        "q_BTNK": x["q"], "k_BTNK": x["k"], "v_BTHV": x["v"], "beta_BTH": x["beta"], "log_decay_BTH": x["log"],
        "state_BHKV": x["state"],
    }  # fmt: skip
    for name in ("q_BTNK", "k_BTNK", "v_BTHV"):
        made[name] = made[name].to(make.dtype)
    if kind == "counted":
        made["counts_B"] = torch.full((sizes["b"],), sizes["t"], dtype=torch.int32, device=make.device)
    return made


def _tape(make: Maker, **sizes: int) -> dict[str, Any]:
    x = _prepared(make, **sizes)
    tape = Tape(x["k"], x["v"], x["beta"], x["decay"])
    keep = make.ints(sizes["b"], high=sizes["t"] + 1, dtype=torch.int32)
    return {"tape": tape, "state_BHKV": x["state"], "keep_B": keep}


def _inputs(make: Maker, narrow: bool = False, **sizes: Any) -> dict[str, Any]:
    raw = _raw(make, **sizes)
    del raw["state_BHKV"]
    return {**raw, "key_width": sizes["k"], "dtype": make.dtype if narrow else torch.float32}


def state_traffic(given: Mapping[str, Any], made: Any) -> int:
    """Bytes of the state read, and written where it is."""
    state: Tensor = given["state_BHKV"]
    written = any(x.shape == state.shape for x in outputs(made))
    return state.numel() * state.element_size() * (1 + written)


def small(b: int, t: int, n: int, h: int, k: int, v: int, **more: Any) -> dict[str, Any]:
    """Sizes by name."""
    return dict(b=b, t=t, n=n, h=h, k=k, v=v, **more)


ODD = (
    Case(small(0, 1, 1, 1, 8, 8)),
    Case(small(1, 1, 1, 1, 10, 18), dict(write="new", tape=True, columns=True)),
    Case(small(2, 7, 2, 6, 16, 10), dict(write="in place", tape=True)),
    Case(small(1, 17, 2, 4, 12, 37), dict(write="none", columns=True)),
    Case(small(3, 4, 1, 2, 11, 13, ragged=True), dict(write="in place")),
)
LONG = (Case(small(0, 3, 1, 1, 8, 8)), Case(small(2, 17, 2, 6, 10, 18)), Case(small(1, 67, 1, 2, 20, 33)))
CHUNKS = (
    *LONG, Case(small(1, 1, 1, 2, 12, 9)), Case(small(1, 70, 1, 2, 9, 17, kind="steep")),
    Case(small(1, 65, 1, 1, 17, 9, kind="idle")), Case(small(2, 66, 1, 1, 33, 18, kind="counted")),
    Case(small(1, 150, 1, 1, 24, 17, kind="hard")),
)  # fmt: skip
H = dict(n=16, h=32, k=128, v=128)
VERIFY: dict[str, Any] = dict(write="none", tape=True)
STEPS = (
    Case(dict(b=1, t=1, **H)), Case(dict(b=1, t=4, **H), VERIFY), Case(dict(b=32, t=1, **H)),
    Case(dict(b=32, t=4, **H), VERIFY), Case(dict(b=32, t=4, **H), dict(tape=True)), Case(dict(b=256, t=1, **H)),
    Case(dict(b=256, t=4, **H), VERIFY),
)  # fmt: skip
FLOAT32 = (torch.float32,)
DELTA = {torch.float32: 2e-5, torch.bfloat16: 2e-5}

OPS = (
    Op(name="gated_delta_step", module="gated_delta", make=_raw, odd=ODD, real=STEPS, moved=state_traffic, loose=DELTA),
    Op(
        name="gated_delta_commit", module="gated_delta", make=_tape, odd=LONG[:2],
        real=tuple(Case(dict(b=b, t=4, **H)) for b in (1, 32, 256)), moved=state_traffic, dtypes=FLOAT32,
    ),
    Op(
        name="gated_delta_scan", module="gated_delta", make=_scan, odd=LONG, real=(Case(dict(b=1, t=1024, **H)),),
        dtypes=FLOAT32,
    ),
    Op(
        name="gated_delta_chunk", module="gated_delta", make=_chunk, moved=nbytes,
        odd=CHUNKS, loose={torch.float32: 5e-5, torch.bfloat16: 2e-2},  # bfloat16: 4e-3 but for "hard", 1.3e-2
        real=(
            Case(dict(b=1, t=2048, **H)), Case(dict(b=1, t=8192, **H)),
            Case(dict(b=1, t=2048, n=16, h=16, k=128, v=128)),
        ),
    ),
    Op(
        name="delta_inputs", module="gated_delta", make=_inputs, moved=nbytes,
        odd=(*LONG, Case(small(1, 19, 1, 2, 20, 33, narrow=True))),
        real=(Case(dict(b=1, t=2048, **H)), Case(dict(b=1, t=2048, narrow=True, **H))),
        loose={torch.float32: 2e-5, torch.bfloat16: 4e-3},
    ),
)  # fmt: skip
