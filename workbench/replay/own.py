"""Own tapes: texts the target generates itself, on which a walk is the live run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workbench.core.errors import UserError, check_int
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.sampling.options import Shaping
from workbench.spec.generate import generate, make_options
from workbench.spec.options import GenerateOptions
from workbench.spec.own import own_mark, shaping_text

FOREIGN = ("force", "grammar")  # arguments of ``generate`` under which a text is not the target's own


def own_tapes(
    model: HybridModel,
    prompts: Corpus | Sequence[Tape] | Tape,
    *,
    prompt_tokens: int = 64,
    max_new_tokens: int = 128,
    sequence: int = 0,
    exact: bool | None = None,
    **options: Any,
) -> Corpus:
    """Continue the beginning of every document, greedily or by sampling.

    Args:
        model: The target.
        prompts: Documents; a tape's own prompt is used when it has one, else its first tokens.
        prompt_tokens: Tokens taken from a document without a prompt; default 64.
        max_new_tokens: Tokens generated per document, unless a stop token comes first; default 128.
        sequence: Random stream of the first document under ``seed``; the next ones take the next; default 0.
        exact: Numerical class; None for the model's own.
        **options: Options of ``generate``. Shaping and ``seed`` make the text, and ``accept="ratio"`` draws it by that
            rule; the others change speed alone.

    Returns:
        Tapes of prompt and text, marked as the target's own, with shaping, seed and stream where they are sampled.

    Raises:
        UserError: A prompt is longer than its document, or an option is not valid.
    """
    check_int("prompt_tokens", prompt_tokens, low=1)
    check_int("sequence", sequence, low=0)
    if wrong := [name for name in FOREIGN if options.get(name) is not None]:
        raise UserError(f"{wrong[0]} goes with wb.generate: a text made with it is not the target's own")
    corpus = as_corpus(prompts)
    options.setdefault("k", 3 if model.can_draft else 0)
    chosen = chosen_options({**options, "max_new_tokens": max_new_tokens})
    drafts = chosen.k > 0 or options.get("policy") is not None
    here, tapes = fingerprint(model), []
    with numerical_class(model, exact):
        for i, tape in enumerate(progress(corpus, desc="own tapes", unit="doc")):
            n = tape.prompt_len or prompt_tokens
            if n > len(tape):
                raise UserError(
                    f"document {tape.doc_id!r} has {len(tape)} tokens, fewer than prompt_tokens={n}: use longer "
                    f"documents (corpus(..., min_tokens={n})) or fewer prompt tokens"
                )
            given = {**options, "max_new_tokens": max_new_tokens, "sequence": sequence + i}
            made = generate(model, tape.tokens[:n].tolist(), **given)
            tokens, own = [*made.prompt, *made.tokens], own_mark(chosen, here, sequence + i, drafts=drafts)
            tapes.append(Tape(tape.doc_id, tokens, n, tape.source, tape.split, own=own))  # type: ignore[arg-type]
    return Corpus(tapes, name=f"own({corpus.name})", tokenizer=corpus.tokenizer)


def chosen_options(given: dict[str, Any]) -> GenerateOptions:
    """The options of a ``generate`` call among all its arguments."""
    names = GenerateOptions.__dataclass_fields__
    return make_options(given.get("options"), {k: v for k, v in given.items() if k in names}, full_force=False)


def sequence_of(tape: Tape, index: int) -> int:
    """Random stream of a tape: the one it was sampled with, else its place in the corpus."""
    own = tape.own
    return index if own is None or own.sequence is None else own.sequence


def differs(tape: Tape, model: str, shaping: Shaping, seed: int) -> tuple[str, str]:
    """How a text was made otherwise than this model would draw it.

    Args:
        tape: The text.
        model: Fingerprint of the model.
        shaping: How its logits become a law; not plain greedy.
        seed: Seed of its draws.

    Returns:
        What differs in law and what differs in the draws, as phrases; "" for nothing. Texts without a difference in
        law follow the target's law; without either they are its draws.
    """
    own = tape.own
    if own is None or own.model != model:
        return ("this target did not generate it",) * 2
    if own.kind != "sampled":
        return ("it is greedy",) * 2
    if not own.shaping or own.seed is None or own.sequence is None:
        return ("its shaping and seed were not recorded",) * 2
    there, here = json.loads(own.shaping), json.loads(shaping_text(shaping))
    law = [f"{name} is {there.get(name)!r} there and {value!r} here" for name, value in here.items()
           if there.get(name) != value]  # fmt: skip
    draws = [] if own.seed == seed else [f"seed is {own.seed} there and {seed} here"]
    if own.accept != "coupled":
        draws.append(f"it was drawn with accept={own.accept!r}")
    return ", ".join(law), ", ".join([*law, *draws])
