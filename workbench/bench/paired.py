"""Arms on a device, in turn, each waited for, and texts for models of random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape


def wait(device: torch.device) -> None:
    """Until the device has done all that was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def paired(
    arms: Mapping[str, Callable[[], Any]], *, device: torch.device, repeats: int, desc: str
) -> dict[str, list[float]]:
    """Time arms in turn, after one untimed turn, the device idle before and after each.

    Args:
        arms: Name to a call.
        device: What they run on.
        repeats: Timed turns.
        desc: Name on the progress bar.

    Returns:
        Seconds per arm, turn by turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with progress((repeats + 1) * len(arms), desc=desc, unit="run") as bar:
        for turn in range(repeats + 1):
            for name, call in arms.items():
                wait(device)
                began = perf_counter()
                call()
                wait(device)
                if turn:
                    seconds[name].append(perf_counter() - began)
                bar.update()
    return seconds


def drawn_texts(vocab: int, lengths: Sequence[int], *, seed: int = 0) -> Corpus:
    """Texts of tokens drawn evenly, for models of random weights."""
    rng = np.random.default_rng(seed)
    tapes = [Tape(f"d{i}", rng.integers(0, vocab, n).astype(np.int32)) for i, n in enumerate(lengths)]
    return Corpus(tapes, name="drawn")
