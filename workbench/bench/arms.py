"""Arms of a benchmark: timed in turns, summarised with their spread, compared pair by pair."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.model.hybrid import HybridModel


def timed(call: Callable[[Any], Any], item: Any) -> float:
    """Seconds one call takes."""
    began = perf_counter()
    call(item)
    return perf_counter() - began


def interleave(
    arms: Mapping[str, Callable[[Any], Any]], items: Sequence[Any], *, repeats: int, desc: str, warm: Any = None
) -> dict[str, list[float]]:
    """Time every arm on every item, arms in turn, after one untimed turn.

    Args:
        arms: Name to a call of one item.
        items: What is measured over, such as prompts.
        repeats: Turns over all items.
        desc: Name on the progress bar.
        warm: What the untimed turn takes; default the first item.

    Returns:
        Seconds per arm, in the same order of (repeat, item) for every arm.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with progress(repeats * len(items) * len(arms), desc=desc, unit="run") as bar, torch.inference_mode():
        for call in arms.values():
            call(items[0] if warm is None else warm)
        for _ in range(repeats):
            for item in items:
                for name, call in arms.items():
                    seconds[name].append(timed(call, item))
                    bar.update()
    return seconds


def speed_row(name: str, seconds: Sequence[float], tokens: Sequence[int], **facts: Any) -> dict[str, Any]:
    """Tokens per second: the median over runs, with the lowest and the highest."""
    rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
    return row(name, rates, "tok/s", **facts)


def ratio_row(name: str, slow: Sequence[float], fast: Sequence[float], **facts: Any) -> dict[str, Any]:
    """Ratio of seconds run by run: how many times faster ``fast`` is than ``slow``."""
    return row(name, [a / b for a, b in zip(slow, fast, strict=True)], "ratio", **facts)


def row(name: str, values: Sequence[float], unit: str, **facts: Any) -> dict[str, Any]:
    """A figure over runs: the median, with the lowest and the highest."""
    return {
        "name": name,
        "value": median(values),
        "low": min(values),
        "high": max(values),
        "unit": unit,
        "n": len(values),
        **facts,
    }


def peak_megabytes() -> float:
    """The most memory this process has held so far, resident megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held_out(model: HybridModel, length: int, count: int) -> Corpus:
    """Held-out tapes of exactly ``length`` tokens, registers in turn."""
    from workbench.corpus import corpus

    tapes = corpus("demo", tokenizer=model.tokenizer, max_tokens=length, overflow="truncate", min_tokens=length)
    by: dict[str, list[Tape]] = {}
    for tape in tapes:
        by.setdefault(tape.source, []).append(tape)
    turns = [tape for i in range(count) for part in by.values() for tape in part[i : i + 1]]
    return Corpus(turns[:count], name="demo", tokenizer=tapes.tokenizer)


def oracle() -> Any:
    """The demo checkpoint in transformers, in float32."""
    from transformers import Qwen3_5ForCausalLM
    from transformers.utils import logging

    from workbench.facade import demo_checkpoint

    logging.set_verbosity_error()
    return Qwen3_5ForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()
