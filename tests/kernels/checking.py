"""Checks that every op of the registry must pass, interpreted on a CPU or natively on a GPU.

Run as a program it checks the ops named, or all, under Triton's interpreter, and prints one line per failure and a
last line with what it did; the interpreter must be chosen before Triton is imported, so tests start it as a process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError
from workbench_kernels.dispatch import recorded
from workbench_kernels.registry import Case, Op, copied, misses, ops, outputs


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nothing wrote is NaN, or the least integer."""
    kept = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.fill_(float("nan"))
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)

    torch.empty = lambda *a, **k: fill(kept[0](*a, **k))
    torch.empty_like = lambda *a, **k: fill(kept[1](*a, **k))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = kept


def against_reference(op: Op, case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Iterator[str]:
    """The kernel against the specification in float64, from poisoned outputs; and that the kernel is what ran."""
    given = op.inputs(case, dtype=dtype, device=device, seed=seed)
    with poisoned(), recorded() as ran:
        made = outputs(op.call(**copied(given), **case.options, impl="triton"))
    if (op.name, "triton") not in ran:
        yield f"{op.name}: the record says {ran}"
    for line in misses(op, made, op.reference(given, case.options), dtype):
        yield f"{case.name} {str(dtype)[6:]}: {line}"


def strided_refused(op: Op, case: Case, dtype: torch.dtype, device: str) -> Iterator[str]:
    """Every tensor input with a gap in its memory is refused."""
    given = op.inputs(case, dtype=dtype, device=device)
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dim() == 0 or x.numel() < 2:
            continue
        gaps = torch.stack([x, x], -1)[..., 0]
        try:
            op.call(**{**given, name: gaps}, **case.options, impl="triton")
        except KernelError as error:
            if "stride" not in str(error):
                yield f"{op.name}: a strided {name} is refused with {error}"
        else:
            yield f"{op.name}: a strided {name} is taken"


def rows_alone(op: Op, case: Case, dtype: torch.dtype, device: str) -> Iterator[str]:
    """A row gives the same bits alone, with others, and in another place."""
    given = op.inputs(case, dtype=dtype, device=device)
    names = op.rows.split()
    whole = outputs(op.call(**copied(given), **case.options, impl="triton"))
    rows = len(given[names[0]])
    turned = {**given, **{n: given[n].roll(1, 0) for n in names}}
    for i, (x, y) in enumerate(zip(whole, outputs(op.call(**copied(turned), **case.options, impl="triton")))):
        if not same(x.roll(1, 0), y):
            yield f"{op.name} {case.name}: output {i} changes when rows change places"
    for r in sorted({0, rows // 2, rows - 1}):
        one = {**given, **{n: given[n][r : r + 1].clone() for n in names}}
        for i, (x, y) in enumerate(zip(whole, outputs(op.call(**copied(one), **case.options, impl="triton")))):
            if not same(x[r : r + 1], y):
                yield f"{op.name} {case.name}: output {i} of row {r} changes when the row stands alone"


def delta_laws(device: str, **sizes: int) -> list[str]:
    """Steps of any size, commits, columns and the scan of the delta rule give the same bits."""
    from workbench_kernels import gated_delta as g

    given = ops()["gated_delta_step"].inputs(Case(sizes), dtype=torch.float32, device=device)
    state, t, b = given.pop("state_BHKV"), sizes["t"], sizes["b"]
    mixed, gates = given.pop("mixed_BTC"), given.pop("gates_BTM")
    whole = g.gated_delta_step(
        mixed, gates, state_BHKV=state, **given, write="none", tape=True, columns=True, impl="triton"
    )
    found, at = [], state.clone()
    for i in range(t):
        row = slice(i, i + 1)
        one = g.gated_delta_step(
            mixed[:, row].contiguous(), gates[:, row].contiguous(), state_BHKV=at, **given, impl="triton"
        )
        if not same(one.out_BTHV, whole.out_BTHV[:, row]):
            found.append(f"row {i} of a step of {t} differs from a step of 1")
        keep = torch.full((b,), i + 1, dtype=torch.int32, device=device)
        kept = g.gated_delta_commit(whole.tape, state.clone(), keep, impl="triton")
        if not same(kept, at) or not same(whole.states_BTHKV[:, i], at):
            found.append(f"the state after {i + 1} rows differs between commit, column and steps")
        wrong = g.gated_delta_commit(whole.tape, state.clone(), keep - 1, impl="triton")
        if same(wrong, at):
            found.append(f"a commit of {i} rows passes for one of {i + 1}")
    ragged = torch.arange(b, dtype=torch.int32, device=device) % (t + 1)
    kept = g.gated_delta_commit(whole.tape, state.clone(), ragged, impl="triton")
    for i, n in enumerate(ragged.tolist()):
        if not same(kept[i], whole.states_BTHKV[i, n - 1] if n else state[i]):
            found.append(f"a ragged commit of {n} rows differs")
    heads = {k: given[k] for k in ("a_log_H", "dt_bias_H", "key_heads")}
    q, k, v, beta, decay, _ = g.delta_inputs(mixed, gates, **heads, key_width=sizes["k"], impl="triton")
    _, after = g.gated_delta_scan(q, *whole.tape, state, impl="triton")
    if not same(after, at):
        found.append("the scan's state differs from the steps'")
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, but for NaN's."""
    if a.is_floating_point():
        return torch.equal(a.nan_to_num(nan=1234.5), b.nan_to_num(nan=1234.5))
    return torch.equal(a, b)


def check(names: list[str]) -> dict[str, Any]:
    """All checks of these ops under the interpreter."""
    failures, done = [], 0
    for name, op in ops().items():
        if names and name not in names:
            continue
        for case in op.odd:
            for dtype in op.dtypes:
                failures += against_reference(op, case, dtype, "cpu")
                done += 1
        full = [c for c in op.odd if all(v != 0 for v in c.sizes.values())]
        failures += strided_refused(op, full[-1], torch.float32, "cpu")
        if op.rows:
            for case in full[-2:]:
                failures += rows_alone(op, case, torch.float32, "cpu")
    if not names:
        failures += delta_laws("cpu", b=2, t=5, n=2, h=6, k=10, v=18)
    return {"failures": failures, "cases": done}


if __name__ == "__main__":
    found = check(sys.argv[1:])
    print(json.dumps(found))
