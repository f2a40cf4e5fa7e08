"""A conversation by the checkpoint's chat template, in which every turn computes only what is new.

Before each reply the whole conversation is rendered and encoded. Where its ids extend the session's text, the session
goes on; where they part from it inside the last turn, it is taken up again from that turn's start; else the longest
prefix a store holds is restored; else the conversation is fed anew. The reply is the same in every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.errors import UserError, check_int
from workbench.model.hybrid import HybridModel
from workbench.spec.generate import make_options
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import PrefixEntry, capture, restore, restored
from workbench.spec.session import Session
from workbench.spec.sink import Sink
from workbench.spec.store import PrefixStore

HOW = {
    "extended": "the session went on",
    "rewound": "taken up again inside the last turn",
    "restored": "restored from the store",
    "fresh": "fed anew",
}


@dataclass(frozen=True)
class Reply:
    """One turn of the model.

    Args:
        text: What it said.
        tokens: Its ids, a stop token included.
        finish: Why it ended, as of a generation.
        how: "extended", "rewound", "restored" or "fresh".
        saved: Tokens of the rendered conversation whose rows were there already.
        recomputed: Tokens fed for it, the session's pending one included.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    how: str
    saved: int
    recomputed: int

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from workbench.display import card

        rows: list[tuple[str, Any]] = [
            ("reply", self.text),
            ("tokens", f"{len(self.tokens)}, ended by {self.finish}"),
            ("conversation", f"{HOW[self.how]}: {self.saved:,} tokens saved, {self.recomputed:,} computed"),
        ]
        return card("Reply", rows)._repr_html_()


@dataclass(frozen=True)
class _Turn:
    """A session at the end of a rendered conversation, its first token chosen into the sink."""

    session: Session
    sink: Sink
    how: str
    saved: int
    marks: tuple[PrefixEntry, ...] = ()  # of before the prompt's end


class Chat:
    """A conversation with a model.

    ``messages`` may be edited between turns; the next ``say`` finds out what still holds.

    Args:
        model: The target, with a tokenizer that has a chat template.
        store: Where prompts are published and looked for; None for nowhere.
        messages: The conversation so far, such as a system message.
        capacity: Longest conversation, tokens; None for the model's longest context.
        options: All options of decoding at once; else by name.
        **given: Options by name, see ``GenerateOptions``.

    Raises:
        UserError: The checkpoint has no tokenizer, or an option is not valid.
    """

    def __init__(
        self,
        model: HybridModel,
        store: PrefixStore | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        capacity: int | None = None,
        options: GenerateOptions | None = None,
        **given: object,
    ) -> None:
        if model.tokenizer is None:
            raise UserError("a chat needs text, and this checkpoint has no tokenizer: use a session with token ids")
        self.model, self.store, self.capacity = model, store, capacity
        self.options = make_options(options, given, full_force=False)
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self.replies: list[Reply] = []
        self._captures = self.options.primed and self.options.refresh  # else the drafter's rows are not the text's
        self._session: Session | None = None
        self._marks: list[
            PrefixEntry
        ] = []  # of the last turn: before it, before its generation tail, at its prompt end

    @property
    def session(self) -> Session | None:
        """The session of the last turn; None before the first."""
        return self._session

    @property
    def nbytes(self) -> int:
        """Bytes of the entries kept for taking the last turn up again; the store may share them."""
        return sum(mark.nbytes for mark in self._marks)

    def say(self, message: str, *, max_new_tokens: int | None = None, role: str = "user") -> Reply:
        """Add a message and let the model answer.

        Args:
            message: Its content.
            max_new_tokens: Tokens of the answer at most; None for the options'.
            role: Of the message.

        Returns:
            The reply; it and the message are then in ``messages``. After an exception they are as they were.

        Raises:
            UserError: The template refuses the conversation, or it does not fit.
        """
        limit = self.options.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_int("max_new_tokens", limit, low=1)
        messages = [*self.messages, {"role": role, "content": message}]
        ids, stable = self._rendered(messages)
        wanted = sorted({at for at in (stable, len(ids)) if at}) if self._captures else []
        turn = self._turn(ids, wanted, limit)
        session, sink = turn.session, turn.sink
        self._session, self._marks = session, [*turn.marks, *session.captured]
        if self.store is not None:
            for entry in session.captured:
                self.store.put(entry)
        finish = session.burst(limit - 1, sink=sink)
        reply = Reply(sink.text, sink.tokens, finish, turn.how, turn.saved, len(ids) - turn.saved)
        self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        self.replies.append(reply)
        return reply

    def undo(self) -> None:
        """Drop the last message and its reply.

        Raises:
            UserError: There is no reply yet.
        """
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise UserError("there is no reply to undo: say something first")
        del self.messages[-2:]

    def _rendered(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], int]:
        """Ids of the conversation with the opening of a reply, and how many of them later turns will hold for sure."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        whole, plain = (
            tokenizer.encode("".join(text for text, _ in tokenizer.render(messages, add_generation_prompt=opened)))
            for opened in (True, False)
        )
        return whole, _common(whole, plain)

    def _turn(self, ids: list[int], wanted: Sequence[int], limit: int) -> _Turn:
        """Bring a session to the end of the prompt by the least work, capturing at the lengths wanted on the way."""
        session, opts = self._session, self.options
        held = [] if session is None else session.tokens
        if session is not None and len(held) < len(ids) and ids[: len(held)] == held:
            marks = (capture(session),) if self._captures else ()
            sink = session.sink(limit, text=True)
            rows = len(held) - 1
            session.feed(ids[len(held) :], sink=sink, boundaries=[at for at in wanted if at > rows])
            return _Turn(session, sink, "extended", rows, marks)
        fresh = Session(self.model, options=opts, capacity=self.capacity)
        sink = fresh.sink(limit, text=True)
        fits = tuple(mark for mark in self._marks if tuple(ids[: len(mark)]) == mark.tokens)
        if fits:
            mark = max(fits, key=len)
            restore(fresh, mark, ids, sink=sink, boundaries=[at for at in wanted if at > len(mark)])
            return _Turn(fresh, sink, "rewound", len(mark), fits)
        if self.store is not None:
            reuse = restored(fresh, ids, self.store, boundaries=wanted, sink=sink)
            return _Turn(fresh, sink, "restored" if reuse.reused else "fresh", reuse.reused)
        fresh.feed(ids, sink=sink, boundaries=wanted)
        return _Turn(fresh, sink, "fresh", 0)

    def _repr_html_(self) -> str:
        from workbench.display import card

        rows = [(str(message["role"]), message.get("content")) for message in self.messages]
        saved, fed = sum(r.saved for r in self.replies), sum(r.recomputed for r in self.replies)
        return card("Chat", rows, f"{saved:,} tokens saved, {fed:,} computed; {self.nbytes:,} bytes held")._repr_html_()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
