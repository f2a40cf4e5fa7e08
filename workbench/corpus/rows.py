"""From one row of a source to whole tapes: ids that are given, texts, conversations, prompts with completions.

Ids are taken over as they are given. A text is encoded once; the ids of a prompt and of its completion are those of
each alone, as a model that is given the prompt sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.core.errors import UserError, check_int
from workbench.core.tape import Own, Tape
from workbench.corpus.chat import Conversation, Rendered, check_variables, render_chat, supervised_tokens
from workbench.corpus.sources import Document, content_column
from workbench.model.tokenizer import Tokenizer


class Made(NamedTuple):
    """A whole tape.

    Args:
        tape: The tape.
        offsets: int [tokens, 2], first and last + 1 character of each token; None when ids were given.
        text: Its text; "" when ids were given.
    """

    tape: Tape
    offsets: np.ndarray | None = None
    text: str = ""


@dataclass(frozen=True)
class Reader:
    """Makes the tapes of one row at a time.

    Args:
        tokenizer: For text and conversations; None takes token ids only.
        text_column: Column that holds text.
        variables: What else a chat template is given by name.
        skip_empty: Make no tape of an empty text, instead of refusing it.
    """

    tokenizer: Tokenizer | None
    text_column: str
    variables: Mapping[str, Any]
    skip_empty: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        text_column: str,
        counts: Mapping[str, int | None],
        seed: int,
        chat_template: str | Path | None,
        template_options: Mapping[str, Any] | None,
        skip_empty: bool = False,
    ) -> Reader:
        """A reader by the arguments that ``corpus`` and ``prompts`` share.

        Args:
            tokenizer: The model's, or None.
            text_column: Column that holds text.
            counts: Options that are a count of at least 1 or None, by name.
            seed: Of the choice of documents.
            chat_template: In place of the tokenizer's own; None for its own.
            template_options: What else the template is given, by name.
            skip_empty: Make no tape of an empty text.

        Raises:
            UserError: One of them is not valid.
        """
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            raise UserError(f"tokenizer of type {type(tokenizer).__name__} is not valid: give model.tokenizer")
        for name, value in counts.items():
            if value is not None:
                check_int(name, value, low=1)
        check_int("seed", seed, low=0)
        variables = check_variables(template_options)
        if chat_template is not None:
            if tokenizer is None:
                raise UserError(
                    "chat_template needs a tokenizer to encode what it renders: give tokenizer=model.tokenizer"
                )
            tokenizer = tokenizer.with_template(chat_template)
        return cls(tokenizer, text_column, variables, skip_empty)

    @property
    def fingerprint(self) -> str:
        """The tokenizer's; "" without one."""
        return "" if self.tokenizer is None else self.tokenizer.fingerprint

    def tapes(self, document: Document) -> Iterator[Made]:
        """Whole tapes of one document.

        Args:
            document: The document.

        Yields:
            One tape; of a conversation whose template rewrites earlier turns, one per assistant message, named
            doc_id@message.

        Raises:
            UserError: The document cannot be used; the sentence names it.
        """
        row, doc_id = document.content(), document.doc_id
        kind = content_column(list(row), self.text_column, f"document {doc_id!r}")
        if kind in ("tokens", "input_ids"):
            yield Made(given_ids(row, document, kind))
        elif kind == "messages":
            yield from self._chat(row[kind], row, document, 0)
        elif kind != "prompt" or self.text_column == "prompt":
            made = self._text(row[kind], document)
            if made is not None:
                yield made
        elif "completion" not in row:
            raise UserError(
                f"document {doc_id!r} has a prompt and no completion: answer it with generate_corpus(model, "
                "prompts(...)), or name the column with text_column='prompt'"
            )
        elif isinstance(row["prompt"], str):
            yield self._completed(row["prompt"], row["completion"], document)
        else:
            asked, said = row["prompt"], row["completion"]
            if not isinstance(asked, (list, tuple)) or not isinstance(said, (list, tuple)):
                raise UserError(
                    f"document {doc_id!r}: prompt and completion must be two texts or two lists of messages"
                )
            yield from self._chat([*asked, *said], row, document, len(asked))

    def encode(self, text: Any, document: Document) -> tuple[list[int], np.ndarray]:
        """Ids of a text and their offsets.

        Raises:
            UserError: It is no text that can be encoded, or there is no tokenizer.
        """
        doc_id = document.doc_id
        if self.tokenizer is None:
            raise UserError(f"document {doc_id!r} is text, which needs a tokenizer: give tokenizer=model.tokenizer")
        if not isinstance(text, str):
            raise UserError(
                f"document {doc_id!r} holds a {type(text).__name__} in {self.text_column!r}: a string is needed; name "
                "the text column with text_column=..."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"document {doc_id!r} holds a lone surrogate at character {error.start}: repair the text"
            ) from None
        encoding = self.tokenizer.backend.encode(text, add_special_tokens=False)
        return encoding.ids, np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _text(self, text: Any, document: Document) -> Made | None:
        ids, offsets = self.encode(text, document)
        if not ids:
            if self.skip_empty:
                return None
            raise UserError(
                f"document {document.doc_id!r} is empty: take it out, or give min_tokens=1 to leave such documents out"
            )
        return Made(_tape(document, ids, n_bytes=len(text.encode())), offsets, text)

    def _chat(self, messages: Any, row: Mapping[str, Any], document: Document, first: int) -> Iterator[Made]:
        chat = conversation(messages, row, document, self.variables, first=first)
        if self.tokenizer is None:
            raise UserError(
                f"document {document.doc_id!r} is a conversation, which needs a tokenizer: give "
                "tokenizer=model.tokenizer"
            )
        for rendered in render_chat(chat, self.tokenizer):
            yield self._rendered(rendered, document)

    def _rendered(self, rendered: Rendered, document: Document) -> Made:
        ids, offsets = self.encode(rendered.text, document)
        mask = supervised_tokens(offsets, rendered.numbers)
        name = document.doc_id if rendered.message is None else f"{document.doc_id}@{rendered.message}"
        if not mask.any():
            raise UserError(
                f"document {name!r}: no token lies wholly inside assistant text, so none is supervised: leave it out"
            )
        if mask.all():
            raise UserError(f"document {name!r}: every token is supervised, its prompt too: leave it out")
        n_bytes = len(rendered.text.encode())
        return Made(_tape(document, ids, mask=mask, n_bytes=n_bytes, name=name), offsets, rendered.text)

    def _completed(self, prompt: str, completion: Any, document: Document) -> Made:
        asked, before = self.encode(prompt, document)
        said, after = self.encode(completion, document)
        for what, ids in (("prompt", asked), ("completion", said)):
            if not ids:
                raise UserError(
                    f"document {document.doc_id!r} has an empty {what}, so its mask would be all "
                    f"{'true' if what == 'prompt' else 'false'}: leave it out, or give plain text"
                )
        text = prompt + completion
        mask = np.arange(len(asked) + len(said)) >= len(asked)
        tape = _tape(document, [*asked, *said], mask=mask, n_bytes=len(text.encode()))
        return Made(tape, np.concatenate([before, after + len(prompt)]), text)


