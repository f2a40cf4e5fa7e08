"""The multi-token-prediction head: one attention layer over pairs (token x_p, carrier of h_{p-1}).

Legend: B sequences, T rows, H hidden, P start positions.
Slot s of its cache holds pair p = s + 1; position 0 has no pair. Embedding and vocabulary head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from workbench.cache.kv import AttentionPlane
from workbench.model.attention import GatedAttention
from workbench.model.config import ModelConfig
from workbench.model.ffn import SwiGLU
from workbench.model.ops import Derived, Numerics, linear, plus_one, rms_norm
from workbench.model.rotary import Rotary


class MTPHead(nn.Module):
    """fc(concat[norm(embedding), norm(carrier)]), one decoder layer, one norm; the result is the next carrier.

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2, as Qwen3.5 checkpoints are served.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, self.eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Parameter(torch.full((h, 2 * h), torch.nan))
        self.embedding_norm = nn.Parameter(torch.full((h,), torch.nan))
        self.hidden_norm = nn.Parameter(torch.full((h,), torch.nan))
        self.input_norm = nn.Parameter(torch.full((h,), torch.nan))
        self.post_norm = nn.Parameter(torch.full((h,), torch.nan))
        self.norm = nn.Parameter(torch.full((h,), torch.nan))
        self.attention = GatedAttention(config)
        self.ffn = SwiGLU(config)
        self._scales = Derived(plus_one)

    def scales(self) -> tuple[Tensor, ...]:
        """1 + weight of the norms: embedding, hidden, input, post, final."""
        return self._scales(self.embedding_norm, self.hidden_norm, self.input_norm, self.post_norm, self.norm)

    def join(self, embedding_BTH: Tensor, carrier_BTH: Tensor, num: Numerics) -> Tensor:
        """Input of the layer for every pair, [B, T, H]; the embedding comes first."""
        b, t, h = embedding_BTH.shape
        scales = self.scales()
        left = rms_norm(embedding_BTH, scales[0], self.eps)
        right = rms_norm(carrier_BTH, scales[1], self.eps)
        return linear(torch.cat([left, right], -1).reshape(b * t, 2 * h), self.fc, num).contiguous().view(b, t, h)

    def enter(self, embedding_BTH: Tensor, carrier_BTH: Tensor, num: Numerics) -> tuple[Tensor, Tensor]:
        """The joined pairs, and the same normed for the attention block, [B, T, H] each."""
        x = self.join(embedding_BTH, carrier_BTH, num)
        return x, rms_norm(x, self.scales()[2], self.eps)

    def after(self, x_BTH: Tensor, mixed_BTH: Tensor, num: Numerics) -> Tensor:
        """Residuals, feed-forward and the head's norm: the next carrier [B, T, H]."""
        scales = self.scales()
        x = x_BTH + mixed_BTH
        x = x + self.ffn(rms_norm(x, scales[3], self.eps), num)
        return rms_norm(x, scales[4], self.eps)

    def forward(
        self,
        embedding_BTH: Tensor,
        carrier_BTH: Tensor,
        plane: AttentionPlane,
        lengths: Sequence[int],
        counts: Sequence[int],
        rotary: Rotary,
        cos_BTR: Tensor,
        sin_BTR: Tensor,
        num: Numerics,
        probe: Callable[[str], None] | None = None,
    ) -> Tensor:
        """Run T pairs at the cache's slots and append their K/V rows.

        Args:
            embedding_BTH: Embeddings of the pairs' tokens.
            carrier_BTH: Carriers of the rows before them.
            plane: K/V rows of this layer.
            lengths: Slots each sequence held before.
            counts: Valid pairs per sequence.
            rotary: Position embedding; the pair in slot s turns by s.
            cos_BTR: Cosines of the slots.
            sin_BTR: Signed sines.
            num: Numerical class.
            probe: Called with the name of each part when it has been issued.

        Returns:
            Next carriers [B, T, H], after the head's norm: what the vocabulary head reads.
        """
        x, h = self.enter(embedding_BTH, carrier_BTH, num)
        mark = probe or _unobserved
        mark("glue")
        mixed = self.attention(h, plane, lengths, counts, rotary, cos_BTR, sin_BTR, num)
        mark("attention")
        out = self.after(x, mixed, num)
        mark("ffn")
        return out


def _unobserved(part: str) -> None:
    """Nobody is timing."""
