"""``corpus``: documents of a source as tapes, those of a split, a limit's fair share of every register."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.errors import UserError, check_choice
from workbench.core.tape import Corpus
from workbench.corpus.choose import split_documents, taken
from workbench.corpus.cut import OVERFLOW, Cut
from workbench.corpus.rows import Reader
from workbench.corpus.sources import Quarantine, in_quarantine, read_source
from workbench.model.tokenizer import Tokenizer


def corpus(
    source: Any,
    *,
    split: str | None = None,
    tokenizer: Tokenizer | None = None,
    text_column: str = "text",
    limit: int | None = None,
    max_tokens: int | None = None,
    overflow: str = "slice",
    min_tokens: int | None = None,
    min_response: int | None = None,
    chat_template: str | Path | None = None,
    template_options: Mapping[str, Any] | None = None,
    quarantine: Quarantine | None = None,
    seed: int = 0,
) -> Corpus:
    """Make tapes of documents.

    Text becomes the ids that the tokenizer gives it, and no beginning-of-sequence or end-of-text token is invented.
    Conversations go through the chat template and keep their prompt length and the mask of what the assistant
    generates, up to and with the token that ends its turn. Where the template rewrites earlier turns, such as by taking
    their thinking away, every assistant message gives a tape of its own, named doc_id@message. Ids that are given stay
    as they are.

    Args:
        source: "demo" (the shipped held-out samples) or "demo/<register>"; a file or a directory of text, .jsonl or
            .parquet; a directory that ``save_to_disk`` or ``generate_corpus`` wrote; a Hugging Face Dataset; or a list
            of texts or mappings. A row holds "text", "messages" (with "tools" if there are), "prompt" and "completion"
            (texts or messages), "tokens" (with "prompt_len" and "supervised"), or "input_ids" (with "loss_mask").
        split: Keep documents of this split; None for all.
        tokenizer: The model's, ``model.tokenizer``; needed unless documents are token ids.
        text_column: Column that holds text; default "text".
        limit: Documents to keep, the same number per source as far as there are, chosen by the seed; None for all.
        max_tokens: Longest tape, tokens; None for no bound.
        overflow: What becomes of a longer document: "slice" into tapes named doc_id@start, "truncate", or "skip".
        min_tokens: Leave tapes with fewer tokens out; None refuses empty documents.
        min_response: Leave tapes with fewer tokens after their prompt out; None for no bound.
        chat_template: Renders conversations instead of the checkpoint's own: a file, or the template; None for its own.
        template_options: What else the template is given, by name, such as enable_thinking.
        quarantine: Documents that cannot be used are appended here as (doc_id, reason) and left out; None stops at the
            first.
        seed: Seed of the choice under ``limit``; default 0.

    Returns:
        The tapes, in the order of the source, with their UTF-8 sizes where the text is known.

    Raises:
        UserError: The source, a document or an option cannot be used, or no document is left.
    """
    counts = {"limit": limit, "max_tokens": max_tokens, "min_tokens": min_tokens, "min_response": min_response}
    reader = Reader.of(
        tokenizer,
        text_column=text_column,
        counts=counts,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options,
        skip_empty=min_tokens is not None,
    )
    check_choice("overflow", overflow, OVERFLOW)
    name, documents = read_source(source, text_column=text_column, quarantine=quarantine)
    if not documents:
        raise UserError(f"corpus {name!r} is empty: it needs at least one document{in_quarantine(quarantine)}")
    chosen = split_documents(documents, split, name)
    cut = Cut(reader, max_tokens, overflow, min_tokens or 0, min_response or 0)
    tapes = taken(
        chosen, lambda one: list(cut.tapes(one)), limit=limit, seed=seed, quarantine=quarantine, desc="tokenize"
    )
    said = [f"{key}={value}" for key, value in {"split": split, **counts}.items() if value is not None]
    if not tapes:
        bounds = f" within {', '.join(said)}" if said else ""
        raise UserError(
            f"corpus {name!r} is empty: none of its {len(chosen):,} documents could be kept{bounds}, and the longest "
            f"tape had {cut.longest} tokens: loosen the bounds{in_quarantine(quarantine)}"
        )
    label = f"{name} ({', '.join(said)})" if said else name
    return Corpus(tapes, name=label, tokenizer=reader.fingerprint)
