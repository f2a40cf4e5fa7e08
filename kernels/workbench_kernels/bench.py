"""Times of every op on a GPU beside the bytes it must move and what it replaces.

Calls are captured in a graph, over as many copies of the inputs as pass the second-level cache, and replayed. A row
has a speed-up only if the op has just passed its check at the same sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from workbench_kernels.registry import Case, Op, copied, misses, ops, outputs

PAST_CACHE = 240 << 20  # bytes of inputs that four caches of 60 MB cannot hold
MOST_SETS = 64
REPLAYS = 25
WARM_SECONDS = 0.05


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def timed(calls: Sequence[Callable[[], Any]], *, replays: int = REPLAYS) -> tuple[float, float, float]:
    """Microseconds of one call: the graph of all calls replayed, its time divided by their number.

    Args:
        calls: The same work on different inputs.
        replays: Timed replays.

    Returns:
        p20, p50, p80.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    began = perf_counter()
    while perf_counter() - began < WARM_SECONDS:  # clocks rise only under load
        graph.replay()
        torch.cuda.synchronize()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return quantiles([1e3 * begin.elapsed_time(end) / len(calls) for begin, end in marks])


def copy_rate() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in marks:  # without a graph, which would copy by the copy engine
        begin.record()
        y.copy_(x)
        end.record()
    torch.cuda.synchronize()
    _, ms, _ = quantiles([begin.elapsed_time(end) for begin, end in marks])
    return 2 * size_of({"x": x}) / ms * 1e3


def size_of(inputs: Mapping[str, Any]) -> int:
    """Bytes of all tensors."""
    return sum(x.numel() * x.element_size() for v in inputs.values() for x in _tensors(v))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value for x in _tensors(part)] if isinstance(value, tuple) else []


def measure(op: Op, case: Case, dtype: torch.dtype, rate: float, device: str = "cuda") -> dict[str, Any]:
    """One row: the op checked, timed, and set against its floor and what it replaces.

    Args:
        op: The op.
        case: Sizes.
        dtype: Of the inputs.
        rate: Measured copy rate, bytes per second.
        device: Where; default "cuda".

    Returns:
        The row; without a speed-up when the check failed.
    """
    given = op.inputs(case, dtype=dtype, device=device)
    made = outputs(op.call(**copied(given), **case.options, impl="triton"))
    faults = list(misses(op, made, op.reference(given, case.options), dtype))
    row: dict[str, Any] = {
        "benchmark": "kernels", "name": op.name, "mode": "op", "case": case.name, "dtype": str(dtype)[6:], "unit": "us",
        "check": "passed" if not faults else f"failed: {faults[0]}",
    }  # fmt: skip
    sets = min(MOST_SETS, max(1, -(-PAST_CACHE // max(1, size_of(given)))))
    many = [given, *(copied(given) for _ in range(sets - 1))]
    low, mid, high = timed([_bound(op.call, x, case.options, impl="triton") for x in many])
    row |= {"value": mid, "low": low, "high": high, "n": REPLAYS, "input_sets": sets}
    if op.moved is not None:
        moved = op.moved(given, made)
        row |= {"bytes": moved, "tb_s": moved / mid / 1e6, "floor_us": moved / rate * 1e6}
        row["of_copy_rate"] = row["tb_s"] * 1e12 / rate
    if op.flops is not None:
        row["tflop_s"] = op.flops(case.sizes) / mid / 1e6
    if op.baseline is not None and not faults:
        _, stock, _ = timed([_bound(op.baseline, x, case.options) for x in many])
        row |= {"stock_us": stock, "speedup": stock / mid}
    return row


def _bound(call: Callable[..., Any], inputs: Mapping[str, Any], options: Mapping[str, Any], **more: Any) -> Any:
    return lambda: call(**inputs, **options, **more)


def rows(names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows of the ops named, or of all, on the current GPU; the first is the copy rate."""
    import triton

    rate = copy_rate()
    facts = {
        "device": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "copy_tb_s": rate / 1e12,
    }  # fmt: skip
    for name, op in ops().items():
        if names and name not in names:
            continue
        dtype = torch.bfloat16 if torch.bfloat16 in op.dtypes else op.dtypes[0]
        for case in op.real:
            yield measure(op, case, dtype, rate) | facts
            torch.cuda.empty_cache()


def line(row: Mapping[str, Any]) -> str:
    """A row as a line of a table."""
    share = f"{row['of_copy_rate']:5.2f}" if "of_copy_rate" in row else "    -"
    stock = f"{row['speedup']:6.2f}x" if "speedup" in row else "      -"
    good = "ok" if row["check"] == "passed" else row["check"]
    spread = f"[{row['low']:.1f}, {row['high']:.1f}]"
    return f"{row['name']:<18} {row['case']:<44.44} {row['value']:9.2f} {spread:<18} {share} {stock} {good}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and add rows to a file; the exit status is 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m workbench_kernels.bench", description=__doc__)
    parser.add_argument("names", nargs="*", help="ops; all by default")
    parser.add_argument("--out", help="JSONL file that rows are added to")
    parser.add_argument("--note", default="{}", help="JSON object added to every row, such as commit and date")
    args = parser.parse_args(argv)
    failed = 0
    for row in rows(args.names):
        print(line(row), flush=True)
        failed += row["check"] != "passed"
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(row | json.loads(args.note)) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
