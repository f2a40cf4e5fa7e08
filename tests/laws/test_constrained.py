"""Constrained speculation is constrained plain decode, token for token, always valid; the matcher follows the cache.

Plain decode here is a loop of its own: one token per forward, the mask of a fresh matcher, the library's law and draw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import HybridCache
from workbench.core.metrics import Telemetry
from workbench.model.hybrid import HybridModel
from workbench.sampling.draw import draw
from workbench.sampling.philox import Noise
from workbench.sampling.shaping import law
from workbench.spec import grammars
from workbench.spec import round as rounds
from workbench.spec.generate import generate
from workbench.spec.grammars import Grammar
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import FixedK
from workbench.spec.proposers import MTPProposer, Proposer, ScriptedProposer
from workbench.spec.round import run_round
from workbench.spec.session import Session

ENGINES = ("llguidance", "xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["table", "index", "view"]},
        "columns": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 8},
                    "type": {"enum": ["integer", "text", "real"]},
                    "null": {"type": "boolean"},
                },
                "required": ["name", "type", "null"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "kind", "columns"],
    "additionalProperties": False,
}
PATTERN = r"(SELECT|INSERT) [a-z_]{1,10}( FROM [a-z]{1,8})?;"
PROMPT = "-- The schema of the table, as JSON:\n"
NEW = 160
SAMPLED = dict(temperature=0.9, top_p=0.97, repetition_penalty=1.05)
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised greedy": dict(presence_penalty=0.3),
    "sampled": SAMPLED,
    "joint": dict(temperature=1.2, top_k=30, top_p=0.9, filter_order="joint"),
}


@pytest.fixture(scope="module")
def demo() -> HybridModel:
    for engine in ENGINES:
        pytest.importorskip(engine)
    return wb.load("demo", exact=True)


@pytest.fixture(scope="module")
def make(demo) -> Callable[..., Grammar]:
    made: dict[Any, Grammar] = {}

    def build(kind: str, engine: str) -> Grammar:
        if (kind, engine) not in made:
            common: dict[str, Any] = dict(
                vocab_size=demo.config.vocab_size, eos_ids=demo.config.eos_token_id, engine=engine
            )
            made[kind, engine] = (
                grammars.json_schema(SCHEMA, demo.tokenizer, whitespace=False, **common)
                if kind == "json"
                else grammars.regex(PATTERN, demo.tokenizer, **common)
            )
        return made[kind, engine]

    return build


def valid(kind: str, text: str) -> bool:
    """The text is what the grammar asks for, checked by hand."""
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "columns"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and value["kind"] in ("table", "index", "view")
        and 2 <= len(value["columns"]) <= 3
        and all(
            list(column) == ["name", "type", "null"]
            and isinstance(column["name"], str)
            and len(column["name"]) <= 8
            and column["type"] in ("integer", "text", "real")
            and isinstance(column["null"], bool)
            for column in value["columns"]
        )
    )


@torch.inference_mode()
def plain(model: HybridModel, grammar: Grammar, options: GenerateOptions, n: int = NEW) -> list[int]:
    """Constrained text by one token per forward; no part of the engine's."""
    text = model.tokenizer.encode(PROMPT)
    cache, constraint, noise, shaping = model.new_cache(), grammar.start(), Noise(options.seed), options.shaping()
    feed, first = text, len(text)
    while len(text) - first < n and (len(text) == first or text[-1] not in model.config.eos_token_id):
        logits_V = model.forward(torch.tensor([feed]), cache, logits="last").logits_BTV[0, 0]
        own = law(logits_V, shaping, history=text, mask=constraint.mask())
        text = [*text, draw(own, noise, len(text))]
        constraint.consume(text[-1])
        feed = text[-1:]
    return text[first:]


QUICK = [
    ("json", "llguidance", "greedy"),
    ("json", "xgrammar", "sampled"),
    ("regex", "llguidance", "sampled"),
    ("regex", "xgrammar", "greedy"),
]
CASES = [*QUICK, *(case for case in product(("json", "regex"), ENGINES, SHAPES) if case not in QUICK)]
FULL = [pytest.param(*case, marks=pytest.mark.full) for case in CASES[len(QUICK) :]]


