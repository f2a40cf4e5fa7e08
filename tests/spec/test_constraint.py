"""Constraints: masks lead to valid text and nowhere else, one oracle, rollback bit for bit, sentences."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError, UserError
from workbench.model.tokenizer import Tokenizer
from workbench.spec import grammars, matchers
from workbench.spec.constraint import Constraint, GrammarConstraint, Matcher, mask_rows
from workbench.spec.grammars import Grammar

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"
V, EOS = 4160, (0, 2)  # the demo tokenizer has 4,096 ids; 1 is a special token that ends nothing
ENGINES = ("llguidance", "xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", 'a "quoted" é']},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PATTERNS = [r"[a-c]{2,5}\d?x|(?:ab){1,3}", r"\d{1,3}(\.\d{1,2})?", r"^.{1,4}$", r"é+漢?/\"[^\s]{0,2}", r"a\.b[.]c"]
CHOICES = ["yes", "no", "yes, please", 'q"uo\\te', "漢字 👍", " /x/\n", "\x01\x7f"]
LARK = 'start: sum\nsum: num ("+" num){0,3}\nnum: /[0-9]{1,2}/ | "(" sum ")"\n'
EBNF = 'root ::= num ("+" num)? ("-" num)?\nnum ::= [0-9] [0-9]?\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    for engine in ENGINES:
        pytest.importorskip(engine)
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def make(tokenizer: Tokenizer) -> Callable[..., Grammar]:
    """``make(kind, source, engine, **more)``."""
    common: dict[str, Any] = dict(vocab_size=V, eos_ids=EOS)

    def build(kind: str, source: Any, engine: str, **more: Any) -> Grammar:
        entry = getattr(grammars, kind)
        return entry(source, tokenizer, engine=engine, **{**common, **more})

    return build


def fits(value: Any) -> bool:
    """A value is valid against ``SCHEMA``, checked by hand."""
    return (
        isinstance(value, dict)
        and {"name", "age", "kind"} <= set(value) <= {"name", "age", "kind", "tags"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and isinstance(tags := value.get("tags", []), list)
        and len(tags) <= 3
        and all(type(tag) is bool for tag in tags)
    )


def walk(
    constraint: Constraint, rng: random.Random, *, most: int = 120, rarely: torch.Tensor | None = None
) -> list[int]:
    """A random text that follows the masks, ``rarely`` along some tokens; its end of text is left out."""
    tokens: list[int] = []
    while len(tokens) < most:
        mask = constraint.mask()
        if rarely is not None and rng.random() < 0.7 and (mask & ~rarely).any():
            mask = mask & ~rarely
        token = rng.choice(mask.nonzero().flatten().tolist())
        constraint.consume(token)
        if token in EOS:
            return tokens
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens")


def cases() -> list[Any]:
    """(kind, source, more, check of the text)."""
    rows: list[Any] = [
        pytest.param("json_schema", SCHEMA, {"whitespace": False}, lambda t: fits(json.loads(t)), id="json"),
        pytest.param("choice", CHOICES, {}, lambda t: t in CHOICES, id="choice"),
    ]
    for p in PATTERNS:
        rows.append(pytest.param("regex", p, {}, lambda t, p=p: bool(re.fullmatch(p, t)), id=f"regex {p}"))
    return rows


EVERY = [
    ("json_schema", SCHEMA, "llguidance"),
    ("json_schema", SCHEMA, "xgrammar"),
    ("regex", PATTERNS[0], "llguidance"),
    ("regex", PATTERNS[0], "xgrammar"),
    ("choice", CHOICES, "llguidance"),
    ("choice", CHOICES, "xgrammar"),
    ("lark", LARK, "llguidance"),
    ("ebnf", EBNF, "xgrammar"),
]
every = pytest.mark.parametrize("kind, source, engine", EVERY, ids=[f"{k} {e}" for k, _, e in EVERY])


def compact(kind: str) -> dict[str, Any]:
    return {"whitespace": False} if kind == "json_schema" else {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind, source, more, valid", cases())
def test_walks_along_the_masks_end_in_valid_text(make, tokenizer, kind, source, more, valid, engine):
    grammar, rng, seen = make(kind, source, engine, **more), random.Random(7), set()
    for _ in range(40):
        text = tokenizer.decode(walk(grammar.start(), rng))
        assert valid(text), text
        seen.add(text)
    assert len(seen) > 3 or kind == "regex"


@pytest.mark.parametrize("engine", ENGINES)
def test_whitespace_is_free_by_default(make, tokenizer, engine):
    grammar = make("json_schema", json.dumps(SCHEMA), engine)
    constraint = grammar.start()
    text = '{ "name" : "Bo",\n  "age":3, "kind": "cat" }'
    for token in tokenizer.encode(text):
        constraint.consume(token)
    assert constraint.mask()[list(EOS)].all()
    blank = torch.zeros(V, dtype=torch.bool)  # whitespace is without bound
    blank[[i for i, piece in enumerate(matchers.token_bytes(tokenizer)) if re.search(rb"\s", piece)]] = True
    rng, spaced = random.Random(2), 0
    for _ in range(30):
        text = tokenizer.decode(walk(grammar.start(), rng, most=400, rarely=blank))
        assert fits(json.loads(text)), text
        spaced += bool(re.search(r"\s", text))
    assert spaced


def test_lark_and_ebnf(make, tokenizer):
    rng = random.Random(4)
    for kind, source, engine in (("lark", LARK, "llguidance"), ("ebnf", EBNF, "xgrammar")):
        for _ in range(30):
            text = tokenizer.decode(walk(make(kind, source, engine).start(), rng, most=400))
            assert re.fullmatch(r"[0-9+()-]+", text) and isinstance(eval(re.sub(r"\b0+(?=\d)", "", text)), int)


@pytest.mark.parametrize("kind, source, more, _", cases())
def test_two_libraries_give_the_same_masks(make, kind, source, more, _):
    """Neither narrows a mask to one tokenisation, neither takes special tokens for text.

    Strings of bounded length are left out: xgrammar writes no escapes there.
    """
    rng = random.Random(8)
    if kind == "json_schema":
        source = {**source, "properties": {**source["properties"], "name": {"type": "null"}}}
    for _ in range(8):
        left, right = (make(kind, source, engine, **more).start() for engine in ENGINES)
        for _ in range(40):
            assert torch.equal(left.mask(), right.mask()), (left.tokens, (left.mask() ^ right.mask()).nonzero())
            assert left.finished == right.finished
            token = rng.choice(left.mask().nonzero().flatten().tolist())
            left.consume(token)
            right.consume(token)


def test_why_forcing_is_off(make, tokenizer):
    """Control: llguidance as it comes allows one tokenisation of forced text by its mask, and accepts the others."""
    import llguidance

    (h,) = tokenizer.encode("h")
    tokens = matchers.llguidance_tokens(tokenizer, V, EOS)
    raw = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark('start: "hello"'), log_level=0)
    row = np.unpackbits(np.frombuffer(raw.compute_bitmask(), np.uint8), bitorder="little")
    assert not row[h] and raw.validate_tokens([h]) == 1
    assert make("lark", 'start: "hello"', "llguidance").start().allowed(h)


@every
def test_one_oracle(make, kind, source, engine):
    """``allowed`` and ``consume`` say what ``mask`` says, at every step, for masked ids and others."""
    grammar, rng = make(kind, source, engine, **compact(kind)), random.Random(11)
    for _ in range(3):
        constraint = grammar.start()
        for step in range(30):
            mask = constraint.mask()
            assert mask.dtype == torch.bool and mask.shape == (V,) and mask.any() and not mask[4096:].any()
            assert not mask[1]
            ids = mask.nonzero().flatten().tolist()
            probes = [*rng.sample(range(V), 200), *rng.sample(ids, min(len(ids), 50))]
            for token in probes:
                assert constraint.allowed(token) == bool(mask[token])
            assert not constraint.allowed(-1) and not constraint.allowed(V)
            for token in rng.sample(probes, 12):
                if mask[token]:
                    constraint.consume(token)
                    constraint.rollback(1)
                else:
                    with pytest.raises(UserError, match=f"token {token} is not allowed"):
                        constraint.consume(token)
                assert torch.equal(constraint.mask(), mask)
            constraint.consume(rng.choice(ids))
            assert len(constraint.tokens) == step + 1


@every
def test_rollback_restores_every_mask_bit_for_bit(make, kind, source, engine):
    grammar, rng = make(kind, source, engine, **compact(kind)), random.Random(12)
    for _ in range(3):
        constraint, masks, tokens = grammar.start(), [], []
        for _ in range(18):
            masks.append(constraint.mask().clone())
            tokens.append(rng.choice(masks[-1].nonzero().flatten().tolist()))
            constraint.consume(tokens[-1])
        masks.append(constraint.mask().clone())
        for n in range(len(tokens) + 1):
            keep = len(tokens) - n
            constraint.rollback(n)
            assert constraint.tokens == tuple(tokens[:keep]) and torch.equal(constraint.mask(), masks[keep])
            twin = constraint.fork()
            for i in range(keep, len(tokens)):
                constraint.consume(tokens[i])
                assert torch.equal(constraint.mask(), masks[i + 1])
            assert torch.equal(twin.mask(), masks[keep]) and twin.tokens == tuple(tokens[:keep])


@every
def test_after_the_end_only_the_end_may_follow(make, kind, source, engine):
    constraint = make(kind, source, engine, **compact(kind)).start()
    only = torch.zeros(V, dtype=torch.bool)
    only[list(EOS)] = True
    tokens = walk(constraint, random.Random(1))
    assert constraint.finished and torch.equal(constraint.mask(), only)
    constraint.consume(EOS[0])
    assert constraint.finished and torch.equal(constraint.mask(), only)
    constraint.rollback(2)
    assert constraint.tokens == tuple(tokens) and constraint.mask()[list(EOS)].all()
    constraint.rollback(len(tokens))
    assert not constraint.finished


def test_complete_and_able_to_go_on_is_not_finished(make, tokenizer):
    for engine in ENGINES:
        constraint = make("choice", ["yes", "yes, please"], engine).start()
        for token in tokenizer.encode("yes"):
            constraint.consume(token)
        assert constraint.mask()[list(EOS)].all() and not constraint.finished


def by_hand(grammar: Grammar, before: list[int], drafted: list[int]) -> list[torch.Tensor]:
    """The masks of a verify from fresh constraints."""
    rows = []
    for r in range(len(drafted) + 1):
        constraint = grammar.start()
        for token in [*before, *drafted[:r]]:
            if (constraint.tokens[len(before) :] and constraint.finished) or not constraint.allowed(token):
                return rows
            constraint.consume(token)
        rows.append(constraint.mask())
        if constraint.finished:
            return rows
    return rows


@every
def test_rows_of_a_verify_are_steps_by_hand(make, kind, source, engine):
    grammar, rng = make(kind, source, engine, **compact(kind)), random.Random(13)
    cut = 0
    for trial in range(12):
        text = walk(grammar.start(), rng)
        start = rng.randrange(len(text))
        drafted = [*text[start : start + 6], EOS[0], EOS[0]]
        if trial % 2:
            drafted[rng.randrange(len(drafted))] = rng.randrange(V)
        constraint = grammar.start()
        for token in text[:start]:
            constraint.consume(token)
        before = constraint.mask().clone()
        masks, legal = mask_rows(constraint, drafted)
        expected = by_hand(grammar, text[:start], drafted)
        assert len(masks) == legal + 1 == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(masks, expected))
        assert constraint.tokens == tuple(text[:start]) and torch.equal(constraint.mask(), before)
        cut += legal < len(drafted)
    assert cut


def test_an_exception_in_a_walk_leaves_the_constraint_as_it_was(make, tokenizer, monkeypatch):
    for engine in ENGINES:
        constraint, ids = make("regex", "(ab|c)+", engine).start(), tokenizer.encode("cabcab")
        constraint.consume(ids[0])
        before, calls = constraint.mask().clone(), [0]
        original = GrammarConstraint.consume

        def consume(self: GrammarConstraint, token: int, calls=calls, original=original) -> None:
            original(self, token)
            calls[0] += 1

        def mask(self: GrammarConstraint, calls=calls, before=before) -> torch.Tensor:
            if calls[0] == 2:
                raise KeyboardInterrupt
            return before

        with monkeypatch.context() as patch:
            patch.setattr(GrammarConstraint, "consume", consume)
            patch.setattr(GrammarConstraint, "mask", mask)
            with pytest.raises(KeyboardInterrupt):
                mask_rows(constraint, ids[1:])
        assert constraint.tokens == (ids[0],) and torch.equal(constraint.mask(), before)


def test_the_drafters_walk_leaves_no_trace(make, tokenizer):
    for engine in ENGINES:
        constraint = make("regex", "abcd", engine).start()
        a, b, c, d = tokenizer.encode("a") + tokenizer.encode("b") + tokenizer.encode("c") + tokenizer.encode("d")
        first = constraint.mask().clone()
        constraint.draft_begin()
        assert torch.equal(constraint.draft_mask(), first)
        assert constraint.draft_advance(a) and not constraint.draft_advance(a) and constraint.draft_advance(b)
        assert constraint.draft_mask()[c] and not constraint.draft_mask()[a]
        constraint.draft_begin()
        assert torch.equal(constraint.draft_mask(), first)
        assert constraint.draft_advance(a)
        assert torch.equal(constraint.mask(), first) and constraint.tokens == ()
        constraint.draft_advance(a)
        constraint.consume(a)
        assert constraint.tokens == (a,)
        constraint.draft_advance(b)
        constraint.rollback(1)
        assert constraint.tokens == () and torch.equal(constraint.mask(), first)
        for token in (a, b, c, d):
            assert constraint.draft_advance(token)
        assert constraint.draft_advance(EOS[0])


class Stubborn:
    """A matcher over the text 1 2 3 that cannot roll back, and refuses token 9, which it allows."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def bits(self) -> np.ndarray:
        row = np.zeros(16, dtype=np.uint8)
        row[[self.at + 1, 9] if self.at < 3 else [0]] = 1
        return np.packbits(row, bitorder="little")

    def advance(self, token: int) -> bool:
        good, self.at = token == self.at + 1, self.at + 1
        return good

    def back(self, n: int) -> bool:
        self.at = -99
        return False

    def copy(self) -> Matcher:
        return Stubborn(self.at)


