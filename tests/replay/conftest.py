"""What the replay tests share: the demo checkpoint, texts, and the comparison of a walk with live rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import workbench as wb
from workbench.core.tape import Tape
from workbench.model.hybrid import HybridModel
from workbench.replay import DraftTable, compare_rounds, live_rounds, replay, walk

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "p_min": dict(p_min=0.5),
    "pmin0": dict(p_min=0.5, pmin0=True),
    "adaptive": dict(adaptive=True),
    "floor": dict(adaptive=True, floor=3, cap=6, p_min=0.3),
}


@pytest.fixture(scope="session")
def policies() -> dict[str, dict[str, Any]]:
    """Policy options by name."""
    return POLICIES


@pytest.fixture(scope="session")
def demo() -> HybridModel:
    """The demo checkpoint in exact mode; tests leave it so."""
    return wb.load("demo", exact=True)


@pytest.fixture(scope="session")
def heldout(demo) -> Callable[..., list[Tape]]:
    """``heldout(register, count=1)``: held-out documents of one register of the demo corpus."""

    def pick(register: str, count: int = 1) -> list[Tape]:
        return list(wb.corpus(f"demo/{register}", split="heldout", tokenizer=demo.tokenizer)[:count])

    return pick


@torch.inference_mode()
def sample(model: HybridModel, n: int, *, prompt: tuple[int, ...] = (1,), temperature: float = 1.0, seed: int = 0):
    """A text of n tokens drawn from the model, so that drafts, picks and text agree often, but not always."""
    generator = torch.Generator().manual_seed(seed)
    state, text = model.new_cache(capacity=n), list(prompt)
    fed = text
    while len(text) < n:
        logits = model.forward(torch.tensor([fed]), state, logits="last").logits_BTV[0, -1]
        fed = [int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))]
        text += fed
    return np.array(text, np.int32)


@pytest.fixture(scope="session")
def sampled() -> Callable[..., np.ndarray]:
    """``sampled(model, n, prompt=, temperature=, seed=)``: token ids drawn from a model."""
    return sample


def problems(walked: pl.DataFrame, live: pl.DataFrame) -> list[str]:
    """What a walk and a live run do not share: rounds, and the bits of every draft's probability."""
    found = [str(row) for row in compare_rounds(walked, live).iter_rows(named=True)]
    keys = ["doc_id", "start", "draft_top1"]
    both = walked.select(keys).join(live.select(keys), on=keys[:2], how="inner", suffix="_live")
    for row in both.iter_rows(named=True):
        if np.array(row["draft_top1"]).tobytes() != np.array(row["draft_top1_live"]).tobytes():
            found.append(f"draft_top1 at {row['doc_id']} {row['start']}: {row['draft_top1']} {row['draft_top1_live']}")
    for name in ("emitted", "bonus", "base", "k", "index", "steps"):
        if not found and walked[name].to_list() != live[name].to_list():
            found.append(f"column {name} differs")
    return found


@pytest.fixture(scope="session")
def differences() -> Callable[[pl.DataFrame, pl.DataFrame], list[str]]:
    """``differences(walked, live)``: sentences, none when the two agree in every bit."""
    return problems


@pytest.fixture
def against_live(tmp_path: Path) -> Callable[..., tuple[pl.DataFrame, pl.DataFrame]]:
    """``against_live(model, tapes, table=None, live={}, exact=True, **policy)``: rounds of a walk and of the engine."""
    made: list[Path] = []

    def run(
        model: HybridModel,
        tapes: Any,
        *,
        table: DraftTable | None = None,
        estimator: str = "own",
        live: dict[str, Any] | None = None,
        exact: bool = True,
        **policy: Any,
    ) -> tuple[pl.DataFrame, pl.DataFrame]:
        if table is None:
            made.append(tmp_path / f"table-{len(made)}")
            table = replay(model, tapes, out=made[-1], k_max=8, exact=exact)
        walked = walk(table, estimator=estimator, **policy)
        return walked, live_rounds(model, tapes, estimator=estimator, exact=exact, **policy, **(live or {}))

    return run
