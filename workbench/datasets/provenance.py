"""Manifests of runs of a model over tapes: fingerprints, machine, versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.core.errors import UserError
from workbench.core.manifest import Manifest, library_versions, machine
from workbench.core.tape import Corpus, Tape
from workbench.corpus.fingerprint import corpus_fingerprint, document_hash
from workbench.corpus.hygiene.grams import listed
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.model.weights.text import TextSide

DOCUMENTS_FILE = "documents.jsonl"


def as_corpus(tapes: Any) -> Corpus:
    """Tapes as a corpus with unique ids.

    Args:
        tapes: A corpus, a tape, or a sequence of tapes.

    Returns:
        The corpus.

    Raises:
        UserError: It is none of these, or it is empty.
    """
    return listed(tapes)


def check_tapes(model: HybridModel | TextSide, tapes: Corpus) -> None:
    """Refuse tapes that this model cannot run.

    Args:
        model: The target, or its text side.
        tapes: The documents.

    Raises:
        UserError: They were made by another tokenizer, are longer than the context, or hold ids out of range.
    """
    own = model.tokenizer.fingerprint if model.tokenizer is not None else ""
    if own and tapes.tokenizer and own != tapes.tokenizer:
        raise UserError(
            f"the tapes were made with tokenizer {tapes.tokenizer} and the model has {own}: make them again with "
            "corpus(..., tokenizer=model.tokenizer)"
        )
    limit, vocab = model.config.max_position_embeddings, model.config.vocab_size
    for tape in tapes:
        if len(tape) > limit:
            raise UserError(
                f"document {tape.doc_id!r} has {len(tape)} tokens (prompt {tape.prompt_len}); this model's context is "
                f"{limit}: cut documents with corpus(..., max_tokens={limit})"
            )
        wrong = (tape.tokens < 0) | (tape.tokens >= vocab)
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"document {tape.doc_id!r} holds token id {int(tape.tokens[at])} at position {at}; this model's ids "
                f"are 0 to {vocab - 1}: make the tapes with this model's tokenizer"
            )


def new_manifest(
    kind: str,
    model: HybridModel,
    tapes: Corpus,
    *,
    parameters: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Describe a run that is about to start.

    Args:
        kind: What it makes.
        model: The target, in the numerical class it will run in.
        tapes: The documents.
        parameters: Every option that shapes the data.
        extra: What else a reader needs.

    Returns:
        An incomplete manifest without shards.
    """
    config, device = model.config, model.device
    return Manifest(
        kind=kind,
        parameters=dict(parameters),
        model={
            "fingerprint": fingerprint(model),
            "name": Path(model.source).name,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.num_layers,
            "dtype": str(model.dtype).removeprefix("torch."),
            "exact": model.exact,
            "row_block": model.numerics.row_block,
        },
        tokenizer=tapes.tokenizer or (model.tokenizer.fingerprint if model.tokenizer is not None else ""),
        template=template_fingerprint(model),
        corpus={
            "name": tapes.name,
            "fingerprint": corpus_fingerprint(tapes),
            "documents": len(tapes),
            "tokens": tapes.n_tokens,
        },
        machine=machine(
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            threads=torch.get_num_threads(),
        ),
        versions=library_versions(),
        extra=dict(extra or {}),
    )


def template_fingerprint(model: HybridModel) -> str:
    """Hash of the model's chat template, 16 hex digits; "" without one."""
    template = None if model.tokenizer is None else model.tokenizer.config.get("chat_template")
    return "" if template is None else hashlib.sha256(json.dumps(template).encode()).hexdigest()[:16]


def documents_bytes(tapes: Sequence[Tape]) -> bytes:
    """The file that lists source documents, one JSON line each: doc_id, source, split, prompt_len, tokens, sha256."""
    lines = []
    for tape in tapes:
        facts = {"doc_id": tape.doc_id, "source": tape.source, "split": tape.split, "prompt_len": tape.prompt_len}
        lines.append(json.dumps({**facts, "tokens": len(tape), "sha256": document_hash(tape)}, ensure_ascii=False))
    return "".join(line + "\n" for line in lines).encode()
