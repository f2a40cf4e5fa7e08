"""How a text that the target generated was made, as the facts its tape carries."""

from __future__ import annotations

import json

from workbench.core.tape import Own
from workbench.sampling.options import Shaping
from workbench.spec.options import GenerateOptions


def own_mark(options: GenerateOptions, model: str, sequence: int, *, drafts: bool) -> Own:
    """The facts of a generated text.

    Args:
        options: How it was decoded.
        model: Fingerprint of the model.
        sequence: Random stream it was drawn from, in place of the options' own.
        drafts: Whether there was a drafter.

    Returns:
        The facts; a greedy text's do not name the stream, since nothing was drawn.
    """
    chooser = options.chooser()
    if chooser.plain:
        return Own("greedy", model)
    return Own(
        "sampled",
        model,
        seed=options.seed,
        temperature=options.temperature,
        sequence=sequence,
        shaping=shaping_text(options.shaping()),
        accept="ratio" if chooser.by_ratio and drafts else "coupled",
    )


def shaping_text(shaping: Shaping) -> str:
    """A shaping as one text, the same for equal shapings."""
    return json.dumps(shaping.key(), sort_keys=True)
