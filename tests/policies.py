"""Random policies of every family, one changed parameter of each, and a clock that agrees with a cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from workbench.model.hybrid import HybridModel
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
    PolicyRun,
    RoundView,
    Scripted,
    Suspend,
)

K_MAX = 8


@dataclass(frozen=True)
class Pairs:
    """A policy as a user writes one: an even number of drafts, one more pair after every round that took any."""

    k: int = 6
    tau: float = 0.2
    anticipating = True

    @property
    def k_max(self) -> int:
        return self.k

    def start(self, *, width: int) -> PolicyRun:
        return PairsRun(self)


class PairsRun:
    """Run of Pairs."""

    def __init__(self, policy: Pairs) -> None:
        self.policy, self.pairs = policy, 1

    def next_k(self, committed: int) -> int:
        return min(2 * self.pairs, self.policy.k)

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        return "policy" if top1 < self.policy.tau else None

    def trim(self, drafted: int, base: int) -> int:
        return drafted - drafted % 2

    def observe(self, view: RoundView) -> None:
        self.pairs = self.pairs + 1 if view.accepted else 1


KINDS = (
    "fixed", "floor", "min_confidence", "cumulative", "ema", "ladder", "suspend", "goodput", "gate", "oracle",
    "scripted", "user",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Seconds of a round, in sixteenths, so that sums have no rounding.

    Args:
        step: One drafter step.
        row: One row of a verify, beside 1 for the verify.
    """

    step: float = 1 / 8
    row: float = 1 / 16

    def round_seconds(self, *, steps: int, drafted: int, context: int = 0) -> float:
        return steps * self.step + 1 + (1 + drafted) * self.row

    def grid(self, k_max: int, *, contexts: Sequence[float]) -> np.ndarray:
        steps, drafted = np.ogrid[: k_max + 1, : k_max + 1]
        seconds = steps * self.step + 1 + (1 + drafted) * self.row
        return np.broadcast_to(seconds, (len(contexts), *seconds.shape))

    def curve(self, k: int) -> tuple[float, ...]:
        return tuple(self.round_seconds(steps=n, drafted=n) for n in range(k + 1))

    @contextmanager
    def clock(self) -> Iterator[Any]:
        """A clock that goes on when the target or the drafter runs, by what the cost model says."""
        now = [0.0]
        forward, draft = HybridModel.forward, HybridModel.draft

        def verify(model: HybridModel, tokens_BT: Any, *rest: Any, **more: Any) -> Any:
            now[0] += 1 + tokens_BT.shape[1] * self.row
            return forward(model, tokens_BT, *rest, **more)

        def step(model: HybridModel, *rest: Any, **more: Any) -> Any:
            now[0] += self.step
            return draft(model, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HybridModel, "forward", verify)
            patch.setattr(HybridModel, "draft", step)
            yield lambda: now[0]


def random_policy(kind: str, rng: np.random.Generator, *, cost: Cost) -> Policy:
    """A policy of one kind with random parameters, quick enough to act within some twenty tokens."""
    k = int(rng.integers(1, K_MAX + 1))
    p = round(float(rng.uniform(0.2, 0.7)), 3)
    statistic = str(rng.choice(["drawn", "top"]))
    threshold: dict[str, Any] = dict(statistic=statistic)
    if rng.random() < 0.5:
        threshold.update(p_min=p, pmin0=bool(rng.random() < 0.5))
    alpha, margin = round(float(rng.uniform(0.2, 1)), 2), round(float(rng.uniform(0.2, 1.5)), 2)
    few = int(rng.integers(1, 4))
    if kind == "fixed":
        return FixedK(k=k, **threshold)
    if kind == "floor":
        floor = None if rng.random() < 0.3 else few
        return AdaptiveFloor(k=max(k, 2), floor=floor, cap=int(rng.integers(2, K_MAX + 1)), **threshold)
    if kind == "min_confidence":
        return MinConfidence(k=k, tau=p, statistic=statistic)
    if kind == "cumulative":
        return Cumulative(k=max(k, 3), threshold=round(p * p, 3), statistic=statistic)
    if kind == "ema":
        return Ema(k=max(k, 3), alpha=alpha, margin=margin, low=int(rng.integers(0, 3)), **threshold)
    if kind == "ladder":
        return Ladder(steps=f"2:{k}, 5:2,9:1", k=K_MAX, lanes=int(rng.integers(1, 12)), max_lanes=10, **threshold)
    if kind == "suspend":
        return Suspend(k=k, window=few, floor=margin, reprobe_tokens=few + 1, **threshold)
    if kind == "goodput":
        return Goodput(
            k=k, seconds=cost.curve(k), alpha=alpha, hysteresis=0.02 * few, reprobe=few + 2, warmup=few, **threshold
        )
    if kind == "gate":
        return Gate(
            k=k, window=few, alpha=alpha, margin=0.02 * few, deviations=0.1 * few, confirm=1 + few % 2,
            reprobe_tokens=few + 2, refresh_tokens=few + 3, context_floor=20, **threshold,
        )  # fmt: skip
    if kind == "oracle":
        return Oracle(k=k, seconds=cost.curve(k) if rng.random() < 0.5 else None)
    if kind == "scripted":
        return Scripted(ks=tuple(int(n) for n in rng.integers(0, K_MAX + 1, 5)))
    return Pairs(k=2 + 2 * few, tau=p / 2)


def random_policies(count: int, *, seed: int, cost: Cost = Cost()) -> list[tuple[str, Policy]]:
    """As many policies, the kinds in turn."""
    rng = np.random.default_rng(seed)
    return [(kind, random_policy(kind, rng, cost=cost)) for kind in (KINDS * count)[:count]]


def changed(policy: Policy) -> list[Policy]:
    """The policy with one field changed, in every way that acts soon."""
    moves: dict[str, Any] = {
        "k": lambda k: k - 1 if k > 1 else k + 1,
        "p_min": lambda p: p + 0.2 if p else 0.5,
        "tau": lambda p: p + 0.15,
        "threshold": lambda p: p + 0.15,
        "floor": lambda floor: (floor or 1) + 1,
        "margin": lambda margin: margin + 1,
        "lanes": lambda lanes: lanes + 4,
        "window": lambda n: n + 1,
        "warmup": lambda n: n + 3,
        "reprobe": lambda n: n + 2,
        "alpha": lambda alpha: alpha / 2,
        "refresh_tokens": lambda n: 10 * n,
        "ks": lambda ks: (*ks[:2], (ks[2] + 3) % 6, *ks[3:]),
    }
    out = []
    for name, move in moves.items():
        if not hasattr(policy, name) or (name == "k" and getattr(policy, "seconds", None) is not None):
            continue
        value = move(getattr(policy, name))
        out.append(replace(policy, **{name: value}))  # type: ignore[type-var]
    return out
