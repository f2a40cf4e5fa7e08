"""Extraction of anchor records, with writing on, against the forward of the same tapes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.bench.arms import held_out, interleave, ratio_row, speed_row
from workbench.core.progress import quiet
from workbench.core.tape import Corpus
from workbench.datasets import extract
from workbench.facade import load

CHUNK = 512


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the extraction benchmark.

    Args:
        quick: Shorter tapes and one repeat.

    Yields:
        Speeds in both numerical classes, and extraction's share of the forward's speed.
    """
    model = load("demo")
    length, count = (256, 2) if quick else (1024, 8)
    tapes = held_out(model, length, count)
    with tempfile.TemporaryDirectory() as folder:
        runs = iter(range(1 << 30))

        def forward(item: Corpus, exact: bool) -> None:
            model.exact = exact
            for tape in item:
                cache = model.new_cache(capacity=length)
                for chunk in torch.from_numpy(tape.tokens.astype(np.int64))[None].split(CHUNK, 1):
                    model.forward(chunk, cache)

        def extraction(item: Corpus, exact: bool) -> None:
            with quiet():
                extract(model, item, out=Path(folder) / str(next(runs)), anchors=4, chunk=CHUNK, exact=exact)

        arms: dict[str, Callable[[Any], Any]] = {}
        for mode, exact in (("fast", False), ("exact", True)):
            arms[f"forward {mode}"] = partial(forward, exact=exact)
            arms[f"extract {mode}, 4 anchors per document, written"] = partial(extraction, exact=exact)
        seconds = interleave(arms, [tapes], repeats=1 if quick else 3, desc="extract")
    facts: dict[str, Any] = {"context": length, "documents": count}
    for name, values in seconds.items():
        mode = "exact" if "exact" in name else "fast"
        yield speed_row(name, values, [tapes.n_tokens] * len(values), mode=mode, **facts)
    for mode in ("fast", "exact"):
        written = seconds[f"extract {mode}, 4 anchors per document, written"]
        yield ratio_row(f"extract / forward, {mode}", seconds[f"forward {mode}"], written, mode=mode, **facts)
