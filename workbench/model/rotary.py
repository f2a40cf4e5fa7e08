"""Partial rotary position embedding: the first ``rotary_dim`` dimensions of a head turn, the rest pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Rotary(nn.Module):
    """Cosines and sines for absolute positions, grown on demand.

    Args:
        dim: Rotated dimensions rd, even.
        theta: Base of the frequencies.

    Source: Su et al. 2021 (arXiv 2104.09864), halves convention; with text alone Qwen's M-RoPE is this.
    """

    def __init__(self, dim: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def table(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine tables [length or more, rd] in float32."""
        if self._cos.shape[0] < length or self._cos.device != device:
            rows = max(length, 2 * self._cos.shape[0], 256)
            half = torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim
            inverse = 1.0 / (self.theta**half)
            angle = torch.arange(rows, dtype=torch.float32)[:, None] * inverse
            cos, sin = angle.cos(), angle.sin()
            self._cos = torch.cat([cos, cos], -1).to(device)
            self._sin = torch.cat([-sin, sin], -1).to(device)
        return self._cos, self._sin

    def forward(self, x_BTND: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> Tensor:
        """Turn the first dimensions of every head; in place where no gradient is wanted.

        Args:
            x_BTND: Queries or keys; the caller's to give away.
            cos_BTR: Cosines of each row's position, [B, T, rd].
            sin_BTR: Sines, the first half negated.

        Returns:
            Same shape and type.
        """
        rd, half = self.dim, self.dim // 2
        head = x_BTND[..., :rd]
        turned = torch.cat([head[..., half:], head[..., :half]], -1)
        cos, sin = cos_BTR.unsqueeze(-2), sin_BTR.unsqueeze(-2)
        if not torch.is_grad_enabled() and x_BTND.dtype == cos.dtype:
            head.mul_(cos).addcmul_(turned, sin)
            return x_BTND
        mixed = torch.addcmul(head * cos, turned, sin).to(x_BTND.dtype)
        return torch.cat([mixed, x_BTND[..., rd:]], -1)
