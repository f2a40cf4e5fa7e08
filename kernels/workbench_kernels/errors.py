"""How far an op's kernel is from its specification in float64, shape by shape, and whether neighbours move its rows.

``python -m workbench_kernels.errors OP`` prints one JSON object per odd shape and type, on a GPU if there is one and
under Triton's interpreter otherwise. Interpreting is chosen before Triton is imported, so callers start a process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench_kernels.checks import KernelError
from workbench_kernels.registry import copied, misses, ops, outputs


def relative_error(made: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest ‖made − truth‖ / ‖truth‖ over outputs of numbers; 0 where all are empty.

    Args:
        made: Outputs of any type.
        truth: What they should be, float64.
    """
    largest = 0.0
    for x, y in zip(made, truth, strict=True):
        if y.is_floating_point() and y.numel():
            y = y.double()
            largest = max(largest, float((x.double() - y.to(x.device)).norm()) / (float(y.norm()) or 1.0))
    return largest


def moved_by_count(call: Callable[..., Any], given: Mapping[str, Any], names: Sequence[str]) -> int:
    """Rows whose bits change with how many rows come after them.

    Args:
        call: Takes the inputs as keywords.
        given: The inputs.
        names: Inputs whose first dimension is rows.

    Returns:
        Rows that differ, at an unchanged place, between the call with all rows and one with fewer.
    """
    whole, moved = outputs(call(**copied(given))), set()
    for count in range(1, len(given[names[0]])):
        fewer = outputs(call(**copied({**given, **{name: given[name][:count].clone() for name in names}})))
        for x, y in zip(whole, fewer, strict=True):
            moved |= {r for r in range(count) if not torch.equal(x[r], y[r])}
    return len(moved)


def moved_by_place(call: Callable[..., Any], given: Mapping[str, Any], names: Sequence[str]) -> int:
    """Rows whose bits differ between their place among all rows and the first place, alone; see ``moved_by_count``.

    The host's product that the interpreter calls rounds a row by its place in the block, so only a GPU can show 0 here.
    """
    whole, moved = outputs(call(**copied(given))), 0
    for r in range(len(given[names[0]])):
        alone = outputs(call(**copied({**given, **{name: given[name][r : r + 1].clone() for name in names}})))
        moved += not all(torch.equal(x[r], y[0]) for x, y in zip(whole, alone, strict=True))
    return moved


def error_rows(name: str, *, device: str) -> Iterator[dict[str, Any]]:
    """Errors of an op's odd shapes in every type.

    Args:
        name: The op.
        device: "cuda", or "cpu" under the interpreter.

    Returns:
        Rows of name, case, dtype, device, error (relative, in norm), allowed, check ("passed", or the first thing that
        differs), and, where outputs are rows, their number, how many ``moved_by_count`` and ``moved_by_place``, and
        how many of the library's product moved by count, ``stock_moved_by_count``.

    Raises:
        KernelError: There is no such op.
    """
    known = ops()
    if name not in known:
        raise KernelError(f"op {name!r} is not valid: choose one of {', '.join(known)}")
    op = known[name]
    for case in op.odd:
        for dtype in op.dtypes:
            given = op.inputs(case, dtype=dtype, device=device)
            made = outputs(op.call(**copied(given), **case.options, impl="triton"))
            truth = op.reference(given, case.options)
            faults = list(misses(op, made, truth, dtype))
            row: dict[str, Any] = {
                "name": name, "case": case.name, "dtype": str(dtype)[6:], "device": device,
                "error": relative_error(made, truth), "allowed": 0.0 if op.exact else op.loose[dtype],
                "check": faults[0] if faults else "passed",
            }  # fmt: skip
            if op.rows:
                names, call = op.rows.split(), partial(op.call, **case.options, impl="triton")
                row["rows"] = len(given[names[0]])
                row["moved_by_count"] = moved_by_count(call, given, names)
                row["moved_by_place"] = moved_by_place(call, given, names)
                if op.baseline is not None:
                    row["stock_moved_by_count"] = moved_by_count(partial(op.baseline, **case.options), given, names)
            yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows of the ops named; the exit status is 1 when one differs from its specification."""
    parser = argparse.ArgumentParser(prog="python -m workbench_kernels.errors", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="OP")
    args = parser.parse_args(argv)
    failed = 0
    for name in args.names:
        for row in error_rows(name, device="cuda" if torch.cuda.is_available() else "cpu"):
            print(json.dumps(row), flush=True)
            failed += row["check"] != "passed"
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
