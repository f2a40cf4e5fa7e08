"""Decoding with packed rows and windows against dense ones, at several lengths of the text before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from workbench.bench.arms import held_out, interleave, ratio_row, row
from workbench.cache.hybrid import HybridCache
from workbench.facade import load
from workbench.model.hybrid import HybridModel

LENGTHS, STEPS, CHUNK, WINDOW = (256, 1024, 4096), 16, 512, 256
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "q8_0": dict(k_format="q8_0", v_format="q8_0"),
    "q8_0 keys, q5_1 values": dict(k_format="q8_0", v_format="q5_1"),
    "q5_1": dict(k_format="q5_1", v_format="q5_1"),
    "fp8": dict(k_format="fp8", v_format="fp8"),
    f"window of {WINDOW}": dict(window=WINDOW),
}


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the formats benchmark.

    Args:
        quick: One short text and few repeats.

    Yields:
        Milliseconds per token of plain decode after texts of several lengths by each cache format, with ratios to
        dense (how many times faster), and the bytes that each cache holds.
    """
    for exact in (True, False):
        model = load("demo", exact=exact)
        for length in LENGTHS[:1] if quick else LENGTHS:
            yield from _steps(model, length, repeats=2 if quick else 20)


@torch.inference_mode()
def _steps(model: HybridModel, length: int, repeats: int) -> Iterator[dict[str, Any]]:
    text = [token for tape in held_out(model, 256, 80) for token in tape.tokens.tolist()][: length + STEPS]
    facts = {"mode": "exact" if model.exact else "fast", "context": length, "new_tokens": STEPS}
    caches = {name: model.new_cache(**kept) for name, kept in KINDS.items()}
    for cache in caches.values():
        for chunk in torch.tensor([text[:length]]).split(CHUNK, 1):
            model.forward(chunk, cache, logits="none")
    following = torch.tensor([text[length:]])
    arms: dict[str, Callable[[Any], Any]] = {name: partial(_decode, model, c, following) for name, c in caches.items()}
    seconds = interleave(arms, range(repeats), repeats=1, desc=f"formats, {facts['mode']}, {length}")
    for name, values in seconds.items():
        yield row(f"a token, {name}", [1e3 * value / STEPS for value in values], "ms", **facts)
    for name, values in list(seconds.items())[1:]:
        yield ratio_row(f"{name} / dense", seconds["dense"], values, **facts)
    for name, cache in caches.items():
        yield row(f"bytes, {name}", [cache.nbytes], "bytes", **facts)


def _decode(model: HybridModel, cache: HybridCache, following_1T: torch.Tensor, _: Any) -> None:
    """One forward per token, taken back at the end: every run starts after the same text."""
    ckpt = cache.checkpoint(cut=False)
    for token in following_1T.split(1, 1):
        model.forward(token, cache, logits="last")
    cache.rollback(ckpt)