def test_a_library_that_cannot_roll_back_or_breaks_its_word():
    constraint = GrammarConstraint(Stubborn, vocab_size=12, eos_ids=[0])
    constraint.consume(1)
    constraint.consume(2)
    with pytest.raises(UserError, match="use the other engine"):
        constraint.consume(9)
    assert constraint.tokens == (1, 2) and constraint.allowed(3)
    constraint.consume(3)
    constraint.consume(0)
    constraint.rollback(3)
    assert constraint.tokens == (1,) and constraint.allowed(2)
    with pytest.raises(AssertionError):
        constraint.rollback(2)


def test_a_constraint_of_ones_own_leaves_the_drafter_unmasked():
    class Own(Constraint):
        finished = False  # type: ignore[assignment]

    own = Own()
    assert isinstance(own, Constraint) and own.draft_mask() is None and own.draft_advance(3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "kind, source, words",
    [
        ("regex", "a(b", "refuses this regex"),
        ("regex", "(?=a)b", "refuses this regex"),
        ("regex", "", "pattern=''"),
        ("json_schema", {"type": "wrong"}, "refuses this json schema|does not enforce"),
        ("json_schema", "{bad", "not JSON"),
        ("json_schema", "[1]", "must be an object"),
        ("json_schema", {"type": {1, 2}}, "not JSON"),
        ("json_schema", {"$ref": "#/$defs/x"}, "refuses this json schema"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "none empty"),
        ("choice", "yes", "list of strings"),
    ],
)
def test_what_is_not_valid_is_a_sentence(make, kind, source, words, engine):
    with pytest.raises(UserError, match=words) as caught:
        make(kind, source, engine)
    error = caught.value
    assert "\n" not in str(error) and (error.__context__ is None or error.__suppress_context__)


