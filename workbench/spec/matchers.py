"""The grammar libraries behind ``Matcher``, made from our tokenizer; both are told the same bytes for every token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workbench.core.errors import CapabilityError, UserError
from workbench.model.tokenizer import Tokenizer
from workbench.spec.constraint import Matcher

CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
UNFORCED = '\n%llguidance {"no_forcing": true}\n'  # at the end, so that the lines a message names are the user's


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of every token id; empty for ids without a token.

    Args:
        tokenizer: A byte-level one.

    Returns:
        One entry per id.

    Raises:
        CapabilityError: The tokenizer is not byte-level.
    """
    backend = tokenizer.backend
    decoder = json.loads(backend.to_str())["decoder"] or {}
    if "ByteLevel" not in [part.get("type") for part in [decoder, *decoder.get("decoders", [])]]:
        raise CapabilityError(
            f"grammars need a byte-level tokenizer, and this one decodes by {decoder.get('type')}: use a checkpoint of "
            "the Qwen kind"
        )
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(kept)]
    alphabet = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(other)}
    vocab, added = backend.get_vocab(with_added_tokens=True), backend.get_added_tokens_decoder()
    pieces = [b""] * (max(vocab.values()) + 1)
    for text, i in vocab.items():
        spelled = i not in added and all(c in alphabet for c in text)
        pieces[i] = bytes(alphabet[c] for c in text) if spelled else text.encode()
    return pieces


class GuidanceMatcher:
    """llguidance behind ``Matcher``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def bits(self) -> np.ndarray:
        """Bits of the ids that may come next."""
        data = self._inner.compute_bitmask()
        if self._inner.is_error():
            raise UserError(f"llguidance gave up on this grammar ({_reason(self._inner.get_error())}): simplify it")
        return np.frombuffer(data, dtype=np.uint8)

    def advance(self, token: int) -> bool:
        """Move past a token."""
        return bool(self._inner.consume_token(token))

    def back(self, n: int) -> bool:
        """Undo ``n`` tokens."""
        return bool(self._inner.rollback(n))

    def copy(self) -> GuidanceMatcher:
        """An independent matcher in the same state."""
        return GuidanceMatcher(self._inner.deep_copy())


class XgrammarMatcher:
    """xgrammar behind ``Matcher``."""

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size

    def bits(self) -> np.ndarray:
        """Bits of the ids that may come next."""
        words = torch.zeros(1, (self._vocab_size + 31) // 32, dtype=torch.int32)
        self._inner.fill_next_token_bitmask(words)
        return words.numpy().view(np.uint8)[0]

    def advance(self, token: int) -> bool:
        """Move past a token."""
        return bool(self._inner.accept_token(token))

    def back(self, n: int) -> bool:
        """Undo ``n`` tokens."""
        self._inner.rollback(n)
        return True

    def copy(self) -> XgrammarMatcher:
        """An independent matcher in the same state."""
        return XgrammarMatcher(self._inner.fork(), self._vocab_size)


class _Vocabulary:
    """A tokenizer in the shape llguidance wants."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], eos_ids: tuple[int, ...]) -> None:
        self._encode, self.tokens, self.eos_token_id = tokenizer.encode, pieces, eos_ids[0]
        self.special_token_ids = [i for i in _specials(tokenizer) if i < len(pieces)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _specials(tokenizer: Tokenizer) -> list[int]:
    return [i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special]


def _padded(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Bytes of the target's ids, whether it has more than the tokenizer or fewer."""
    pieces = token_bytes(tokenizer)[:vocab_size]
    return pieces + [b""] * (vocab_size - len(pieces))


@lru_cache(maxsize=4)
def llguidance_tokens(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> Any:
    """The target's vocabulary as llguidance holds it, made once per tokenizer."""
    import llguidance

    shape = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, _padded(tokenizer, vocab_size), eos_ids))
    return llguidance.LLTokenizer(shape, n_vocab=vocab_size, eos_token=list(eos_ids))


@lru_cache(maxsize=4)
def xgrammar_compiler(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...], as_json: bool) -> Any:
    """xgrammar's compiler for the target's vocabulary, once per tokenizer; ``as_json`` hides control characters."""
    import xgrammar

    pieces = _padded(tokenizer, vocab_size)
    if as_json:  # valid JSON holds none of these but as whitespace; space, line feed and return are left for that
        pieces = [b"" if CONTROL.search(piece) else piece for piece in pieces]
    for i in _specials(tokenizer):
        if i < vocab_size:
            pieces[i] = b""
    info = xgrammar.TokenizerInfo(
        pieces, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(eos_ids), add_prefix_space=False
    )
    return xgrammar.GrammarCompiler(info, max_threads=torch.get_num_threads())


def compile_llguidance(kind: str, lark: Callable[[], str] | None, tokens: Any) -> Callable[[], Matcher]:
    """Compile a Lark grammar once; what is returned makes matchers at its start.

    Raises:
        UserError: The library refuses the grammar, with its reason.
    """
    import llguidance

    assert lark is not None
    text = llguidance.LLMatcher.grammar_from_lark(lark() + UNFORCED)
    first = llguidance.LLMatcher(tokens, text, log_level=0)
    if first.is_error():
        raise _refused(kind, "llguidance", first.get_error())
    return lambda: GuidanceMatcher(first.deep_copy())


def compile_xgrammar(
    kind: str, compiled: Callable[[Any], Any] | None, compiler: Any, vocab_size: int
) -> Callable[[], Matcher]:
    """Compile by one of the compiler's methods once; what is returned makes matchers at the start.

    Raises:
        UserError: The library refuses the grammar, with its reason.
    """
    import xgrammar

    assert compiled is not None
    try:
        made = compiled(compiler)
    except (RuntimeError, ValueError) as error:
        raise _refused(kind, "xgrammar", str(error)) from None
    return lambda: XgrammarMatcher(xgrammar.GrammarMatcher(made), vocab_size)


def _refused(kind: str, engine: str, message: str) -> UserError:
    return UserError(f"{engine} refuses this {kind.replace('_', ' ')} ({_reason(message)}): correct it")


def _reason(message: str) -> str:
    """A library's message on one line, without its place in C++ and the excerpt it prints below."""
    message = re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: .*? is false: )?", "", message.strip())
    lines = []
    for line in message.splitlines():
        if re.match(r"\s*\d+ \|", line) or line.startswith("<state>"):
            break
        if line.strip(" ^"):
            lines.append(line.strip())
    return " ".join(lines).rstrip(". ")
