"""A conversation by the checkpoint's chat template, in which every turn computes only what is new.

Before each reply the whole conversation is rendered and encoded. Where its ids extend the session's text, the session
goes on; where they part from it inside the last turn, it is rewound, to the end of the last message or to the start of
the turn; else the longest prefix a store holds is restored; else the conversation is fed anew. The reply is the same in
every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.core.errors import UserError, check_int
from workbench.model.hybrid import HybridModel
from workbench.spec.generate import make_options
from workbench.spec.options import GenerateOptions
from workbench.spec.prefix import restored
from workbench.spec.session import Session
from workbench.spec.sink import Sink
from workbench.spec.store import PrefixStore
from workbench.spec.turns import Turn

HOW = {
    "extended": "the session went on",
    "rewound": "rewound inside the last turn",
    "restored": "restored from the store",
    "fresh": "fed anew",
}

PLACES = 3  # checkpoints kept: a turn's start, the end of its message, the end of its prompt


@dataclass(frozen=True)
class Reply:
    """One turn of the model.

    Args:
        text: What it said.
        tokens: Its ids, a stop token included.
        finish: Why it ended, as of a generation.
        prompt: Ids of the rendered conversation that it answers.
        how: "extended", "rewound", "restored" or "fresh".
        saved: Tokens of the rendered conversation whose rows were there already.
        recomputed: Tokens fed for it, the session's pending one included.
        refused: Why cheaper ways were not taken: checkpoints that are gone, entries that do not fit.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt: tuple[int, ...] = field(repr=False)
    how: str
    saved: int
    recomputed: int
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from workbench.display import card

        rows: list[tuple[str, Any]] = [
            ("reply", self.text),
            ("tokens", f"{len(self.tokens)}, ended by {self.finish}"),
            ("conversation", f"{HOW[self.how]}: {self.saved:,} tokens saved, {self.recomputed:,} computed"),
        ]
        rows += [("not used", why) for why in self.refused]
        return card("Reply", rows)._repr_html_()


@dataclass(frozen=True)
class _Begun:
    """A session at the end of a rendered conversation, its first token chosen into the sink."""

    session: Session
    sink: Sink
    how: str
    saved: int
    places: tuple[Turn, ...] = ()  # checkpoints before its own
    refused: tuple[str, ...] = ()


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
        self._places: tuple[Turn, ...] = ()  # of the last turn: its start, the end of its message, its prompt's end

    @property
    def session(self) -> Session | None:
        """The session of the last turn; None before the first."""
        return self._session

    @property
    def nbytes(self) -> int:
        """Bytes that the checkpoints for rewinding the last turn hold; neither the session's nor the store's."""
        return sum(place.nbytes for place in self._places)

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
        begun = self._begin(ids, stable, limit)
        session = self._session = begun.session
        assert session.turn is not None
        self._places = (*begun.places, session.turn)[-PLACES:]
        if self.store is not None:
            for entry in session.captured:
                self.store.put(entry)
        finish = session.burst(limit - 1, sink=begun.sink)
        reply = Reply(
            begun.sink.text,
            begun.sink.tokens,
            finish,
            tuple(ids),
            begun.how,
            begun.saved,
            len(ids) - begun.saved,
            begun.refused,
        )
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
        """Ids of the conversation with the opening of a reply, and how many of them later turns will hold for sure.

        These are fewer than all, so that a session rewound to them has something to be fed.
        """
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        whole, plain = (
            tokenizer.encode("".join(text for text, _ in tokenizer.render(messages, add_generation_prompt=opened)))
            for opened in (True, False)
        )
        return whole, min(_common(whole, plain), len(whole) - 1)

    def _begin(self, ids: list[int], stable: int, limit: int) -> _Begun:
        """Bring a session to the end of the prompt by the least work, capturing for the store on the way."""
        self._check_room(len(ids))
        places, how, refused = self._kept(ids)
        if places:
            session, known = self._session, places[-1].known
            assert session is not None
            sink = session.sink(limit, text=True)
            session.feed(
                ids[known:],
                sink=sink,
                stable=stable - known if stable > known else None,
                boundaries=[at for at in self._wanted(ids, stable) if at >= known],
            )
            return _Begun(session, sink, how, known - 1, places, tuple(refused))
        fresh = Session(self.model, options=self.options, capacity=self.capacity)
        sink, at = fresh.sink(limit, text=True), stable or None
        if self.store is None:
            fresh.feed(ids, sink=sink, stable=at)
            return _Begun(fresh, sink, "fresh", 0, refused=tuple(refused))
        reuse = restored(fresh, ids, self.store, boundaries=self._wanted(ids, stable), sink=sink, stable=at)
        how = "restored" if reuse.reused else "fresh"
        return _Begun(fresh, sink, how, reuse.reused, refused=(*refused, *reuse.refused))

    def _kept(self, ids: Sequence[int]) -> tuple[tuple[Turn, ...], str, list[str]]:
        """Bring the session to where the conversation goes on from, the last of the checkpoints given; none is nowhere.

        Also how it came there, and why checkpoints could not be used.
        """
        session, refused = self._session, []
        if session is None:
            return (), "fresh", []
        held, places = session.tokens, self._places
        if _begins(held, ids):
            return (session.checkpoint(),), "extended", []
        while places:
            if _begins(held[: places[-1].known], ids):
                try:
                    session.rewind(to=places[-1])
                    break
                except UserError as error:
                    refused.append(str(error))
            places = places[:-1]
        return places, "rewound", refused

    def _wanted(self, ids: Sequence[int], stable: int) -> list[int]:
        """Lengths to publish: the whole, and one from which a restored session can still keep its checkpoint."""
        if self.store is None or not self._captures:
            return []
        return sorted({at for at in (stable - 1, len(ids)) if at > 0})

    def _check_room(self, n: int) -> None:
        limit = self.model.config.max_position_embeddings if self.capacity is None else self.capacity
        if n + 1 > limit:
            raise UserError(
                f"the conversation's {n} tokens and one of a reply do not fit into {limit}: drop or shorten messages, "
                "or make a chat of a larger capacity"
            )

    def _repr_html_(self) -> str:
        from workbench.display import card

        rows = [(str(message["role"]), message.get("content")) for message in self.messages]
        saved, fed = sum(r.saved for r in self.replies), sum(r.recomputed for r in self.replies)
        return card(
            "Chat", rows, f"{saved:,} tokens saved, {fed:,} computed; {self.nbytes:,} bytes for rewinds"
        )._repr_html_()


def _begins(text: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether ids go on after this text."""
    return len(text) < len(ids) and list(ids[: len(text)]) == list(text)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
