"""Grammars a text must follow: JSON schema, regular expression, Lark, EBNF or a list of choices.

Two libraries do the work, both of the ``formats`` extra: ``llguidance`` (the default) and ``xgrammar``. A ``Grammar``
is compiled once; ``start`` gives a fresh constraint per text. A mask is a function of the text alone and means what the
grammar says:

- llguidance narrows the mask to one tokenisation where the text is forced, while it goes on accepting the others:
  forcing is switched off. It is also poisoned for good by one token it refuses, and then answers with a mask of end of
  text: nothing is given to it that its mask does not hold, and every mask is followed by a look at its error.
- xgrammar takes special tokens for their spelling: they are hidden from it. It ignores JSON keywords it does not
  enforce: such schemas are refused. It writes control characters into strings of bounded length: tokens that hold one
  are hidden from it in JSON. In its regular expressions ``.`` stands for a line feed as well, and is rewritten.
- Both would let ``\\u0061`` write a key a second time: llguidance writes no ``\\u`` escapes, and xgrammar no key that
  the schema does not name, unless ``additionalProperties`` asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.errors import CapabilityError, UserError, check_choice, check_flag, check_int
from workbench.model.tokenizer import Tokenizer
from workbench.spec.constraint import GrammarConstraint, Matcher
from workbench.spec.matchers import compile_llguidance, compile_xgrammar, llguidance_tokens, xgrammar_compiler
from workbench.spec.schema_check import unenforced

ENGINES = ("llguidance", "xgrammar")


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, to be used for any number of texts.

    Args:
        kind: "json_schema", "regex", "lark", "ebnf" or "choice".
        source: The grammar as given; JSON for a schema and for choices.
        engine: The library.
        vocab_size: V of the target.
        eos_ids: End-of-text tokens: the only ones allowed once the text is complete and cannot go on.
        fresh: Makes the library's matcher at the start of the grammar.
    """

    kind: str
    source: str
    engine: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    fresh: Callable[[], Matcher] = field(repr=False)

    def start(self) -> GrammarConstraint:
        """A constraint at the start of a text."""
        return GrammarConstraint(self.fresh, vocab_size=self.vocab_size, eos_ids=self.eos_ids)


def json_schema(
    schema: str | dict[str, Any],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    eos_ids: Iterable[int],
    engine: str = "llguidance",
    whitespace: bool = True,
) -> Grammar:
    """JSON text that a schema allows.

    Args:
        schema: JSON schema, parsed or not.
        tokenizer: The target's.
        vocab_size: V of the target; ids past the tokenizer's are never allowed.
        eos_ids: End-of-text tokens, at least one.
        engine: "llguidance" or "xgrammar".
        whitespace: Allow any whitespace between the parts, without bound; False allows none.

    Returns:
        The grammar. Keys come in the schema's order.

    Raises:
        UserError: The schema is not valid, or holds what the library cannot enforce.
        CapabilityError: The library is not installed, or the tokenizer is not byte-level.
    """
    check_flag("whitespace", whitespace)
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed)
    except (TypeError, ValueError) as error:
        raise UserError(f"this JSON schema is not JSON ({error}): give a dict, or its JSON text") from None
    if not isinstance(parsed, dict):
        raise UserError(f"the JSON schema {text} is not valid: it must be an object, such as {{'type': 'object'}}")
    options = {"whitespace_flexible": whitespace, "json_allowed_escapes": '"\\bfnrt'}
    guided = json.dumps({**parsed, "x-guidance": {**options, **parsed.get("x-guidance", {})}})
    if engine == "xgrammar" and (ignored := list(unenforced(parsed))):
        raise UserError(
            f"xgrammar does not enforce {'; '.join(ignored)}: leave it out of the schema, or use engine='llguidance'"
        )
    separators = None if whitespace else (",", ":")
    return _grammar(
        "json_schema",
        text,
        tokenizer,
        vocab_size,
        eos_ids,
        engine,
        lark=lambda: f"start: %json {guided}",
        compiled=lambda c: c.compile_json_schema(text, any_whitespace=whitespace, separators=separators),
    )


def regex(
    pattern: str, tokenizer: Tokenizer | None, *, vocab_size: int, eos_ids: Iterable[int], engine: str = "llguidance"
) -> Grammar:
    """Text that a regular expression matches as a whole.

    What both libraries read is a common core: no look-around, no back-references. ``\\d``, ``\\w`` and ``\\s`` are
    ASCII, and ``.`` is anything but a line feed.

    Args:
        pattern: The expression.
        tokenizer: The target's.
        vocab_size: V of the target.
        eos_ids: End-of-text tokens, at least one.
        engine: "llguidance" or "xgrammar".

    Returns:
        The grammar.

    Raises:
        UserError: The expression is not valid in the library.
        CapabilityError: The library is not installed, or the tokenizer is not byte-level.
    """
    _check_text("pattern", pattern)

    def lark() -> str:
        import llguidance

        return f"start: /{llguidance.regex_to_lark(pattern, 'dws')}/"

    plain = _for_xgrammar(pattern) if engine == "xgrammar" else ""
    return _grammar(
        "regex", pattern, tokenizer, vocab_size, eos_ids, engine, lark=lark, compiled=lambda c: c.compile_regex(plain)
    )


