"""Forwards against transformers', and a replay of every start against the forward and against separate chains."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.bench.arms import held_out, interleave, oracle, ratio_row, speed_row
from workbench.bench.extract import forward_groups
from workbench.bench.paired import drawn_texts, paired
from workbench.bench.shape.timing import figure
from workbench.core.progress import quiet
from workbench.core.tape import Tape
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.replay.options import ReplayOptions
from workbench.replay.run import chain_tape
from workbench.replay.table import replay
from workbench.sampling.pick import top1

K_MAX, SAMPLED = 8, 64


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the replay benchmark.

    Args:
        quick: Shorter tapes and one repeat.

    Yields:
        Speeds and ratios per tape length.
    """
    model, theirs = load("demo"), oracle()
    for length, count in ((256, 2),) if quick else ((1024, 3), (4096, 1)):
        tapes = list(held_out(model, length, count))
        with tempfile.TemporaryDirectory() as folder:
            yield from _length(model, theirs, tapes, length, Path(folder), repeats=1 if quick else 2)


def measure_shape(
    shape: str, *, device: str, quick: bool, dtype: str | None = None, seed: int = 0, trim: int | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a replay by a model of random weights.

    Args:
        shape: A published geometry, such as "4B".
        device: Where to run.
        quick: Shorter texts and fewer turns.
        dtype: Weight type; default float32 on a CPU and bfloat16 on a GPU.
        seed: Of the weights.
        trim: Ids of a trimmed draft head, measured beside the whole one; None for none.

    Yields:
        Speeds, and the cost of a replay of every start in forwards over the same rows.
    """
    from workbench.model.shapes import random_model

    model = random_model(shape, seed=seed, device=device, dtype=dtype, exact=False)
    lengths = [256, 384] if quick else [2049] * 24
    yield from measure_model(model, lengths, repeats=2 if quick else 7, trim=trim, shape=shape)


def measure_model(
    model: HybridModel, lengths: list[int], *, repeats: int, chunk: int = 512, trim: int | None = None, **facts: Any
) -> Iterator[dict[str, Any]]:
    """Rows of a replay of every start, written, by a model over drawn texts of these lengths, in the fast class.

    Args:
        model: The target with its head.
        lengths: Tokens of every text.
        repeats: Timed turns.
        chunk: Tokens per forward and document.
        trim: Ids of a trimmed draft head, measured beside the whole one; None for none.
        facts: Go into every row.

    Yields:
        Speeds, and the cost in forwards over the same rows, turn by turn.
    """
    model.exact = False
    tapes = drawn_texts(model.config.vocab_size, lengths)
    rows = [n - 1 for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        runs = iter(range(1 << 30))

        def written() -> None:
            with quiet():
                replay(model, tapes, out=Path(folder) / str(next(runs)), k_max=K_MAX, chunk=chunk, exact=False)

        def trimmed_head() -> None:
            model.trim_draft_vocab(range(trim or 0))
            try:
                written()
            finally:
                model.untrim_draft_vocab()

        heads = {"whole head": written}
        if trim is not None:
            heads[f"head of {trim:,} ids"] = trimmed_head
        arms: dict[str, Callable[[], Any]] = {"forward": lambda: forward_groups(model, tapes, rows, chunk)}
        arms |= {f"replay, every start, written, {name}": call for name, call in heads.items()}
        seconds = paired(arms, device=model.device, repeats=repeats, desc="replay")
    kind = str(model.dtype).removeprefix("torch.")
    facts |= {"mode": "fast", "chunk": chunk, "documents": len(tapes), "k_max": K_MAX, "dtype": kind}
    for name, values in seconds.items():
        yield figure(name, [sum(rows) / s for s in values], "tok/s", **facts)
    for name in list(arms)[1:]:
        ratios = [a / b for a, b in zip(seconds[name], seconds["forward"], strict=True)]
        yield figure(f"cost of {name}, in forwards", ratios, "ratio", **facts)


def _length(
    model: HybridModel, theirs: Any, tapes: list[Tape], length: int, folder: Path, *, repeats: int
) -> Iterator[dict[str, Any]]:
    options, runs = ReplayOptions(k_max=K_MAX), iter(range(1 << 30))

    def ids(tape: Tape) -> torch.Tensor:
        return torch.from_numpy(tape.tokens.astype(np.int64))[None]

    def forward(tape: Tape, exact: bool = False) -> None:
        model.exact = exact
        cache = model.new_cache(capacity=length)
        for chunk in ids(tape).split(options.chunk, 1):
            model.forward(chunk, cache)

    def chains(tape: Tape, exact: bool = False) -> None:
        model.exact = exact
        for _ in chain_tape(model, tape, options):
            pass

    def written(tape: Tape) -> None:
        with quiet():
            replay(model, tape, out=folder / str(next(runs)), k_max=K_MAX, exact=False)

    arms: dict[str, Callable[[Any], Any]] = {
        "transformers forward": lambda tape: theirs(ids(tape), use_cache=False),
        "forward fast": forward,
        "replay fast, every start": chains,
        "replay fast, every start, written": written,
        "forward exact": lambda tape: forward(tape, True),
        "replay exact, every start": lambda tape: chains(tape, True),
    }
    seconds = interleave(arms, tapes, repeats=repeats, desc=f"replay {length}")
    model.exact = False
    facts: dict[str, Any] = {"context": length, "k_max": K_MAX}
    tokens = [length] * len(seconds["forward fast"])
    for name, values in seconds.items():
        yield speed_row(name, values, tokens, mode="exact" if "exact" in name else "fast", **facts)
    base = seconds["forward fast"]
    yield ratio_row("forward fast / transformers forward", seconds["transformers forward"], base, mode="fast", **facts)
    for name in ("replay fast, every start", "replay fast, every start, written"):
        yield ratio_row(f"cost of {name}, in forwards", seconds[name], base, mode="fast", **facts)
    exact = seconds["replay exact, every start"]
    yield ratio_row("cost of replay exact, in exact forwards", exact, seconds["forward exact"], mode="exact", **facts)
    apart = [_separately(model, tape) for tape in tapes]
    together = [a - b for a, b in zip(seconds["replay fast, every start"], base, strict=True)][: len(tapes)]
    yield ratio_row("separate chains / chains together", apart, together, mode="fast", sampled=SAMPLED, **facts)


@torch.inference_mode()
def _separately(model: HybridModel, tape: Tape) -> float:
    """Seconds of chaining every start one by one, scaled up from evenly spaced starts; true rows are shared."""
    from time import perf_counter

    tokens = torch.from_numpy(tape.tokens.astype(np.int64))[None]
    rows = model.forward(tokens, model.new_cache(capacity=len(tape)), logits="none")
    cache = model.new_draft_cache(capacity=len(tape) + K_MAX)
    model.draft(tokens[:, 1:], rows.normed_BTH[:, :-1], cache)
    starts = np.linspace(1, len(tape) - 2, SAMPLED).astype(int)[::-1].tolist()
    began = perf_counter()
    for p in starts:  # from the end, so that a chain's rows never lie below a later start
        cache.lengths = [p - 1]
        hidden = model.draft(tokens[:, p : p + 1], rows.normed_BTH[:, p - 1 : p], cache)
        for slot in range(K_MAX):
            pick, _ = top1(model.unembed_draft(hidden)[0, 0])
            if slot + 1 < K_MAX:
                hidden = model.draft(torch.tensor([[pick]]), hidden, cache)
    return (perf_counter() - began) / len(starts) * (len(tape) - 2)
