"""A law: the ids that can be drawn and their probabilities. Legend: S ids of the support."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Law:
    """A distribution over vocabulary ids.

    Args:
        ids: The support, ascending, int64 [S], S >= 1. A probability in it may still be so small that it is 0.
        probs: Float64 [S]; they sum to 1 within 1e-12.
    """

    ids: Tensor
    probs: Tensor

    def __len__(self) -> int:
        """Ids in the support."""
        return len(self.ids)

    def prob(self, token: int) -> float:
        """Probability of an id; 0 outside the support."""
        at = int(torch.searchsorted(self.ids, token))
        return float(self.probs[at]) if at < len(self.ids) and int(self.ids[at]) == token else 0.0

    def at(self, ids_N: Tensor) -> Tensor:
        """Probabilities of many ids, float64 [N]; 0 outside the support."""
        place_N = torch.searchsorted(self.ids, ids_N).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[place_N] == ids_N, self.probs[place_N], 0.0)

    @property
    def pick(self) -> int:
        """The most probable id, the lowest on ties."""
        return int(self.ids[self.probs.argmax()])

    def dense(self, vocab: int) -> Tensor:
        """Probabilities of ids 0 to ``vocab`` - 1, float64; the support lies below ``vocab``."""
        return self.probs.new_zeros(vocab).scatter_(0, self.ids, self.probs)


def point_mass(token: int, like: Tensor) -> Law:
    """The law that always gives ``token``, on the device of ``like``."""
    one = torch.ones(1, dtype=torch.float64, device=like.device)
    return Law(ids=torch.tensor([token], device=like.device), probs=one)
