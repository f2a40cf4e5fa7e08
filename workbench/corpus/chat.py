"""Conversations to text with marks on what the assistant generates, by the checkpoint's own chat template.

Every assistant message is rendered as it is at inference: the messages before it with the opening of a reply, then the
message itself. What follows the opening, up to and with the token that ends the turn, is what the model generates
there. A template that marks it with {% generation %} says so itself; for one without marks the two renderings are
compared. Where a template rewrites earlier turns, such as by taking their thinking away, no single text holds what was
generated, and each assistant message gives a text of its own.

A text is encoded once, as a whole. A token that straddles a boundary is not supervised. The end of a turn is a token of
the template; the end of a text is one of the checkpoint, and is never added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.core.errors import UserError
from workbench.model.tokenizer import Tokenizer

RESERVED = ("messages", "tools", "add_generation_prompt")
PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


@dataclass(frozen=True, eq=False)
class Rendered:
    """A text of a conversation.

    Args:
        text: The text.
        numbers: int32 [characters]: number of the generated span each lies in, counted from 1; 0 outside.
        message: Index of the assistant message that the text is for; None where it is for all of them.
    """

    text: str
    numbers: np.ndarray
    message: int | None = None


@dataclass(frozen=True, eq=False)
class Conversation:
    """What a chat template is given.

    Args:
        doc_id: For sentences.
        messages: Mappings with "role" and "content"; keys that hold None, other than the content, are left out.
        tools: Descriptions of tools, a list or its JSON text; None for none.
        variables: What else the template is given by name.
        first: Index of the first message that may be supervised.

    Raises:
        UserError: The messages or the tools are malformed, or a variable takes a name that the template needs.
    """

    doc_id: str
    messages: Sequence[Mapping[str, Any]]
    tools: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0

    def __post_init__(self) -> None:
        messages, tools = self.messages, self.tools
        if not isinstance(messages, (list, tuple)) or not messages:
            raise self.wrong("messages must be a list of mappings with a role and a content, at least one")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise self.wrong(
                    f"message {i} is {message!r}: each message must be a mapping with a role and a content"
                )
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise self.wrong(f"tools is not valid JSON ({error}): give a list of descriptions") from None
        if tools is not None and not isinstance(tools, (list, tuple)):
            raise self.wrong(f"tools of type {type(tools).__name__} is not valid: give a list of descriptions")
        said = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in messages]
        object.__setattr__(self, "messages", said)
        object.__setattr__(self, "tools", tools or None)
        object.__setattr__(self, "variables", check_variables(self.variables))

    def wrong(self, what: str) -> UserError:
        """An error that names the document."""
        return UserError(f"document {self.doc_id!r}: {what}")

    def spans(self, tokenizer: Tokenizer, upto: int, *, opened: bool = False) -> list[tuple[str, bool]]:
        """The first ``upto`` messages rendered, with the opening of a reply if asked for; see ``Tokenizer.render``."""
        given = {"add_generation_prompt": opened, "tools": self.tools, "variables": self.variables}
        try:
            return tokenizer.render(self.messages[:upto], **given)
        except UserError as error:
            raise self.wrong(str(error)) from None

    def text(self, tokenizer: Tokenizer, upto: int, *, opened: bool = False) -> str:
        """The same as one text."""
        return "".join(piece for piece, _ in self.spans(tokenizer, upto, opened=opened))


@dataclass(frozen=True, eq=False)
class _Turn:
    """An assistant message as it is generated: the text up to it, and the generated places of it."""

    message: int
    text: str
    places: list[tuple[int, int]]
    end: int  # of the last of these


def check_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for a template as a mapping; a sentence when a name is taken."""
    variables = dict(given or {})
    if taken := [name for name in RESERVED if name in variables]:
        raise UserError(f"template_options holds {taken[0]!r}, which the conversation itself gives: leave it out")
    return variables


