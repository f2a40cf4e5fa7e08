"""Caches that hold the prompt, and the phases of a round as calls that start from there.

Legend: T rows, L tokens of the prompt, D ids of a trimmed head, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.model.ops import linear
from workbench.sampling.pick import greedy

if TYPE_CHECKING:
    from workbench.bench.shape.setting import Setting


@dataclass(eq=False)
class Primed:
    """Target and drafter after the prompt.

    Args:
        cache: The target's state.
        drafter: The MTP head's rows.
        carrier_11H: The last row's carrier.
        restore: Brings the target's state back.
        held: Rows the drafter holds.
    """

    cache: HybridCache
    drafter: HybridCache
    carrier_11H: Tensor
    restore: Callable[[], None]
    held: int

    @classmethod
    def of(cls, setting: Setting) -> Primed:
        """Feed the prompt to both."""
        model, ids_1L = setting.model, torch.tensor([setting.prompt], device=setting.device)
        capacity = setting.context + setting.k + 2
        cache, drafter = model.new_cache(capacity=capacity), model.new_draft_cache(capacity=capacity)
        rows = model.forward(ids_1L, cache, logits="none").normed_BTH
        model.draft(ids_1L[:, 1:], rows[:, :-1], drafter)
        saved = cache.save()
        return cls(cache, drafter, rows[:, -1:].clone(), lambda: cache.restore(saved), drafter.lengths[0])

    def phase(self, setting: Setting, name: str) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A phase's call, and what brings its state back before it."""
        model, cache = setting.model, self.cache
        if name in ("decode", "verify", "verify cut"):
            ids_1T = torch.tensor([setting.prompt[: 1 if name == "decode" else 1 + setting.k]], device=setting.device)
            keep = 1 if name == "verify cut" else ids_1T.shape[1]

            def forward() -> None:
                ckpt = cache.checkpoint()
                logits = model.forward(ids_1T, cache).logits_BTV
                assert logits is not None
                greedy(logits)
                cache.commit(ckpt, keep=keep)

            return forward, self.restore
        id_11 = torch.tensor([setting.prompt[:1]], device=setting.device)
        weight_DH: Tensor = model.embed if model.head is None else model.head
        if name == "draft trimmed":
            assert setting.trim is not None
            weight_DH = weight_DH[: setting.trim].clone()

        def draft() -> None:
            hidden = model.draft(id_11, self.carrier_11H, self.drafter)
            greedy(linear(hidden[0], weight_DH, model.numerics).float())

        return draft, lambda: self.drafter.truncate(self.held)
