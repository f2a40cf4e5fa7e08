"""Predicted speed against live speed: phases measured, tapes decoded and walked in one session on one machine.

Live runs of every policy alternate with turns of the phase measurement, so that both see the machine in the same
moods. A prediction knows the phases, the draft table of the tapes and the policy, and nothing of the live runs. Live
times hold all of decoding after the first token, with the drafter's last rows, written at the end of a text, under
"other".
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.bench.arms import held_out, row
from workbench.bench.phases import PhaseMeter, run_name
from workbench.core.progress import progress
from workbench.core.tape import Corpus, first_pending
from workbench.facade import load
from workbench.model.hybrid import HybridModel
from workbench.replay.cost import CostModel
from workbench.replay.fast import walk_counts
from workbench.replay.own import own_tapes
from workbench.replay.predict import Prediction, predict
from workbench.replay.table import replay
from workbench.spec.generate import generate
from workbench.spec.policies import AdaptiveFloor, Cumulative, Ema, FixedK, MinConfidence, Policy, Suspend
from workbench.spec.policies.naming import label_of

K_MAX, PROMPT, NEW, DOCUMENTS, REPEATS = 8, 64, 128, 4, 3
STRATEGY = "columns"  # what sessions use on a CPU
EVERY = 4  # live policies between two turns of the phase measurement
POLICIES: tuple[Policy, ...] = (
    *(FixedK(k=k) for k in (1, 2, 3, 4, 6, 8)),
    FixedK(k=3, p_min=0.5),
    FixedK(k=4, p_min=0.3, pmin0=True),
    FixedK(k=8, p_min=0.5),
    FixedK(k=8, p_min=0.7, pmin0=True),
    AdaptiveFloor(k=4),
    AdaptiveFloor(k=7),
    AdaptiveFloor(k=7, floor=2, p_min=0.4),
    AdaptiveFloor(k=8, cap=8, floor=4),
    MinConfidence(k=4, tau=0.4),
    Cumulative(k=8, threshold=0.3),
    Ema(k=8),
    Suspend(k=6, floor=3.0, reprobe_tokens=16),
)


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the predict benchmark.

    Args:
        quick: Two policies, one short tape, one repeat.

    Yields:
        Per policy the error of the predicted tokens per second against the live ones, with both and their phases; then
        the median absolute error over policies; in both numerical classes.
    """
    model, run = load("demo"), run_name()
    policies = POLICIES[1:7:5] if quick else POLICIES
    for exact in (True, False):
        live = LiveRuns(model, policies, exact=exact, documents=1 if quick else DOCUMENTS, new=24 if quick else NEW)
        longest = K_MAX if not quick else max(policy.k_max for policy in policies)
        meter = PhaseMeter(
            model,
            exact=exact,
            contexts=(PROMPT, PROMPT + (NEW if not quick else 16)),
            k_max=longest,
            run=run,
            strategies=[STRATEGY],
        )
        live.alternate(meter, repeats=1 if quick else REPEATS)
        cost = CostModel.fit(list(meter.rows()))
        yield from live.rows(cost, run=run)