def render_chat(chat: Conversation, tokenizer: Tokenizer) -> list[Rendered]:
    """Render a conversation and say which characters the assistant generates.

    Args:
        chat: The conversation.
        tokenizer: Its chat template renders it.

    Returns:
        One text when it holds every turn as it was generated, else one per assistant message that generates
        something, in order, with that message alone marked.

    Raises:
        UserError: The template refuses the conversation, what is generated cannot be told, or it is nothing or all.
    """
    turns = [_turn(chat, tokenizer, i) for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    turns = [turn for turn in turns if turn.message >= chat.first]
    if not turns:
        raise chat.wrong("it has no assistant message, so no token of it is supervised: leave it out")
    whole = chat.text(tokenizer, len(chat.messages))
    if all(whole.startswith(turn.text[: turn.end]) for turn in turns):
        made = [Rendered(whole, _numbers(whole, [place for turn in turns for place in turn.places]))]
    else:
        made = [Rendered(turn.text, _numbers(turn.text, turn.places), turn.message) for turn in turns if turn.places]
    if not any(rendered.numbers.any() for rendered in made):
        raise chat.wrong(
            "the chat template marks no assistant text, so no token is supervised: put {% generation %} and "
            "{% endgeneration %} around what the assistant generates in chat_template.jinja"
            if tokenizer.marks_generation
            else "the assistant's messages render as nothing, so no token is supervised: leave it out"
        )
    if any(rendered.numbers.all() for rendered in made):
        raise chat.wrong(
            "the chat template marks the whole conversation as generated, so its prompt would be trained on: mark what "
            "the assistant generates alone, or leave it out"
        )
    return made


def _turn(chat: Conversation, tokenizer: Tokenizer, i: int) -> _Turn:
    """Message i as it is generated after those before it."""
    spans = chat.spans(tokenizer, i + 1)
    text = "".join(piece for piece, _ in spans)
    if not tokenizer.marks_generation:
        if not i:
            raise chat.wrong(
                "it begins with an assistant message, which answers nothing: put a user message before it, or mark "
                "what is generated with {% generation %} in the template"
            )
        opening = chat.text(tokenizer, i, opened=True)
        if not text.startswith(opening):
            raise chat.wrong(
                f"assistant message {i} does not begin with the template's opening of a reply ({opening[-32:]!r}), so "
                "what is generated cannot be told: give the message as the model writes it, other template_options, or "
                "a template that marks it with {% generation %}"
            )
        stop = turn_end(text, len(opening), tokenizer)
        return _Turn(i, text, [(len(opening), stop)] if stop > len(opening) else [], stop)
    places, at = [], 0
    for piece, generated in spans:
        if generated:
            places.append((at, at + len(piece)))
        at += len(piece)
    before = [piece for piece, generated in chat.spans(tokenizer, i) if generated] if i else []
    if [text[a:b] for a, b in places[: len(before)]] != before:
        raise chat.wrong(
            f"assistant message {i} changes what the chat template marks as generated in the messages before it, so "
            "what is generated cannot be told: use a template that renders them the same"
        )
    opening = chat.text(tokenizer, i, opened=True) if i else ""
    floor = len(opening) if text.startswith(opening) else 0  # what the opening gives is not generated
    own = [(max(a, floor), b) for a, b in places[len(before) :] if b > floor]
    return _Turn(i, text, own, own[-1][1] if own else len(text))


def turn_end(text: str, start: int, tokenizer: Tokenizer) -> int:
    """Where a turn ends: after its last special token if nothing but white space follows, else with the text.

    Args:
        text: A text that ends with the turn.
        start: Its first generated character.
        tokenizer: Says which tokens are special.

    Returns:
        The character after the turn.
    """
    ends = [text.rfind(token, start) + len(token) for token in tokenizer.special_texts if token in text[start:]]
    end = max(ends, default=len(text))
    return len(text) if text[end:].strip() else end


def end_of_turn(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> int | None:
    """The special token with which the chat template ends an assistant's turn.

    Args:
        tokenizer: Has a chat template.
        variables: What else the template is given by name.

    Returns:
        Its id; None when the template ends a turn with none.

    Raises:
        UserError: There is no template, or it does not render a question and an answer one after the other.
    """
    chat = Conversation("probe", PROBE, variables=variables or {})
    opening, text = chat.text(tokenizer, 1, opened=True), chat.text(tokenizer, 2)
    if not text.startswith(opening):
        raise UserError(
            f"the chat template does not render an answer after its own opening of a reply ({opening[-32:]!r}), so the "
            "token that ends a turn cannot be told: give it in stop_token_ids, with turn_ends=False"
        )
    said = tokenizer.encode(text[len(opening) : turn_end(text, len(opening), tokenizer)])
    return said[-1] if said and said[-1] in tokenizer.special_ids else None


def _numbers(text: str, places: Sequence[tuple[int, int]]) -> np.ndarray:
    numbers = np.zeros(len(text), dtype=np.int32)
    for number, (start, stop) in enumerate(places, 1):
        numbers[start:stop] = number
    return numbers


def supervised_tokens(offsets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Which tokens lie inside one generated span, every character of theirs.

    Args:
        offsets: int [tokens, 2], first and last + 1 character of each token.
        numbers: Span number per character, as ``render_chat`` gives it.

    Returns:
        bool [tokens].
    """
    start, stop = offsets[:, 0], offsets[:, 1]
    changes = np.concatenate([[0, 0], np.cumsum(numbers[1:] != numbers[:-1])])  # boundaries before each character
    first = np.minimum(start, len(numbers) - 1)
    last = np.clip(stop - 1, 0, len(numbers) - 1)
    return (stop > start) & (numbers[first] > 0) & (changes[last + 1] == changes[first + 1])
