"""On the demo checkpoint: what rounds emit has the target's law, by 20,000 draws each, and wrong variants have not.

Rows of target and head are computed once; ``propose`` and ``judge`` of the library then run with the noise of 20,000
seeds. The measure is total variation, the threshold the 99.9 % quantile of what as many draws from the law itself give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.model.hybrid import HybridModel
from workbench.sampling.draw import inverse_cdf
from workbench.sampling.law import Law
from workbench.sampling.options import Shaping
from workbench.sampling.philox import ACCEPT, DRAFT, TAG, TARGET, Noise, gumbel_of, philox, uniform
from workbench.sampling.residual import overlap, ratio_test
from workbench.sampling.shaping import law
from workbench.spec import choose
from workbench.spec.choose import Chooser, TargetRows
from workbench.spec.policies import FixedK, Policy
from workbench.spec.propose import judge, propose
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal, Proposer
from workbench.spec.round import DecodeState

N, SIMULATED = 20_000, 4000
Text = tuple[int, ...]
PROMPT = "The members of this House"


class Head(Proposer):
    """The checkpoint's head at one place: its rows, once per chain drafted so far."""

    has_q = True

    def __init__(self, rows: Callable[[Text], torch.Tensor]) -> None:
        self.rows = rows

    def propose(self, ctx: DraftContext) -> Proposal:
        drafted: list[Any] = []
        for slot in range(ctx.k):
            choice = ctx.choose(self.rows(tuple(c.token for c in drafted)), [c.token for c in drafted])
            assert choice is not None
            if ctx.drops(slot, choice.p, choice.top) is not None:
                break
            drafted.append(choice)
        q = tuple(c.q for c in drafted)
        return Proposal(tuple(c.token for c in drafted), tuple(c.p for c in drafted), "k", q)


class Streams:
    """The noise of seeds 0 to n - 1, all of them computed at once for whatever is asked of one."""

    def __init__(self, n: int) -> None:
        keys = np.array([Noise(seed).key for seed in range(n)], dtype=np.int64)
        self.key = (keys[:, :1], keys[:, 1:])
        self.tables: dict[Any, Any] = {}

    def numbers(self, first: tuple[int, ...], *counter: int) -> Any:
        if (first, counter) not in self.tables:
            words = philox((np.array([first], dtype=np.int64), *counter), self.key)
            self.tables[first, counter] = np.stack([uniform(word) for word in words], -1)  # seed, word, lane
        return self.tables[first, counter]


class Stream:
    """What a chooser asks of ``Noise``, out of tables."""

    def __init__(self, streams: Streams, seed: int) -> None:
        self.streams, self.seed = streams, seed

    def uniform(self, position: int, purpose: int, start: int = 0) -> float:
        return float(self.streams.numbers((TAG,), position, purpose, start)[self.seed, 0, 0])

    def gumbel(self, ids_S: torch.Tensor, position: int, purpose: int = TARGET, start: int = 0) -> torch.Tensor:
        key = ids_S.data_ptr(), position, purpose, start
        if key not in self.streams.tables:
            ids = ids_S.numpy()
            table = self.streams.numbers(
                tuple((ids >> 2).tolist()), position, purpose, 0 if purpose == TARGET else start
            )
            self.streams.tables[key] = torch.from_numpy(gumbel_of(table[:, np.arange(len(ids)), ids & 3]))
        return self.streams.tables[key][self.seed]


def test_the_tables_hold_the_noise_of_every_seed():
    ids, streams = torch.tensor([0, 3, 4, 9, 4000]), Streams(5)
    for seed in range(5):
        mine, right = Stream(streams, seed), Noise(seed)
        for purpose, start in ((TARGET, 0), (TARGET, 6), (DRAFT, 6)):
            assert mine.gumbel(ids, 7, purpose, start).equal(right.gumbel(ids, 7, purpose, start))
        assert mine.uniform(7, ACCEPT, 6) == right.uniform(7, ACCEPT, 6)


