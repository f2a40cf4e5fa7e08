"""From one document to its tapes: tokenize, mask, cut to length, leave out what is too short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.tape import Own, Tape
from workbench.corpus.chat import render_chat, supervised_tokens
from workbench.corpus.sources import Document, content_column
from workbench.model.tokenizer import Tokenizer

OVERFLOW = ("slice", "truncate", "skip")


@dataclass
class Cut:
    """Makes the tapes of one document at a time.

    Args:
        tokenizer: For text and conversations; None takes token ids only.
        text_column: Column that holds text.
        max_tokens: Longest tape, tokens; None for no bound.
        overflow: What becomes of a longer document: "slice", "truncate" or "skip".
        min_tokens: Shorter tapes are left out; 0 refuses empty documents.
        min_response: Tapes with fewer tokens after their prompt are left out; 0 for no bound.
        longest: Tokens of the longest tape made so far.
    """

    tokenizer: Tokenizer | None
    text_column: str
    max_tokens: int | None
    overflow: str
    min_tokens: int
    min_response: int
    longest: int = 0

    def tapes(self, document: Document) -> Iterator[Tape]:
        """Tapes of one document, those that are too short left out.

        Args:
            document: The document.

        Yields:
            One tape, or its slices.

        Raises:
            UserError: The document cannot be used; the sentence names it.
        """
        row = document.content()
        kind = content_column(list(row), self.text_column, f"document {document.doc_id!r}")
        if kind == "tokens":
            tape, offsets, text = self._given(row, document), None, ""
        else:
            made = self._text(row[kind], document, chat=kind == "messages")
            if made is None:
                return
            tape, offsets, text = made
        pieces = [tape]
        if self.max_tokens is not None and len(tape) > self.max_tokens:
            pieces = self._pieces(tape, offsets, text)
        for piece in pieces:
            self.longest = max(self.longest, len(piece))
            if len(piece) >= self.min_tokens and len(piece) - piece.prompt_len >= self.min_response:
                yield piece

    def _text(self, value: Any, document: Document, *, chat: bool) -> tuple[Tape, np.ndarray, str] | None:
        doc_id = document.doc_id
        if self.tokenizer is None:
            raise UserError(f"document {doc_id!r} is text, which needs a tokenizer: give tokenizer=model.tokenizer")
        numbers = None
        if chat:
            text, numbers = render_chat(value, self.tokenizer, doc_id)
        elif isinstance(value, str):
            text = value
        else:
            raise UserError(
                f"document {doc_id!r} holds a {type(value).__name__} in {self.text_column!r}: a string is needed; name "
                "the text column with text_column=..."
            )
        try:
            n_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise UserError(
                f"document {doc_id!r} holds a lone surrogate at character {error.start}: repair the text"
            ) from None
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        if not encoding.ids:
            if self.min_tokens:
                return None
            raise UserError(
                f"document {doc_id!r} is empty: take it out, or give min_tokens=1 to leave such documents out"
            )
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        mask = None if numbers is None else supervised_tokens(offsets, numbers)
        if mask is not None and not mask.any():
            raise UserError(
                f"document {doc_id!r}: no token lies wholly inside assistant text, so none is supervised: leave it out"
            )
        tape = Tape(
            doc_id,
            np.asarray(encoding.ids, dtype=np.int32),
            prompt_len=0 if mask is None else int(mask.argmax()),
            source=document.source,
            split=document.split,
            supervised=mask,
            n_bytes=n_bytes,
        )
        return tape, offsets, text

    def _given(self, row: Mapping[str, Any], document: Document) -> Tape:
        doc_id, tokens = document.doc_id, np.asarray(row["tokens"])
        if (
            tokens.ndim != 1
            or not len(tokens)
            or tokens.dtype.kind not in "iu"
            or tokens.min() < 0
            or tokens.max() >= 2**31
        ):
            raise UserError(
                f"document {doc_id!r}: tokens must be a list of token ids, integers from 0 on, at least one"
            )
        mask = row.get("supervised")
        if mask is not None and not np.any(mask):
            raise UserError(
                f"document {doc_id!r} has a supervised mask that is all false: leave it out, or leave the mask out"
            )
        prompt_len = row.get("prompt_len")
        own, size = row.get("own"), row.get("n_bytes")
        try:
            return Tape(
                doc_id,
                tokens,
                prompt_len=0 if prompt_len is None else check_int("prompt_len", prompt_len, low=0, high=len(tokens)),
                source=document.source,
                split=document.split,
                supervised=None if mask is None else np.asarray(mask),
                n_bytes=None if size is None else check_int("n_bytes", size, low=0),
                own=None if own is None else Own(**own),
            )
        except (UserError, TypeError) as error:
            raise UserError(f"document {doc_id!r} cannot be used: {error}") from None

    def _pieces(self, tape: Tape, offsets: np.ndarray | None, text: str) -> list[Tape]:
        width = self.max_tokens
        assert width is not None
        if self.overflow == "skip":
            return []
        if self.overflow == "truncate":
            return [_piece(tape, 0, width, offsets, text, tape.doc_id)]
        if tape.prompt_len or tape.supervised is not None:
            raise UserError(
                f"document {tape.doc_id!r} has a prompt and {len(tape)} tokens, over max_tokens={width}: slices would "
                "part the response from its prompt; give overflow='truncate' or overflow='skip'"
            )
        return [
            _piece(tape, at, min(at + width, len(tape)), offsets, text, f"{tape.doc_id}@{at}")
            for at in range(0, len(tape), width)
        ]


def _piece(tape: Tape, start: int, stop: int, offsets: np.ndarray | None, text: str, doc_id: str) -> Tape:
    mask = None if tape.supervised is None else tape.supervised[start:stop]
    if mask is not None and not mask.any():
        raise UserError(
            f"document {tape.doc_id!r} has a prompt of {tape.prompt_len} tokens, so its first {stop} hold no "
            "supervised token: raise max_tokens, or give overflow='skip'"
        )
    n_bytes = None
    if offsets is not None:
        last = len(text) if stop == len(tape) else int(offsets[stop, 0])
        n_bytes = len(text[0 if start == 0 else int(offsets[start, 0]) : last].encode())
    return replace(
        tape,
        doc_id=doc_id,
        tokens=tape.tokens[start:stop],
        prompt_len=min(tape.prompt_len, stop),
        supervised=mask,
        n_bytes=n_bytes,
        own=tape.own if start == 0 else None,
    )
