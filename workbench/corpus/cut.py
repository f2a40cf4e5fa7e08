"""From one document to its tapes: cut to length, and leave out what is too short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workbench.core.errors import UserError
from workbench.core.tape import Tape
from workbench.corpus.rows import Made, Reader
from workbench.corpus.sources import Document

OVERFLOW = ("slice", "truncate", "skip")


@dataclass
class Cut:
    """Makes the tapes of one document at a time.

    Args:
        reader: Makes whole tapes.
        max_tokens: Longest tape, tokens; None for no bound.
        overflow: What becomes of a longer document: "slice", "truncate" or "skip".
        min_tokens: Shorter tapes are left out; 0 for no bound.
        min_response: Tapes with fewer tokens after their prompt are left out; 0 for no bound.
        longest: Tokens of the longest tape made so far.
    """

    reader: Reader
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
            Its tapes, or their slices.

        Raises:
            UserError: The document cannot be used; the sentence names it.
        """
        for made in self.reader.tapes(document):
            over = self.max_tokens is not None and len(made.tape) > self.max_tokens
            for piece in self._pieces(made) if over else [made.tape]:
                self.longest = max(self.longest, len(piece))
                if len(piece) >= self.min_tokens and len(piece) - piece.prompt_len >= self.min_response:
                    yield piece

    def _pieces(self, made: Made) -> list[Tape]:
        tape, width = made.tape, self.max_tokens
        assert width is not None
        if self.overflow == "skip":
            return []
        if self.overflow == "truncate":
            return [_piece(made, 0, width, tape.doc_id)]
        if tape.prompt_len or tape.supervised is not None:
            raise UserError(
                f"document {tape.doc_id!r} has a prompt and {len(tape)} tokens, over max_tokens={width}: slices would "
                "part the response from its prompt; give overflow='truncate' or overflow='skip'"
            )
        return [
            _piece(made, at, min(at + width, len(tape)), f"{tape.doc_id}@{at}") for at in range(0, len(tape), width)
        ]


def _piece(made: Made, start: int, stop: int, doc_id: str) -> Tape:
    tape, offsets, text = made
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