@dataclass
class Place:
    """One place in a text: rows of the target and of the head after every continuation, computed when asked for."""

    model: HybridModel
    tokens: list[int]
    laws: dict[Any, Law] = field(default_factory=dict)
    found: dict[Any, Any] = field(default_factory=dict)
    target: dict[Text, torch.Tensor] = field(default_factory=dict)
    head: dict[Text, torch.Tensor] = field(default_factory=dict)

    @torch.inference_mode()
    def own(self, chain: Text) -> torch.Tensor:
        """The target's logits after the text and a chain."""
        if chain not in self.target:
            rows = self.model.forward(torch.tensor([[*self.tokens, *chain]]), self.model.new_cache(), logits="last")
            self.target[chain] = rows.logits_BTV[0, 0]
        return self.target[chain]

    @torch.inference_mode()
    def drafted(self, chain: Text) -> torch.Tensor:
        """The head's logits after the text and a chain of its own, by the real proposer."""
        if chain not in self.head:
            fed = torch.tensor([self.tokens[:-1]])
            proposer = MTPProposer(self.model)
            proposer.prime(fed, self.model.forward(fed, self.model.new_cache(), logits="none"))
            seen: list[torch.Tensor] = []

            def pick(logits_V: torch.Tensor, before: Sequence[int]) -> Any:
                seen.append(logits_V.clone())
                return choose.Choice(chain[len(before)], 1.0, 1.0) if len(before) < len(chain) else None

            last = len(self.tokens) - 1
            proposer.propose(DraftContext(len(chain) + 1, self.tokens[-1], last, lambda *a: None, pick))
            self.head[chain] = seen[-1]
        return self.head[chain]

    def reuse(self, patch: pytest.MonkeyPatch) -> None:
        """Laws and picks of a row are computed once."""
        right, picks = choose.law, choose.picks

        def known(logits_V: torch.Tensor, shaping: Shaping, *, history: Sequence[int], mask: Any) -> Law:
            key = logits_V.data_ptr(), shaping
            if key not in self.laws:
                self.laws[key] = right(logits_V, shaping, history=history, mask=mask)
            return self.laws[key]

        def seen(logits_RV: torch.Tensor) -> Any:
            key = logits_RV.data_ptr()
            if key not in self.found:
                self.found[key] = picks(logits_RV)
            return self.found[key]

        patch.setattr(choose, "law", known)
        patch.setattr(choose, "picks", seen)

    def draws(
        self, shaping: Shaping, accept: str, policy: Policy, *, depth: int, n: int = N
    ) -> tuple[Counter[Text], float]:
        """The first ``depth`` tokens that a round emits, and the next from the target where it emits fewer."""
        out: Counter[Text] = Counter()
        drafted = accepted = 0
        start, run = len(self.tokens) - 1, policy.start(width=1)
        state = DecodeState(self.model, None, self.tokens, Head(self.drafted), run)  # type: ignore[arg-type]
        streams = Streams(n)
        for seed in range(n):
            state.chooser = Chooser(shaping, Stream(streams, seed), accept)  # type: ignore[arg-type]
            proposal = propose(state, policy.k_max, 1)
            rows = Rows([self.own(proposal.tokens[:i]) for i in range(len(proposal.tokens) + 1)])
            own = TargetRows(state.chooser, rows, self.tokens, proposal.tokens, None)  # type: ignore[arg-type]
            text = judge(state, proposal, own, start, None).emitted[:depth]
            drafted += len(proposal.tokens)
            accepted += sum(a == b for a, b in zip(text, proposal.tokens))
            while len(text) < depth:
                text = (*text, state.chooser.pick(self.own(text), [*self.tokens, *text]))
            out[text] += 1
        return out, accepted / drafted

    def chain(self, shaping: Shaping, depth: int) -> dict[Text, float]:
        """The law of the target's own continuations of some length."""
        out: dict[Text, float] = {(): 1.0}
        for _ in range(depth):
            grown = {}
            for text, weight in out.items():
                own = law(self.own(text), shaping)
                grown.update({(*text, t): weight * p for t, p in zip(own.ids.tolist(), own.probs.tolist())})
            out = grown
        return out


class Rows(list[torch.Tensor]):
    """Rows of one verify."""

    device = torch.device("cpu")


def distance(counts: Counter[Text], own: dict[Text, float]) -> float:
    n = counts.total()
    return sum(abs(counts[text] / n - own.get(text, 0.0)) for text in {*counts, *own}) / 2


def threshold(own: dict[Text, float], n: int = N) -> float:
    """The 99.9 % quantile of the distance of n draws from the law itself."""
    p = np.array(list(own.values()))
    counts = np.random.default_rng(0).multinomial(n, p / p.sum(), size=SIMULATED)
    return float(np.quantile(np.abs(counts / n - p).sum(1) / 2, 0.999))


@pytest.fixture(scope="module")
def place() -> Place:
    model = wb.load("demo", exact=True)
    return Place(model, model.tokenizer.encode(PROMPT))


