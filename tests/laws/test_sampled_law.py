"""Sampled speculation emits the target's own law: by enumeration of every draw of the real rounds on a toy target.

Target and head are tables over a vocabulary of five, and texts of three or four tokens are followed to their end: see
tests/enumeration.py. Controls break one thing each, and the same enumeration finds it. Under shared noise the text
itself must be plain sampling's, which is checked by seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workbench.model.config import FULL, LINEAR
from workbench.sampling import shaping as shapings
from workbench.sampling.law import Law
from workbench.sampling.philox import Noise
from workbench.spec import choose
from workbench.spec.choose import Chooser, TargetRows
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal
from workbench.spec.round import DecodeState, run_round
from workbench.spec.session import Session

EXACT = 1e-9


@pytest.fixture
def branching(enumeration, monkeypatch) -> Any:
    """Every draw a fork of the path."""
    return enumeration.Branching(monkeypatch)


def test_the_emitted_law_is_the_targets(toy, enumeration, covering, branching, record_property):
    cells, rates = covering(enumeration.FACTORS, times=2, seed=1), []
    for i, cell in enumerate(cells):
        gap, _, rate = enumeration.enumerate_cell(toy, branching, cell, seed=i)
        assert gap < EXACT, (cell, gap)
        rates.append(rate)
    record_property("cells", len(cells))
    record_property("acceptance", [round(rate, 3) for rate in rates])
    assert sum(0.05 < rate < 0.95 for rate in rates) > 0.9 * len(cells)


def test_the_law_holds_on_a_random_model_with_its_own_head(toy, enumeration, branching, tiny):
    """The real model, caches and head, a vocabulary of five."""
    model = tiny(vocab_size=enumeration.V, tied=False, layer_types=(LINEAR, FULL), seed=4)
    options = GenerateOptions(k=2, temperature=1.1, top_k=3, accept="ratio", ignore_eos=True)
    sessions: dict[tuple[int, ...], Any] = {}

    def begin(text: tuple[int, ...]) -> DecodeState:
        if text not in sessions:
            sessions[text] = session = Session(model, options=options)
            session.feed([*enumeration.PROMPT, *text][:-1], force=[*enumeration.PROMPT, *text][-1])
            sessions[text] = session.state, session.state.proposer.mark()
        state, mark = sessions[text]
        state.proposer.rewind(mark)
        chooser = Chooser(options.shaping(), branching, "ratio")  # type: ignore[arg-type]
        return DecodeState(model, state.cache.fork(), list(state.tokens), state.proposer, state.policy, chooser=chooser)

    with torch.inference_mode():
        got, rate = enumeration.emitted(toy, branching, begin, (3,))
        own = {(): 1.0}
        for _ in range(3):
            texts = list(own)
            grown = {}
            for text in texts:
                rows = model.forward(torch.tensor([[*enumeration.PROMPT, *text]]), model.new_cache(), logits="last")
                law = shapings.law(rows.logits_BTV[0, 0], options.shaping())
                grown.update({(*text, t): own[text] * p for t, p in zip(law.ids.tolist(), law.probs.tolist())})
            own = grown
    assert got.keys() == own.keys() and max(abs(got[text] - own[text]) for text in own) < EXACT
    assert 0.05 < rate < 0.95


# --- controls: what bends the law is found by the enumeration above ---------------------------------------------------


def the_target_itself_for_the_residual(patch: pytest.MonkeyPatch, branching: Any) -> None:
    patch.setattr(choose, "residual", lambda p, q: p)


def inverted_test(patch: pytest.MonkeyPatch, branching: Any) -> None:
    patch.setattr(choose, "ratio_test", lambda *args: not branching.ratio_test(*args))


def one_uniform_for_draft_and_test(patch: pytest.MonkeyPatch, branching: Any) -> None:
    branching.reuse = True


def bonus_by_the_row_before(patch: pytest.MonkeyPatch, branching: Any) -> None:
    right = TargetRows.__getitem__
    patch.setattr(TargetRows, "__getitem__", lambda self, row: right(self, max(row - 1, 0)))


def law_of_the_row_before(patch: pytest.MonkeyPatch, branching: Any) -> None:
    right = TargetRows.law
    patch.setattr(TargetRows, "law", lambda self, row: right(self, max(row - 1, 0)))


def penalties_without_the_drafts(patch: pytest.MonkeyPatch, branching: Any) -> None:
    def wrong(self: TargetRows, row: int) -> Law:
        return self.chooser.law(self.logits_TV[row], self.text[: self.first], self.mask(row))

    patch.setattr(TargetRows, "law", wrong)


def filters_of_the_target_alone(patch: pytest.MonkeyPatch, branching: Any) -> None:
    """The drafter draws from its whole row, and is tested as if it had been filtered."""
    right = Chooser.draft

    def wrong(self: Chooser, logits_V: torch.Tensor, history: Any, mask_V: Any, start: int) -> Any:
        whole = Chooser(type(self.shaping)(temperature=self.shaping.temperature), self.noise, self.accept)
        drawn = right(whole, logits_V, history, mask_V, start)
        return type(drawn)(drawn.token, drawn.p, drawn.top, self.law(logits_V, history, mask_V))

    patch.setattr(Chooser, "draft", wrong)
    patch.setattr(
        branching, "share", lambda p, q, token: min(1.0, p.prob(token) / q.prob(token)) if q.prob(token) else 1.0
    )


class Unsure(MTPProposer):
    """Drops the whole chain when any token of it was drawn with little confidence."""

    def propose(self, ctx: DraftContext) -> Proposal:
        made = super().propose(ctx)
        return made if min(made.top1, default=1.0) >= 0.3 else made.first(0, "policy")


class Tidy(MTPProposer):
    """Leaves out what it drew that the rule forbids, and all after it."""

    rule: Callable[..., torch.Tensor]

    def propose(self, ctx: DraftContext) -> Proposal:
        made, text = super().propose(ctx), [0] * ctx.position + [ctx.pending]
        for n, token in enumerate(made.tokens):
            if not self.rule(text)[token]:
                return made.first(n, "constraint")
            text.append(token)
        return made


def nothing(patch: pytest.MonkeyPatch, branching: Any) -> None:
    """The rest of the control is in the cell or the proposer."""


BREAKS: dict[str, tuple[Any, dict[str, Any], type[MTPProposer]]] = {
    "p for the residual": (the_target_itself_for_the_residual, {}, MTPProposer),
    "inverted accept": (inverted_test, {}, MTPProposer),
    "reused uniform": (one_uniform_for_draft_and_test, {}, MTPProposer),
    "bonus by the row before": (bonus_by_the_row_before, {}, MTPProposer),
    "law of the row before": (law_of_the_row_before, {}, MTPProposer),
    "penalties without the drafts": (penalties_without_the_drafts, dict(penalties="all"), MTPProposer),
    "filters of the target alone": (filters_of_the_target_alone, {}, MTPProposer),
    "p_min on the drawn token": (nothing, dict(policy="drawn"), MTPProposer),
    "drop-all by chain confidence": (nothing, {}, Unsure),
    "forbidden drafts left out": (nothing, dict(constraint="unmasked"), Tidy),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_enumeration_finds(toy, enumeration, branching, monkeypatch, record_property, name):
    wrong, levels, proposer = BREAKS[name]
    Tidy.rule = staticmethod(enumeration.Rule.after)
    cell = {**enumeration.CELL, "filters": "top_k and top_p", "k": 2, **levels}
    right = {**cell, "policy": "fixed"}
    assert enumeration.enumerate_cell(toy, branching, right, seed=7)[0] < EXACT
    wrong(monkeypatch, branching)
    gap, distance, _ = enumeration.enumerate_cell(toy, branching, cell, seed=7, proposer=proposer)
    record_property("total_variation", round(distance, 4))
    assert gap > 1e6 * EXACT and distance > 3e-3


def test_a_threshold_on_the_drawn_token_by_hand():
    """p = q = (.5, .3, .2) and p_min = .25: slot 0 is dropped where id 2 was drawn, and drawn again from p."""
    p, kept = [0.5, 0.3, 0.2], [0.5, 0.3, 0.0]
    assert [k + 0.2 * x for k, x in zip(kept, p)] == pytest.approx([0.6, 0.36, 0.04])


# --- shared noise: the text is plain sampling's, whatever is dropped and why ------------------------------------------


@torch.inference_mode()
def text_of(toy, enumeration, cell, seed: int, *, n: int, proposer: Any = MTPProposer, k: int | None = None):
    """A text by rounds under shared noise, and its records."""
    model = toy.Toy(enumeration.V, seed=seed)
    chooser = Chooser(enumeration.shaping_of(cell), Noise(seed), "coupled")
    state = enumeration.state_of(toy, model, {**cell, "k": cell["k"] if k is None else k}, (), chooser, proposer)
    if k == 0:
        state.policy = None
    while len(state.tokens) < n + 2 and state.tokens[-1] not in state.stop_ids:
        run_round(state, n + 2 - len(state.tokens))
    return state.tokens, state.records


@pytest.mark.parametrize(
    "name", ["p_min on the drawn token", "drop-all by chain confidence", "forbidden drafts left out"]
)
def test_under_shared_noise_what_is_dropped_does_not_matter(toy, enumeration, covering, name):
    """The same three that bend the law of the ratio rule."""
    _, levels, proposer = BREAKS[name]
    Tidy.rule = staticmethod(enumeration.Rule.after)
    cells, dropped = covering({**enumeration.FACTORS, "policy": ("fixed",)}, seed=2), 0
    for i, drawn in enumerate(cells):
        cell = {**drawn, **levels}
        plain, _ = text_of(toy, enumeration, cell, i, n=40, k=0)
        text, records = text_of(toy, enumeration, cell, i, n=40, proposer=proposer)
        assert text == plain, cell
        dropped += sum(record.drafted < record.k and record.round_stop == "" for record in records)
    assert dropped > 5 * len(cells)
