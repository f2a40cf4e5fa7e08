"""What a trimmed draft head costs in acceptance, by its size and by what its ids were counted from, and what it saves.

Texts are the model's own, greedy, after openings of held-out documents. Ids are counted from other documents, from one
register of them, from the model's own output after them, and from the measured text itself, which no counting in
advance can match.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.bench.arms import held_out, interleave, row
from workbench.cache.hybrid import HybridCache
from workbench.core.bootstrap import bootstrap_by, bootstrap_difference
from workbench.core.metrics import acceptance
from workbench.core.progress import progress, quiet
from workbench.core.tape import Corpus
from workbench.corpus import corpus, token_counts
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.replay.own import own_tapes
from workbench.replay.table import replay

if TYPE_CHECKING:
    import polars as pl

SIZES, K, PROMPT, NEW = (2048, 1024, 512, 256, 128), 4, 64, 128
MEASURED, COUNTED, REGISTER = 20, 40, "pycode"
CONTEXT, REPEATS, BATCH = 256, 30, 8


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the trim benchmark.

    Args:
        quick: Few short texts and one size.

    Yields:
        Per counted text and size the accepted tokens a round with their loss against the whole head, both with
        intervals over documents, and the share of the measured text that the map holds; then milliseconds of a draft
        step by size.
    """
    model = load("demo", exact=True)
    documents, new, sizes = (4, 24, SIZES[2:3]) if quick else (MEASURED, NEW, SIZES)
    tapes = held_out(model, PROMPT, documents + (4 if quick else COUNTED))
    own = own_tapes(model, tapes, prompt_tokens=PROMPT, max_new_tokens=new, exact=True, ignore_eos=True)
    measured, others = own[:documents], own[documents:]
    facts = {"mode": "exact", "k_max": K, "documents": documents, "prompt_tokens": PROMPT, "new_tokens": new}
    yield from _acceptance(model, measured, _counts(model, measured, others), sizes, facts)
    yield from _steps(model, token_counts(others), sizes, repeats=2 if quick else REPEATS)


def _counts(model: HybridModel, measured: Corpus, others: Corpus) -> dict[str, pl.DataFrame]:
    """Counts by what was counted."""
    seen = {tape.doc_id for tape in measured}
    texts = [tape for tape in corpus("demo", tokenizer=model.tokenizer) if tape.doc_id not in seen]
    return {
        "other documents": token_counts(texts),
        f"other documents, {REGISTER} alone": token_counts([tape for tape in texts if tape.source == REGISTER]),
        "own output after other documents": token_counts(others),
        "the measured text": token_counts(measured),
    }


def _acceptance(
    model: HybridModel, own: Corpus, counts: dict[str, pl.DataFrame], sizes: tuple[int, ...], facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    text = counts["the measured text"]
    arms = [("whole head", None), *((name, size) for name in counts for size in sizes)]
    whole: tuple[np.ndarray, np.ndarray] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, size) in enumerate(progress(arms, desc="trim", unit="head")):
            head = None
            if size is not None:
                head = model.trim_draft_vocab(top_n=size, counts=counts[name], note=name)
            with quiet():
                rounds = replay(model, own, out=Path(folder) / str(i), k_max=K, exact=True).rounds(k=K)
            found = acceptance(rounds)
            pair = rounds["doc_id"].to_numpy(), rounds["accepted"].to_numpy()
            whole = whole or pair
            tau = bootstrap_by(*pair)[0]
            lost = bootstrap_difference((*whole, None), (*pair, None))[0]
            made = {
                "name": name if size is None else f"{name}, top {size}",
                **{"value": tau.value, "low": tau.low, "high": tau.high, "unit": "tau", "n": found.rounds},
                **{"tau_lost": lost.value, "tau_lost_low": lost.low, "tau_lost_high": lost.high},
                "joint": list(found.joint),
                **{"ids": model.config.vocab_size, "coverage": 1.0, "measured_coverage": 1.0},
                **facts,
            }
            if head is not None:
                kept = text["id"].is_in(head.ids_D.tolist())
                covered = float(text.filter(kept)["share"].sum())
                made |= {"ids": len(head), "coverage": head.coverage, "measured_coverage": covered}
            yield made
    model.untrim_draft_vocab()


def _steps(model: HybridModel, counts: pl.DataFrame, sizes: tuple[int, ...], repeats: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of a draft step, a head of every size in turn."""
    hidden = model.config.hidden_size
    models = {"draft step, whole head": model}
    for size in sizes:  # a model for each, so that no change of heads is timed
        models[f"draft step, top {size}"] = one = load("demo")
        one.trim_draft_vocab(top_n=size, counts=counts)
    for exact in (True, False):
        arms: dict[str, Callable[[Any], Any]] = {}
        for name, one in models.items():
            one.exact = exact
            cache = one.new_draft_cache(capacity=CONTEXT + BATCH)
            one.draft(torch.zeros(1, CONTEXT, dtype=torch.int64), torch.zeros(1, CONTEXT, hidden), cache)
            arms[name] = partial(_chain, one, cache)
        facts = {"mode": "exact" if exact else "fast", "context": CONTEXT}
        for name, seconds in interleave(arms, range(repeats), repeats=1, desc=f"steps, {facts['mode']}").items():
            yield row(name, [1e3 * value / BATCH for value in seconds], "ms", **facts)


def _chain(model: HybridModel, cache: HybridCache, _: Any) -> None:
    """Some draft steps after one context."""
    token, carrier = 0, torch.zeros(1, 1, model.config.hidden_size)
    for _step in range(BATCH):
        carrier = model.draft(torch.tensor([[token]]), carrier, cache)
        token = int(model.unembed_draft(carrier)[0, 0].argmax())
    cache.truncate(CONTEXT)
