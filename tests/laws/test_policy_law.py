"""The ratio rule keeps the target's law under every policy that does not anticipate, and not under one that does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from workbench.spec.policies import Cumulative, Ema, Goodput, MinConfidence, Suspend


@pytest.fixture
def branching(enumeration, monkeypatch) -> Any:
    """Every draw takes every branch."""
    return enumeration.Branching(monkeypatch)


@dataclass(frozen=True)
class Even:
    """Takes an odd token off every finished chain; without a threshold that hangs on no draw."""

    k_max: int
    anticipating = False

    def start(self, *, width: int) -> Any:
        run = Cumulative(k=self.k_max).start(width=width)
        run.trim = lambda drafted, base: drafted - drafted % 2  # type: ignore[method-assign]
        return run


EXACT = {
    "product": lambda k: Cumulative(k=k, threshold=0.3, statistic="top"),
    "weakest, one slot": lambda k: MinConfidence(k=1, tau=0.5, statistic="top"),
    "mean": lambda k: Ema(k=k, alpha=1.0, margin=0.5, low=0, p_min=0.4, statistic="top"),
    "suspension": lambda k: Suspend(k=k, window=1, floor=1.0, reprobe_tokens=1),
    "goodput": lambda k: Goodput(k=k, seconds=(1.0, 1.2, 1.4), warmup=1, reprobe=2, p_min=0.4, statistic="top"),
    "trimmed": Even,
}
BENT = {
    "weakest": lambda k: MinConfidence(k=k, tau=0.45, statistic="top"),
    "product of the drawn": lambda k: Cumulative(k=k, threshold=0.2),
}


@pytest.mark.parametrize("name", [*EXACT, *BENT])
def test_the_law_of_what_rounds_emit(toy, enumeration, branching, monkeypatch, name):
    make = EXACT.get(name) or BENT[name]
    monkeypatch.setitem(enumeration.POLICIES, name, make)
    cell = {**enumeration.CELL, "policy": name, "k": 2, "filters": "top_k and top_p"}
    assert make(2).anticipating == (name in BENT)
    gap, distance, _ = enumeration.enumerate_cell(toy, branching, cell, seed=7)
    if name in EXACT:
        assert gap < enumeration.EXACT
    else:
        assert gap > 1e6 * enumeration.EXACT and distance > 3e-3
