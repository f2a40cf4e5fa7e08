"""Own tapes: texts the target generates itself, on which a walk is the live run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.core.errors import UserError, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Own, Tape
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.spec.generate import generate


def own_tapes(
    model: HybridModel,
    prompts: Corpus | Sequence[Tape] | Tape,
    *,
    prompt_tokens: int = 64,
    max_new_tokens: int = 128,
    exact: bool | None = None,
    **options: Any,
) -> Corpus:
    """Continue the beginning of every document greedily.

    Args:
        model: The target.
        prompts: Documents; a tape's own prompt is used when it has one, else its first tokens.
        prompt_tokens: Tokens taken from a document without a prompt; default 64.
        max_new_tokens: Tokens generated per document, unless a stop token comes first; default 128.
        exact: Numerical class; None for the model's own.
        **options: Options of ``generate``; they change speed, not the text.

    Returns:
        Tapes of prompt and text, marked as the target's own.

    Raises:
        UserError: A prompt is longer than its document, or an option is not valid.
    """
    check_int("prompt_tokens", prompt_tokens, low=1)
    corpus = as_corpus(prompts)
    marked = Own("greedy", fingerprint(model))
    tapes = []
    options.setdefault("k", 3 if model.can_draft else 0)
    with numerical_class(model, exact):
        for tape in progress(corpus, desc="own tapes", unit="doc"):
            n = tape.prompt_len or prompt_tokens
            if n > len(tape):
                raise UserError(
                    f"document {tape.doc_id!r} has {len(tape)} tokens, fewer than prompt_tokens={n}: use longer "
                    f"documents (corpus(..., min_tokens={n})) or fewer prompt tokens"
                )
            made = generate(model, tape.tokens[:n].tolist(), max_new_tokens=max_new_tokens, **options)
            tokens = [*made.prompt, *made.tokens]
            tapes.append(Tape(tape.doc_id, tokens, n, tape.source, tape.split, own=marked))  # type: ignore[arg-type]
    return Corpus(tapes, name=f"own({corpus.name})", tokenizer=corpus.tokenizer)
