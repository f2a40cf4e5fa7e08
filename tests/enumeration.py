"""The law of the texts that rounds emit, by enumeration of every draw on the tables of tests/toy.py.

Rounds, the MTP proposer, shaping, acceptance and residual are the library's; only the functions that turn a random
number into a choice are replaced, by ones that take every branch with its exact probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import pytest
import torch

from workbench.sampling import residual as residuals
from workbench.sampling import shaping as shapings
from workbench.sampling.law import Law
from workbench.sampling.options import ORDERS, Shaping
from workbench.sampling.philox import TARGET
from workbench.sampling.pick import picks
from workbench.spec import choose
from workbench.spec.choose import Chooser
from workbench.spec.constraint import Constraint
from workbench.spec.policies import AdaptiveFloor, FixedK, Policy
from workbench.spec.proposers import MTPProposer
from workbench.spec.round import DecodeState, run_round

Text = tuple[int, ...]
Cell = Mapping[str, Any]
V, PROMPT, EXACT = 5, (1, 0), 1e-9

FILTERS: dict[str, dict[str, Any]] = {
    "none": dict(temperature=1.2),
    "top_k": dict(temperature=0.8, top_k=3),
    "top_p and min_p": dict(temperature=1.5, top_p=0.8, min_p=0.1),
    "top_k and top_p": dict(temperature=1.0, top_k=4, top_p=0.85),
}
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "all": dict(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=-0.3),
    "window": dict(frequency_penalty=1.5, penalty_last_n=2),
}
POLICIES: dict[str, Callable[[int], Policy]] = {
    "fixed": lambda k: FixedK(k=k),
    "top": lambda k: FixedK(k=k, p_min=0.55, statistic="top"),
    "top, slot 0 too": lambda k: FixedK(k=k, p_min=0.5, pmin0=True, statistic="top"),
    "adaptive": lambda k: AdaptiveFloor(k=k, p_min=0.4, statistic="top"),
    "drawn": lambda k: FixedK(k=k, p_min=0.4, pmin0=True),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "k": (1, 2, 3),
    "order": ORDERS,
    "filters": tuple(FILTERS),
    "penalties": tuple(PENALTIES),
    "policy": ("fixed", "top", "top, slot 0 too", "adaptive"),
    "vocab": (None, (0, 2, 3)),
    "bursts": ((4,), (1, 3), (2, 2), (1, 1, 2)),
    "stops": ((), (2,)),
    "carry": (True, False),
    "constraint": ("none", "masked", "unmasked", "refused"),
}
CELL: Cell = dict(
    k=3, order="chain", filters="top_k", penalties="none", policy="fixed", vocab=None, bursts=(4,), stops=(),
    carry=True, constraint="none",
)  # fmt: skip


class Rule(Constraint):
    """Forbids the id after the last one, and an id that depends on the length.

    The drafter walks it as ``kind`` says: masked; "unmasked", and never stopped; or unmasked and "refused" where wrong.
    """

    def __init__(self, text: Text, kind: str) -> None:
        self.text, self.ahead, self.kind = list(text), list(text), kind

    @staticmethod
    def after(text: Any) -> torch.Tensor:
        row = torch.ones(V, dtype=torch.bool)
        row[[(text[-1] + 1) % V, 3 * len(text) % V]] = False
        return row

    finished = False

    def mask(self) -> torch.Tensor:
        return self.after(self.text)

    def allowed(self, token: int) -> bool:
        return bool(self.mask()[token])

    def consume(self, token: int) -> None:
        assert self.allowed(token)
        self.text.append(token)

    def rollback(self, n: int) -> None:
        del self.text[len(self.text) - n :]

    def draft_begin(self) -> None:
        self.ahead = list(self.text)

    def draft_mask(self) -> torch.Tensor | None:
        return self.after(self.ahead) if self.kind == "masked" else None

    def draft_advance(self, token: int) -> bool:
        fits = self.kind == "unmasked" or bool(self.after(self.ahead)[token])
        if fits:
            self.ahead.append(token)
        return fits


class Branching:
    """Stands in for the noise and for what reads it: every choice is a fork of the path."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fork: Any = None
        self.laws: dict[Any, Law] = {}
        self.found: dict[Any, Any] = {}
        self.shares: dict[Any, tuple[float, Law, Law]] = {}
        self.part: dict[int, tuple[float, float]] = {}
        self.reuse = False  # a control: the test reads the uniform number that the draft was drawn with
        for name in ("draw", "ratio_test", "inverse_cdf", "law", "picks"):
            patch.setattr(choose, name, getattr(self, name))

    def uniform(self, position: int, purpose: int, start: int = 0) -> float:
        self.fork.once(purpose, position, start)
        return float(position)

    def draw(self, law: Law, noise: Any, position: int, purpose: int = TARGET, start: int = 0) -> int:
        self.fork.once(purpose, position, 0 if purpose == TARGET else start)
        at = self.fork.pick(law.probs.tolist())
        ends = [0.0, *accumulate(law.probs.tolist())]
        self.part[position] = (ends[at], ends[at + 1])
        return int(law.ids[at])

    def inverse_cdf(self, law: Law, u: float) -> int:
        return int(law.ids[self.fork.pick(law.probs.tolist())])

    def share(self, p: Law, q: Law, token: int) -> float:
        """Uniform numbers below this pass the library's test, and those above do not."""
        key = id(p), id(q), token
        if key not in self.shares:
            share = min(1.0, p.prob(token) / q.prob(token))
            assert residuals.ratio_test(p, q, token, share * (1 - 1e-12)) == (share > 0)
            assert share == 1 or not residuals.ratio_test(p, q, token, share * (1 + 1e-12) + 1e-300)
            self.shares[key] = share, p, q
        return self.shares[key][0]

    def ratio_test(self, p: Law, q: Law, token: int, u: float) -> bool:
        share = self.share(p, q, token)
        if self.reuse:
            low, high = self.part[int(u)]
            share = min(max(share - low, 0.0) / (high - low), 1.0)
        return self.fork.pick([share, 1 - share]) == 0

    def law(self, logits_V: torch.Tensor, shaping: Shaping, *, history: Any, mask: torch.Tensor | None) -> Law:
        """The library's, once per row and text."""
        key = logits_V.numpy().tobytes(), shaping, tuple(history), None if mask is None else tuple(mask.tolist())
        if key not in self.laws:
            self.laws[key] = shapings.law(logits_V, shaping, history=history, mask=mask)
        return self.laws[key]

    def picks(self, logits_RV: torch.Tensor) -> Any:
        key = logits_RV.numpy().tobytes()
        if key not in self.found:
            self.found[key] = picks(logits_RV)
        return self.found[key]


