"""Prompts and given texts as checked token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from workbench.core.errors import UserError
from workbench.core.tape import Tape, first_pending
from workbench.model.hybrid import HybridModel


def token_ids(name: str, values: Iterable[int], vocab_size: int) -> list[int]:
    """Values as plain ids of a vocabulary.

    Args:
        name: What the user calls them.
        values: Ids: any sequence of integers, tensors and arrays included.
        vocab_size: Ids below this are valid.

    Returns:
        The ids.

    Raises:
        UserError: The values are no integers, or not all in range.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise UserError(f"{name}={values!r} is not valid: give a sequence of token ids")
    ids = []
    for at, value in enumerate(values):
        try:
            token = index(value)
        except TypeError:
            token = None
        if token is None or isinstance(value, bool):
            raise UserError(f"{name} holds {value!r} at place {at}, which is no token id: ids are integers")
        if not 0 <= token < vocab_size:
            raise UserError(
                f"token id {token} is out of range at place {at} of {name}: this model's ids are 0 to "
                f"{vocab_size - 1}; encode the text with this model's tokenizer"
            )
        ids.append(token)
    return ids


def prompt_ids(model: HybridModel, prompt: str | Sequence[int] | Tape) -> tuple[list[int], str, str]:
    """Ids, document id and source of a prompt: text, ids, or a tape's prompt (its first token when it has none)."""
    vocab, doc_id, source = model.config.vocab_size, "prompt", ""
    if isinstance(prompt, Tape):
        doc_id, source = prompt.doc_id, prompt.source
        ids = token_ids("the prompt", prompt.tokens[: first_pending(prompt.prompt_len)], vocab)
    elif isinstance(prompt, str):
        if model.tokenizer is None:
            raise UserError("this checkpoint has no tokenizer: give token ids instead of text")
        ids = model.tokenizer.encode(prompt)
    else:
        ids = token_ids("the prompt", prompt, vocab)
    if not ids:
        raise UserError("the prompt is empty: give text, or at least one token id")
    return ids, doc_id, source
