"""What the sweep tests share: synthetic tables, tables of tiny models, a cost model, user-written policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.core.tape import Corpus, Tape
from workbench.replay import DraftTable, replay
from workbench.replay.cost import CostModel
from workbench.replay.synthetic import Profile, synthetic_table

SOURCES = ("code", "prose")


@pytest.fixture(autouse=True)
def no_bars():
    """Tests are quiet."""
    with wb.quiet():
        yield


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> DraftTable:
    """A table of the target's own texts, of two sources; a document is too short to hold a round."""
    out = tmp_path_factory.mktemp("sweep") / "own"
    return synthetic_table(out, documents=9, tokens=(2, 90), sources=SOURCES, k_max=4, seed=3, shard_rows=150)


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> DraftTable:
    """The same kind of table at a temperature, with forced chains."""
    out = tmp_path_factory.mktemp("sweep") / "warm"
    return synthetic_table(out, documents=7, tokens=(20, 70), sources=SOURCES, k_max=4, temperature=0.7, seed=4)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory) -> DraftTable:
    """A table of texts that are not the target's own."""
    out = tmp_path_factory.mktemp("sweep") / "foreign"
    profile = Profile(agree=0.8)
    return synthetic_table(out, documents=6, tokens=(30, 60), sources=SOURCES, k_max=4, profile=profile, seed=5)


@pytest.fixture(scope="session")
def cost() -> CostModel:
    """A machine on which drafts pay, up to a point."""
    verify = {1: 1.0, 2: 1.1, 3: 1.25, 4: 1.5, 5: 1.9}
    return CostModel.from_ratios(verify, draft=0.06, overhead=0.02, plain_seconds=0.01, name="a machine")


@pytest.fixture(scope="session")
def pair(tiny, tmp_path_factory) -> Callable[..., DraftTable]:
    """``pair(seed, texts=0)``: the table of a random drafter over fixed texts of 11 token ids."""
    made: dict[tuple[int, int], DraftTable] = {}

    def build(seed: int, texts: int = 0, **changes: Any) -> DraftTable:
        if (seed, texts) not in made:
            random = np.random.default_rng(texts)
            tapes = [Tape(f"d{i}", random.integers(0, 11, 30 + 4 * i), source=SOURCES[i % 2]) for i in range(5)]
            model = tiny(ratio=1, tied=False, vocab_size=11, seed=seed)
            out: Path = tmp_path_factory.mktemp("pair") / "table"
            made[seed, texts] = replay(model, Corpus(tapes, name="c"), out=out, k_max=3)
        return made[seed, texts]

    return build


class EveryOther:
    """Rounds of ``n`` drafts and of none, in turn; a policy of a notebook cell, without a description."""

    anticipating = False

    def __init__(self, n: int = 2) -> None:
        self.k_max = n

    def start(self, *, width: int) -> Any:
        return EveryOtherRun(self.k_max)


class EveryOtherRun:
    def __init__(self, n: int) -> None:
        self.n, self.rounds = n, 0

    def next_k(self, committed: int) -> int:
        return self.n * (self.rounds % 2)

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        return None

    def observe(self, view: Any) -> None:
        self.rounds += 1


@dataclass(frozen=True)
class Described:
    """The same with a description."""

    n: int = 2
    anticipating: bool = False

    @property
    def k_max(self) -> int:
        return self.n

    def start(self, *, width: int) -> Any:
        return EveryOtherRun(self.n)

    def spec(self) -> dict[str, Any]:
        return {"n": self.n}


@pytest.fixture(scope="session")
def user_policies() -> tuple[type, type]:
    """Classes of user-written policies: without ``spec``, and with it."""
    return EveryOther, Described
