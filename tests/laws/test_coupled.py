"""Sampled speculation under shared noise is plain sampling, token for token, whatever drafts and however it is cut.

The reference is drawn by sequences side by side in one batch, by one token per forward, with nothing of the engine's
but logits, laws and draws. Every run draws one cell of a covering design; controls break one thing each.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import STRATEGIES
from workbench.core.metrics import Telemetry
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.sampling.draw import draw
from workbench.sampling.options import ORDERS
from workbench.sampling.penalties import penalise
from workbench.sampling.philox import DRAFT, TARGET, Noise
from workbench.sampling.pick import picks
from workbench.sampling.shaping import law
from workbench.spec import choose
from workbench.spec import round as rounds
from workbench.spec.choose import Chooser
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import GivenProposer, Proposer, ScriptedProposer
from workbench.spec.proposers.scripted import PATTERNS
from workbench.spec.session import Session

NEW = 200
Cell = Mapping[str, Any]
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "p_min": dict(p_min=0.02),
    "pmin0": dict(p_min=0.05, pmin0=True),
    "top": dict(p_min=0.1, p_min_reads="top"),
    "adaptive": dict(adaptive=True, p_min=0.01),
    "floor": dict(adaptive=True, floor=2),
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": dict(top_k=20),
    "top_p": dict(top_p=0.9),
    "min_p": dict(min_p=0.05),
    "all": dict(top_k=40, top_p=0.95, min_p=0.02),
}
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": dict(repetition_penalty=1.2),
    "window": dict(frequency_penalty=0.4, presence_penalty=0.3, penalty_last_n=24),
    "bias": dict(logit_bias={3: 1.5, 7: float("-inf")}, presence_penalty=-0.2),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "k": tuple(range(1, 9)),
    "proposer": ("mtp", "trimmed", *PATTERNS, "given"),
    "policy": tuple(POLICIES),
    "temperature": (0.7, 1.5, 3.0),
    "filters": tuple(FILTERS),
    "order": ORDERS,
    "penalties": tuple(PENALTIES),
    "carry": (True, True, True, False),  # what costs a second forward is drawn less often
    "strategy": (*STRATEGIES, "columns", "tape", "columns"),
    "cut": ("none", "bursts", "ones"),
    "sequence": (0, 5),
}
SIZES = {"none": (NEW,), "bursts": (1, 2, 3, 5, 8, 13, 21), "ones": (1, 7, 1, 15)}


def options_of(cell: Cell, seed: int, **more: Any) -> GenerateOptions:
    return GenerateOptions(
        k=cell["k"],
        carry=cell["carry"],
        strategy=cell["strategy"],
        temperature=cell["temperature"],
        filter_order=cell["order"],
        seed=seed,
        sequence=cell["sequence"],
        ignore_eos=True,
        logprobs=True,
        **{**POLICIES[cell["policy"]], **FILTERS[cell["filters"]], **PENALTIES[cell["penalties"]], **more},
    )


@torch.inference_mode()
def plain(model: HybridModel, prompts: Sequence[Sequence[int]], options: Sequence[GenerateOptions], n: int) -> Any:
    """Texts and log-probabilities by one token per forward, all sequences side by side; no part of the engine's."""
    counts = [len(prompt) for prompt in prompts]
    cache = model.new_cache(batch=len(prompts), capacity=max(counts) + n)
    texts, told = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    padded = torch.tensor([[*prompt, *[0] * (max(counts) - len(prompt))] for prompt in prompts])
    rows = model.forward(padded, cache, counts=counts, logits="last")
    shapings, noises = [o.shaping() for o in options], [Noise(o.seed, o.sequence) for o in options]
    for step in range(n):
        found = picks(rows.logits_BTV[:, 0])
        for b, (text, logits_V) in enumerate(zip(texts, rows.logits_BTV[:, 0])):
            token = draw(law(logits_V, shapings[b], history=text), noises[b], len(text))
            told[b].append(float(logits_V[token].double() - found.logsumexp[b].double()))
            text.append(token)
        if step < n - 1:
            rows = model.forward(torch.tensor([text[-1:] for text in texts]), cache)
    return [text[count:] for text, count in zip(texts, counts)], told


