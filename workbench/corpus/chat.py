"""Conversations to token ids with a mask of what the assistant wrote, by the checkpoint's own chat template.

The rendered text is encoded once, as a whole, so that ids are those the model sees when served; marks of the template
become a mask over tokens through their character offsets. A token that straddles a boundary is not supervised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.core.errors import UserError
from workbench.model.tokenizer import Tokenizer


def render_chat(messages: Any, tokenizer: Tokenizer, doc_id: str) -> tuple[str, np.ndarray]:
    """Render a conversation and say which characters the assistant generated.

    Args:
        messages: Mappings with "role" and "content".
        tokenizer: Its template marks assistant text with {% generation %}.
        doc_id: For sentences.

    Returns:
        The text, and int32 [characters]: the number of the generated span each lies in, counted from 1; 0 outside.

    Raises:
        UserError: The messages are malformed, the template refuses them, or nothing is marked as generated.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UserError(
            f"document {doc_id!r}: messages must be a list of mappings with a role and a content, at least one"
        )
    try:
        spans = tokenizer.render(messages)
    except UserError as error:
        raise UserError(f"document {doc_id!r}: {error}") from None
    text = "".join(piece for piece, _ in spans)
    numbers = np.zeros(len(text), dtype=np.int32)
    at = 0
    for number, (piece, generated) in enumerate(spans, 1):
        numbers[at : at + len(piece)] = number if generated else 0
        at += len(piece)
    if not numbers.any():
        if not any(m["role"] == "assistant" for m in messages):
            raise UserError(
                f"document {doc_id!r} has no assistant message, so no token of it is supervised: leave it out"
            )
        raise UserError(
            f"document {doc_id!r}: the chat template marks no assistant text, so no token is supervised: put "
            "{% generation %} and {% endgeneration %} around the assistant's content in chat_template.jinja"
        )
    return text, numbers


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
