"""A tape: one document as token ids, the unit of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from workbench.core.errors import UserError


@dataclass(frozen=True)
class Own:
    """How the target itself generated a tape's text.

    Args:
        kind: "greedy", or "sampled" under a shaping and a seed, which temperature 0 with penalties or a bias is too.
        model: Fingerprint of the model.
        seed: Seed of a sampled tape; None for greedy.
        temperature: Temperature of a sampled tape; 0 for greedy.
        sequence: Random stream of a sampled tape under its seed; None for greedy.
        shaping: ``Shaping.key`` of a sampled tape as JSON text, keys sorted; "" for greedy.
        accept: "coupled" where a sampled tape holds plain sampling's draws, "ratio" where it only follows their law;
            "" for greedy.
    """

    kind: str
    model: str
    seed: int | None = None
    temperature: float = 0.0
    sequence: int | None = None
    shaping: str = ""
    accept: str = ""

    def facts(self) -> dict[str, Any]:
        """JSON-ready mapping that ``Own(**facts)`` reads back; what only sampled tapes have is left out where unset."""
        sampled = {"sequence": self.sequence, "shaping": self.shaping, "accept": self.accept}
        known = {name: value for name, value in sampled.items() if value not in (None, "")}
        return {"kind": self.kind, "model": self.model, "seed": self.seed, "temperature": self.temperature, **known}


@dataclass(frozen=True, eq=False)
class Tape:
    """One document.

    Args:
        doc_id: Unique id within its corpus.
        tokens: Token ids, int32 [length].
        prompt_len: Leading tokens that are prompt; 0 for plain text.
        source: Register or file the text came from.
        split: "train", "heldout" or another name.
        supervised: bool [length], True where a token may be trained on; None for all.
        n_bytes: UTF-8 bytes of the text; None when unknown.
        own: Set when the target generated the text after the prompt.
    """

    doc_id: str
    tokens: np.ndarray
    prompt_len: int = 0
    source: str = ""
    split: str = ""
    supervised: np.ndarray | None = None
    n_bytes: int | None = None
    own: Own | None = None

    def __post_init__(self) -> None:
        tokens = np.ascontiguousarray(self.tokens, dtype=np.int32)
        if tokens.ndim != 1 or not len(tokens):
            raise UserError(f"tape {self.doc_id!r} holds no tokens; a tape needs a one-dimensional list of token ids")
        if not 0 <= self.prompt_len <= len(tokens):
            raise UserError(
                f"tape {self.doc_id!r} has prompt_len={self.prompt_len} over {len(tokens)} tokens; "
                f"0 to {len(tokens)} is valid"
            )
        object.__setattr__(self, "tokens", tokens)
        if self.supervised is not None:
            mask = np.ascontiguousarray(self.supervised, dtype=bool)
            if mask.shape != tokens.shape:
                raise UserError(
                    f"tape {self.doc_id!r} has {len(tokens)} tokens and a supervised mask of shape {mask.shape}; "
                    "the two must have one entry per token"
                )
            object.__setattr__(self, "supervised", mask)

    def __len__(self) -> int:
        return len(self.tokens)


def first_pending(prompt_len: int) -> int:
    """Position of the first pending token when a text goes on from its prompt; without one, from its first token."""
    return max(prompt_len, 1)


class Corpus(Sequence[Tape]):
    """An ordered collection of tapes with unique ids.

    Args:
        tapes: The tapes.
        name: What the user asked for; goes into manifests.
        tokenizer: Fingerprint of the tokenizer that made the ids; "" when ids were given.
    """

    def __init__(self, tapes: Sequence[Tape], *, name: str = "", tokenizer: str = "") -> None:
        self.tapes, self.name, self.tokenizer = tuple(tapes), name, tokenizer
        if not self.tapes:
            raise UserError(f"corpus {name!r} is empty: it needs at least one document")
        seen: set[str] = set()
        for tape in self.tapes:
            if tape.doc_id in seen:
                raise UserError(f"corpus {name!r} holds doc_id {tape.doc_id!r} twice: document ids must be unique")
            seen.add(tape.doc_id)

    @overload
    def __getitem__(self, index: int) -> Tape: ...
    @overload
    def __getitem__(self, index: slice) -> Corpus: ...
    def __getitem__(self, index: int | slice) -> Tape | Corpus:
        if isinstance(index, slice):
            return Corpus(self.tapes[index], name=self.name, tokenizer=self.tokenizer)
        return self.tapes[index]

    def __len__(self) -> int:
        return len(self.tapes)

    def __iter__(self) -> Iterator[Tape]:
        return iter(self.tapes)

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}: {len(self)} tapes, {self.n_tokens:,} tokens)"

    @property
    def n_tokens(self) -> int:
        """Tokens over all tapes."""
        return sum(len(tape) for tape in self.tapes)
