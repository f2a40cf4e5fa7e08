"""Text of committed tokens, piece by piece: what may be shown now, and where a stop string ends it.

Two parts that know nothing of models: ``TextStream`` turns token ids into text that is never taken back, and
``StopMatcher`` withholds what might be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import UserError
from workbench.model.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what decoders write for a character whose bytes are not all there


class StopMatcher:
    """Releases text up to the first stop string.

    The match that is *complete* first wins; of several that end at the same character, the longest. So the outcome
    is a function of the text alone, however it is cut into pieces.

    Args:
        stops: Stop strings; empty ones are dropped.

    Raises:
        UserError: The stop strings are not a sequence of strings.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UserError(f"stop strings {stops!r} are not valid: give a list of strings, such as ['\\n\\n']")
        self.stops = tuple(stop for stop in dict.fromkeys(stops) if stop)
        self._longest = max(map(len, self.stops), default=0)
        self._pending, self._matched = "", None  # type: tuple[str, str | None]

    @property
    def stopped(self) -> bool:
        """A stop string was completed."""
        return self._matched is not None

    @property
    def matched(self) -> str | None:
        """The stop string that was completed."""
        return self._matched

    def push(self, text: str) -> str:
        """Add text; return what may be shown.

        A completed stop string releases what stands before it, and discards itself and all that follows. Otherwise
        everything is released but the longest suffix that is a proper prefix of a stop string.

        Args:
            text: The next piece; "" changes nothing.

        Returns:
            Text to append to what was released before.
        """
        if self.stopped:
            return ""
        held = self._pending + text
        found = [(held.find(stop), stop) for stop in self.stops]
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends:
            _, start, self._matched = min(ends)
            self._pending = ""
            return held[:start]
        size = min(self._longest - 1, len(held))
        while size > 0 and not any(stop.startswith(held[-size:]) for stop in self.stops):
            size -= 1
        cut = len(held) - max(size, 0)
        self._pending = held[cut:]
        return held[:cut]

    def finish(self) -> str:
        """Release what is withheld, at the end of the text; nothing once a stop string was completed."""
        tail, self._pending = self._pending, ""
        return tail

    def mark(self) -> tuple[str, str | None]:
        """The present state, for ``rewind``."""
        return self._pending, self._matched

    def rewind(self, mark: tuple[str, str | None]) -> None:
        """Return to a marked state."""
        self._pending, self._matched = mark


class TextStream:
    """Token ids to text, one token at a time; all deltas together are ``tokenizer.decode`` of all ids.

    Each token decodes a window: the tokens since the last two places where the text was whole. Replacement characters
    at the end of the window's text are withheld, since the next token may complete the character they stand for.

    Args:
        tokenizer: Decodes ids; None gives no text.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._first = self._whole = self._shown = 0  # window's first id, ids up to the last whole text, chars released

    def push(self, token: int) -> str:
        """Add a token; return the text it completes: all but a trailing unfinished character."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._first :])
        stable = max(len(text.rstrip(UNFINISHED)), self._shown)
        delta, self._shown = text[self._shown : stable], stable
        if stable == len(text):
            self._first, self._whole = self._whole, len(self._ids)
            self._shown = len(self._tokenizer.decode(self._ids[self._first :]))
        return delta

    def flush(self) -> str:
        """Release what is withheld, at the end of the text: replacement characters as ``decode`` writes them."""
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.decode(self._ids[self._first :])
        delta, self._shown = text[self._shown :], len(text)
        return delta

    def mark(self) -> tuple[int, int, int, int]:
        """The present state, for ``rewind``."""
        return len(self._ids), self._first, self._whole, self._shown

    def rewind(self, mark: tuple[int, int, int, int]) -> None:
        """Return to an earlier marked state."""
        size, self._first, self._whole, self._shown = mark
        assert size <= len(self._ids), "a mark lies before the present state"
        del self._ids[size:]
