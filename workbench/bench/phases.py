"""What the phases of a round cost: rows that ``CostModel.fit`` takes.

Every kind of round up to K is run by the live engine at its own lengths and acceptances, in a new random order each
turn, strategies and contexts in turns; prefill is not timed. Batches are measured as forwards, since rounds of several
sequences together are what an engine makes of them.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from statistics import fmean, median
from typing import Any

import torch

from workbench.bench.arms import held_out
from workbench.bench.planned import Measured, batched, continuation, plain, run_plain, run_plan, speculative
from workbench.cache.hybrid import STRATEGIES
from workbench.core.progress import progress
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.spec.generate import numerics

K_MAX, CONTEXTS, REPEATS = 8, (64, 512, 2048), 8
WIDTHS, WIDE_ROWS, WIDE_CONTEXTS, WIDE_REPEATS = (2, 4, 8), (1, 2, 3, 5, 9), (64, 1024), 4
WIDE_STRATEGY = "columns"  # what sessions use on a CPU
PLAIN_STEPS, DOCUMENT = 24, 256
SHARED = ("draft first", "draft step", "accept", "other")  # the same whatever the strategy


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the phases benchmark.

    Args:
        quick: Short drafts, one short context, one batch width, one turn.

    Yields:
        Milliseconds per phase, in both numerical classes.
    """
    model, run = load("demo"), run_name()
    contexts, k_max, repeats = ((32,), 2, 1) if quick else (CONTEXTS, K_MAX, REPEATS)
    for exact in (True, False):
        meter = PhaseMeter(model, exact=exact, contexts=contexts, k_max=k_max, run=run)
        with progress(repeats, desc=f"phases, {meter.mode}", unit="turn") as bar:
            for _ in range(repeats):
                meter.turn()
                bar.update()
        widths, rows, lengths = ((2,), (1, 2, 3), (32,)) if quick else (WIDTHS, WIDE_ROWS, WIDE_CONTEXTS)
        for width in progress(widths, desc=f"batches, {meter.mode}", unit="width"):
            for context in lengths:
                meter.wide(width, context, rows, repeats=1 if quick else WIDE_REPEATS)
        yield from meter.rows()


def run_name() -> str:
    """What tells the rows of one run from those of another: when it began."""
    return datetime.now().isoformat(timespec="seconds")


class PhaseMeter:
    """Measures phases turn by turn, so that other measurements can run between the turns.

    Args:
        model: The target with its head.
        exact: Numerical class.
        contexts: Prompt lengths, tokens.
        k_max: Longest draft.
        run: Names the run in its rows.
        strategies: Ways of committing.
        seed: Of the order of rounds.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        exact: bool,
        contexts: Sequence[int],
        k_max: int,
        run: str,
        strategies: Sequence[str] = STRATEGIES,
        seed: int = 0,
    ) -> None:
        self.model, self.exact, self.k_max, self.run = model, exact, k_max, run
        self.rng = random.Random(seed)
        self.seen: dict[tuple[str, str | None, int | None, int, int], list[Measured]] = defaultdict(list)
        tokens = sum(1 + a for _, a in self._cells()) + 3 * (1 + k_max)
        documents = held_out(model, DOCUMENT, -(-(max(contexts) + DOCUMENT) // DOCUMENT))
        self.text = [token for tape in documents for token in tape.tokens.tolist()]
        self.bases = []
        with numerics(model, exact):
            for context in contexts:
                prompt = self.text[:context]
                text = continuation(model, prompt, max(tokens, PLAIN_STEPS + 3))
                for strategy in strategies:
                    pair = speculative(model, prompt, text, strategy, k_max), plain(model, prompt, text, strategy)
                    self.bases.append((context, strategy, *pair))

    @property
    def mode(self) -> str:
        """ "exact" or "fast"."""
        return "exact" if self.exact else "fast"

    def _cells(self) -> list[tuple[int, int]]:
        return [(k, a) for k in range(self.k_max + 1) for a in range(k + 1)]

    def _plan(self) -> list[tuple[int, int]]:
        """Every kind of round once, after one of the largest; a chain comes right after that."""
        cells = self._cells()
        self.rng.shuffle(cells)
        first = next(i for i, (k, _) in enumerate(cells) if k > 0)
        return [(self.k_max, self.k_max), cells.pop(first), *cells]

    def _note(self, found: Iterator[Measured], context: int, strategy: str, width: int = 1) -> None:
        for item in found:
            shared = None if item.phase in SHARED else strategy
            self.seen[item.phase, shared, item.rows, context, width].append(item)

    def turn(self) -> None:
        """Measure every kind of round and some plain steps once more, at every context by every strategy."""
        with numerics(self.model, self.exact):
            for context, strategy, rounds, steps in self.bases:
                self._note(run_plan(rounds.fork(), self._plan()), context, strategy)
                self._note(run_plain(steps.fork(), PLAIN_STEPS), context, strategy)

    def wide(self, width: int, context: int, rows: Sequence[int], *, repeats: int) -> None:
        """Measure the forwards of a batch.

        Args:
            width: Sequences.
            context: Prompt length, at most the longest of the meter's.
            rows: Rows per sequence.
            repeats: Turns.
        """
        length = context + max(rows)
        prompts_BT = torch.tensor([self.text[i : i + length] for i in range(width)])
        with numerics(self.model, self.exact):
            found = batched(self.model, prompts_BT, WIDE_STRATEGY, rows, repeats=repeats)
            self._note(found, context, WIDE_STRATEGY, width)

    def rows(self) -> Iterator[dict[str, Any]]:
        """What was measured so far.

        Yields:
            Per phase, strategy (None where it makes no difference), number of rows, prompt length and width: the
            median, lowest, highest and mean milliseconds, and the mean context.
        """
        for (phase, strategy, count, prompt, width), items in sorted(self.seen.items(), key=lambda entry: _order(entry[0])):
            ms = [1e3 * item.seconds for item in items]
            name = " ".join([phase, *([] if count is None else [f"{count} row{'s' * (count > 1)}"])])
            yield {
                "name": name if strategy is None else f"{name}, {strategy}",
                "mode": self.mode,
                "value": median(ms),
                "low": min(ms),
                "high": max(ms),
                "mean": fmean(ms),
                "unit": "ms",
                "n": len(ms),
                "phase": phase,
                "strategy": strategy,
                "rows": count,
                "context": round(fmean(item.context for item in items), 1),
                "prompt_tokens": prompt,
                "width": width,
                "k_max": self.k_max,
                "run": self.run,
            }


def _order(key: tuple[str, str | None, int | None, int, int]) -> tuple[int, int, str, str, int]:
    """By width, prompt length, phase, strategy and rows."""
    phase, strategy, rows, prompt, width = key
    return width, prompt, phase, strategy or "", rows or 0
