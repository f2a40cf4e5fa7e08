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

NAMES = ("decode", "replay", "extract", "memory", "shaping", "prefix", "formats", "phases", "predict", "walk", "trim")


def run(
    name: str,
    *,
    out: str | Path | None = None,
    threads: str | Sequence[int] = (1, 2),
    quick: bool = False,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Measure on the demo checkpoint and return one row per arm.

    Args:
        name: One of ``NAMES``.
        out: JSONL file that rows are added to; None keeps them in memory.
        threads: Thread counts, each in a process of its own; "1,2" and (1, 2) mean the same.
        quick: Small sizes: a trial of the benchmark, no numbers to quote.
        progress: Let the measuring process show its progress on stderr.

    Returns:
        Rows: benchmark, name, mode, threads, value, low, high, unit, n, and what the arm needs; with date, commit,
        machine and versions.

    Raises:
        UserError: The name or a thread count is not valid, or the measuring process failed.
    """
    check_choice("name", name, NAMES)
    counts = [int(c) if c.strip().isdigit() else c for c in threads.split(",")] if isinstance(threads, str) else threads
    rows: list[dict[str, Any]] = []
    for count in counts:
        check_int("threads", count, low=1, high=4096)
        rows += _measure(name, int(count), quick, progress)
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _measure(name: str, threads: int, quick: bool, progress: bool) -> list[dict[str, Any]]:
    limits = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-m", "workbench.bench", name, str(threads), *(["--quick"] if quick else [])]
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
    facts = origin(quick=quick, machine=machine(device="cpu", device_name="", threads=threads))
    return [{**json.loads(line), "threads": threads, **facts} for line in done.stdout.splitlines() if line[:1] == "{"]


def origin(*, quick: bool, machine: dict[str, Any]) -> dict[str, Any]:
    """What every row tells of the run it is from.

    Args:
        quick: Small sizes.
        machine: From ``workbench.core.manifest.machine``.

    Returns:
        Date, commit (with "+" where tracked files differ from it), machine, versions and quick.
    """
    state = git_state() or {}
    return {
        "date": date.today().isoformat(),
        "commit": str(state.get("commit", ""))[:12] + ("+" if state.get("dirty") else ""),
        "machine": machine,
        "versions": library_versions(),
        "quick": quick,
    }
