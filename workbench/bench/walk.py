"""Many policies over one draft table: seconds, memory, and how much longer live rounds would take.

The table is synthetic (``replay.synthetic``, seed and profile below), so that no model bounds its size. Live rounds are
those of the demo checkpoint in the same run; how long the walk's number of rounds would take live is extrapolated from
their rate, and the row says so.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from workbench.bench.arms import held_out, peak_megabytes, row
from workbench.core.progress import progress, quiet
from workbench.facade import load
from workbench.replay import load_table, synthetic_table, walk_counts
from workbench.spec.generate import generate
from workbench.spec.policies import (
    AdaptiveFloor,
    Cumulative,
    Ema,
    FixedK,
    Gate,
    Goodput,
    Ladder,
    MinConfidence,
    Oracle,
    Policy,
    Scripted,
    Suspend,
)

DOCUMENTS, TOKENS, POLICIES, K_MAX, SEED = 1000, 1001, 1000, 8, 0
SHARD_ROWS = 65_536
PROMPT, NEW, PROMPTS = 64, 128, 4
LIVE = {"K=3": FixedK(k=3), "K=8, p_min=0.5": FixedK(k=8, p_min=0.5), "adaptive K=8": AdaptiveFloor(k=8, cap=8)}


class Ratios:
    """Durations for the gates: a verify of 1 + D rows takes 1 + 0.03 D, a step 0.06, and 4,000 tokens double both."""

    def grid(self, k_max: int, *, contexts: Sequence[float]) -> np.ndarray:
        """Durations of rounds, in plain steps of an empty context, [C, K+1, K+1]."""
        n = np.arange(k_max + 1)
        per_round = 1 + 0.03 * n[None, :] + 0.06 * n[:, None]
        return per_round * (1 + np.asarray(contexts)[:, None, None] / 4000)


def random_policies(count: int, *, seed: int) -> list[Policy]:
    """Policies of every family in turn, parameters drawn.

    Args:
        count: How many.
        seed: Of the parameters.

    Returns:
        The policies, up to ``K_MAX`` drafts long.
    """
    r = random.Random(seed)

    def threshold() -> dict[str, Any]:
        return {"p_min": r.choice((0.0, round(r.random(), 3))), "pmin0": r.random() < 0.5}

    def length() -> int:
        return r.randint(1, K_MAX)

    def oracle() -> Oracle:
        k = length()
        return Oracle(k=k, seconds=r.choice((None, tuple(1 + 0.1 * i for i in range(k + 1)))))

    def goodput() -> Goodput:
        k = length()
        return Goodput(k=k, seconds=tuple(1 + r.uniform(0.05, 0.2) * i for i in range(k + 1)))

    makers = (
        lambda: FixedK(k=r.randint(0, K_MAX), **threshold()),
        lambda: AdaptiveFloor(k=length(), cap=length(), floor=r.choice((None, 1, 2, 4)), **threshold()),
        lambda: MinConfidence(k=length(), tau=r.random()),
        lambda: Cumulative(k=length(), threshold=r.random()),
        lambda: Ema(k=length(), alpha=r.uniform(0.05, 1.0)),
        lambda: Ladder(k=length(), lanes=r.randint(1, 40), **threshold()),
        lambda: Suspend(k=length(), floor=2 * r.random()),
        goodput,
        lambda: Gate(k=length(), **threshold()),
        oracle,
        lambda: Scripted(ks=tuple(r.randint(0, K_MAX) for _ in range(64))),
    )
    return [makers[i % len(makers)]() for i in range(count)]


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the walk benchmark.

    Args:
        quick: A small table and few policies.

    Yields:
        Seconds of loading (or compiling) the kernels and of the walk, its rate, peak memory over a table and over an
        eighth of it, live rounds per second, and the ratio of live to walked time for as many rounds.
    """
    documents, tokens, count = (40, 201, 44) if quick else (DOCUMENTS, TOKENS, POLICIES)
    repeats, threads = 1 if quick else 3, torch.get_num_threads()
    facts: dict[str, Any] = {"policies": count, "k_max": K_MAX, "seed": SEED, "mode": "compiled"}
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, part in (("an eighth of it", documents // 8), ("the table", documents)):
            out = Path(folder) / name
            synthetic_table(out, documents=part, tokens=(tokens, tokens), k_max=K_MAX, seed=SEED, shard_rows=SHARD_ROWS)
            command = [sys.executable, "-m", "workbench.bench.walk", str(out), str(count), str(repeats), str(threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
        rows = documents * (tokens - 1)
        facts |= {"documents": documents, "rows": rows, "shard_rows": SHARD_ROWS}
        whole = found["the table"]
        seconds, rounds = whole["seconds"], whole["rounds"]
        yield row("kernels loaded or compiled", [whole["loading"]], "s", **facts)
        yield row("walk of all policies", seconds, "s", rounds=rounds, **facts)
        yield row("rows x policies per second", [rows * count / s for s in seconds], "1/s", **facts)
        for name, one in found.items():
            yield row(f"peak memory of a walk over {name}", [one["mb"]], "MB", before=one["before_mb"], **facts)
    rates = []
    for name, values in _live(12 if quick else NEW, 1 if quick else PROMPTS).items():
        rates.append(median(values))
        yield row(f"live rounds per second, {name}", values, "1/s", mode="fast", new_tokens=NEW)
    ratios = [rounds / rate / median(seconds) for rate in rates]
    yield row("live / walk, for as many rounds", ratios, "ratio", extrapolated=True, rounds=rounds, **facts)


def _live(new: int, prompts: int) -> dict[str, list[float]]:
    """Live rounds per second of some policies, by prompt; prefill is not counted."""
    model = load("demo", exact=False)
    texts = [tape.tokens.tolist() for tape in held_out(model, PROMPT, prompts)]
    rates: dict[str, list[float]] = {name: [] for name in LIVE}
    generate(model, texts[0], policy=LIVE["K=3"], max_new_tokens=8, ignore_eos=True)
    for ids in progress(texts, desc="live rounds", unit="prompt"):
        for name, policy in LIVE.items():
            made = generate(model, ids, policy=policy, max_new_tokens=new, ignore_eos=True)
            rates[name].append(len(made.records) / made.setup.rounds)
    return rates


def child(path: str, count: int, repeats: int, threads: int) -> dict[str, Any]:
    """Walk a table in this process: seconds, rounds, and peak resident megabytes before and after."""
    policies, costs = random_policies(count, seed=SEED), Ratios()
    with tempfile.TemporaryDirectory() as folder:
        small = synthetic_table(Path(folder) / "x", documents=1, k_max=K_MAX)
        began = perf_counter()
        list(walk_counts(small, random_policies(11, seed=SEED), cost=costs, threads=1))
        loading = perf_counter() - began
    table = load_table(path, check_hashes=False)
    before, seconds, rounds = peak_megabytes(), [], 0
    for _ in range(repeats):
        began, rounds = perf_counter(), 0
        for counts in walk_counts(table, policies, cost=costs, threads=threads):
            rounds += int(counts.rounds_G.sum())
        seconds.append(perf_counter() - began)
    return {"loading": loading, "seconds": seconds, "rounds": rounds, "before_mb": before, "mb": peak_megabytes()}


if __name__ == "__main__":
    with quiet():
        print(json.dumps(child(sys.argv[1], *(int(number) for number in sys.argv[2:5]))))
