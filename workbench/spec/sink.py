"""The one place every committed token passes, drafted or not: stops, text, budget and cancellation.

What a reader of the text sees is decided here and nowhere else, so that a speculative text ends exactly where plain
decode's does. The sink knows nothing of models, caches and rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.errors import UserError, check_int
from workbench.model.tokenizer import Tokenizer
from workbench.spec.stops import StopMatcher, TextStream


class Cancelled(Exception):
    """The caller's ``cancel`` ended a prefill; the session is as it was before it."""


@dataclass(frozen=True, slots=True)
class SinkMark:
    """A state of a sink, for ``rewind``."""

    tokens: int
    pieces: int
    stream: Any
    matcher: Any
    finish: str | None


class Sink:
    """Commits tokens one by one, releases their text, and says when the text ends and why.

    Reasons, strongest first: "stop" (a stop token), "stop_string", "length" (``max_new_tokens`` are committed),
    "cancel". Text is released as soon as it cannot change: an unfinished character, and a suffix that may grow into a
    stop string, are withheld. At the end, whatever the reason, the withheld tail is released, unless a stop string
    ended the text: that text ends before the match. Released text is never taken back.

    Args:
        tokenizer: Decodes tokens; None gives no text.
        stop_ids: Tokens that end the text; the one that does is committed, and shows no text.
        stop_strings: Strings that end the text, wherever tokens cut them; empty ones are dropped.
        max_new_tokens: Tokens to commit at most; 0 is finished from the start.
        cancel: Asked whether to end; at most once per committed token and once per ``poll``.

    Raises:
        UserError: ``max_new_tokens`` or the stop strings are not valid, or there is no tokenizer to match them.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        stop_ids: Iterable[int] = frozenset(),
        stop_strings: Sequence[str] = (),
        max_new_tokens: int,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.max_new_tokens = check_int("max_new_tokens", max_new_tokens, low=0)
        self.stop_ids, self.cancel = frozenset(stop_ids), cancel
        self._matcher, self._stream = StopMatcher(stop_strings), TextStream(tokenizer)
        if self._matcher.stops and tokenizer is None:
            raise UserError(
                f"stop strings {list(self._matcher.stops)} need text, and there is no tokenizer: use a checkpoint "
                "that has a tokenizer.json, or stop tokens"
            )
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._taken = 0
        self._finish: str | None = "length" if self.max_new_tokens == 0 else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Committed tokens, the one that ended the text included."""
        return tuple(self._tokens)

    @property
    def generated(self) -> int:
        """Number of committed tokens."""
        return len(self._tokens)

    @property
    def finish(self) -> str | None:
        """Why the text ended; None while it goes on."""
        return self._finish

    @property
    def matched(self) -> str | None:
        """The stop string that was completed, if one was."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._pieces)

    def take(self) -> str:
        """Text released since the last ``take``; what was taken can no longer be rewound."""
        fresh = "".join(self._pieces[self._taken :])
        self._taken = len(self._pieces)
        return fresh

    def commit(self, token: int) -> str | None:
        """Commit one token.

        In this order: it is counted; a stop token ends the text; its text is added and matched against the stop
        strings; the budget is compared; ``cancel`` is asked, only if nothing else ended the text.

        Args:
            token: The token; none may follow a reason.

        Returns:
            "stop", "stop_string", "length", "cancel", or None when the text goes on.
        """
        assert self._finish is None, f"the text ended ({self._finish}); no token may follow"
        self._tokens.append(token)
        if token in self.stop_ids:
            return self._end("stop")
        self._release(self._matcher.push(self._stream.push(token)))
        if self._matcher.stopped:
            return self._end("stop_string")
        if self.generated >= self.max_new_tokens:
            return self._end("length")
        return self.poll()

    def scan(self, tokens: Iterable[int]) -> tuple[int, str | None]:
        """Commit tokens until one ends the text.

        Args:
            tokens: Tokens in order, such as those a round emits.

        Returns:
            (number committed, the one that ended the text included; the reason or None).
        """
        kept = 0
        for token in tokens:
            kept += 1
            if (reason := self.commit(token)) is not None:
                return kept, reason
        return kept, None

    def poll(self) -> str | None:
        """Ask ``cancel``, as before the first token, once per chunk of the prompt.

        Returns:
            "cancel" when the text ends here, else None.
        """
        assert self._finish is None, f"the text ended ({self._finish})"
        return self._end("cancel") if self.cancel is not None and self.cancel() else None

    def mark(self) -> SinkMark:
        """The present state, for ``rewind``."""
        return SinkMark(len(self._tokens), len(self._pieces), self._stream.mark(), self._matcher.mark(), self._finish)

    def rewind(self, mark: SinkMark) -> None:
        """Return to an earlier marked state, as if nothing had been committed since.

        Args:
            mark: What ``mark`` returned; no text released after it may have been taken.
        """
        assert self._taken <= mark.pieces, "text that was taken cannot be rewound: take it after the round"
        del self._tokens[mark.tokens :]
        del self._pieces[mark.pieces :]
        self._stream.rewind(mark.stream)
        self._matcher.rewind(mark.matcher)
        self._finish = mark.finish

    def _release(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _end(self, reason: str) -> str:
        """Close the text, the withheld tail released unless a stop string was completed."""
        self._release(self._matcher.push(self._stream.flush()))
        self._release(self._matcher.finish())
        self._finish = reason
        return reason