def proposer_for(cell: Cell, model: HybridModel, ids: Sequence[int], own: Sequence[int], seed: int) -> Proposer | None:
    vocab, rng, kind = model.config.vocab_size, random.Random(seed), cell["proposer"]
    if kind == "trimmed":
        model.trim_draft_vocab(rng.sample(range(vocab), 3 * vocab // 4))
    if kind in ("mtp", "trimmed"):
        return None
    if kind == "given":
        chains, at = [], 1
        while at < len(own):  # right for a while, then wrong; in step with the text as long as nothing else cuts it
            right = rng.randrange(cell["k"] + 1)
            chains.append([*own[at : at + right], 9, 9, 9])
            at += right + 1
        return GivenProposer(chains, [[rng.random() for _ in chain] for chain in chains])
    made = ScriptedProposer.pattern(kind, [*ids, *own], vocab_size=vocab, seed=seed)
    made.confidence = lambda at, slot: 0.01 if (at * 7 + seed) % 6 == 0 else 0.9
    return made


def speculate(
    model: HybridModel, ids: Sequence[int], own: Sequence[int], cell: Cell, seed: int, **more: Any
) -> tuple[Session, list[float]]:
    """A session that decodes the cell's text burst by burst, and its log-probabilities."""
    session = Session(model, options=options_of(cell, seed, **more), proposer=proposer_for(cell, model, ids, own, seed))
    session.feed(ids)
    left, sizes = len(own) - 1, cycle(SIZES[cell["cut"]])
    while left > 0:
        size = min(next(sizes), left)
        left -= size
        assert session.burst(size) == "length"
    model.untrim_draft_vocab()
    told = [*session.first_logprobs, *(x for record in session.state.records for x in record.logprobs)]
    return session, told


def prompt_of(seed: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, vocab) for _ in range(rng.randint(2, 12))]


def run_design(model: HybridModel, cells: Sequence[Cell], prompts: Sequence[Sequence[int]], n: int) -> dict[str, Any]:
    """Every cell against the batch: identity of text and log-probabilities; figures of what happened."""
    options = [options_of(cell, seed) for seed, cell in enumerate(cells)]
    texts, told = plain(model, prompts, options, n)
    accepted: dict[str, Telemetry] = {}
    for i, (cell, ids, own) in enumerate(zip(cells, prompts, texts)):
        session, said = speculate(model, ids, own, cell, i)
        got = session.tokens[len(ids) :]
        at = next((j for j, (a, b) in enumerate(zip(got, own)) if a != b), None)
        assert got == own, f"run {i}, {cell}: the text differs from token {at} on"
        assert said == told[i], f"run {i}, {cell}: log-probabilities differ"
        if i % 16 == 0:
            alone = replace(options[i], k=0, adaptive=False, floor=None, max_new_tokens=n)
            whole = generate(model, ids, options=alone)
            assert list(whole.tokens) == own and list(whole.logprobs) == told[i]
            with torch.inference_mode():
                fresh = model.new_cache()
                model.forward(torch.tensor([session.tokens[:-1]]), fresh, logits="none")
            assert session.state.cache.first_difference(fresh) is None
        counters = Telemetry.of(session.state.records)
        accepted[cell["proposer"]] = accepted.get(cell["proposer"], Telemetry()).merge(counters)
    return {
        "runs": len(cells),
        "distinct_texts": len({tuple(text) for text in texts}),
        "acceptance": {name: round(c.accepted / max(c.drafted, 1), 3) for name, c in accepted.items()},
    }


@pytest.fixture(scope="module")
def small(tiny) -> HybridModel:
    return tiny(vocab_size=101, tied=False, layer_types=(LINEAR, FULL), seed=3)


@pytest.fixture(scope="module")
def demo() -> HybridModel:
    return wb.load("demo", exact=True)


def test_text_and_log_probabilities_are_plain_samplings(small, covering, record_property):
    cells = covering(FACTORS, seed=1)
    figures = run_design(small, cells, [prompt_of(i, 101) for i in range(len(cells))], NEW)
    record_property("figures", figures)
    print(figures)
    assert figures["runs"] >= 60 and figures["distinct_texts"] == figures["runs"]
    assert all(0.05 < figures["acceptance"][name] < 0.95 for name in ("mtp", "trimmed", "alternating", "random"))
    assert figures["acceptance"]["useless"] == 0 and figures["acceptance"]["perfect"] == 1


DEMO_PROMPTS = ("def main(", "It was a bright cold day", "SELECT name FROM", "The members of this House", "import os\n")


def test_the_demo_checkpoint_too(demo, covering, record_property):
    head = {"proposer": ("mtp", "trimmed", "random"), "temperature": (0.7, 1.0)}
    cells = covering({**FACTORS, **head}, seed=5)[:3]
    prompts = [demo.tokenizer.encode(text) for text in DEMO_PROMPTS]
    figures = run_design(demo, cells, prompts[:3], 64)
    record_property("figures", figures)
    print(figures)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_larger_designs(small, covering, seed):
    cells = covering(FACTORS, times=3, seed=100 + seed)
    run_design(small, cells, [prompt_of(1000 * seed + i, 101) for i in range(len(cells))], NEW)


@pytest.mark.full
def test_a_larger_design_on_the_demo_checkpoint(demo, covering):
    cells = covering(FACTORS, seed=9)
    prompts = [demo.tokenizer.encode(text) for text, _ in zip(cycle(DEMO_PROMPTS), cells)]
    figures = run_design(demo, cells, prompts, NEW)
    assert 0.05 < figures["acceptance"]["mtp"] < 0.95


# --- temperature zero and near it -------------------------------------------------------------------------------------


@torch.inference_mode()
def penalised_greedy(model: HybridModel, ids: Sequence[int], options: GenerateOptions, n: int) -> list[int]:
    text = list(ids)
    for _ in range(n):
        logits = model.forward(torch.tensor([text]), model.new_cache(), logits="last").logits_BTV[0, 0]
        text.append(int(penalise(logits, text, options.shaping()).argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("accept", ["coupled", "ratio"])
@pytest.mark.parametrize("penalties", PENALTIES)
def test_temperature_zero_is_penalised_plain_greedy(small, penalties, accept):
    ids, given = prompt_of(1, 101), dict(PENALTIES[penalties], max_new_tokens=24, ignore_eos=True)
    own = penalised_greedy(small, ids, GenerateOptions(**given), 24)
    for k, more in ((0, {}), (3, {}), (5, dict(adaptive=True, carry=False)), (4, dict(top_k=2, top_p=0.1))):
        assert list(generate(small, ids, k=k, accept=accept, **given, **more).tokens) == own


def test_temperature_towards_zero_approaches_greedy(small):
    ids = prompt_of(2, 101)
    given = dict(max_new_tokens=40, ignore_eos=True)
    own = list(generate(small, ids, k=0, **given).tokens)
    agreed = []
    for temperature in (1.0, 1e-4, 1e-30):
        for accept in ("coupled", "ratio"):
            text = generate(small, ids, k=3, temperature=temperature, accept=accept, seed=4, **given).tokens
            same = [a == b for a, b in zip(text, own)]
            agreed.append((same + [False]).index(False))
    assert agreed[-4:] == [40] * 4 and agreed[0] < 10 and agreed[1] < 10


# --- controls ---------------------------------------------------------------------------------------------------------

CELL: Cell = dict(
    k=4, proposer="mtp", policy="fixed", temperature=1.0, filters="none", order="chain", penalties="none", carry=True,
    strategy="columns", cut="none", sequence=0,
)  # fmt: skip


def rate(session: Session) -> float:
    counters = Telemetry.of(session.state.records)
    return counters.accepted / counters.drafted


def test_a_drafter_at_a_neighbouring_position_costs_acceptance_and_nothing_else(small, monkeypatch):
    ids = prompt_of(3, 101)
    (own,), _ = plain(small, [ids], [options_of(CELL, 3)], 100)
    right, _ = speculate(small, ids, own, CELL, 3)
    chosen = Chooser.draft

    def wrong(self: Chooser, logits_V: Any, history: Sequence[int], mask_V: Any, start: int) -> Any:
        return chosen(self, logits_V, [0, *history], mask_V, start)

    monkeypatch.setattr(Chooser, "draft", wrong)
    shifted, _ = speculate(small, ids, own, CELL, 3)
    assert right.tokens[len(ids) :] == shifted.tokens[len(ids) :] == own
    assert rate(shifted) < rate(right) / 3


def test_a_target_draw_keyed_by_the_start_of_its_round_breaks_identity(small, monkeypatch):
    ids = prompt_of(3, 101)
    (own,), _ = plain(small, [ids], [options_of(CELL, 3)], 100)
    begin, at, right = rounds.run_round, [0], choose.draw

    def noted(state: Any, *args: Any) -> Any:
        at[0] = len(state.tokens) - 1
        return begin(state, *args)

    def wrong(law: Any, noise: Noise, position: int, purpose: int = TARGET, start: int = 0) -> int:
        return right(law, noise, position, DRAFT, at[0])

    monkeypatch.setattr("workbench.spec.bursts.run_round", noted)
    monkeypatch.setattr(choose, "draw", wrong)
    texts = [speculate(small, ids, own, {**CELL, "k": k}, 3)[0].tokens for k in (1, 2, 4)]
    assert len({tuple(text) for text in texts}) == 3, "with noise of rounds the text depends on the rounds"


def test_seed_and_sequence_and_place_make_the_text(small):
    given = dict(max_new_tokens=40, ignore_eos=True, temperature=1.0)
    runs = {
        (seed, sequence): generate(small, [4, 5], k=3, seed=seed, sequence=sequence, **given).tokens
        for seed in (0, 1)
        for sequence in (0, 1)
    }
    assert len(set(runs.values())) == 4
    assert generate(small, [4, 5], k=5, seed=1, sequence=1, **given).tokens == runs[1, 1]


@pytest.mark.parametrize("accept", ["coupled", "ratio"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_whose_ids_are_all_forbidden_drafts_nothing(small, accept, temperature):
    given = dict(
        max_new_tokens=30, ignore_eos=True, temperature=temperature, logit_bias={5: float("-inf"), 9: float("-inf")}
    )
    plain_text = generate(small, [4, 6], k=0, **given).tokens
    small.trim_draft_vocab([5, 9])
    done = generate(small, [4, 6], k=3, accept=accept, **given)
    small.untrim_draft_vocab()
    assert done.tokens == plain_text and not any(r.drafted for r in done.records)
    assert {r.chain_stop for r in done.records if r.k} == {"constraint"}
