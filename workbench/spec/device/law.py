"""Tokens from rows of logits on the device, greedy or drawn with the noise of their positions.

Legend: R rows, V vocabulary, L cells of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.sampling.options import Shaping
from workbench_kernels.shape_draw import edit_logits, shape_draw
from workbench_kernels.sparse_topk import sparse_topk


@dataclass(frozen=True)
class Choices:
    """What was chosen from some rows.

    Args:
        tokens_R: Ids, int32 or int64; of no meaning where the row is not finite.
        probs_R: The row's own probability of them (softmax at T = 1, unfiltered), float32; NaN for such a row.
        tops_R: Largest probability of the row.
    """

    tokens_R: Tensor
    probs_R: Tensor
    tops_R: Tensor


class DeviceLaw:
    """How rows become tokens, the same for target and drafter.

    Args:
        shaping: Penalties, bias, temperature and filters.
        key: The sequence's Philox key. It lies on the device, and no launch holds it: see ``take``.
        device: Where rows lie.
    """

    def __init__(self, shaping: Shaping, key: tuple[int, int], device: torch.device) -> None:
        self.shaping = shaping
        self.key_2 = torch.tensor(key, dtype=torch.int64, device=device)
        self.edits = shaping.penalised or bool(shaping.bias)
        ids, values = zip(*shaping.bias, strict=True) if shaping.bias else ((), ())
        self.bias_ids = torch.tensor(ids, dtype=torch.int64, device=device) if shaping.bias else None
        self.bias = torch.tensor(values, dtype=torch.float32, device=device) if shaping.bias else None

    def take(self, key: tuple[int, int]) -> None:
        """Draw by another sequence's key from here on, captured launches too."""
        self.key_2.copy_(torch.tensor(key, dtype=torch.int64))

    @property
    def plain(self) -> bool:
        """Whether a choice is the arg-max of its row, whatever came before."""
        return self.shaping.greedy and not self.edits

    @property
    def reads_text(self) -> bool:
        """Whether a choice depends on the text before it."""
        return self.shaping.penalised

    def signature(self) -> tuple[object, ...]:
        """What shapes the launches of a choice, for the key of a graph."""
        return tuple(sorted((name, repr(value)) for name, value in self.shaping.key().items()))

    def choose(self, logits_RV: Tensor, places_R: Tensor, text_L: Tensor, length_1: Tensor) -> Choices:
        """Tokens of rows.

        Args:
            logits_RV: Float32 rows.
            places_R: Positions of their tokens, int64.
            text_L: The text, then the drafts that rows after the first follow.
            length_1: Tokens before row 0, int32.

        Returns:
            The choices.
        """
        best = sparse_topk(logits_RV, k=1)
        tops = best.probs_Rk[:, 0]
        if self.plain:
            return Choices(best.ids_Rk[:, 0], tops, tops)
        shaping, rows = self.shaping, logits_RV
        if self.edits:
            rows = edit_logits(
                logits_RV.clone(), tokens_L=text_L if shaping.penalised else None,
                length_1=length_1 if shaping.penalised else None, last_n=shaping.penalty_last_n,
                repetition=shaping.repetition_penalty, frequency=shaping.frequency_penalty,
                presence=shaping.presence_penalty, bias_ids_U=self.bias_ids, bias_U=self.bias,
            )  # fmt: skip
        drawn = shape_draw(
            rows, places_R, places_R, key=self.key_2, temperature=shaping.temperature, top_k=shaping.top_k,
            top_p=shaping.top_p, min_p=shaping.min_p, order=shaping.order,
        )  # fmt: skip
        tokens = drawn.tokens_R.clamp(min=0)
        said = (logits_RV.gather(1, tokens[:, None])[:, 0] - best.logsumexp_R).exp()
        return Choices(tokens, torch.where(drawn.tokens_R < 0, torch.nan, said), tops)
