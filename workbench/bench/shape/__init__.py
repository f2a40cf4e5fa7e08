"""Speed in the published geometries, on random weights: where no checkpoint is, and at an acceptance that is given.

The pieces stand alone; ``run_shape`` builds the model and runs those asked for, one after the other in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.bench.run import origin
from workbench.bench.shape.anatomy import anatomy_rows
from workbench.bench.shape.peer import peer_rows
from workbench.bench.shape.pieces import (
    chunk_rows,
    copy_rows,
    draft_rows,
    plain_rows,
    product_rows,
    speculative_rows,
    verify_rows,
)
from workbench.bench.shape.setting import Setting
from workbench.core.errors import check_choice
from workbench.core.manifest import machine
from workbench.core.progress import progress
from workbench.model.hybrid import HybridModel
from workbench.model.shapes import random_model

ACCEPTANCE = (0.87, 0.69, 0.53)  # an example of joint acceptance, for want of a measured one
PIECES: dict[str, Callable[[Setting], Iterator[dict[str, Any]]]] = {
    "copy": copy_rows,
    "product": product_rows,
    "plain": plain_rows,
    "verify": verify_rows,
    "draft": draft_rows,
    "speculative": speculative_rows,
    "anatomy": anatomy_rows,
    "chunk": chunk_rows,
    "transformers": peer_rows,
}

__all__ = ["ACCEPTANCE", "PIECES", "Setting", "run_shape"]


def run_shape(
    shape: str,
    *,
    synthetic_acceptance: Sequence[float] = ACCEPTANCE,
    device: str | None = None,
    dtype: str | None = None,
    exact: bool | None = None,
    context: int = 1024,
    trim: int | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    out: str | Path | None = None,
    quick: bool = False,
    note: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure a published geometry with random weights.

    Args:
        shape: "0.8B", "2B", "4B", "9B" or "27B".
        synthetic_acceptance: joint(j) of every draft slot, the share of rounds in which slots 1..j are accepted, never
            rising; its length is K. The MTP head runs in full, and only its pick is replaced.
        device: Where to run; default "cpu".
        dtype: Weight type; default float32 on a CPU and bfloat16 on a GPU.
        exact: Numerical class; default True on a CPU, False on a GPU.
        context: Tokens of the random prompt; default 1024.
        trim: Rows of a trimmed draft head, measured beside the whole one; None for none.
        only: Names of ``PIECES``; empty for all.
        seed: Of weights, prompt and acceptance.
        out: JSONL file that each row is added to as it comes; None keeps them in memory.
        quick: Small sizes: a trial, no numbers to quote.
        note: Takes a sentence about each piece that was left out; None prints it to stderr.

    Returns:
        Rows as of ``workbench.bench.run``, with shape, piece, p20, p80 and the device.

    Raises:
        UserError: An argument is not valid.
    """
    for name in only:
        check_choice("only", name, PIECES)
    model = random_model(shape, seed=seed, device=device, dtype=dtype, exact=exact)
    setting = Setting(
        model,
        shape,
        context=context,
        acceptance=tuple(synthetic_acceptance),
        trim=trim,
        seed=seed,
        quick=quick,
        note=note or _to_stderr,
    )
    facts, rows = _facts(setting), []
    for name in progress([piece for piece in PIECES if piece in (only or PIECES)], desc=f"shape {shape}", unit="piece"):
        for row in PIECES[name](setting):
            rows.append({"benchmark": "decode", "shape": shape, "piece": name, **row, **facts})
            if out is not None:
                path = Path(out)
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    return rows


def _facts(setting: Setting) -> dict[str, Any]:
    model: HybridModel = setting.model
    gpu = torch.cuda.get_device_name(model.device) if setting.on_gpu else ""
    threads = torch.get_num_threads()
    where = machine(device=model.device.type, device_name=gpu, threads=threads)
    size = {"context": setting.context, "dtype": str(model.dtype).removeprefix("torch."), "seed": setting.seed}
    return {**size, "threads": threads, **origin(quick=setting.quick, machine=where)}


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)
