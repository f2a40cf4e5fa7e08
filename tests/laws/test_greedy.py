"""Greedy speculation is plain decode, bit for bit: tokens, and every plane of the target's cache.

Each held-out prompt draws one cell of a covering design: every pair of levels of every two factors occurs. Controls
break one thing each and show that the same check finds it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, combinations, cycle, product
from statistics import mean
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import STRATEGIES, HybridCache
from workbench.cache.recurrent import RecurrentPlane
from workbench.core.metrics import Telemetry, repeated_ngrams
from workbench.core.records import RoundRecord
from workbench.model.hybrid import HybridModel
from workbench.spec import propose as proposing
from workbench.spec import round as rounds
from workbench.spec.accept import Verdict, accept_greedy
from workbench.spec.options import GenerateOptions
from workbench.spec.proposers import GivenProposer, MTPProposer, Proposer, ScriptedProposer
from workbench.spec.proposers.scripted import PATTERNS
from workbench.spec.session import Session

NEW = 128
REGISTERS = ("novels", "pycode", "pydocs", "speeches", "sqlite")
FACTORS: dict[str, tuple[Any, ...]] = {
    "k": tuple(range(1, 9)),
    "proposer": ("mtp", *PATTERNS, "given"),
    "policy": ("fixed", "p_min", "pmin0", "adaptive", "floor"),
    "cut": ("none", "stop", "budget", "context"),
    "strategy": STRATEGIES,
    "carry": (True, False),
}
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "p_min": dict(p_min=0.5),
    "pmin0": dict(p_min=0.5, pmin0=True),
    "adaptive": dict(adaptive=True),
    "floor": dict(adaptive=True, floor=3, p_min=0.3),
}
Cell = Mapping[str, Any]


@torch.inference_mode()
def plain(model: HybridModel, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    """Greedy texts by one token per forward, several prompts of any lengths side by side; no part of the engine's."""
    counts = [len(prompt) for prompt in prompts]
    state = model.new_cache(batch=len(prompts), capacity=max(counts) + n)
    padded = torch.tensor([[*prompt, *[0] * (max(counts) - len(prompt))] for prompt in prompts])
    rows = model.forward(padded, state, counts=counts, logits="last")
    picks = [rows.logits_BTV[:, 0].argmax(-1, keepdim=True)]
    while len(picks) < n:
        rows = model.forward(picks[-1], state)
        picks.append(rows.logits_BTV[:, 0].argmax(-1, keepdim=True))
    return torch.cat(picks, 1).tolist()


def proposer_for(cell: Cell, model: HybridModel, ids: list[int], own: list[int], seed: int) -> Proposer | None:
    """The cell's proposer; scripted ones are unsure of a sixth of the tokens, so that thresholds cut their chains.

    What a scripted one gets right depends on the place in the generated text alone, never on the text itself.
    """
    vocab, rng, first, kind = model.config.vocab_size, random.Random(seed), len(ids), cell["proposer"]
    if kind == "mtp":
        return None
    if kind == "given":  # a mixture of true tokens and any others, of any length
        chains = [
            [rng.choice((own[(start + i) % len(own)], rng.randrange(vocab))) for i in range(rng.randrange(10))]
            for start in range(NEW)
        ]
        return GivenProposer(chains, [[rng.random() for _ in chain] for chain in chains])
    wrong = set(accumulate(rng.randint(1, cell["k"] + 2) for _ in range(NEW)))  # so that every length is as likely
    sure = [rng.random() for _ in range(4 * NEW)]
    rules: dict[str, Callable[[int, int], bool]] = {
        "perfect": lambda at, slot: False,
        "useless": lambda at, slot: True,
        "alternating": lambda at, slot: (at - first) % 2 == 1,
        "random": lambda at, slot: at - first in wrong,
    }
    return ScriptedProposer(
        [*ids, *own],
        rules[kind],
        vocab_size=vocab,
        confidence=lambda at, slot: 0.2 if sure[at - first] < 1 / 6 else 0.9,
    )