@pytest.mark.parametrize("kind, engine, shape", [*QUICK, *FULL])
def test_text_is_valid_and_constrained_plain_decodes(demo, make, kind, engine, shape):
    grammar = make(kind, engine)
    given: dict[str, Any] = dict(max_new_tokens=NEW, seed=CASES.index((kind, engine, shape)), **SHAPES[shape])
    own = plain(demo, grammar, GenerateOptions(**given))
    assert own[-1] in demo.config.eos_token_id, "the text ends by itself"
    first = CASES.index((kind, engine, shape)) % 5
    for k in sorted({0, 1 + first, 1 + (first + 2) % 5}):
        more = dict(adaptive=True) if k == 4 else dict(p_min=0.2, carry=False) if k == 3 else {}
        done = generate(demo, PROMPT, k=k, grammar=grammar, **given, **more)
        assert list(done.tokens) == own and done.finish == "stop", (k, done.text)
        assert valid(kind, demo.tokenizer.decode(own[:-1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_write_the_same_greedy_text(demo, make, engine):
    done = generate(demo, PROMPT, k=3, grammar=make("json", engine), max_new_tokens=NEW)
    other = generate(demo, PROMPT, k=2, grammar=make("json", "llguidance"), max_new_tokens=NEW)
    assert json.loads(done.text.removesuffix("<|endoftext|>")) == json.loads(other.text.removesuffix("<|endoftext|>"))


def test_speculation_still_accepts_on_json(demo, make, record_property):
    """Position 1, pooled over seeds, greedy and sampled, by equality and by ratio."""
    rates = {}
    for name, given, seeds in (
        ("greedy", {}, 1),
        ("coupled", SAMPLED, 2),
        ("ratio", dict(accept="ratio", **SAMPLED), 2),
    ):
        counters = Telemetry()
        for seed in range(seeds):
            done = generate(
                demo, PROMPT, k=3, seed=seed, grammar=make("json", ENGINES[seed % 2]), max_new_tokens=NEW, **given
            )
            assert done.finish == "stop" and valid("json", demo.tokenizer.decode(done.tokens[:-1]))
            counters = counters.merge(Telemetry.of(done.records))
        rates[name] = round(counters.pos_accepted[0] / counters.pos_tested[0], 3)
    record_property("position_1_acceptance", rates)
    print(rates)
    assert min(rates.values()) > 0.3


class Wild(MTPProposer):
    """Drafts without regard to the grammar: ids of its own every other slot."""

    def propose(self, ctx: Any) -> Any:
        made = super().propose(ctx)
        tokens = tuple(7 if i % 2 else token for i, token in enumerate(made.tokens))
        return type(made)(tokens, made.top1, made.stop_cause)


@pytest.mark.parametrize("shape", ["sampled", pytest.param("greedy", marks=pytest.mark.full)])
def test_a_drafter_that_knows_no_grammar_costs_acceptance_and_nothing_else(demo, make, shape):
    grammar = make("json", "llguidance")
    given: dict[str, Any] = dict(max_new_tokens=NEW, **SHAPES[shape])
    own = plain(demo, grammar, GenerateOptions(**given))
    truth = [*demo.tokenizer.encode(PROMPT), *own]
    drafters: list[Proposer] = [
        Wild(demo),
        MTPProposer(demo),
        *(ScriptedProposer.pattern(p, truth, vocab_size=demo.config.vocab_size) for p in ("alternating",)),
    ]
    demo.trim_draft_vocab(range(0, demo.config.vocab_size, 3))
    for drafter in drafters:
        done = generate(demo, PROMPT, k=4, proposer=drafter, grammar=grammar, **given)
        assert list(done.tokens) == own, drafter.name
    demo.untrim_draft_vocab()


class Interrupt(KeyboardInterrupt):
    """What a reader of a notebook does in the middle of a cell."""


@contextmanager
def raising(owner: Any, name: str, *, call: int = 0) -> Iterator[None]:
    """``owner.name`` raises on its ``call``-th use."""
    original, uses = getattr(owner, name), [0]

    def patched(*args: Any, **more: Any) -> Any:
        uses[0] += 1
        if uses[0] == call + 1:
            raise Interrupt
        return original(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, patched)
        yield
    assert uses[0] > call, f"{name} was never reached"


POINTS: dict[str, Callable[[Any], Any]] = {
    "in the chain": lambda s: raising(s.policy, "drops", call=1),
    "after the chain": lambda s: raising(s.model, "forward"),
    "masks walked": lambda s: raising(s.constraint, "mask"),
    "rows drawn": lambda s: raising(s.constraint, "consume", call=1),
    "checked": lambda s: raising(rounds, "check_finite"),
    "judged": lambda s: raising(rounds, "cut"),
    "told": lambda s: raising(s.proposer, "observe"),
    "committing": lambda s: raising(HybridCache, "commit"),
}


@pytest.mark.parametrize("accept, engine", [("coupled", "llguidance"), ("ratio", "xgrammar")])
def test_an_abort_takes_the_matcher_back(demo, make, engine, accept):
    options = GenerateOptions(k=3, accept=accept, **SAMPLED)

    def begin() -> Session:
        session = Session(demo, options=options, policy=FixedK(k=3), grammar=make("json", engine))
        session.feed(demo.tokenizer.encode(PROMPT))
        return session

    whole = begin()
    whole.burst(60)
    session, first = begin(), len(demo.tokenizer.encode(PROMPT))
    state = session.state
    state.sink = session.sink(60)
    with torch.inference_mode():
        for point in POINTS.values():
            before = state.constraint.tokens, state.constraint.mask().clone(), state.cache.lengths, state.sink.tokens
            assert before[0] == tuple(session.tokens[first:])
            with pytest.raises(Interrupt), point(state):
                run_round(state, 60 - len(state.tokens) + first + 1)
            after = state.constraint.tokens, state.constraint.mask(), state.cache.lengths, state.sink.tokens
            assert [*before[:1], *before[2:]] == [*after[:1], *after[2:]] and bool((before[1] == after[1]).all())
            run_round(state, 60 - len(state.tokens) + first + 1)
    session.burst(60 - len(state.tokens) + first + 1)
    assert session.tokens == whole.tokens
    assert state.constraint.tokens == tuple(session.tokens[first:])


def test_an_abort_of_the_prompt_takes_the_matcher_back(demo, make):
    session = Session(demo, options=GenerateOptions(k=2), grammar=make("json", "llguidance"))
    ids: Sequence[int] = demo.tokenizer.encode(PROMPT)
    with pytest.raises(Interrupt), raising(HybridCache, "commit"):
        session.feed(ids)
    assert session.state.constraint.tokens == () and session.tokens == []
    session.feed(ids)
    assert len(session.state.constraint.tokens) == 1
