"""``prompts``: what a model is asked, as tapes that are all prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core.errors import UserError, check_flag
from workbench.core.tape import Corpus, Tape
from workbench.corpus.chat import Conversation
from workbench.corpus.choose import split_documents, taken
from workbench.corpus.rows import Reader, conversation, given_ids
from workbench.corpus.sources import (
    DEMO_PROMPTS,
    Document,
    Quarantine,
    content_column,
    in_quarantine,
    read_source,
)
from workbench.model.tokenizer import Tokenizer


def prompts(
    source: Any,
    *,
    split: str | None = None,
    tokenizer: Tokenizer | None = None,
    text_column: str = "text",
    chat: bool = False,
    limit: int | None = None,
    prompt_tokens: int | None = None,
    max_prompt: int | None = None,
    chat_template: str | Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    quarantine: Quarantine | None = None,
    seed: int = 0,
) -> Corpus:
    """Read what a model is to answer, for ``generate_corpus``.

    A conversation is rendered up to its last message that is not the assistant's, with the opening of a reply; an
    answer at its end is left out. A text stands as it is, and the model goes on from it. Of ids with a prompt length or
    a loss mask, the prompt is taken.

    Args:
        source: As of ``corpus``; "demo" is the shipped prompts. A row holds "messages", "prompt" (a text or messages),
            "tokens", "input_ids" or text.
        split: Keep documents of this split; None for all.
        tokenizer: The model's, ``model.tokenizer``; needed unless prompts are token ids.
        text_column: Column that holds text; default "text".
        chat: Make of every text a conversation with one message of the user's.
        limit: Prompts to keep, the same number per source as far as there are, chosen by the seed; None for all.
        prompt_tokens: Take this many tokens from the beginning of a plain text or of ids; None for all of it.
        max_prompt: Longest prompt that can be used, tokens; None for no bound.
        chat_template: Renders conversations instead of the checkpoint's own: a file, or the template; None for its own.
        template_options: What else the template is given, by name, such as enable_thinking.
        quarantine: Prompts that cannot be used are appended here as (doc_id, reason) and left out; None stops at the
            first.
        seed: Seed of the choice under ``limit``; default 0.

    Returns:
        Tapes whose every token is prompt, in the order of the source.

    Raises:
        UserError: The source, a prompt or an option cannot be used, or none is left.
    """
    reader = Reader.of(
        tokenizer,
        text_column=text_column,
        counts={"limit": limit, "prompt_tokens": prompt_tokens, "max_prompt": max_prompt},
        seed=seed,
        chat_template=chat_template,
        template_options=template_options,
    )
    if check_flag("chat", chat) and prompt_tokens is not None:
        raise UserError(
            f"prompt_tokens={prompt_tokens} cuts plain texts, and chat=True makes none: leave one of them out"
        )
    demo = isinstance(source, str) and source == "demo"
    name, documents = read_source(DEMO_PROMPTS if demo else source, text_column=text_column, quarantine=quarantine)
    name = "demo" if demo else name
    if not documents:
        raise UserError(f"source {name!r} is empty: it needs at least one prompt{in_quarantine(quarantine)}")
    asking = _Asking(reader, chat, prompt_tokens, max_prompt)
    tapes = taken(
        split_documents(documents, split, name),
        lambda one: [asking.tape(one)],
        limit=limit,
        seed=seed,
        quarantine=quarantine,
        desc="prompts",
    )
    if not tapes:
        raise UserError(f"source {name!r} holds no prompt that can be used{in_quarantine(quarantine)}")
    label = name if limit is None else f"{name} (limit={limit})"
    return Corpus(tapes, name=f"prompts({label})", tokenizer=reader.fingerprint)


class _Asking:
    """Makes the prompt of one document at a time."""

    def __init__(self, reader: Reader, chat: bool, prompt_tokens: int | None, max_prompt: int | None) -> None:
        self.reader, self.chat, self.prompt_tokens, self.max_prompt = reader, chat, prompt_tokens, max_prompt

    def tape(self, document: Document) -> Tape:
        ids = np.asarray(self._ids(document), dtype=np.int32)
        if not len(ids):
            raise UserError(f"document {document.doc_id!r} is an empty prompt: leave it out")
        if self.max_prompt is not None and len(ids) > self.max_prompt:
            raise UserError(
                f"document {document.doc_id!r} has a prompt of {len(ids)} tokens, over max_prompt={self.max_prompt}: "
                "raise it, or give quarantine=[] to leave such prompts out"
            )
        return Tape(document.doc_id, ids, len(ids), document.source, document.split)

    def _ids(self, document: Document) -> Any:
        row, column = document.content(), self.reader.text_column
        kind = content_column(list(row), column, f"document {document.doc_id!r}")
        if kind == "text" == column and "prompt" in row:
            kind = "prompt"
        if kind in ("tokens", "input_ids"):
            tape = given_ids(row, document, kind)
            return tape.tokens[: tape.prompt_len or self.prompt_tokens]
        if kind == "messages" or not isinstance(row[kind], str):
            if not isinstance(row[kind], (list, tuple)):
                raise UserError(
                    f"document {document.doc_id!r} holds a {type(row[kind]).__name__} in {kind!r}: give a text, or a "
                    "list of messages"
                )
            return self._asked(conversation(row[kind], row, document, self.reader.variables), document)
        if self.chat:
            asked = [{"role": "user", "content": row[kind]}]
            return self._asked(conversation(asked, row, document, self.reader.variables), document)
        return self.reader.encode(row[kind], document)[0][: self.prompt_tokens]

    def _asked(self, talk: Conversation, document: Document) -> list[int]:
        """Ids of a conversation up to its last message that is not the assistant's, with the opening of a reply."""
        last = max((i for i, message in enumerate(talk.messages) if message["role"] != "assistant"), default=-1)
        if last < 0 or all(message["role"] == "system" for message in talk.messages[: last + 1]):
            raise talk.wrong("it asks nothing, since it holds no message of a user: leave it out")
        if self.reader.tokenizer is None:
            raise talk.wrong("it is a conversation, which needs a tokenizer: give tokenizer=model.tokenizer")
        return self.reader.encode(talk.text(self.reader.tokenizer, last + 1, opened=True), document)[0]