def shaping_of(cell: Cell) -> Shaping:
    return Shaping(order=cell["order"], **FILTERS[cell["filters"]], **PENALTIES[cell["penalties"]])


def state_of(
    toy: Any, model: Any, cell: Cell, text: Text, chooser: Chooser, proposer: Any = MTPProposer
) -> DecodeState:
    """A sequence that stands after a prompt and a text."""
    tokens = [*PROMPT, *text]
    cache, fed = toy.ToyCache(), torch.tensor([tokens[:-1]])
    model.draft_over(cell["vocab"])
    drafter = proposer(model)
    drafter.prime(fed, model.forward(fed, cache))
    return DecodeState(
        model,
        cache,
        tokens,
        drafter,
        POLICIES[cell["policy"]](cell["k"]).start(width=1),
        carry=cell["carry"],
        stop_ids=frozenset(cell["stops"]),
        chooser=chooser,
        constraint=None if cell["constraint"] == "none" else Rule(tuple(tokens), cell["constraint"]),
    )


def chain(model: Any, cell: Cell, horizon: int) -> dict[Text, float]:
    """The law of the target's own texts, token by token."""
    out: dict[Text, float] = {}

    def grow(text: Text, weight: float) -> None:
        if len(text) == horizon or (text and text[-1] in cell["stops"]):
            out[text] = weight
            return
        before = (*PROMPT, *text)
        mask = None if cell["constraint"] == "none" else Rule.after(before)
        own = shapings.law(model.row(before), shaping_of(cell), history=before, mask=mask)
        for token, p in zip(own.ids.tolist(), own.probs.tolist()):
            grow((*text, token), weight * p)

    grow((), 1.0)
    return out


def emitted(
    toy: Any, branching: Branching, begin: Callable[[Text], DecodeState], bursts: Any, stops: Any = ()
) -> tuple[dict[Text, float], float]:
    """The law of the texts that rounds emit, and the share of drafts accepted."""
    ends, horizon = [*accumulate(bursts)], sum(bursts)
    todo: dict[int, dict[tuple[Text, Any], float]] = defaultdict(lambda: defaultdict(float))
    todo[0][(), None] = 1.0
    out: dict[Text, float] = defaultdict(float)
    drafted = accepted = 0.0
    for n in range(horizon + 1):
        for (text, seen), weight in todo[n].items():
            if n == horizon or (text and text[-1] in stops):
                out[text] += weight
                continue

            def once(fork: Any, text: Text = text, seen: Any = seen, n: int = n) -> tuple[Any, ...]:
                branching.fork = fork
                state = begin(text)
                state.policy.accepted = seen  # what an adaptive policy remembers
                record = run_round(state, next(end for end in ends if end > n) - n)
                after = tuple(state.tokens[len(PROMPT) :])
                return after, state.policy.accepted, record.drafted, record.accepted

            for share, (after, now, k, hits) in toy.paths(once):
                todo[len(after)][after, now] += weight * share
                drafted += weight * share * k
                accepted += weight * share * hits
    return out, accepted / drafted


def enumerate_cell(toy: Any, branching: Branching, cell: Cell, seed: int = 0, proposer: Any = MTPProposer) -> Any:
    """Largest difference from the target's law, total variation, and acceptance."""
    model = toy.Toy(V, seed=seed)
    chooser = Chooser(shaping_of(cell), branching, "ratio")  # type: ignore[arg-type]
    bursts = cell["bursts"]
    with torch.inference_mode():
        got, rate = emitted(
            toy, branching, lambda text: state_of(toy, model, cell, text, chooser, proposer), bursts, cell["stops"]
        )
    own = chain(model, cell, sum(bursts))
    gaps = [abs(got.get(text, 0.0) - own.get(text, 0.0)) for text in {*got, *own}]
    return max(gaps), sum(gaps) / 2, rate
