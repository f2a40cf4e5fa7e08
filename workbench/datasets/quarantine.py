"""Tapes that an extraction would refuse, set aside with the sentence it would refuse them by.

Legend: B batch, T rows of a chunk, R rows that go through the head at once, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workbench.core.errors import CapabilityError, UserError, check_flag, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.corpus.hygiene.grams import listed
from workbench.corpus.hygiene.outcome import Cleaned, Drop, cleaned
from workbench.datasets.anchors import Anchors, anchor_positions, check_anchors
from workbench.datasets.heads import head_slices
from workbench.datasets.options import ExtractOptions
from workbench.datasets.provenance import check_tapes
from workbench.model.checks import check_finite
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import upload
from workbench.model.weights.text import TextSide

STEP = "quarantine"


def quarantine(
    tapes: Corpus | Sequence[Tape] | Tape,
    model: HybridModel | TextSide,
    *,
    gamma: int = ExtractOptions.gamma,
    anchors: Anchors = ExtractOptions.anchors,
    whole_masks: bool = False,
    run: bool = False,
) -> Cleaned:
    """Set aside the tapes that records cannot be made of, each with its reason.

    The reasons are the refusals of ``extract`` itself: an id outside the vocabulary, more tokens than the context, too
    few tokens for an anchor, no supervised slot. Beside them, a mask that supervises every token of a document is
    one that a chat template without marks leaves, and is set aside too.

    Args:
        tapes: The documents.
        model: The target, or ``load_text_side`` of its checkpoint.
        gamma: Slots per record; default 5.
        anchors: As ``extract`` takes it; default 4.
        whole_masks: Keep tapes whose mask supervises every token; default False.
        run: Run every tape that is sound so far through the model once, and set aside those of which a row of logits
            holds NaN or infinity, at any position; default False.

    Returns:
        The outcome; ``extract`` takes its tapes.

    Raises:
        UserError: An option is out of range, the tapes were made by another tokenizer, or no tape would be left.
        CapabilityError: ``run`` was asked for without a model.
    """
    corpus = listed(tapes)
    check_int("gamma", gamma, low=1, hint="a record needs a slot")
    checked = check_anchors(anchors)
    check_flag("whole_masks", whole_masks)
    if check_flag("run", run) and not isinstance(model, HybridModel):
        raise CapabilityError("run=True needs the model itself, and only its text side was given: give wb.load(...)")
    drops: dict[int, Drop] = {}
    with progress(len(corpus), desc="quarantine", unit="doc") as bar:
        for i, tape in enumerate(corpus):
            reason = _reason(tape, corpus.tokenizer, model, gamma, checked, whole_masks)
            if reason is None and run and isinstance(model, HybridModel):
                reason = _fault(tape, model)
            if reason is not None:
                drops[i] = Drop(tape, STEP, reason)
            bar.update()
    parameters: dict[str, Any] = {
        "gamma": gamma,
        "anchors": checked if isinstance(checked, (int, str)) else "listed",
        "whole_masks": whole_masks,
        "run": run,
        "vocab_size": model.config.vocab_size,
        "context": model.config.max_position_embeddings,
    }
    return cleaned(corpus, drops, step=STEP, parameters=parameters)


def _reason(
    tape: Tape, tokenizer: str, model: HybridModel | TextSide, gamma: int, anchors: Anchors, whole_masks: bool
) -> str | None:
    """Why a tape is set aside; None when it is sound."""
    if tape.supervised is not None and tape.supervised.all() and not whole_masks:
        return (
            f"document {tape.doc_id!r} has a mask that supervises all {len(tape)} tokens: mark what the assistant "
            "wrote, leave the mask out, or give whole_masks=True"
        )
    try:
        check_tapes(model, Corpus([tape], tokenizer=tokenizer))
        anchor_positions(tape, anchors=anchors, gamma=gamma, seed=0)
    except UserError as error:
        return str(error)
    return None


@torch.inference_mode()
def _fault(tape: Tape, model: HybridModel) -> str | None:
    """What keeps a tape's rows of logits from being finite; None when they all are."""
    cache = model.new_cache(batch=1, capacity=len(tape))
    tokens_BT = upload(tape.tokens.astype(np.int64)[None], model.device)
    for start in range(0, len(tape), ExtractOptions.chunk):
        rows = model.forward(tokens_BT[:, start : start + ExtractOptions.chunk], cache, logits="none", checked=True)
        for part, logits_RV in head_slices(model, rows.normed_BTH[0]):
            try:
                check_finite(logits_RV, start + part.start)
            except UserError as error:
                return f"document {tape.doc_id!r}: {error}"
    return None
