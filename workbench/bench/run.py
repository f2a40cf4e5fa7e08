"""Run a benchmark, one fresh process per thread count, and collect its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.manifest import git_state, library_versions, machine

NAMES = ("decode", "replay", "extract", "memory", "shaping", "prefix", "formats", "phases", "predict", "walk")
SHAPED = ("extract", "replay")  # those that also run a model of random weights in a published geometry


def run(
    name: str,
    *,
    out: str | Path | None = None,
    threads: str | Sequence[int] = (1, 2),
    quick: bool = False,
    progress: bool = True,
    shape: str | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Measure, on the demo checkpoint unless a shape is given, and return one row per arm.

    Args:
        name: One of ``NAMES``.
        out: JSONL file that rows are added to; None keeps them in memory.
        threads: Thread counts, each in a process of its own; "1,2" and (1, 2) mean the same.
        quick: Small sizes: a trial of the benchmark, no numbers to quote.
        progress: Let the measuring process show its progress on stderr.
        shape: A published geometry, such as "4B", to be filled with random weights; None for the demo checkpoint.
        device: Where the random model runs; default "cpu".

    Returns:
        Rows: benchmark, name, mode, threads, value, low, high, unit, n, and what the arm needs; with date, commit,
        machine and versions.

    Raises:
        UserError: The name, a thread count, the shape or the device is not valid, or the measuring process failed.
    """
    check_choice("name", name, NAMES)
    if shape is not None and name not in SHAPED:
        raise UserError(f"shape={shape!r} is not valid for benchmark {name!r}: only {', '.join(SHAPED)} take a shape")
    if shape is None and device != "cpu":
        raise UserError(f"device={device!r} needs a shape: the demo checkpoint is measured on the CPU")
    counts = [int(c) if c.strip().isdigit() else c for c in threads.split(",")] if isinstance(threads, str) else threads
    rows: list[dict[str, Any]] = []
    for count in counts:
        check_int("threads", count, low=1, high=4096)
        rows += _measure(name, int(count), quick, progress, [] if shape is None else ["--shape", shape, device])
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _measure(name: str, threads: int, quick: bool, progress: bool, shape: Sequence[str]) -> list[dict[str, Any]]:
    limits = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-m", "workbench.bench", name, str(threads), *(["--quick"] if quick else []), *shape]
    done = subprocess.run(
        command,
        env={**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=None if progress else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr or "").strip().splitlines()[-1:] or ["see the messages above"]
        raise UserError(
            f"benchmark {name!r} with {threads} threads stopped ({last[0]}); run it again with fewer threads"
        )
    state = git_state() or {}
    facts = {
        "date": date.today().isoformat(),
        "commit": str(state.get("commit", ""))[:12] + ("+" if state.get("dirty") else ""),
        "versions": library_versions(),
        "quick": quick,
    }
    rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    kind = shape[2] if shape else "cpu"
    here = [machine(device=kind, device_name=row.pop("device_name", ""), threads=threads) for row in rows]
    return [{**row, "threads": threads, "machine": on, **facts} for row, on in zip(rows, here, strict=True)]
