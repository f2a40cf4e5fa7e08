"""``corpus``: documents of a source as tapes, those of a split, a limit's fair share of every register."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.chat import check_variables
from workbench.corpus.choose import Quarantine, set_aside, split_documents, spread
from workbench.corpus.cut import OVERFLOW, Cut
from workbench.corpus.rows import Reader
from workbench.corpus.sources import read_source
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
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise UserError(f"tokenizer of type {type(tokenizer).__name__} is not valid: give model.tokenizer")
    for name, value in (("limit", limit), ("max_tokens", max_tokens), ("min_tokens", min_tokens)):
        if value is not None:
            check_int(name, value, low=1)
    if min_response is not None:
        check_int("min_response", min_response, low=1)
    check_choice("overflow", overflow, OVERFLOW)
    check_int("seed", seed, low=0)
    variables = check_variables(template_options)
    if chat_template is not None:
        if tokenizer is None:
            raise UserError("chat_template needs a tokenizer to encode what it renders: give tokenizer=model.tokenizer")
        tokenizer = tokenizer.with_template(chat_template)
    name, documents = read_source(source, text_column=text_column)
    if not documents:
        raise UserError(f"corpus {name!r} is empty: it needs at least one document")
    chosen = split_documents(documents, split, name)
    reader = Reader(tokenizer, text_column, variables, skip_empty=bool(min_tokens))
    cut = Cut(reader, max_tokens, overflow, min_tokens or 0, min_response or 0)
    tapes: dict[int, list[Tape]] = {}
    with progress(len(chosen) if limit is None else min(limit, len(chosen)), desc="tokenize", unit="doc") as bar:
        for i in range(len(chosen)) if limit is None else spread(chosen, seed):
            try:
                kept = list(cut.tapes(chosen[i]))
            except UserError as error:
                set_aside(quarantine, chosen[i], error)
                continue
            if kept:
                tapes[i] = kept
                bar.update()
            if len(tapes) == limit:
                break
    asked = {
        "split": split,
        "limit": limit,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "min_response": min_response,
    }
    said = [f"{key}={value}" for key, value in asked.items() if value is not None]
    if not tapes:
        aside = f", {len(quarantine)} of them in quarantine, such as {quarantine[-1]}" if quarantine else ""
        raise UserError(
            f"corpus {name!r} is empty: its {len(chosen)} documents were all left out ({', '.join(said)}){aside}; the "
            f"longest tape had {cut.longest} tokens: loosen the bounds"
        )
    label = f"{name} ({', '.join(said)})" if said else name
    fingerprint = "" if tokenizer is None else tokenizer.fingerprint
    return Corpus([tape for i in sorted(tapes) for tape in tapes[i]], name=label, tokenizer=fingerprint)
