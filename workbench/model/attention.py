"""Gated grouped-query attention with per-head norms and partial rotary positions.

Legend: B sequences, T rows, N key/value heads, G query heads per key/value head, D head width, S keys, H hidden,
P start positions, J private rows of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from workbench.cache.kv import BLOCK, AttentionPlane
from workbench.core.lanes import SERIAL
from workbench.model.config import ModelConfig
from workbench.model.ops import Derived, Numerics, linear, mapped, plus_one, rms_norm, widen
from workbench.model.rotary import Rotary

NEG = float("-inf")


def _head_scales(heads: int, key_heads: int, q_norm_D: Tensor, k_norm_D: Tensor) -> Tensor:
    """1 + weight of every query and key head's norm."""
    return torch.cat([q_norm_D.expand(heads, -1), k_norm_D.expand(key_heads, -1)]).float() + 1.0


class GatedAttention(nn.Module):
    """Attention mixer of a full-attention layer and of the MTP layer.

    ``qkv`` stacks, per query head, [query | gate], then the keys, then the values.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n, self.d = config.num_key_value_heads, config.head_dim
        self.g = config.num_attention_heads // self.n
        self.eps = config.rms_norm_eps
        heads = config.num_attention_heads
        self.qkv = nn.Parameter(torch.full((2 * heads * self.d + 2 * self.n * self.d, config.hidden_size), torch.nan))
        self.o_proj = nn.Parameter(torch.full((config.hidden_size, heads * self.d), torch.nan))
        self.q_norm = nn.Parameter(torch.full((self.d,), torch.nan))
        self.k_norm = nn.Parameter(torch.full((self.d,), torch.nan))
        self._scales = Derived(partial(_head_scales, heads, self.n))
        self._two = Derived(plus_one)

    def scales(self) -> tuple[Tensor, ...]:
        """1 + weight of a query head's and of a key head's norm, float32."""
        return self._two(self.q_norm, self.k_norm)

    def project(
        self, x_BTH: Tensor, rotary: Rotary, cos_BTR: Tensor, sin_BTR: Tensor, num: Numerics
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B,T,N,G,D], keys [B,T,N,D], values [B,T,N,D] and the output gate [B,T,N*G*D] of each row."""
        b, t, h = x_BTH.shape
        heads = self.n * self.g
        packed = linear(x_BTH.reshape(b * t, h), self.qkv, num).view(b, t, -1)
        q_gate, k, v = torch.split_with_sizes(packed, (2 * heads * self.d, self.n * self.d, self.n * self.d), 2)
        query, gate = q_gate.view(b, t, heads, 2, self.d).unbind(3)
        both = torch.cat([query, k.view(b, t, self.n, self.d)], dim=2)
        both = rotary(rms_norm(both, self._scales(self.q_norm, self.k_norm), self.eps), cos_BTR, sin_BTR)
        q, k = both.split([heads, self.n], 2)
        gate = gate.reshape(b, t, heads * self.d)
        return q.unflatten(2, (self.n, self.g)), k, v.view(b, t, self.n, self.d), gate

    def finish(self, out_BTQ: Tensor, gate_BTQ: Tensor, num: Numerics) -> Tensor:
        """Gate the attended values and project them back to [B, T, H]."""
        b, t, width = out_BTQ.shape
        gated = out_BTQ * mapped(torch.sigmoid, gate_BTQ, num)
        return linear(gated.reshape(b * t, width), self.o_proj, num).view(b, t, -1)

    def forward(
        self,
        x_BTH: Tensor,
        plane: AttentionPlane,
        lengths: Sequence[int],
        counts: Sequence[int],
        rotary: Rotary,
        cos_BTR: Tensor,
        sin_BTR: Tensor,
        num: Numerics,
    ) -> Tensor:
        """Append this layer's rows to the plane and attend from them.

        Args:
            x_BTH: Normed input rows.
            plane: K/V rows of this layer.
            lengths: Rows each sequence held before.
            counts: Valid rows per sequence.
            rotary: Position embedding.
            cos_BTR: Cosines of the rows' positions.
            sin_BTR: Signed sines.
            num: Numerical class.

        Returns:
            [B, T, H].
        """
        q, k, v, gate = self.project(x_BTH, rotary, cos_BTR, sin_BTR, num)
        plane.append(k, v, lengths, counts)
        attend = attend_exact if num.exact else attend_fast
        if len(counts) == 1 and counts[0]:
            n, rows = counts[0], gate.shape[1]
            return self.finish(widen(attend(q[0, :n], plane, 0, lengths[0], num), rows).unsqueeze(0), gate, num)
        out = torch.zeros_like(gate)
        for b, (at, n) in enumerate(zip(lengths, counts, strict=True)):
            if n:
                out[b, :n] = attend(q[b, :n], plane, b, at, num)
        return self.finish(out, gate, num)

    def forward_train(self, x_BTH: Tensor, rotary: Rotary, cos_BTR: Tensor, sin_BTR: Tensor, num: Numerics) -> Tensor:
        """Causal attention over whole sequences without a cache; differentiable."""
        q, k, v, gate = self.project(x_BTH, rotary, cos_BTR, sin_BTR, num)
        return self.finish(attend_causal(q, k, v), gate, num)


