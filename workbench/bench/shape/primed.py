"""Caches that hold the prompt, and the phases of a round as calls that start from there.

A call is either the engine's own, or the same forward with what the host checks and copies done beforehand, so that a
graph can hold it. Legend: T rows, L tokens of the prompt, D ids of a trimmed head, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.cache.kv import AttentionPlane
from workbench.core.errors import CapabilityError
from workbench.model import kernel_forward, kernel_path
from workbench.model.hybrid import HybridModel
from workbench.model.ops import linear
from workbench.sampling.pick import greedy

if TYPE_CHECKING:
    from workbench.bench.shape.setting import Setting


@dataclass(eq=False)
class Primed:
    """Target and drafter after the prompt.

    Args:
        model: The target with its head.
        cache: The target's state.
        drafter: The MTP head's rows.
        carrier_11H: The last row's carrier.
        restore: Brings the target's state back.
        held: Rows the drafter holds.
    """

    model: HybridModel
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
        carrier = rows[:, -1:].clone()
        return cls(model, cache, drafter, carrier, lambda: cache.restore(saved), drafter.lengths[0])

    def phase(self, setting: Setting, name: str, *, graph: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
        """A phase's call, and what brings its state back before it.

        Args:
            setting: Prompt, slots and trim.
            name: As of ``Setting.phase``.
            graph: Leave out what a CUDA graph cannot hold: checks of ids, and copies from the host.

        Returns:
            Both calls.

        Raises:
            CapabilityError: A graph is asked for where forwards do not go through the kernels.
        """
        if graph and not self.model.through_kernels:
            raise CapabilityError("graphs hold forwards through the kernels, and this model's take another path")
        self.restore()
        self.drafter.truncate(self.held)
        if name in ("decode", "verify", "verify cut"):
            rows = 1 if name == "decode" else 1 + setting.k
            ids_1T = torch.tensor([setting.prompt[:rows]], device=setting.device)
            return self._forward(ids_1T, 1 if name == "verify cut" else rows, graph), self.restore
        trim = setting.trim if name == "draft trimmed" else None
        id_11 = torch.tensor([setting.prompt[:1]], device=setting.device)
        return self._draft(id_11, trim, graph), lambda: self.drafter.truncate(self.held)

    def _forward(self, ids_1T: Tensor, keep: int, graph: bool) -> Callable[[], Any]:
        model, cache, counts = self.model, self.cache, [ids_1T.shape[1]]
        batch = self._batch(cache, ids_1T) if graph else None

        def forward() -> Tensor:
            ckpt = cache.checkpoint()
            if batch is None:
                logits = model.forward(ids_1T, cache).logits_BTV
                assert logits is not None
            else:
                cache.admit(ids_1T, counts)
                logits = model.unembed(kernel_forward.forward(model, ids_1T, cache, batch, taps=())[1])
                cache.advance(counts)
            picked = greedy(logits)
            cache.commit(ckpt, keep=keep)
            return picked

        return forward

    def _draft(self, id_11: Tensor, trim: int | None, graph: bool) -> Callable[[], Any]:
        model, drafter, carrier_11H = self.model, self.drafter, self.carrier_11H
        batch = self._batch(drafter, id_11) if graph else None
        head: Tensor = model.embed if model.head is None else model.head
        weight_DH = head if trim is None else head[:trim].clone()
        plane = drafter.planes[0]
        assert isinstance(plane, AttentionPlane)

        def draft() -> Tensor:
            if batch is None:
                hidden = model.draft(id_11, carrier_11H, drafter)
            else:
                drafter.admit(id_11, [1])
                hidden = kernel_forward.draft(model, id_11, carrier_11H, plane, batch, None)
                drafter.advance([1])
            if model.through_kernels:
                return greedy(kernel_path.logits_of(hidden[0], weight_DH, few=True))
            return greedy(linear(hidden[0], weight_DH, model.numerics).float())

        return draft

    def _batch(self, cache: HybridCache, ids_1T: Tensor) -> kernel_forward.Batch:
        t = ids_1T.shape[1]
        return kernel_forward.Batch(cache.lengths, [t], t, ids_1T.device)