IGNORED = [
    {"not": {"type": "integer"}},
    {"minimum": 3},
    {"allOf": [{"type": "integer"}]},
    {"type": "array", "items": {"type": "integer", "if": {"minimum": 3}}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 5},
    {"enum": [1, "x"], "type": "string"},
    {"type": "object", "required": ["a"]},
    {"type": "string", "pattern": "a", "maxLength": 2},
    {"type": "string", "pattern": '"'},
    {"type": "string", "format": "wow"},
    {"type": "number", "multipleOf": 0.5},
    {"type": "integer", "multipleOf": 2, "minimum": 3},
]


@pytest.mark.parametrize("schema", IGNORED, ids=json.dumps)
def test_xgrammar_is_not_given_what_it_would_ignore(make, schema):
    """Control: the library itself compiles every one of these."""
    with pytest.raises(UserError, match=r"does not enforce .* use engine='llguidance'"):
        make("json_schema", schema, "xgrammar")
    import xgrammar

    xgrammar.Grammar.from_json_schema(json.dumps(schema))


def test_engines_and_other_arguments(make, tokenizer, monkeypatch):
    with pytest.raises(CapabilityError, match="engine='llguidance', or write it as EBNF"):
        make("lark", LARK, "xgrammar")
    with pytest.raises(CapabilityError, match="engine='xgrammar', or write it as Lark"):
        make("ebnf", EBNF, "llguidance")
    with pytest.raises(UserError, match="refuses this lark \\(at 1"):
        make("lark", 'start: "a" b', "llguidance")
    for pattern, words in (("a^b", "ignores the '\\^'"), ("(a$)|b", "ignores the '\\$'"), (r"a\b", "boundaries")):
        with pytest.raises(UserError, match=words):
            make("regex", pattern, "xgrammar")
    with pytest.raises(UserError, match="'llguidance', 'xgrammar'"):
        make("regex", "a", "other")
    with pytest.raises(UserError, match="eos_ids is empty"):
        make("regex", "a", "llguidance", eos_ids=[])
    with pytest.raises(UserError, match="eos_ids=4160"):
        make("regex", "a", "llguidance", eos_ids=[V])
    with pytest.raises(CapabilityError, match="no tokenizer"):
        grammars.regex("a", None, vocab_size=V, eos_ids=EOS)
    matchers.llguidance_tokens.cache_clear()
    matchers.xgrammar_compiler.cache_clear()
    for engine in ENGINES:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, engine, None)
            with pytest.raises(CapabilityError, match=r"pip install 'specdec-workbench\[formats\]'"):
                make("regex", "a", engine)


def test_a_smaller_and_a_larger_vocabulary(make, tokenizer):
    ids = torch.tensor([len(piece) > 0 for piece in matchers.token_bytes(tokenizer)])
    for engine in ENGINES:
        small, large = (make("regex", "[a-z ]+", engine, vocab_size=v).start().mask() for v in (300, 5000))
        assert torch.equal(small, large[:300]) and not large[4096:].any() and large[300:].any()
        assert ids[large.nonzero().flatten()].all()


def test_tokens_are_their_bytes(tokenizer):
    pieces = matchers.token_bytes(tokenizer)
    assert len(pieces) == tokenizer.vocab_size
    for text in ("plain", "naïve 漢字 👍🏽", "<|im_end|>\n"):
        assert b"".join(pieces[i] for i in tokenizer.encode(text)) == text.encode()
