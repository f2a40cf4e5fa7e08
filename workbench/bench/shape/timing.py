"""Time on a device: one helper for everything, and figures with their spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from workbench.bench.arms import row
from workbench.core.errors import CapabilityError


def seconds_of(
    call: Callable[[], Any],
    *,
    device: torch.device,
    repeats: int,
    warm: int = 1,
    inner: int = 1,
    before: Callable[[], Any] | None = None,
) -> list[float]:
    """Seconds of a call, host included, until the device is done with it: by events on a GPU, by the clock on a CPU.

    Args:
        call: What is timed.
        device: Where it runs.
        repeats: Readings.
        warm: Untimed calls before; default 1.
        inner: Calls per reading, which is divided by their number; default 1.
        before: Run before each reading, untimed.

    Returns:
        One number per reading.
    """
    seconds = []
    for i in range(warm + repeats):
        if before is not None:
            before()
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            for _ in range(inner):
                call()
            end.record()
            torch.cuda.synchronize(device)
            taken = start.elapsed_time(end) * 1e-3
        else:
            began = perf_counter()
            for _ in range(inner):
                call()
            taken = perf_counter() - began
        if i >= warm:
            seconds.append(taken / inner)
    return seconds


def captured(call: Callable[[], Any], *, before: Callable[[], Any], warm: int = 3) -> Callable[[], None]:
    """A call recorded as one CUDA graph, whose replays take no time of the host.

    Args:
        call: What is recorded; it must not read from the device.
        before: Brings its state back before each run.
        warm: Runs before it is recorded; default 3.

    Returns:
        Its replay, over the same memory every time.

    Raises:
        CapabilityError: The call cannot be recorded.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            before()
            call()
    torch.cuda.current_stream().wait_stream(side)
    before()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        cause = error.__context__ or error  # what the call raised, rather than how the recording ended
        raise CapabilityError(
            f"it cannot be recorded as a CUDA graph ({str(cause).splitlines()[0]}): only its eager time is measured"
        ) from None
    return graph.replay


def figure(name: str, values: Sequence[float], unit: str, **facts: Any) -> dict[str, Any]:
    """A figure over readings: the median, with the 20th and 80th percentile, the lowest and the highest."""
    p20, p80 = (float(np.percentile(values, q)) for q in (20, 80))
    return {**row(name, values, unit, **facts), "p20": p20, "p80": p80}


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Ratio of two medians."""
    return median(over) / median(under)