NEXT = Shaping(temperature=1.0, top_k=32)  # the law of one token, K = 1
PAIR = Shaping(temperature=1.2, top_k=5)  # the law of two tokens, K = 2


@pytest.mark.parametrize("accept", ["ratio", "coupled"])
@pytest.mark.parametrize("shaping, depth", [(NEXT, 1), (PAIR, 2)], ids=["next token", "two tokens"])
def test_draws_have_the_targets_law(place, monkeypatch, record_property, shaping, depth, accept):
    place.reuse(monkeypatch)
    own = place.chain(shaping, depth)
    assert 8 <= len(own) <= 32
    counts, rate = place.draws(shaping, accept, FixedK(k=depth), depth=depth)
    found, limit = distance(counts, own), threshold(own)
    record_property("figures", dict(distance=round(found, 4), threshold=round(limit, 4), acceptance=round(rate, 3)))
    assert found < limit
    assert 0.05 < rate < 0.95
    if depth == 1:
        best = overlap(law(place.own(()), shaping), law(place.drafted(()), shaping))
        assert rate == pytest.approx(best, abs=0.015) if accept == "ratio" else 0.05 < rate < best + 0.015


# --- controls ---------------------------------------------------------------------------------------------------------


def the_target_itself_for_the_residual(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choose, "residual", lambda p, q: p)


def inverted_test(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choose, "ratio_test", lambda *args: not ratio_test(*args))


def one_uniform_for_draft_and_test(patch: pytest.MonkeyPatch) -> None:
    def wrong(law: Law, noise: Any, position: int, purpose: int = 0, start: int = 0) -> int:
        return inverse_cdf(law, noise.uniform(position, ACCEPT, start))

    patch.setattr(choose, "draw", wrong)


def bonus_by_the_row_before(patch: pytest.MonkeyPatch) -> None:
    right = TargetRows.__getitem__
    patch.setattr(TargetRows, "__getitem__", lambda self, row: right(self, max(row - 1, 0)))


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The rest of the control is its policy."""


DRAWN = FixedK(k=1, p_min=0.1, pmin0=True)
FEW = 5000  # draws that find a control
BREAKS: dict[str, tuple[Any, Shaping, int, Policy]] = {
    "p for the residual": (the_target_itself_for_the_residual, NEXT, 1, FixedK(k=1)),
    "inverted accept": (inverted_test, NEXT, 1, FixedK(k=1)),
    "reused uniform": (one_uniform_for_draft_and_test, NEXT, 1, FixedK(k=1)),
    "bonus by the row before": (bonus_by_the_row_before, PAIR, 2, FixedK(k=1)),
    "p_min on the drawn token": (nothing, NEXT, 1, DRAWN),
}


@pytest.mark.parametrize("name", BREAKS)
def test_draws_find(place, monkeypatch, record_property, name):
    wrong, shaping, depth, policy = BREAKS[name]
    place.reuse(monkeypatch)
    own = place.chain(shaping, depth)
    wrong(monkeypatch)
    counts, _ = place.draws(shaping, "ratio", policy, depth=depth, n=FEW)
    found, limit = distance(counts, own), threshold(own, FEW)
    record_property("figures", dict(distance=round(found, 4), threshold=round(limit, 4)))
    assert found > 3 * limit


def test_under_shared_noise_a_threshold_on_the_drawn_token_is_none_of_these(place, monkeypatch):
    place.reuse(monkeypatch)
    own = place.chain(NEXT, 1)
    counts, _ = place.draws(NEXT, "coupled", DRAWN, depth=1, n=FEW)
    assert distance(counts, own) < threshold(own, FEW)
    plain, _ = place.draws(NEXT, "coupled", FixedK(k=1), depth=1, n=FEW)
    assert counts == plain, "the draws of every seed are the same, so their counts are"


@pytest.mark.full
@pytest.mark.parametrize("order", ["chain", "joint", "temperature_last"])
@pytest.mark.parametrize("accept", ["ratio", "coupled"])
@pytest.mark.parametrize("prompt", ["def main(", "SELECT name FROM", "It was a bright cold day in April, and the"])
def test_further_places_and_orders(place, monkeypatch, prompt, accept, order):
    other = Place(place.model, place.model.tokenizer.encode(prompt))
    other.reuse(monkeypatch)
    shaping = Shaping(temperature=0.9, top_k=32, top_p=0.97, min_p=0.002, order=order)
    own = other.chain(shaping, 1)
    counts, rate = other.draws(shaping, accept, FixedK(k=1), depth=1)
    assert distance(counts, own) < threshold(own) and 0.05 < rate <= 1
