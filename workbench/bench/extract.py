"""Extraction of anchor records and of a sequence store, with writing on, against the forward of the same tapes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.bench.arms import held_out, interleave, ratio_row, speed_row
from workbench.bench.paired import drawn_texts, paired
from workbench.bench.shape.timing import figure
from workbench.core.progress import quiet
from workbench.core.tape import Corpus
from workbench.datasets import ExtractOptions, extract, extract_sequences
from workbench.datasets.anchors import anchor_positions
from workbench.datasets.groups import batch_limit, plan_groups
from workbench.datasets.passes import group_rows
from workbench.facade import load
from workbench.model.hybrid import HybridModel

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

        def extraction(item: Corpus, exact: bool, write: Callable[..., Any], **options: Any) -> None:
            with quiet():
                write(model, item, out=Path(folder) / str(next(runs)), chunk=CHUNK, exact=exact, **options)

        kinds = {"4 anchors per document": partial(extraction, write=extract, anchors=4)}
        kinds["sequence store"] = partial(extraction, write=extract_sequences)
        arms: dict[str, Callable[[Any], Any]] = {}
        for mode, exact in (("fast", False), ("exact", True)):
            arms[f"forward {mode}"] = partial(forward, exact=exact)
            arms |= {f"extract {mode}, {kind}, written": partial(run, exact=exact) for kind, run in kinds.items()}
        seconds = interleave(arms, [tapes], repeats=1 if quick else 3, desc="extract")
    facts: dict[str, Any] = {"context": length, "documents": count}
    for name, values in seconds.items():
        mode = "exact" if "exact" in name else "fast"
        yield speed_row(name, values, [tapes.n_tokens] * len(values), mode=mode, **facts)
    for kind in kinds:
        for mode in ("fast", "exact"):
            written = seconds[f"extract {mode}, {kind}, written"]
            name = f"extract / forward, {mode}" + (", sequence store" if kind == "sequence store" else "")
            yield ratio_row(name, seconds[f"forward {mode}"], written, mode=mode, **facts)


def measure_shape(
    shape: str, *, device: str, quick: bool, dtype: str | None = None, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Rows of extraction by a model of random weights.

    Args:
        shape: A published geometry, such as "4B".
        device: Where to run.
        quick: Shorter texts and fewer turns.
        dtype: Weight type; default float32 on a CPU and bfloat16 on a GPU.
        seed: Of the weights.

    Yields:
        Speeds, and extraction's share of the speed of forwards over the same rows.
    """
    from workbench.model.shapes import random_model

    model = random_model(shape, seed=seed, device=device, dtype=dtype, exact=False)
    lengths = np.linspace(256, 512, 8) if quick else np.linspace(1024, 2048, 32)
    yield from measure_model(model, lengths.astype(int).tolist(), repeats=2 if quick else 7, shape=shape)


def measure_model(
    model: HybridModel, lengths: list[int], *, repeats: int, chunk: int = CHUNK, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Rows of extraction by a model over drawn texts of these lengths, in the fast class.

    Args:
        model: The target.
        lengths: Tokens of every text.
        repeats: Timed turns.
        chunk: Tokens per forward and document.
        facts: Go into every row.

    Yields:
        Speeds, and extraction's share of the speed of forwards over the same rows, turn by turn.
    """
    model.exact = False
    tapes = drawn_texts(model.config.vocab_size, lengths)
    some = Corpus(list(tapes)[: max(1, len(tapes) // 8)], name="some")

    def fed(texts: Corpus, anchors: Any) -> list[int]:
        of = ExtractOptions(anchors=anchors)
        each = [anchor_positions(t, anchors=of.anchors, gamma=of.gamma, seed=of.seed) for t in texts]
        return [int(positions[-1]) + of.gamma for positions in each]

    with tempfile.TemporaryDirectory() as folder:
        runs = iter(range(1 << 30))

        def written(texts: Corpus, anchors: Any) -> None:
            with quiet():
                extract(model, texts, out=Path(folder) / str(next(runs)), anchors=anchors, chunk=chunk, exact=False)

        cells: list[tuple[str, Corpus, Any]] = [("4 anchors per document", tapes, 4), ("every anchor", some, "all")]
        arms: dict[str, Callable[[], Any]] = {}
        tokens: dict[str, int] = {}
        for name, texts, anchors in cells:
            rows = fed(texts, anchors)
            arms[f"forward, rows of {name}"] = partial(forward_groups, model, texts, rows, chunk)
            arms[f"extract, {name}, written"] = partial(written, texts, anchors)
            tokens |= {f"forward, rows of {name}": sum(rows), f"extract, {name}, written": sum(rows)}
        seconds = paired(arms, device=model.device, repeats=repeats, desc="extract")
    facts |= {"mode": "fast", "chunk": chunk, "documents": len(tapes), "dtype": str(model.dtype).removeprefix("torch.")}
    for name, values in seconds.items():
        yield figure(name, [tokens[name] / s for s in values], "tok/s", **facts)
    for name, _, _ in cells:
        pairs = zip(seconds[f"forward, rows of {name}"], seconds[f"extract, {name}, written"], strict=True)
        yield figure(f"extract / forward, {name}", [a / b for a, b in pairs], "ratio", **facts)


@torch.inference_mode()
def forward_groups(model: HybridModel, tapes: Corpus, rows: list[int], chunk: int) -> None:
    """Forwards without logits over the first rows of every text, in the groups and chunks that extraction makes."""
    for group in plan_groups(rows, batch_limit(model, None, chunk)):
        fed = [rows[i] for i in group]
        for _ in group_rows(model, [tapes.tapes[i] for i in group], fed, chunk=chunk):
            pass
