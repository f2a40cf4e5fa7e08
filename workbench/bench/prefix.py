"""Restoring a prefix against priming it again, and cutting a verify by its tape against running kept rows again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from workbench.bench.arms import held_out, interleave, ratio_row, row
from workbench.cache.hybrid import HybridCache
from workbench.core.progress import progress
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import PrefixEntry, restore
from workbench.spec.session import Session
from workbench.spec.store import PrefixStore

TOKENS, SUFFIX, K = 2000, 16, 4
STRATEGIES = ("tape", "columns", "snapshot")


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the prefix benchmark.

    Args:
        quick: A short prompt and few repeats.

    Yields:
        Milliseconds from a prompt to its pending token: primed, restored from memory, from disk, and restored but for
        a short suffix, with ratios to priming (how many times faster), and the entry's bytes; then, per kept rows of a
        verify and by each strategy, milliseconds of the commit, and of verify and commit together (what the commit
        needs is recorded in the verify), with ratios to restoring a snapshot and running the kept rows again.
    """
    length, repeats = (200, 2) if quick else (TOKENS, 15)
    for exact in (True, False):
        model = load("demo", exact=exact)
        yield from _restores(model, length, repeats)
        yield from _commits(model, length, 3 if quick else 40)


def _mode(model: HybridModel) -> str:
    return "exact" if model.exact else "fast"


def _prompts(model: HybridModel, length: int) -> list[list[int]]:
    """Held-out tapes, one after the other, cut to length."""
    ids = [token for tape in held_out(model, 256, 40) for token in tape.tokens]
    return [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)][:3]


def _restores(model: HybridModel, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    options = GenerateOptions(ignore_eos=True)
    new = partial(Session, model, options=options)
    facts = {"mode": _mode(model), "context": length}
    prompts = _prompts(model, length)
    entries: list[PrefixEntry] = []
    shorter: list[PrefixEntry] = []
    with tempfile.TemporaryDirectory() as folder:
        disk, memory = PrefixStore(0, folder), PrefixStore(1 << 30)
        for prompt in prompts:
            session = new()
            session.feed(prompt, boundaries=(length - SUFFIX, length))
            shorter.append(session.captured[0])
            entries.append(session.captured[-1])
            disk.put(session.captured[-1])
            memory.put(session.captured[-1])
        items = range(len(prompts))
        arms: dict[str, Callable[[int], Any]] = {
            "prime": lambda i: new().feed(prompts[i]),
            "from memory": lambda i: Session.from_prefix(model, prompts[i], memory, options=options),
            "from disk": lambda i: Session.from_prefix(model, prompts[i], disk, options=options),
            f"from memory, {SUFFIX} tokens fed": lambda i: restore(new(), shorter[i], prompts[i]),
        }
        seconds = interleave(arms, items, repeats=repeats, desc=f"restores, {facts['mode']}")
    for name, values in seconds.items():
        yield _time_row(name if name == "prime" else f"restore {name}", values, **facts)
    for name, values in list(seconds.items())[1:]:
        yield ratio_row(f"restore {name} / prime", seconds["prime"], values, **facts)
    size = entries[0].nbytes
    yield row("bytes of an entry", [size], "bytes", **facts)


def _time_row(name: str, values: list[float], **facts: Any) -> dict[str, Any]:
    return row(name, [1e3 * value for value in values], "ms", **facts)


@torch.inference_mode()
def _commits(model: HybridModel, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A verify of 1 + K rows committed at every length, by each strategy in turn."""
    prompt = torch.tensor([_prompts(model, length)[0]])
    rows = torch.tensor([_prompts(model, length)[0][: 1 + K]])
    facts = {"mode": _mode(model), "context": length, "rows": 1 + K}
    caches = {}
    for name in STRATEGIES:
        caches[name] = model.new_cache(strategy=name)
        model.forward(prompt, caches[name], logits="none")
    runs = [(name, keep) for keep in range(1, 2 + K) for name in STRATEGIES]
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {run: [] for run in runs}
    with progress((repeats + 1) * len(runs), desc=f"commits, {facts['mode']}", unit="run") as bar:
        for again in range(repeats + 1):
            for name, keep in runs:
                took = _commit(model, caches[name].fork(), rows, keep)
                seconds[name, keep] += [took] if again else []  # the first turn is not timed
                bar.update()
    for keep in range(1, 2 + K):
        told = {"kept": keep, "accepted": keep - 1, **facts}
        for part, what in enumerate(("commit", "verify and commit")):
            of = {name: [took[part] for took in seconds[name, keep]] for name in STRATEGIES}
            for name in STRATEGIES:
                yield _time_row(f"{what} {keep} of {1 + K} rows, {name}", of[name], **told)
            for name in STRATEGIES[:2]:
                yield ratio_row(f"{what}: {name} / snapshot, {keep} of {1 + K} rows", of["snapshot"], of[name], **told)


def _commit(model: HybridModel, cache: HybridCache, rows_BT: torch.Tensor, keep: int) -> tuple[float, float]:
    """Seconds of the commit, and of verify and commit."""
    began = perf_counter()
    ckpt = cache.checkpoint()
    model.forward(rows_BT, cache)
    verified = perf_counter()
    cache.commit(ckpt, keep=keep)
    ended = perf_counter()
    return ended - verified, ended - began