def conversation(
    messages: Any, row: Mapping[str, Any], document: Document, variables: Mapping[str, Any], *, first: int = 0
) -> Conversation:
    """The conversation of a row, with the tools and template variables that the row itself carries."""
    own = row.get("chat_template_kwargs") or {}
    if not isinstance(own, Mapping):
        raise UserError(f"document {document.doc_id!r}: chat_template_kwargs must be a mapping of names to values")
    given = {**variables, **{name: value for name, value in own.items() if value is not None}}
    return Conversation(document.doc_id, messages, row.get("tools"), given, first)


def given_ids(row: Mapping[str, Any], document: Document, kind: str) -> Tape:
    """The tape of a row that holds token ids.

    Args:
        row: Holds "tokens", with "supervised" and "prompt_len" if there are; or "input_ids", with "loss_mask", whose
            first true token ends the prompt, and "attention_mask", whose false places are padding, if there are.
        document: Its names.
        kind: Which of the two.

    Returns:
        The tape.

    Raises:
        UserError: The ids or a mask cannot be used.
    """
    doc_id, tokens = document.doc_id, np.asarray(row[kind])
    listed = tokens.ndim == 1 and len(tokens) and tokens.dtype.kind in "iu"
    if not listed or tokens.min() < 0 or tokens.max() >= 2**31:
        raise UserError(f"document {doc_id!r}: {kind} must be a list of token ids, integers from 0 on, at least one")
    column = "loss_mask" if row.get("loss_mask") is not None else "supervised"
    mask = _mask(row.get(column), column, len(tokens), doc_id)
    prompt_len = row.get("prompt_len")
    padding = row.get("attention_mask") if kind == "input_ids" else None
    if (real := _mask(padding, "attention_mask", len(tokens), doc_id)) is not None:
        if not real.any():
            raise UserError(f"document {doc_id!r}: attention_mask is false everywhere: leave the document out")
        if prompt_len is not None and not real.all():
            raise UserError(f"document {doc_id!r} is padded and has prompt_len={prompt_len}: give one or the other")
        tokens, mask = tokens[real], None if mask is None else mask[real]
    if mask is not None and not mask.any():
        raise UserError(
            f"document {doc_id!r} has a {column} mask that is all false: leave it out, or leave the mask out"
        )
    if column == "loss_mask" and mask is not None and mask.all():
        raise UserError(
            f"document {doc_id!r} has a loss_mask that is all true, so a prompt would be trained on: for plain text "
            "leave the mask out"
        )
    if column == "loss_mask" and mask is not None and prompt_len is None:
        prompt_len = int(mask.argmax())
    own, size = row.get("own"), row.get("n_bytes")
    try:
        return Tape(
            doc_id,
            tokens,
            prompt_len=0 if prompt_len is None else check_int("prompt_len", prompt_len, low=0, high=len(tokens)),
            source=document.source,
            split=document.split,
            supervised=mask,
            n_bytes=None if size is None else check_int("n_bytes", size, low=0),
            own=None if own is None else Own(**(json.loads(own) if isinstance(own, str) else own)),
        )
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"document {doc_id!r} cannot be used: {error}") from None


def _mask(values: Any, column: str, length: int, doc_id: str) -> np.ndarray | None:
    if values is None:
        return None
    mask = np.asarray(values)
    if mask.shape != (length,):
        raise UserError(
            f"document {doc_id!r} cannot be used: its {length} tokens have a {column} of shape {mask.shape}; "
            "the two must have one entry per token"
        )
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise UserError(f"document {doc_id!r}: {column} must hold true and false, or 1 and 0, and nothing else")
    return mask.astype(bool)


def _tape(
    document: Document, ids: list[int], *, n_bytes: int, mask: np.ndarray | None = None, name: str | None = None
) -> Tape:
    return Tape(
        name or document.doc_id,
        np.asarray(ids, dtype=np.int32),
        prompt_len=0 if mask is None else int(mask.argmax()),
        source=document.source,
        split=document.split,
        supervised=mask,
        n_bytes=n_bytes,
    )
