"""Shaping and drawing of one row of a large vocabulary on the CPU: ours against the same chain by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.bench.arms import interleave, ratio_row, speed_row
from workbench.sampling.draw import draw
from workbench.sampling.options import Shaping
from workbench.sampling.philox import Noise
from workbench.sampling.shaping import law

VOCAB, HISTORY = 248_320, 2000
SCALES = {"peaked": 3.0, "flat": 1.0}  # standard deviation of the logits
SETTINGS = {
    "top-k 20, top-p .95, min-p .05": Shaping(temperature=0.7, top_k=20, top_p=0.95, min_p=0.05),
    "top-p .9": Shaping(temperature=0.7, top_p=0.9),
    "penalties, top-k 20, top-p .95, min-p .05": Shaping(
        temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repetition_penalty=1.1
    ),
    "temperature alone": Shaping(temperature=0.7),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row to draw from.

    Args:
        logits_V: Float32.
        history: Tokens before it.
        history_1T: The same as transformers takes them.
        position: Place of the token drawn.
    """

    logits_V: Tensor
    history: list[int]
    history_1T: Tensor
    position: int


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the shaping benchmark.

    Args:
        quick: Fewer rows.

    Yields:
        For every setting and shape of row: drawn tokens per second of both arms, then their ratio. The penalty is the
        repetition penalty over 2,000 tokens, the only one that transformers has.
    """
    facts: dict[str, Any] = {"vocabulary": VOCAB, "history": HISTORY}
    for shape, scale in SCALES.items():
        rows = [_row(i, scale) for i in range(3 if quick else 20)]
        for setting, shaping in SETTINGS.items():
            arms: dict[str, Callable[[Any], Any]] = {"ours": _ours(shaping), "transformers": _theirs(shaping)}
            seconds = interleave(arms, rows, repeats=1 if quick else 3, desc=f"{setting}, {shape}")
            told = {"mode": "fast", "setting": setting, "logits": shape, **facts}
            support = [len(law(row.logits_V, shaping, history=row.history)) for row in rows[:5]]
            for name, values in seconds.items():
                yield speed_row(f"{name}: {setting}, {shape}", values, [1] * len(values), **told, support=support)
            yield ratio_row(
                f"ours / transformers: {setting}, {shape}", seconds["transformers"], seconds["ours"], **told
            )


def _row(i: int, scale: float) -> Row:
    generator = torch.Generator().manual_seed(i)
    history = torch.randint(0, VOCAB, (HISTORY,), generator=generator)
    logits = torch.randn(VOCAB, generator=generator) * scale
    return Row(logits_V=logits, history=history.tolist(), history_1T=history[None], position=HISTORY + i)


def _ours(shaping: Shaping) -> Callable[[Row], int]:
    noise = Noise(0)

    def call(row: Row) -> int:
        return draw(law(row.logits_V, shaping, history=row.history), noise, row.position)

    return call


def _theirs(shaping: Shaping) -> Callable[[Row], int]:
    from transformers.generation import logits_process as known

    steps: list[Any] = []
    if shaping.penalised:
        steps.append(known.RepetitionPenaltyLogitsProcessor(shaping.repetition_penalty))
    steps.append(known.TemperatureLogitsWarper(shaping.temperature))
    if shaping.top_k:
        steps.append(known.TopKLogitsWarper(shaping.top_k))
    if shaping.top_p < 1:
        steps.append(known.TopPLogitsWarper(shaping.top_p))
    if shaping.min_p > 0:
        steps.append(known.MinPLogitsWarper(shaping.min_p))

    def call(row: Row) -> int:
        scores = row.logits_V[None]
        for step in steps:
            scores = step(row.history_1T, scores)
        return int(torch.multinomial(scores.softmax(-1), 1))

    return call
