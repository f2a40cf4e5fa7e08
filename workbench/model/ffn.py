"""The SwiGLU feed-forward block. Legend: R rows, H hidden, I intermediate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.model.config import ModelConfig
from workbench.model.ops import Numerics, linear, mapped


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x); ``gate_up`` stacks the gate rows and the up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.intermediate_size
        self.gate_up = nn.Parameter(torch.full((2 * self.width, config.hidden_size), torch.nan))
        self.down = nn.Parameter(torch.full((config.hidden_size, self.width), torch.nan))

    def forward(self, x_BTH: Tensor, num: Numerics) -> Tensor:
        """Apply the block to every row."""
        b, t, h = x_BTH.shape
        gate, up = linear(x_BTH.reshape(b * t, h), self.gate_up, num).chunk(2, 1)
        hidden = mapped(nn.functional.silu, gate, num) * up
        return linear(hidden, self.down, num).view(b, t, h)