def lark(
    grammar: str, tokenizer: Tokenizer | None, *, vocab_size: int, eos_ids: Iterable[int], engine: str = "llguidance"
) -> Grammar:
    """Text of a Lark grammar with a ``start`` rule, in llguidance's dialect.

    Args:
        grammar: The grammar.
        tokenizer: The target's.
        vocab_size: V of the target.
        eos_ids: End-of-text tokens, at least one.
        engine: "llguidance"; no other reads the same dialect.

    Returns:
        The grammar.

    Raises:
        UserError: The grammar is not valid.
        CapabilityError: The engine is another, not installed, or the tokenizer is not byte-level.
    """
    _check_text("grammar", grammar)
    check_choice("engine", engine, ENGINES)
    if engine != "llguidance":
        raise CapabilityError(
            f"a Lark grammar is not read by engine={engine!r}: use engine='llguidance', or write it as EBNF (ebnf)"
        )
    return _grammar("lark", grammar, tokenizer, vocab_size, eos_ids, engine, lark=lambda: grammar)


def ebnf(
    grammar: str, tokenizer: Tokenizer | None, *, vocab_size: int, eos_ids: Iterable[int], engine: str = "xgrammar"
) -> Grammar:
    """Text of an EBNF grammar with a ``root`` rule, as llama.cpp writes them.

    Args:
        grammar: The grammar.
        tokenizer: The target's.
        vocab_size: V of the target.
        eos_ids: End-of-text tokens, at least one.
        engine: "xgrammar"; no other reads it.

    Returns:
        The grammar.

    Raises:
        UserError: The grammar is not valid.
        CapabilityError: The engine is another, not installed, or the tokenizer is not byte-level.
    """
    _check_text("grammar", grammar)
    check_choice("engine", engine, ENGINES)
    if engine != "xgrammar":
        raise CapabilityError(
            f"an EBNF grammar is not read by engine={engine!r}: use engine='xgrammar', or write it as Lark (lark)"
        )
    return _grammar(
        "ebnf", grammar, tokenizer, vocab_size, eos_ids, engine, compiled=lambda c: c.compile_grammar(grammar)
    )


def choice(
    choices: Sequence[str],
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    eos_ids: Iterable[int],
    engine: str = "llguidance",
) -> Grammar:
    """One of several texts.

    Args:
        choices: The texts, none empty; one may begin another.
        tokenizer: The target's.
        vocab_size: V of the target.
        eos_ids: End-of-text tokens, at least one.
        engine: "llguidance" or "xgrammar".

    Returns:
        The grammar.

    Raises:
        UserError: The choices are not valid.
        CapabilityError: The library is not installed, or the tokenizer is not byte-level.
    """
    good = not isinstance(choices, str) and all(isinstance(text, str) and text for text in choices)
    if not good or not choices:
        raise UserError(f"choices {choices!r} are not valid: give a list of strings, at least one and none empty")
    codes = ("".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text) for text in choices)
    pattern = "|".join(codes)
    rule = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    source = json.dumps(list(choices), ensure_ascii=False)
    return _grammar(
        "choice",
        source,
        tokenizer,
        vocab_size,
        eos_ids,
        engine,
        lark=lambda: f"start: /{pattern}/",
        compiled=lambda c: c.compile_grammar(f"root ::= {rule}"),
    )


def _grammar(
    kind: str,
    source: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_ids: Iterable[int],
    engine: str,
    *,
    lark: Callable[[], str] | None = None,
    compiled: Callable[[Any], Any] | None = None,
) -> Grammar:
    """Check what every entry point takes, compile, and refuse in a sentence."""
    check_choice("engine", engine, ENGINES)
    check_int("vocab_size", vocab_size, low=1)
    if tokenizer is None:
        raise CapabilityError(
            "a grammar is about text, and there is no tokenizer: use a checkpoint with tokenizer.json"
        )
    ends = tuple(dict.fromkeys(check_int("eos_ids", i, low=0, high=vocab_size - 1) for i in eos_ids))
    if not ends:
        raise UserError("eos_ids is empty: give at least one token that ends a text, for a complete text to end with")
    try:
        fresh = (
            compile_llguidance(kind, lark, llguidance_tokens(tokenizer, vocab_size, ends))
            if engine == "llguidance"
            else compile_xgrammar(
                kind, compiled, xgrammar_compiler(tokenizer, vocab_size, ends, kind == "json_schema"), vocab_size
            )
        )
    except ImportError as error:
        raise CapabilityError(
            f"engine={engine!r} needs a package that is not installed ({error}): run pip install "
            "'specdec-workbench[formats]'"
        ) from None
    return Grammar(kind, source, engine, vocab_size, ends, fresh)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name}={value!r} is not valid: it must be text, and not empty")


def _for_xgrammar(pattern: str) -> str:
    """The pattern with every free ``.`` written as anything but a line feed; anchors it would ignore are refused."""
    out, inside, i = [], False, 0
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            if pattern[i + 1 : i + 2] in ("b", "B", "A", "Z", "z") and not inside:
                raise UserError(f"xgrammar has no boundaries, and {pattern!r} holds one: use engine='llguidance'")
            out.append(pattern[i : i + 2])
            i += 2
            continue
        if not inside and ((c == "^" and i > 0) or (c == "$" and i + 1 < len(pattern))):
            raise UserError(
                f"xgrammar ignores the {c!r} inside {pattern!r}: leave it out (the whole text is matched anyway), or "
                "use engine='llguidance'"
            )
        inside = c == "[" if not inside else c != "]"
        out.append("[^\\n]" if c == "." and not inside else c)
        i += 1
    return "".join(out)