def speculate(
    model: HybridModel, ids: list[int], own: list[int], cell: Cell, seed: int = 0, **options: Any
) -> tuple[Session, list[int]]:
    """Decode one prompt as the cell says: the session, and the text that plain decode gives under its stops."""
    n, stops = len(own), frozenset({0})
    if cell["cut"] == "stop":  # the token that is new latest in the first three quarters of the text
        at = max(i for i in range(3 * n // 4) if own[i] not in own[:i])
        stops = frozenset({own[at]})
    ends = [i for i, token in enumerate(own) if token in stops]
    expected, finish = (own[: ends[0] + 1], "stop") if ends else (own, "length")
    if finish == "length" and cell["cut"] == "context":
        finish = "context"
    session = Session(
        model,
        options=GenerateOptions(
            k=cell["k"], carry=cell["carry"], strategy=cell["strategy"], **{**POLICIES[cell["policy"]], **options}
        ),
        proposer=proposer_for(cell, model, ids, own, seed),
        capacity=len(ids) + n if cell["cut"] == "context" else None,
    )
    session.state.stop_ids = stops
    session.feed(ids)
    sizes = {"budget": cycle((1, 2, 3, 5, 8, 13, 21)), "context": iter([10 * n])}.get(cell["cut"], iter([n - 1]))
    left, ended = n - 1, "length"
    while left > 0:
        size = next(sizes) if cell["cut"] == "context" else min(next(sizes), left)
        left -= size
        ended = session.burst(size)
    assert ended == finish, f"ended by {ended}, not {finish}"
    return session, expected


@torch.inference_mode()
def difference(session: Session, ids: list[int], expected: list[int]) -> str | None:
    """Where a decoded session departs from plain decode: its text, the target's planes, the drafter's rows."""
    state, model = session.state, session.state.model
    text = session.tokens[len(ids) :]
    if text != expected:
        at = next((i for i, (a, b) in enumerate(zip(text, expected)) if a != b), min(len(text), len(expected)))
        return f"text differs from token {at} on: {text[at : at + 3]} is not {expected[at : at + 3]}"
    fresh = model.new_cache()
    known = torch.tensor([session.tokens[:-1]])
    rows = model.forward(known, fresh, logits="none")
    if found := state.cache.first_difference(fresh):
        return f"cache: {found}"
    if isinstance(state.proposer, MTPProposer) and state.proposer.refresh:
        twin = MTPProposer(model)
        twin.prime(known, rows)
        twin.flush()
        if found := state.proposer.cache.first_difference(twin.cache):
            return f"drafter: {found}"
    return None


def check(model: HybridModel, ids: list[int], own: list[int], cell: Cell, seed: int = 0, **options: Any) -> str | None:
    """Run a cell and compare; an exception of the engine counts as a difference."""
    try:
        session, expected = speculate(model, ids, own, cell, seed, **options)
    except (ValueError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return difference(session, ids, expected)


class Tally:
    """What happened over a design: accepted counts by K, slots, round starts."""

    def __init__(self) -> None:
        self.by_k: dict[int, set[int]] = defaultdict(set)
        self.starts: set[int] = set()
        self.stops: Counter[str] = Counter()
        self.counters = Telemetry()

    def add(self, records: Sequence[RoundRecord], first: int) -> None:
        for record in records:
            self.by_k[record.drafted].add(record.accepted)
            self.starts.add(record.start - first)
            self.stops[record.round_stop] += 1
            self.counters = self.counters.add(record)

    def check(self, k_max: int, new: int) -> None:
        for k in range(1, k_max + 1):
            assert self.by_k[k] == set(range(k + 1)), f"drafts of {k}: accepted counts {sorted(self.by_k[k])}"
        assert self.starts >= set(range(new - 1)), f"no round starts at {set(range(new - 1)) - self.starts}"
        told = self.counters
        assert all(0 < hit < tested for hit, tested in zip(told.pos_accepted, told.pos_tested, strict=True))
        assert set(self.stops) >= {"", "stop", "budget", "context"}


@pytest.fixture(scope="module")
def demo() -> HybridModel:
    return wb.load("demo", exact=True)


def prompts_of(model: HybridModel, per_register: int, seed: int = 1) -> list[tuple[str, list[int]]]:
    """Prompts of 32 to 64 held-out tokens, as many of every register, cut from different places."""
    rng, out = random.Random(seed), []
    for register in REGISTERS:
        with wb.quiet():
            tapes = wb.corpus(f"demo/{register}", split="heldout", tokenizer=model.tokenizer, min_tokens=80)
        for tape, _ in zip(cycle(tapes), range(per_register)):
            size = rng.randint(32, 64)
            at = rng.randrange(len(tape) - size + 1)
            out.append((register, tape.tokens[at : at + size].tolist()))
    return [out[i + j * per_register] for i in range(per_register) for j in range(len(REGISTERS))]


def design(covering: Callable[..., Any], size: int = 104, *, times: int = 1, seed: int = 0) -> list[Cell]:
    """Every pair of levels ``times`` times, every K with chains of every accepted length, and the head for the rest."""
    even = dict(proposer="random", policy="fixed", cut="none", strategy="tape", carry=True)
    cells = [*covering(FACTORS, times=times, seed=seed), *({"k": k, **even} for k in FACTORS["k"])]
    head = cycle(covering({name: levels for name, levels in FACTORS.items() if name != "proposer"}, seed=seed))
    return [*cells, *({**next(head), "proposer": "mtp"} for _ in range(size - len(cells)))]


def test_the_design_covers_every_pair(covering):
    cells = design(covering)
    seen = Counter((a, cell[a], b, cell[b]) for cell in cells for a, b in combinations(FACTORS, 2))
    for a, b in combinations(FACTORS, 2):
        assert all(seen[a, x, b, y] for x, y in product(FACTORS[a], FACTORS[b]))
    assert len(cells) == 104 and sum(cell["proposer"] == "mtp" for cell in cells) > 40


def run_design(
    model: HybridModel, cells: Sequence[Cell], *, batch: int = 26, seed: int = 1
) -> tuple[list[str], Tally, dict[str, Any]]:
    """Every cell on a prompt of its own: differences, what happened, and figures."""
    per_register = -(-len(cells) // len(REGISTERS))
    prompts = prompts_of(model, per_register, seed)[: len(cells)]
    problems, tally, loops, head = [], Tally(), defaultdict(list), Telemetry()
    for lo in range(0, len(cells), batch):
        group = prompts[lo : lo + batch]
        for i, ((register, ids), own) in enumerate(zip(group, plain(model, [ids for _, ids in group], NEW)), start=lo):
            cell = cells[i]
            session, expected = speculate(model, ids, own, cell, seed=i)
            if found := difference(session, ids, expected):
                problems.append(f"prompt {i} ({register}), {cell}: {found}")
            tally.add(session.state.records, len(ids))
            loops[register].append(repeated_ngrams(own, 8))
            if cell["proposer"] == "mtp":
                head = head.merge(Telemetry.of(session.state.records))
            if i % 15 == 0:
                whole = wb.generate(model, ids, k=0, max_new_tokens=NEW, ignore_eos=True)
                assert list(whole.tokens) == own and not any(r.drafted for r in whole.records)
    figures = {
        "prompts": len(prompts),
        "repeated_8grams": round(mean(x for group in loops.values() for x in group), 3),
        "repeated_8grams_by_register": {name: round(mean(group), 3) for name, group in loops.items()},
        "mtp_conditional_acceptance": [
            round(hit / tested, 3) for hit, tested in zip(head.pos_accepted, head.pos_tested)
        ],
        "round_stops": dict(tally.stops),
    }
    return problems, tally, figures


def test_speculation_is_plain_decode_on_held_out_prompts(demo, covering, record_property):
    problems, tally, figures = run_design(demo, design(covering))
    for name, value in figures.items():
        record_property(name, value)
    print(figures)
    assert not problems, "\n".join(problems)
    assert figures["prompts"] >= 100
    tally.check(8, NEW)
    assert all(0 <= share < 1 for share in figures["repeated_8grams_by_register"].values())


@pytest.fixture(scope="module")
def lively(tiny) -> Callable[[int], tuple[HybridModel, list[int], list[int]]]:
    """Tiny random models whose greedy text does not loop: model, prompt, own text."""

    @cache
    def build(ratio: int) -> tuple[HybridModel, list[int], list[int]]:
        model = tiny(ratio=ratio, tied=False, vocab_size=211, seed=ratio)
        ids = [5, 6, 7, 8, 9][: ratio + 2]
        own = plain(model, [ids], 72)[0]
        assert repeated_ngrams(own, 8) == 0 and len(set(own)) > 40
        return model, ids, own

    return build


def test_speculation_is_plain_decode_on_random_models(lively, covering):
    for i, cell in enumerate(covering({**FACTORS, "ratio": (1, 2, 3)}, seed=3)):
        model, ids, own = lively(cell["ratio"])
        session, expected = speculate(model, ids, own, cell, seed=i)
        assert (found := difference(session, ids, expected)) is None, (cell, found)


@pytest.mark.parametrize("cut", FACTORS["cut"])
def test_row_by_row_verify_gives_the_same_rounds(lively, cut):
    model, ids, own = lively(2)
    for carry, strategy in ((True, "tape"), (False, "columns")):
        cell = dict(k=5, policy="fixed", proposer="random", cut=cut, strategy=strategy, carry=carry)
        sessions = []
        for rowwise in (False, True):
            session, expected = speculate(model, ids, own, cell, rowwise=rowwise)
            assert difference(session, ids, expected) is None
            sessions.append([record.key() for record in session.state.records])
        assert sessions[0] == sessions[1]


# --- controls: what breaks the law is found by the check above -------------------------------------------------------

CELL: dict[str, Any] = dict(k=5, policy="fixed", proposer="random", cut="none", strategy="tape", carry=True)


def accepts_one_too_many(patch: pytest.MonkeyPatch) -> None:
    def wrong(draft: Sequence[int], picks: Sequence[int], **more: Any) -> Verdict:
        good = accept_greedy(draft, picks, **more)
        n = min(good.accepted + 1, len(draft))
        return Verdict(n, (*draft[:n], picks[n]), picks[n], "")

    patch.setattr(proposing, "accept_greedy", wrong)


def bonus_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    def wrong(draft: Sequence[int], picks: Sequence[int], **more: Any) -> Verdict:
        good = accept_greedy(draft, picks, **more)
        n = good.accepted
        return Verdict(n, (*draft[:n], picks[max(n - 1, 0)]), picks[max(n - 1, 0)], "")

    patch.setattr(proposing, "accept_greedy", wrong)


def commits(shift: int) -> Callable[[pytest.MonkeyPatch], None]:
    def control(patch: pytest.MonkeyPatch) -> None:
        commit = HybridCache.commit

        def wrong(self: HybridCache, ckpt: Any, *, keep: int) -> None:
            fed = self.lengths[0] - ckpt.lengths[0]
            commit(self, ckpt, keep=min(max(keep + shift, 0), fed))

        patch.setattr(HybridCache, "commit", wrong)

    control.__name__ = f"commits_{shift:+d}_row"
    return control


def leaves(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    def control(patch: pytest.MonkeyPatch) -> None:
        cut = RecurrentPlane.cut

        def wrong(self: RecurrentPlane, *args: Any) -> None:
            after = getattr(self, part)
            cut(self, *args)
            setattr(self, part, after)

        patch.setattr(RecurrentPlane, "cut", wrong)

    control.__name__ = f"leaves_{part}"
    return control


def one_layer_not_cut(patch: pytest.MonkeyPatch) -> None:
    cut, calls = RecurrentPlane.cut, iter(range(10**6))
    patch.setattr(RecurrentPlane, "cut", lambda self, *args: next(calls) % 3 == 1 or cut(self, *args))


def clamps_the_kept_rows(patch: pytest.MonkeyPatch) -> None:
    """One count clamped for the window and used for the state too."""
    cut = RecurrentPlane.cut
    patch.setattr(
        RecurrentPlane, "cut", lambda self, conv, state, keep: cut(self, conv, state, [min(n, 3) for n in keep])
    )


def leaves_key_rows(patch: pytest.MonkeyPatch) -> None:
    """Lengths that are not cut back: rejected rows stay visible."""
    commit = HybridCache.commit

    def wrong(self: HybridCache, ckpt: Any, *, keep: int) -> None:
        longer = list(self.lengths)
        commit(self, ckpt, keep=keep)
        self.lengths = longer

    patch.setattr(HybridCache, "commit", wrong)


BREAKS = [
    accepts_one_too_many,
    bonus_of_the_row_before,
    commits(-1),
    commits(+1),
    leaves("conv_BWC"),
    leaves("state_BHKV"),
    one_layer_not_cut,
    clamps_the_kept_rows,
    leaves_key_rows,
]


@pytest.mark.parametrize("strategy", ["tape", "columns"])
@pytest.mark.parametrize("wrong", BREAKS, ids=lambda control: control.__name__)
def test_the_check_finds(lively, monkeypatch, wrong, strategy):
    model, ids, own = lively(2)
    cell = {**CELL, "strategy": strategy}
    assert check(model, ids, own, cell) is None
    wrong(monkeypatch)
    assert check(model, ids, own, cell) is not None


def test_the_check_finds_a_stop_that_is_read_only_at_the_end_of_a_round(lively, monkeypatch):
    model, ids, own = lively(2)
    cells = [{**CELL, "cut": "stop", "proposer": "perfect", "k": k} for k in (3, 4, 5)]
    assert [check(model, ids, own, cell) for cell in cells] == [None] * 3
    monkeypatch.setattr(proposing, "accept_greedy", lambda d, p, stop_ids, force: accept_greedy(d, p, force=force))
    monkeypatch.setattr(rounds, "cut", lambda verdict, kept, reason: verdict)
    found = [check(model, ids, own, cell) for cell in cells]
    assert sum(one is not None for one in found) >= 2, "at most one of these blocks ends with the stop token"


def test_exactness_is_what_makes_the_planes_equal(lively):
    """In the fast class the same cell leaves rows that differ by rounding; the text may or may not survive it."""
    model, ids, own = lively(2)
    try:
        model.exact = False
        found = check(model, ids, own, {**CELL, "proposer": "perfect", "k": 8})
    finally:
        model.exact = True
    assert found is not None


class Deaf(MTPProposer):
    """Loses what every third round committed."""

    heard = 0

    def observe(self, tokens_BT: torch.Tensor, rows: Any) -> None:
        super().observe(tokens_BT, rows)
        self.heard += 1
        if self.heard % 3 == 0:
            self.queue = [(t, torch.zeros_like(c)) for t, c in self.queue]


def test_a_wrong_drafter_costs_acceptance_and_nothing_else(demo):
    """Draft rows kept, rows lost, no priming, another carrier: other rounds, the same text."""
    (_, ids), *_ = prompts_of(demo, 1)
    (own,) = plain(demo, [ids], 96)
    seen = {}
    for name, proposer in {
        "right": MTPProposer(demo),
        "draft rows kept": MTPProposer(demo, refresh=False),
        "unprimed": MTPProposer(demo, primed=False),
        "pre-norm carrier": MTPProposer(demo, carrier="pre_norm"),
        "shifted": MTPProposer(demo, shift=1),
        "deaf": Deaf(demo),
    }.items():
        session = Session(demo, options=GenerateOptions(k=4, ignore_eos=True), proposer=proposer)
        session.feed(ids)
        session.burst(95)
        assert session.tokens[len(ids) :] == own, name
        fresh = demo.new_cache()
        demo.forward(torch.tensor([session.tokens[:-1]]), fresh, logits="none")
        assert session.state.cache.first_difference(fresh) is None, name
        seen[name] = [(record.draft_ids, record.draft_top1) for record in session.state.records]
    assert all(seen[name] != seen["right"] for name in seen if name != "right")


# --- the full crosses -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("k", FACTORS["k"])
def test_every_combination_on_random_models(lively, k):
    names = ("policy", "proposer", "carry", "cut")
    for i, levels in enumerate(product(*(FACTORS[name] for name in names))):
        cell = {**dict(zip(names, levels)), "k": k, "strategy": STRATEGIES[(i + i // 3) % 3]}
        model, ids, own = lively(i % 3 + 1)
        assert (found := check(model, ids, own, cell, seed=i)) is None, (cell, found)


@pytest.mark.full
def test_a_larger_design_on_further_held_out_prompts(demo, covering):
    problems, tally, figures = run_design(demo, design(covering, times=4, seed=100), seed=77)
    print(figures)
    assert not problems, "\n".join(problems)
    tally.check(8, NEW)


@pytest.mark.full
@pytest.mark.parametrize("register", REGISTERS)
def test_long_runs_cross_every_growth_of_the_cache(demo, register, record_property):
    ids = next(ids for name, ids in prompts_of(demo, 1, seed=9) if name == register)
    n = 1700
    own = list(wb.generate(demo, ids, k=0, max_new_tokens=n, ignore_eos=True).tokens)
    record_property("repeated_8grams", repeated_ngrams(own, 8))
    for k, policy, carry, strategy in (
        (3, "fixed", True, "tape"),
        (8, "p_min", False, "columns"),
        (7, "adaptive", True, "snapshot"),
    ):
        cell = dict(k=k, policy=policy, proposer="mtp", cut="none", strategy=strategy, carry=carry)
        session = Session(
            demo,
            options=GenerateOptions(k=k, carry=carry, strategy=strategy, ignore_eos=True, **POLICIES[policy]),
        )
        session.feed(ids)
        assert session.burst(n - 1) == "length"
        assert (found := difference(session, ids, own)) is None, (cell, found)
