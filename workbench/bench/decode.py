"""Greedy decode: transformers, plain exact, plain fast, speculative exact and fast, on texts that do not loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch

from workbench.bench.arms import held_out, interleave, oracle, ratio_row, row, speed_row
from workbench.core.metrics import acceptance, repeated_ngrams
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.spec.generate import generate

PROMPT, NEW, LOOPS = 64, 128, 0.2
KS = range(1, 9)


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the decode benchmark.

    Args:
        quick: Fewer prompts, tokens and draft lengths.

    Yields:
        Speeds of every arm, over decoding alone (from the first new token on, as decoding speed is usually quoted)
        and over whole calls (prompt included); then ratios of both spans; then acceptance.
    """
    model, new = load("demo"), 24 if quick else NEW
    candidates = held_out(model, PROMPT, 10 if quick else 80)
    prompts, shares = [], []
    for tape in candidates:
        ids = tape.tokens.tolist()
        text = generate(model, ids, k=3, max_new_tokens=new, ignore_eos=True).tokens
        share = repeated_ngrams(text, n=8) or 0.0
        shares.append(share)
        if share < LOOPS:
            prompts.append(ids)
    found = len(prompts)
    prompts = prompts[: 2 if quick else 8]
    ks = [3] if quick else list(KS)
    facts: dict[str, Any] = {"prompt_tokens": PROMPT, "new_tokens": new}
    theirs = oracle()

    def reference(ids: list[int]) -> float:
        clock = FirstToken()
        theirs.generate(
            torch.tensor([ids]), max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True,
            pad_token_id=0, streamer=clock,
        )  # fmt: skip
        return clock.since

    def ours(exact: bool, k: int) -> Callable[[list[int]], float]:
        def call(ids: list[int]) -> float:
            return generate(model, ids, k=k, max_new_tokens=new, ignore_eos=True, exact=exact).setup.rounds

        return call

    arms: dict[str, Callable[[Any], float]] = {"transformers generate": reference}
    arms |= {"plain exact": ours(True, 0), "plain fast": ours(False, 0)}
    arms |= {f"speculative exact k={k}": ours(True, k) for k in ks}
    arms |= {f"speculative fast k={k}": ours(False, k) for k in ks if quick or k in (2, 3, 4)}
    decoding: dict[str, list[float]] = {name: [] for name in arms}
    watched = {name: _noting(call, decoding[name]) for name, call in arms.items()}
    whole = interleave(watched, prompts, repeats=1 if quick else 2, desc="decode")
    kept: dict[str, Any] = {"kept": len(prompts), "not_looping": found, "candidates": len(candidates)}
    kept |= {"median_repeated_8grams": median(shares)}
    spans = {
        "decode": ({name: values[1:] for name, values in decoding.items()}, new - 1),  # the first call warmed up
        "whole call": (whole, new),
    }
    for span, (seconds, tokens) in spans.items():
        for name, values in seconds.items():
            mode = "exact" if "exact" in name else "fast"
            yield speed_row(name, values, [tokens] * len(values), span=span, mode=mode, **facts, **kept)
        best = min((f"speculative exact k={k}" for k in ks), key=lambda name: median(seconds[name]))
        plain, peers = seconds["plain fast"], seconds["transformers generate"]
        told = {"span": span, **facts}
        yield ratio_row("plain fast / transformers generate", peers, plain, mode="fast", **told)
        yield ratio_row(f"{best} / plain fast", plain, seconds[best], mode="exact against fast", **told)
        yield ratio_row(f"{best} / plain exact", seconds["plain exact"], seconds[best], mode="exact", **told)
    yield from _acceptance(model, prompts, new, ks)
    yield from _one_row_products(model)


class FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.came = 0, 0.0
        self.since = 0.0  # seconds between the first new token and the end

    def put(self, value: object) -> None:
        """Take the prompt, then token after token."""
        self.calls += 1
        if self.calls == 2:
            self.came = perf_counter()

    def end(self) -> None:
        """Take the end of the text."""
        self.since = perf_counter() - self.came


def _noting(call: Callable[[Any], float], into: list[float]) -> Callable[[Any], None]:
    def noted(item: Any) -> None:
        into.append(call(item))

    return noted


def _acceptance(model: HybridModel, prompts: list[list[int]], new: int, ks: list[int]) -> Iterator[dict[str, Any]]:
    for k in ks:
        made = {str(i): generate(model, ids, k=k, max_new_tokens=new, ignore_eos=True) for i, ids in enumerate(prompts)}
        pooled = acceptance({name: g.records for name, g in made.items()}, aggregation="pooled")
        joint = [None if share is None else round(share, 4) for share in pooled.joint]
        yield {"name": f"acceptance k={k}", "mode": "exact", "unit": "tau", "value": pooled.tau, "joint": joint}


def _one_row_products(model: HybridModel) -> Iterator[dict[str, Any]]:
    """One row times every weight of the model: the usual call, ours, and a transposed copy of the weights."""
    weights = [p for p in model.parameters() if p.dim() == 2 and p.shape[1] > 8]
    copies = [w.t().contiguous() for w in weights]
    xs = {width: torch.randn(4, width) for width in {w.shape[1] for w in weights}}
    arms: dict[str, Callable[[Any], Any]] = {
        "one row, F.linear": lambda _: [torch.nn.functional.linear(xs[w.shape[1]][:1], w) for w in weights],
        "four rows, weight times transposed rows": lambda _: [torch.mm(w, xs[w.shape[1]].t()) for w in weights],
        "one row, transposed copy of the weights": lambda _: [torch.mm(xs[c.shape[0]][:1], c) for c in copies],
    }
    for name, values in interleave(arms, range(30), repeats=1, desc="products").items():
        yield row(name, [1e3 * value for value in values], "ms", mode="fast")
