"""Extraction by workers of a Ray cluster on this machine against extraction in one process, after both have started.

A worker's time begins with its first shard: starting Ray, processes and models is a row of its own, in seconds. Two
workers on one machine share its cores and its memory, so their ratio says what this machine gives, not a cluster.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workbench.bench.arms import interleave, ratio_row, row, speed_row
from workbench.bench.paired import drawn_texts
from workbench.core.progress import quiet
from workbench.core.tape import Corpus
from workbench.datasets import extract
from workbench.facade import load

LENGTH = 1000  # tokens per document
DOCUMENTS = 200  # 200,000 tokens
PER_SHARD = 8  # documents


class Spans(logging.Handler):
    """What runs on Ray say of their times: seconds before the first shard was begun, and from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take the times of a run that has ended."""
        assert isinstance(record.args, tuple)
        _, started, _, worked = record.args
        self.seen.append((float(started), float(worked)))  # type: ignore[arg-type]


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the Ray benchmark.

    Args:
        quick: Fewer documents and one repeat.

    Yields:
        Speeds of one process and of one and two workers, start-up in seconds, and their share of one process's speed.
    """
    model = load("demo")
    tapes = drawn_texts(model.config.vocab_size, [LENGTH] * (16 if quick else DOCUMENTS))
    counts = [n for n in (1, 2) if n == 1 or n * torch.get_num_threads() <= len(os.sched_getaffinity(0))]
    spans, log = Spans(), logging.getLogger("workbench.datasets.engine")
    level = log.level
    with tempfile.TemporaryDirectory() as folder:
        runs = iter(range(1 << 30))

        def run(item: Corpus, **place: Any) -> None:
            with quiet():
                out = Path(folder) / str(next(runs))
                extract(model, item, out=out, anchors=4, shard_rows=4 * PER_SHARD, exact=True, **place)

        arms: dict[str, Callable[[Any], Any]] = {"one process": run}
        arms |= {f"ray, {n} workers": partial(run, engine="ray", workers=n) for n in counts}
        log.addHandler(spans)
        log.setLevel(logging.INFO)
        try:
            seconds = interleave(arms, [tapes], repeats=1 if quick else 3, desc="ray", warm=tapes[:PER_SHARD])
        finally:
            log.removeHandler(spans)
            log.setLevel(level)
    facts = {"mode": "exact", "documents": len(tapes), "context": LENGTH, "documents_per_shard": PER_SHARD}
    local = seconds["one process"]
    tokens = [tapes.n_tokens] * len(local)
    yield speed_row("one process", local, tokens, **facts)
    for i, n in enumerate(counts):
        turns = spans.seen[len(counts) + i :: len(counts)]  # the first turn is not timed
        started, worked = zip(*turns, strict=True)
        name = f"ray, {n} worker{'s'[: n - 1]}"
        yield speed_row(f"{name}, after start-up", worked, tokens, workers=n, **facts)
        yield row(f"{name}, start-up", started, "s", workers=n, **facts)
        yield ratio_row(f"{name}, after start-up / one process", local, worked, workers=n, **facts)