def attend_causal(q_BTNGD: Tensor, k_BTND: Tensor, v_BTND: Tensor) -> Tensor:
    """Causal attention of whole sequences over themselves, [B, T, N*G*D]; differentiable."""
    b, t, d = q_BTNGD.shape[0], q_BTNGD.shape[1], q_BTNGD.shape[-1]
    out = nn.functional.scaled_dot_product_attention(
        q_BTNGD.reshape(b, t, -1, d).transpose(1, 2),
        k_BTND.transpose(1, 2),
        v_BTND.transpose(1, 2),
        is_causal=True,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(b, t, -1)


def attend_fast(q_TNGD: Tensor, plane: AttentionPlane, b: int, at: int, num: Numerics) -> Tensor:
    """Attention of T new rows at positions at..at+T-1, by stock operations."""
    t, n, g, d = q_TNGD.shape
    first, window = plane.oldest(at), plane.window
    k_NSD, v_NSD = plane.read(b, first, at + t)
    before, keys = at - first, at + t - first
    if t <= 16:
        q = (q_TNGD * d**-0.5).permute(1, 0, 2, 3).reshape(n, t * g, d)
        scores = torch.bmm(q, k_NSD.transpose(1, 2)).float()
        if t > 1:
            unseen = torch.ones(t, keys, dtype=torch.bool, device=q.device).triu(before + 1)
            if window is not None:
                unseen |= torch.ones_like(unseen).tril(before - window)
            scores = scores.view(n, t, g, -1).masked_fill(unseen[:, None], NEG).view(n, t * g, -1)
        out = torch.bmm(scores.softmax(-1).to(v_NSD.dtype), v_NSD)
        return out.view(n, t, g, d).transpose(0, 1).reshape(t, n * g * d)
    whole = at == 0 and window is None
    mask = None if whole else torch.ones(t, keys, dtype=torch.bool, device=q_TNGD.device).tril(before)
    if mask is not None and window is not None:
        mask = mask.triu(before - window + 1)
    out = nn.functional.scaled_dot_product_attention(
        q_TNGD.reshape(1, t, n * g, d).transpose(1, 2),
        k_NSD.unsqueeze(0),
        v_NSD.unsqueeze(0),
        attn_mask=mask,
        is_causal=whole,
        enable_gqa=g > 1,
    )
    return out[0].transpose(0, 1).reshape(t, n * g * d)


def attend_exact(q_TNGD: Tensor, plane: AttentionPlane, b: int, at: int, num: Numerics) -> Tensor:
    """Attention whose bits per row do not depend on T: fixed row blocks over fixed key blocks, merged in order.

    Key blocks lie at absolute positions. Under a window they are walked from the block of the oldest key in sight of
    a row block's first row; to a row that does not see it, that block adds exact zeros.
    """
    t, n, g, d = q_TNGD.shape
    block, window = num.row_block, plane.window
    q = widen((q_TNGD * d**-0.5).reshape(t, n * g * d), t + -t % block).view(-1, n, g, d)
    base = plane.oldest(at) // BLOCK
    k_NSD, v_NSD = plane.read(b, base * BLOCK, ((at + t - 1) // BLOCK + 1) * BLOCK)
    outs = []
    for lo in range(0, t, block):
        first = plane.oldest(at + lo) // BLOCK
        nb = (at + min(lo + block, t) - 1) // BLOCK + 1 - first
        seen = slice((first - base) * BLOCK, (first - base + nb) * BLOCK)
        k, v = k_NSD[:, seen].reshape(n * nb, BLOCK, d), v_NSD[:, seen].reshape(n * nb, BLOCK, d)
        q_NRD = q[lo : lo + block].transpose(0, 1).reshape(n, 1, block * g, d)
        outs.append(merge_blocks(q_NRD, k, v, at + lo - first * BLOCK, g, num, window))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if t == len(out) else out[:t]


@lru_cache(maxsize=512)
def late_keys(at: int, rows: int, g: int, blocks: int, device: torch.device) -> Tensor:
    """0 where a row at place ``at + r`` sees a key of the first ``blocks`` key blocks, else -inf, [blocks, R*G, 64]."""
    keys = torch.arange(blocks * BLOCK, device=device).view(blocks, 1, BLOCK)
    places = torch.arange(at, at + rows, device=device).repeat_interleave(g)
    return torch.zeros(blocks, rows * g, BLOCK, device=device).masked_fill(keys > places[:, None], NEG)


@lru_cache(maxsize=32)
def unseen_keys(at: int, rows: int, g: int, blocks: int, window: int, device: torch.device) -> Tensor:
    """0 where a row at place ``at + r`` sees a key within its window, else -inf, [blocks, R*G, 64].

    Rows that only fill up a row block may stand past the last key; they see it, so that they stay finite.
    """
    keys = torch.arange(blocks * BLOCK, device=device).view(blocks, 1, BLOCK)
    places = torch.arange(at, at + rows, device=device).clamp_(max=blocks * BLOCK - 1).repeat_interleave(g)[:, None]
    hidden = (keys > places) | (keys <= places - window)
    return torch.zeros(blocks, rows * g, BLOCK, device=device).masked_fill(hidden, NEG)


def merge_blocks(
    q_N1RD: Tensor, k_MSD: Tensor, v_MSD: Tensor, at: int, g: int, num: Numerics, window: int | None = None
) -> Tensor:
    """Softmax attention of one block of rows over key blocks, summed block by block in order.

    Args:
        q_N1RD: Scaled queries of one row block, [N, 1, R*G, D].
        k_MSD: Key blocks [N*blocks, 64, D].
        v_MSD: Value blocks, likewise.
        at: Place of the first row among the keys, the last key that it may see; the others follow.
        g: Query heads per key/value head.
        num: Numerical class.
        window: Keys that a row sees, its own included; None for all up to it.

    Returns:
        [R, N*G*D].
    """
    n, _, rows, d = q_N1RD.shape
    nb = k_MSD.shape[0] // n
    q = q_N1RD.expand(n, nb, rows, d).reshape(n * nb, rows, d)
    scores = torch.bmm(q, k_MSD.transpose(1, 2)).float().view(n, nb, rows, BLOCK)
    if window is None:
        first = at // BLOCK
        scores[:, first:] += late_keys(at % BLOCK, rows // g, g, nb - first, q.device)
    else:
        scores += unseen_keys(at, rows // g, g, nb, window, q.device)
    scores -= scores.amax((1, 3), keepdim=True)
    weight = scores.exp_() if scores.numel() <= SERIAL else mapped(torch.exp, scores, num)
    parts = torch.bmm(weight.view(n * nb, rows, BLOCK).to(v_MSD.dtype), v_MSD).view(n, nb, rows, d).float()
    if window is not None:
        parts = parts + 0.0  # no sum then starts at a negative zero, whether or not unseen blocks come before it
    out, *others = parts.unbind(1)
    total, *totals = weight.sum(-1).unbind(1)
    for more, weight_sum in zip(others, totals, strict=True):
        out, total = out + more, total + weight_sum
    out = (out / total.unsqueeze(-1)).to(v_MSD.dtype)
    return out.view(n, rows // g, g, d).transpose(0, 1).reshape(rows // g, n * g * d)


def attend_chain(
    q_BPNGD: Tensor, k_BSND: Tensor, v_BSND: Tensor, seen_PS: Tensor, private: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of one chain step for many start positions at once: shared true rows plus each chain's own rows.

    Args:
        q_BPNGD: Queries of the step, one per start.
        k_BSND: True keys.
        v_BSND: True values.
        seen_PS: True where a start may see a true row.
        private: Keys and values [B, P, N, D] of this chain's steps so far, this one included.

    Returns:
        [B, P, N*G*D]; differentiable.
    """
    b, p, n, g, d = q_BPNGD.shape
    q = q_BPNGD * d**-0.5
    shared = torch.einsum("bpngd,bsnd->bngps", q, k_BSND).float().masked_fill(~seen_PS, NEG)
    own = torch.stack([torch.einsum("bpngd,bpnd->bngp", q, k) for k, _ in private], -1).float()
    weight = torch.cat([shared, own], -1).softmax(-1).to(v_BSND.dtype)
    s = k_BSND.shape[1]
    out = torch.einsum("bngps,bsnd->bpngd", weight[..., :s], v_BSND)
    for j, (_, v) in enumerate(private):
        out = out + weight[..., s + j].permute(0, 3, 1, 2).unsqueeze(-1) * v.unsqueeze(3)
    return out.reshape(b, p, n * g * d)
