"""A session restored from a prefix entry equals one fed the same text, in every bit; what does not fit is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import same_bits
from workbench.core.errors import UserError
from workbench.core.records import PhaseTimes
from workbench.model.hybrid import HybridModel
from workbench.spec.constraint import Constraint
from workbench.spec.prefix import PrefixEntry, capture, restore
from workbench.spec.proposers import GivenProposer
from workbench.spec.session import Session
from workbench.spec.sink import Cancelled
from workbench.spec.store import PrefixStore

CHUNK = 5
TEXT = [5, 6, 7, 8, 60, 31, 9, 110, 4, 77, 12, 12, 200]
VARIANTS: dict[str, dict[str, Any]] = {
    "k=3": {},
    "plain": {"k": 0},
    "pre_norm": {"carrier": "pre_norm"},
    "shift": {"shift": 2},
    "not primed": {"primed": False},
    "tape": {"strategy": "tape", "chunk": 1},
    "one chunk": {"chunk": 512},
    "coupled": {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3},
}


class Odd(Constraint):
    """A grammar of odd ids."""

    eos_ids = (0,)
    finished = False

    def __init__(self) -> None:
        self.seen: list[int] = []

    def start(self) -> Odd:
        return Odd()

    def mask(self) -> torch.Tensor:
        return torch.arange(211) % 2 == 1

    def allowed(self, token: int) -> bool:
        return token % 2 == 1

    def consume(self, token: int) -> None:
        assert self.allowed(token)
        self.seen.append(token)

    def rollback(self, n: int) -> None:
        del self.seen[len(self.seen) - n :]


def new(
    model: HybridModel, *, capacity: int = 64, grammar: Any = None, proposer: Any = None, **options: Any
) -> Session:
    opts = wb.GenerateOptions(**{"ignore_eos": grammar is None, "chunk": CHUNK, **options})
    return Session(model, options=opts, capacity=capacity, grammar=grammar, proposer=proposer)


def fed(model: HybridModel, text: list[int], boundaries: Any = (), **more: Any) -> Session:
    session = new(model, **more)
    session.feed(text, boundaries=boundaries)
    return session


def entry_difference(a: PrefixEntry, b: PrefixEntry) -> str | None:
    for name in ("terms", "tokens", "drafter"):
        if getattr(a, name) != getattr(b, name):
            return name
    if a.tensors.keys() != b.tensors.keys():
        return "names"
    return next((name for name, x in a.tensors.items() if not same_bits(x, b.tensors[name])), None)


def with_tensors(entry: PrefixEntry, change: Callable[[dict[str, torch.Tensor]], object]) -> PrefixEntry:
    tensors = dict(entry.tensors)
    change(tensors)
    return replace(entry, tensors=tensors)


@pytest.fixture
def same(parts) -> Callable[[Session, Session], str | None]:
    """What differs between two sessions, their last rows included."""

    def difference(a: Session, b: Session) -> str | None:
        first, second = (parts.frozen.of(x.state) for x in (a, b))
        for frozen in (first, second):
            frozen.records[:] = [replace(record, phases=PhaseTimes()) for record in frozen.records]
        found = first.difference(second)
        rows = [(x.state.boundary.trunk_H, x.state.boundary.normed_H, x.state.boundary.logits_V) for x in (a, b)]
        return found or (None if all(map(same_bits, *rows)) else "last row")

    return difference


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_boundary_of_a_prompt(lively, same, options: Mapping[str, Any]) -> None:
    lengths = range(1, len(TEXT) + 1)
    whole = fed(lively.model, TEXT, **options)
    assert not whole.captured
    split = fed(lively.model, TEXT, lengths, **options)
    assert same(split, whole) is None and [len(e) for e in split.captured] == list(lengths)
    after = whole.burst(8)
    every = options in ({}, {"k": 0})
    for entry in split.captured if every else [split.captured[n] for n in (0, 1, 4, 5, 11, 12)]:
        direct = capture(fed(lively.model, TEXT[: len(entry)], **options))
        assert entry_difference(entry, direct) is None
        session = new(lively.model, **options)
        restore(session, entry, TEXT)
        assert same(session, split) is None, len(entry)
        assert session.burst(8) == after and session.tokens == whole.tokens
        assert same(session, whole) is None, len(entry)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_at_the_very_end_the_sessions_own_chooser_chooses(lively, same, options: Mapping[str, Any]) -> None:
    whole = fed(lively.model, TEXT, **options)
    session = new(lively.model, **options)
    restore(session, capture(whole))
    assert same(session, whole) is None
    greedy, drawn = fed(lively.model, TEXT, k=0), new(lively.model, k=0, temperature=2.0, seed=1)
    restore(drawn, capture(greedy))
    assert drawn.tokens == fed(lively.model, TEXT, k=0, temperature=2.0, seed=1).tokens != greedy.tokens


def test_at_the_very_end_penalties_and_grammars_are_heeded(lively) -> None:
    plain = fed(lively.model, TEXT)
    entry, top = capture(plain), plain.tokens[-1]
    biased = new(lively.model, logit_bias={top: -100.0}, logprobs=True)
    restore(biased, entry)
    again = fed(lively.model, TEXT, logit_bias={top: -100.0}, logprobs=True)
    assert biased.tokens == again.tokens != plain.tokens and biased.first_logprobs == again.first_logprobs
    ruled = new(lively.model, grammar=Odd())
    restore(ruled, entry)
    assert ruled.tokens == fed(lively.model, TEXT, grammar=Odd()).tokens and ruled.tokens[-1] % 2
    constraint = ruled.state.constraint
    assert isinstance(constraint, Odd) and constraint.seen == ruled.tokens[-1:]
    ruled.burst(6)
    assert all(token % 2 for token in ruled.tokens[len(TEXT) :])


@pytest.mark.parametrize("suffix", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
@pytest.mark.parametrize("k", [0, 3])
def test_after_bursts_and_with_suffixes_around_the_chunk(lively, same, suffix: int, k: int) -> None:
    talked = fed(lively.model, TEXT[:6], k=k)
    talked.burst(9)
    talked.feed(TEXT[6:8])
    talked.burst(4)
    entry = capture(talked)
    assert entry.tokens == tuple(talked.tokens[:-1])
    text = [*entry.tokens, *(lively.own[:suffix])]
    session = new(lively.model, k=k)
    restore(session, entry, text)
    assert same(session, fed(lively.model, text, k=k)) is None
    assert entry_difference(capture(session), capture(fed(lively.model, text, k=k))) is None


def test_in_the_middle_of_a_burst(lively, parts) -> None:
    whole = fed(lively.model, TEXT)
    whole.burst(30)
    guide = parts.obedient(lively.model, whole.tokens, lambda at: at % 5 == 0, capacity=64)
    session = fed(lively.model, TEXT, proposer=guide)
    for record in session.rounds(30):
        entry = capture(session)
        assert len(entry) == record.start + record.emitted
        assert entry_difference(entry, capture(fed(lively.model, list(entry.tokens)))) is None
    assert {record.accepted for record in session.state.records} == {0, 1, 2, 3}
    assert session.tokens == whole.tokens


HISTORIES: list[dict[str, Any]] = [
    {},
    {"k": 0},
    {"adaptive": True, "k": 5},
    {"carry": False},
    {"rowwise": True, "strategy": "tape"},
    {"strategy": "snapshot", "p_min": 0.03},
    {"temperature": 1.0},
    {"temperature": 1.0, "accept": "ratio", "carrier": "pre_norm"},
]


@pytest.mark.parametrize("seed", range(len(HISTORIES)))
def test_any_history_of_feeds_and_bursts(lively, same, seed: int) -> None:
    rng, options = random.Random(seed), HISTORIES[seed]
    session, entries = new(lively.model, capacity=200, **options), []
    for _ in range(6):
        rows = session.state.cache.lengths[0]
        given = [rng.randrange(211) for _ in range(rng.randint(1, 2 * CHUNK + 1))]
        last = len(session.tokens) + len(given)
        session.feed(given, boundaries=rng.sample(range(rows + 1, last + 1), min(2, last - rows)))
        entries += session.captured
        session.burst(rng.randint(0, 8))
        entries.append(capture(session))
        if rng.random() < 0.4:
            text = [*session.tokens, rng.randrange(211)]
            session = new(lively.model, capacity=200, **options)
            usable = [entry for entry in entries if tuple(text[: len(entry)]) == entry.tokens]
            restore(session, rng.choice(usable), text)
            assert same(session, fed(lively.model, text, capacity=200, **options)) is None
    for entry in rng.sample(entries, 4):
        direct = fed(lively.model, list(entry.tokens), capacity=200, **options)
        assert entry_difference(entry, capture(direct)) is None


def test_boundaries_of_a_second_feed_count_from_the_start(lively) -> None:
    session = fed(lively.model, TEXT[:6])
    rows = session.state.cache.lengths[0]
    text = [*session.tokens, *TEXT[6:]]
    session.feed(TEXT[6:], boundaries=(rows + 1, rows + 3, len(text)))
    for entry in session.captured:
        assert entry_difference(entry, capture(fed(lively.model, list(entry.tokens)))) is None
    assert [len(entry) for entry in session.captured] == [rows + 1, rows + 3, len(text)]
    for wrong in (0, len(session.tokens) - 1, len(session.tokens) + 2):
        with pytest.raises(UserError, match="a boundary"):
            session.feed([3], boundaries=(wrong,))


def test_an_entry_is_of_its_own_memory(lively, same) -> None:
    session = fed(lively.model, TEXT)
    entry = capture(session)
    before = {name: x.clone() for name, x in entry.tensors.items()}
    session.burst(9)
    for _ in range(2):
        other = new(lively.model)
        restore(other, entry)
        other.burst(9)
        assert same(other, session) is None
    assert all(same_bits(x, before[name]) for name, x in entry.tensors.items())
    assert entry.nbytes == 8 * len(TEXT) + sum(x.untyped_storage().nbytes() for x in entry.tensors.values())


def test_bfloat16(tiny) -> None:
    model = tiny(seed=3, max_position_embeddings=64).to(torch.bfloat16)
    text = [t % 83 for t in TEXT]
    whole = fed(model, text, boundaries=(4,))
    session = new(model)
    restore(session, whole.captured[0], text)
    assert entry_difference(capture(session), capture(whole)) is None and session.tokens == whole.tokens
    with pytest.raises(UserError, match="another model"):
        restore(new(tiny(seed=3, max_position_embeddings=64)), whole.captured[0], text)


def test_fast_numerics(tiny) -> None:
    model = tiny(ratio=2, tied=False, vocab_size=211, seed=2, exact=False)
    whole = fed(model, TEXT, boundaries=(8,))
    session = new(model)
    restore(session, whole.captured[0], TEXT)
    assert session.state.boundary is not None and whole.state.boundary is not None
    torch.testing.assert_close(session.state.boundary.logits_V, whole.state.boundary.logits_V)
    model.exact = True
    with pytest.raises(UserError, match="of another exactness"):
        restore(new(model), whole.captured[0], TEXT)


# ---- refusals ----------------------------------------------------------------------------------------------


def short(name: str) -> Callable[[PrefixEntry], PrefixEntry]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:, :-1]

    return lambda entry: with_tensors(entry, change)


def without(name: str) -> Callable[[PrefixEntry], PrefixEntry]:
    return lambda entry: with_tensors(entry, lambda tensors: tensors.pop(name))


def termed(**terms: Any) -> Callable[[PrefixEntry], PrefixEntry]:
    return lambda entry: replace(entry, terms=replace(entry.terms, **terms))


REFUSALS: dict[str, tuple[Callable[[PrefixEntry], PrefixEntry], str]] = {
    "model": (termed(model="0" * 16), "of another model"),
    "exactness": (termed(exact=False, machine=""), "of another exactness"),
    "dtype": (termed(dtype="bfloat16"), "of another dtype"),
    "layout": (termed(layout="K/V q8_0"), "of another cache layout"),
    "machine": (termed(machine="a loom"), "of another machine, thread count or torch"),
    "carrier": (termed(drafter="mtp, carrier pre_norm, shift 0, primed"), "of another drafter"),
    "no drafter": (lambda e: replace(termed(drafter="")(e), drafter=None), "no drafter rows"),
    "drafter counts": (lambda e: replace(e, drafter=(len(e), 0, len(e) - 2)), "holds .* rows, where"),
    "drafter counts missing": (lambda e: replace(e, drafter=None), "holds 0 rows"),
    "drafter a row short": (short("drafter.0.k"), "drafter is truncated"),
    "drafter without values": (without("drafter.0.v"), "drafter is truncated: it has no '0.v'"),
    "drafter without carrier": (without("drafter.tail"), "drafter is truncated"),
    "no window": (without("layer.0.conv"), "truncated: it has no '0.conv'"),
    "no state": (without("layer.1.state"), "truncated: it has no '1.state'"),
    "keys a row short": (short("layer.2.k"), "truncated"),
    "values a row short": (short("layer.4.v"), "truncated"),
    "no logits": (without("boundary.logits"), "boundary row is truncated"),
    "no tokens": (lambda e: replace(e, tokens=()), "of no tokens"),
    "longer": (lambda e: replace(e, tokens=(*e.tokens, *range(9))), "no longer than the prompt"),
    "other text": (lambda e: replace(e, tokens=(*e.tokens[:3], 1, *e.tokens[4:])), "not a prefix .* token 3 is 1"),
}


@pytest.mark.parametrize("change, sentence", REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_and_leaves_nothing(lively, same, change: Any, sentence: str) -> None:
    whole = fed(lively.model, TEXT, boundaries=(8,))
    session = new(lively.model)
    with pytest.raises(UserError, match=sentence):
        restore(session, change(whole.captured[0]), TEXT)
    assert session.tokens == [] and session.state.cache.lengths == [0]
    session.feed(TEXT)
    assert same(session, whole) is None


def test_sessions_that_cannot_take_an_entry(lively) -> None:
    entry = capture(fed(lively.model, TEXT))
    with pytest.raises(UserError, match="holds 14 tokens already"):
        restore(fed(lively.model, TEXT), entry)
    with pytest.raises(UserError, match="no room for the entry's 13 tokens"):
        restore(new(lively.model, capacity=len(TEXT)), entry)
    with pytest.raises(UserError, match="do not fit"):
        restore(new(lively.model, capacity=len(TEXT) + 1), entry, [*TEXT, 3])
    with pytest.raises(UserError, match="keeps a state that prefix entries do not hold"):
        restore(new(lively.model, proposer=GivenProposer([[1]])), entry)
    with pytest.raises(UserError, match="holds no row"):
        capture(new(lively.model))
    unprimed = fed(lively.model, TEXT, primed=False)
    unprimed.burst(3)
    with pytest.raises(UserError, match="keeps rows that the text alone does not give"):
        capture(unprimed)


def test_a_plain_session_takes_an_entry_with_a_drafter(lively, same) -> None:
    session = new(lively.model, k=0)
    restore(session, capture(fed(lively.model, TEXT)))
    assert same(session, fed(lively.model, TEXT, k=0)) is None


@pytest.mark.parametrize("name", ["layer.0.conv", "layer.0.state", "layer.2.v", "drafter.0.k", "drafter.tail"])
def test_a_wrong_value_is_seen_by_the_comparison(lively, same, name: str) -> None:
    whole = fed(lively.model, TEXT, boundaries=(8,))

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.int32).view(-1)[-1] ^= 1 << 22  # the largest bit of the fraction

    session = new(lively.model)
    restore(session, with_tensors(whole.captured[0], flip), TEXT)
    assert same(session, whole) is not None


# ---- exceptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, call",
    [("target", 0), ("target", 1), ("drafter", 0), ("drafter", 1), ("chooser", 0), ("adopt", 0), ("adopt", 1)],
)
def test_an_exception_leaves_a_session_without_text(lively, same, monkeypatch, where: str, call: int) -> None:
    whole = fed(lively.model, TEXT, boundaries=(3,))
    session, uses = new(lively.model), [0]
    owner, name = {
        "target": (lively.model, "forward"),
        "drafter": (lively.model.mtp, "forward"),
        "chooser": (type(session.state.chooser), "pick"),
        "adopt": (type(session.state.cache.planes[2]), "adopt"),
    }[where]
    original = getattr(owner, name)

    def failing(*args: Any, **more: Any) -> Any:
        uses[0] += 1
        if uses[0] == call + 1:
            raise KeyboardInterrupt
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(KeyboardInterrupt):
            restore(session, whole.captured[0], TEXT)
    assert session.tokens == [] and session.state.boundary is None
    restore(session, whole.captured[0], TEXT)
    assert same(session, whole) is None


def test_a_cancelled_restore_can_be_done_again(lively, same) -> None:
    whole = fed(lively.model, TEXT, boundaries=(3,))
    session, asked = new(lively.model), []
    sink = session.sink(4, cancel=lambda: bool(asked.append(1) or len(asked) > 1))
    with pytest.raises(Cancelled):
        restore(session, whole.captured[0], TEXT, sink=sink)
    assert session.tokens == []
    restore(session, whole.captured[0], TEXT, sink=session.sink(4))
    assert same(session, whole) is None


# ---- from a store ----------------------------------------------------------------------------------------------


def test_from_prefix_restores_the_longest_and_publishes_the_end(lively, same) -> None:
    store = PrefixStore(1 << 20)
    opts = wb.GenerateOptions(ignore_eos=True, chunk=CHUNK)
    found = []
    for n in (6, 9, 9, len(TEXT)):
        session = wb.Session.from_prefix(lively.model, TEXT[:n], store, options=opts, capacity=64, boundaries=(2, 4))
        assert session.reuse is not None
        found.append((session.reuse.reused, session.reuse.recomputed))
        assert same(session, fed(lively.model, TEXT[:n])) is None
    assert found == [(0, 6), (6, 3), (9, 0), (9, 4)]
    assert len(store) == 5 and [len(e) for e in store.candidates(TEXT, lively_print(lively))] == [13, 9, 6, 4, 2]
    other = wb.Session.from_prefix(lively.model, [*TEXT[:4], 1], store, options=opts, capacity=64)
    assert other.reuse is not None and other.reuse.reused == 4
    assert same(other, fed(lively.model, [*TEXT[:4], 1])) is None


def lively_print(setting: Any) -> str:
    from workbench.model.fingerprint import fingerprint

    return fingerprint(setting.model)


def test_from_prefix_says_what_it_could_not_use(lively, same) -> None:
    store = PrefixStore(1 << 20)
    store.put(capture(fed(lively.model, TEXT[:4])))
    store.put(capture(fed(lively.model, TEXT[:8], carrier="pre_norm")))
    store.put(capture(fed(lively.model, TEXT[:10], k=0)))
    opts = wb.GenerateOptions(ignore_eos=True, chunk=CHUNK)
    session = wb.Session.from_prefix(lively.model, TEXT, store, options=opts, capacity=64)
    assert session.reuse is not None and session.reuse.reused == 4
    assert "no drafter rows" in session.reuse.refused[0] and "another drafter" in session.reuse.refused[1]
    assert same(session, fed(lively.model, TEXT)) is None
