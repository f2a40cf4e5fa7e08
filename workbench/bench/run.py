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

NAMES = (
    *("decode", "replay", "extract", "memory", "shaping", "prefix", "formats", "phases", "predict", "walk", "trim"),
    *("resume", "ray", "records"),
)
SHAPED = ("decode", "extract", "replay")  # those that also run a model of random weights in a published geometry


def run(
    name: str,
    *,
    out: str | Path | None = None,
    threads: str | Sequence[int] = (1, 2),
    quick: bool = False,
    progress: bool = True,
    shape: str | None = None,
    **of_shape: Any,
) -> list[dict[str, Any]]:
    """Measure, on the demo checkpoint unless a shape is given, and return one row per arm.

    Args:
        name: One of ``NAMES``.
        out: JSONL file that rows are added to; None keeps them in memory.
        threads: Thread counts, each in a process of its own; "1,2" and (1, 2) mean the same.
        quick: Small sizes: a trial of the benchmark, no numbers to quote.
        progress: Let the measuring process show its progress on stderr.
        shape: A published geometry, such as "4B", to be filled with random weights, of "extract" or "replay"; None for
            the demo checkpoint. For "decode" see ``workbench.bench.shape.run_shape``.
        **of_shape: With a shape: ``device``, default "cpu"; ``dtype``, default float32 on a CPU and bfloat16 on a GPU;
            ``seed`` of the weights, default 0; and for "replay" ``trim``, ids of a trimmed draft head to measure too.

    Returns:
        Rows: benchmark, name, mode, threads, value, low, high, unit, n, and what the arm needs; with date, commit,
        machine and versions.

    Raises:
        UserError: The name, a thread count, the shape or one of its options is not valid, or the measuring process
            failed.
    """
    check_choice("name", name, NAMES)
    options = _shape_options(name, shape, of_shape)
    counts = [int(c) if c.strip().isdigit() else c for c in threads.split(",")] if isinstance(threads, str) else threads
    rows: list[dict[str, Any]] = []
    for count in counts:
        check_int("threads", count, low=1, high=4096)
        rows += _measure(name, int(count), quick, progress, options)
    if out is not None:
        path = Path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def _shape_options(name: str, shape: str | None, given: dict[str, Any]) -> dict[str, Any] | None:
    """What the measuring process is told of a shape; None without one."""
    known = ("device", "dtype", "seed", *(("trim",) if name == "replay" else ()))
    if shape is None:
        if given:
            raise UserError(f"{min(given)}={given[min(given)]!r} goes with a shape: give one, or leave it out")
        return None
    if name not in SHAPED[1:]:
        raise UserError(
            f"shape={shape!r} is not valid for benchmark {name!r} here: extract and replay take one, and decode by "
            "workbench.bench.shape.run_shape"
        )
    for option in given:
        check_choice(f"an option of {name} with a shape", option, known)
    from workbench.model.shapes import published_config
    from workbench.model.weights.load import device_of, dtype_of

    vocab, where = published_config(shape).vocab_size, device_of(given.get("device"))
    dtype_of(given.get("dtype"), where)
    check_int("seed", given.get("seed", 0), low=0)
    if given.get("trim") is not None:
        check_int("trim", given["trim"], low=1, high=vocab)
    return {"shape": shape, "device": where.type, **{key: x for key, x in given.items() if key != "device"}}


def _measure(
    name: str, threads: int, quick: bool, progress: bool, shape: dict[str, Any] | None
) -> list[dict[str, Any]]:
    limits = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    told = [] if shape is None else ["--shape", json.dumps(shape)]
    command = [sys.executable, "-m", "workbench.bench", name, str(threads), *(["--quick"] if quick else []), *told]
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
    rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    gpus, kind = [row.pop("device_name", "") for row in rows], "cpu" if shape is None else shape["device"]
    here = machine(device=kind, device_name=gpus[0] if gpus else "", threads=threads)
    facts = origin(quick=quick, machine=here)
    return [{**row, "threads": threads, **facts} for row in rows]


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