class LiveRuns:
    """Live runs of policies over own tapes, and the walks of the same policies over the draft table of these tapes.

    Args:
        model: The target with its head.
        policies: The policies.
        exact: Numerical class.
        documents: Tapes.
        new: Tokens generated per tape.
    """

    def __init__(
        self, model: HybridModel, policies: Sequence[Policy], *, exact: bool, documents: int, new: int
    ) -> None:
        self.model, self.policies, self.exact = model, policies, exact
        prompts = held_out(model, PROMPT, documents)
        made = own_tapes(
            model, prompts, prompt_tokens=PROMPT, max_new_tokens=new, exact=exact, ignore_eos=True, strategy=STRATEGY
        )
        self.tapes: Corpus = made
        self.seconds: dict[int | None, list[float]] = defaultdict(list)  # by policy, None for plain decode; per repeat
        self.phases: dict[int, list[dict[str, float]]] = defaultdict(list)
        self.tokens = sum(len(tape) - 1 - first_pending(tape.prompt_len) for tape in made)

    @property
    def mode(self) -> str:
        """ "exact" or "fast"."""
        return "exact" if self.exact else "fast"

    def alternate(self, meter: PhaseMeter, *, repeats: int) -> None:
        """Run every policy and plain decode live, in a new order each repeat, with turns of the meter between."""
        rng = random.Random(0)
        arms: list[int | None] = [None, *range(len(self.policies))]
        with progress(repeats * len(arms), desc=f"live, {self.mode}", unit="run") as bar:
            for again in range(repeats + 1):
                rng.shuffle(arms)
                for i, arm in enumerate(arms if again else arms[:1]):  # one run before all others warms up
                    if i % EVERY == 0:
                        meter.turn()
                    seconds, phases = self._live(arm)
                    if not again:
                        continue
                    self.seconds[arm].append(seconds)
                    if arm is not None:
                        self.phases[arm].append(phases)
                    bar.update()

    def _live(self, arm: int | None) -> tuple[float, dict[str, float]]:
        """Seconds of all rounds over all tapes, without prefill, and those that each phase names."""
        total, phases = 0.0, dict.fromkeys(("draft", "verify", "accept", "commit"), 0.0)
        for tape in self.tapes:
            made = generate(
                self.model,
                tape.tokens[: tape.prompt_len].tolist(),
                policy=None if arm is None else self.policies[arm],
                k=0 if arm is None else self.policies[arm].k_max,
                max_new_tokens=len(tape) - first_pending(tape.prompt_len),
                ignore_eos=True,
                strategy=STRATEGY,
                exact=self.exact,
            )
            total += made.setup.rounds
            for record in made.records:
                times = record.phases
                phases["draft"] += times.draft
                phases["verify"] += times.verify_issue + times.verify_wait
                phases["accept"] += times.accept
                phases["commit"] += times.commit
        return total, {**phases, "other": total - sum(phases.values())}

    def predictions(self, cost: CostModel) -> list[Prediction]:
        """The prediction of every policy, from a draft table of the tapes."""
        with tempfile.TemporaryDirectory() as folder:
            table = replay(self.model, self.tapes, out=Path(folder) / "table", k_max=K_MAX, exact=self.exact)
            return [predict(counts, cost) for counts in walk_counts(table, self.policies, estimator="own")]

    def rows(self, cost: CostModel, *, run: str) -> Iterator[dict[str, Any]]:
        """Errors per policy, and their median.

        Args:
            cost: Fitted to phases measured between the live runs.
            run: Names the run.

        Yields:
            Rows.
        """
        facts: dict[str, Any] = {"mode": self.mode, "prompt_tokens": PROMPT, "documents": len(self.tapes), "run": run}
        errors, plain = [], sum(self.seconds[None])
        for i, (policy, said) in enumerate(zip(self.policies, self.predictions(cost), strict=True)):
            seconds, n = self.seconds[i], len(self.seconds[i])
            rates, mean = [self.tokens / s for s in seconds], self.tokens * n / sum(seconds)
            predicted = said.tokens_per_second.value
            assert predicted is not None and said.emitted == self.tokens, "walk and live runs emit the same tokens"
            errors.append(predicted / mean - 1)
            yield {
                "name": label_of(policy),
                "value": 100 * errors[-1],
                "low": 100 * (predicted / max(rates) - 1),
                "high": 100 * (predicted / min(rates) - 1),
                "unit": "%",
                "n": n,
                "predicted": predicted,
                "live": mean,
                "predicted_speedup": said.speedup.value,
                "live_speedup": plain / sum(seconds),
                "predicted_ms": {phase: 1e3 * spent / said.rounds for phase, spent in said.phases.items()},
                "live_ms": {phase: 1e3 * self._mean(i, phase) / said.rounds for phase in said.phases},
                **facts,
            }
        sizes = [100 * abs(error) for error in errors]
        yield row("median absolute error of predicted tokens per second", sizes, "%", **facts)

    def _mean(self, arm: int, phase: str) -> float:
        return sum(times[phase] for times in self.phases[arm]) / len(self.phases[arm])
