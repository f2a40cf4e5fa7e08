"""Short excerpts of a dataset's rows, and what they say about the rows of a finished export.

Legend: S tokens, H hidden, V vocabulary, N leading values, P excerpts.
An excerpt is taken before an exporter turns rows into its own form, so that a checker can tell from the export alone
whether each row is where, and what, its manifest says: whose layer, on which side of the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from workbench.datasets.export.parts import ModelParts
    from workbench.datasets.export.source import SequenceRow

VALUES = 4  # leading values of a row in an excerpt
BLOCK = 16_384  # ids whose head rows are turned to float32 at a time
ULPS = {torch.float32: 2.0**-19, torch.bfloat16: 2.0**-8}  # of a value: what the order of a sum may move it by
SLACK = 2.0**-7  # of the sum of absolute products of a logit: what a row rounded to bfloat16 may move it by
LEAST_SLACK = 1e-3


def logits_of(normed_SH: Tensor, parts: ModelParts) -> Tensor:
    """Logits [S, V] in float32 of rows after the final norm, whatever the type of the head."""
    rows_SH = normed_SH.float()
    return torch.cat([rows_SH @ block_NH.float().T for block_NH in parts.head_VH.split(BLOCK)], dim=1)


def excerpts(row: SequenceRow, layers: Sequence[int], parts: ModelParts, *, logits: bool) -> list[dict[str, Any]]:
    """Excerpts of a document's first, middle and last position.

    Args:
        row: The document.
        layers: Tapped layers of the export.
        parts: Norm and head.
        logits: Add the arg-max of the model's logits there, its logit, and the log of their sum.

    Returns:
        Per position: position, rms (of the trunk row, with eps), last and taps (leading values), and the logits' facts.
    """
    places = sorted({0, len(row.tokens_S) // 2, len(row.tokens_S) - 1})
    last_PH = row.last_SH[places].float()
    found: list[dict[str, Any]] = [
        {
            "position": at,
            "rms": float((x_H.double().square().mean() + parts.eps).sqrt()),
            "last": x_H[:VALUES].tolist(),
            "taps": [row.taps[layer][at, :VALUES].float().tolist() for layer in layers],
        }
        for at, x_H in zip(places, last_PH, strict=True)
    ]
    if logits:
        for each, logits_V in zip(found, logits_of(parts.normed(last_PH), parts), strict=True):
            pick = int(logits_V.argmax())
            each |= {"argmax": pick, "logit": float(logits_V[pick]), "logsumexp": float(logits_V.logsumexp(0))}
    return found


def misfits(
    excerpt: dict[str, Any], last_SH: Tensor | None, taps: Sequence[Tensor], parts: ModelParts, *, prenorm: bool
) -> list[str]:
    """How exported rows differ from an excerpt, a phrase each.

    Args:
        excerpt: One of ``excerpts``.
        last_SH: Exported last rows; None where the format has none.
        taps: Exported rows per layer.
        parts: Norm and head.
        prenorm: The export says that its last rows lie before the final norm.
    """
    at = excerpt["position"]
    phrases = [
        f"row {at} of tap {place} is not the dataset's row of that layer"
        for place, (x_SH, values) in enumerate(zip(taps, excerpt["taps"], strict=True))
        if not torch.equal(x_SH[at, :VALUES], torch.tensor(values).to(x_SH.dtype))
    ]
    if last_SH is None:
        return phrases
    found_N, due_N = last_SH[at, :VALUES], torch.tensor(excerpt["last"])
    if prenorm:
        fits = torch.equal(found_N, due_N.to(found_N.dtype))
    else:
        due_N = due_N / excerpt["rms"] * parts.scale_H[: len(due_N)]
        fits = bool(((found_N.float() - due_N).abs() <= due_N.abs() * ULPS[found_N.dtype] + 1e-12).all())
    if not fits:
        phrases.append(f"last row {at} is not the dataset's row {'before' if prenorm else 'after'} the final norm")
    if "argmax" in excerpt:
        phrases += _logit_misfits(excerpt, last_SH[at : at + 1], parts, prenorm=prenorm)
    return phrases


def _logit_misfits(excerpt: dict[str, Any], last_1H: Tensor, parts: ModelParts, *, prenorm: bool) -> list[str]:
    normed_1H = parts.normed(last_1H) if prenorm else last_1H.float()
    logits_V, pick = logits_of(normed_1H, parts)[0], excerpt["argmax"]
    products = float((normed_1H[0].abs() * parts.head_VH[pick].float().abs()).sum())
    slack = SLACK * products + LEAST_SLACK
    found = {"logit": float(logits_V[pick]), "logsumexp": float(logits_V.logsumexp(0))}
    if all(abs(value - excerpt[name]) <= slack for name, value in found.items()):  # never so for NaN
        return []
    rule = "the final norm and the head" if prenorm else "the head alone"
    return [
        f"logits rebuilt from last row {excerpt['position']} by {rule} miss the model's: id {pick} has "
        f"{found['logit']:.4g} where {excerpt['logit']:.4g} is due"
    ]
