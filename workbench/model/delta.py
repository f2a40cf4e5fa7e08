"""The gated DeltaNet mixer: causal convolution, gated delta rule, gated norm.

Legend: B sequences, T rows, H hidden, C convolution channels, W window rows (taps - 1), N value heads,
K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workbench.cache.recurrent import DeltaInputs, RecurrentPlane
from workbench.model.config import ModelConfig
from workbench.model.ops import Numerics, linear, mapped, rms_norm
from workbench_kernels.gated_delta import chunk, scan

SCAN_ROWS = 16  # in fast mode, up to this many rows run as a scan, more as chunks


class GatedDeltaNet(nn.Module):
    """Mixer of a delta layer.

    ``in_proj`` stacks the rows of qkv, z, b and a, in this order.

    Source: Yang et al. 2024 (arXiv 2412.06464); conventions of transformers' Qwen3.5.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hk, self.hv = config.linear_num_key_heads, config.linear_num_value_heads
        self.dk, self.dv = config.linear_key_head_dim, config.linear_value_head_dim
        self.c, self.v = config.conv_dim, config.value_dim
        self.taps, self.eps = config.linear_conv_kernel_dim, config.rms_norm_eps
        self.in_proj = nn.Parameter(torch.full((self.c + self.v + 2 * self.hv, config.hidden_size), torch.nan))
        self.conv = nn.Parameter(torch.full((self.c, self.taps), torch.nan))
        self.a_log = nn.Parameter(torch.full((self.hv,), torch.nan))
        self.dt_bias = nn.Parameter(torch.full((self.hv,), torch.nan))
        self.norm = nn.Parameter(torch.full((self.dv,), torch.nan))
        self.out_proj = nn.Parameter(torch.full((config.hidden_size, self.v), torch.nan))

    def project(self, x_BTH: Tensor, window_BWC: Tensor, num: Numerics) -> tuple[Tensor, ...]:
        """Inputs of the recurrence for each row: fed [B,W+T,C], q, k, v, beta, log decay, z."""
        b, t, h = x_BTH.shape
        packed = linear(x_BTH.reshape(b * t, h), self.in_proj, num).view(b, t, -1)
        u, z, raw_b, raw_a = packed.split([self.c, self.v, self.hv, self.hv], -1)
        fed = torch.cat([window_BWC, u], 1)
        mixed = fed[:, :t] * self.conv[:, 0]
        for i in range(1, self.taps):
            mixed = mixed + fed[:, i : i + t] * self.conv[:, i]
        mixed = mapped(nn.functional.silu, mixed, num).float()
        keys = self.hk * self.dk
        qk = mixed[..., : 2 * keys].view(b, t, 2 * self.hk, self.dk)
        qk = qk * torch.rsqrt(qk.square().sum(-1, keepdim=True).add(1e-6))
        q, k = qk[:, :, : self.hk] * self.dk**-0.5, qk[:, :, self.hk :]
        if self.hv != self.hk:
            repeat = self.hv // self.hk
            q, k = q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2)
        v = mixed[..., 2 * keys :].view(b, t, self.hv, self.dv)
        beta = mapped(torch.sigmoid, raw_b.float(), num)
        rate = -self.a_log.float().exp()
        g = rate * mapped(nn.functional.softplus, raw_a.float() + self.dt_bias.float(), num)
        return fed, q, k, v, beta, g, z

    def finish(self, o_BTNV: Tensor, z_BTV: Tensor, dtype: torch.dtype, num: Numerics) -> Tensor:
        """Gated norm and output projection, [B, T, H]."""
        b, t = o_BTNV.shape[:2]
        o = rms_norm(o_BTNV, torch.ones((), device=o_BTNV.device), self.eps).to(dtype)
        gate = mapped(nn.functional.silu, z_BTV.float(), num).view(b, t, self.hv, self.dv)
        o = ((self.norm * o).float() * gate).to(dtype)
        return linear(o.reshape(b * t, self.v), self.out_proj, num).view(b, t, -1)

    def forward(self, x_BTH: Tensor, plane: RecurrentPlane, counts: Sequence[int], num: Numerics) -> Tensor:
        """Run T rows from the plane's state and leave it after the valid ones.

        Args:
            x_BTH: Normed input rows.
            plane: Window and state of this layer.
            counts: Valid rows per sequence; the state of a sequence does not see rows past them.
            num: Numerical class; exact always scans.

        Returns:
            [B, T, H].
        """
        t = x_BTH.shape[1]
        fed, q, k, v, beta, g, z = self.project(x_BTH, plane.conv_BWC, num)
        ragged = any(n != t for n in counts)
        window = self.taps - 1
        columns = plane.keep_columns and plane.tape is not None
        if num.exact or t <= SCAN_ROWS or columns:
            decay = mapped(torch.exp, g, num)
            o, states = scan(q, k, v, beta, decay, plane.state_BHKV, every=ragged or columns)
            state = states[-1]
            if ragged:
                before = [plane.state_BHKV, *states]
                state = torch.stack([before[n][i] for i, n in enumerate(counts)])
        else:
            decay, states = g.exp(), []
            if ragged:
                live = torch.arange(t, device=g.device) < torch.tensor(list(counts), device=g.device)[:, None]
                beta, g = beta * live.unsqueeze(-1), g * live.unsqueeze(-1)
            o, state = chunk(q, k, v, beta, g, plane.state_BHKV)
        if ragged:
            conv = torch.stack([fed[i, n : n + window] for i, n in enumerate(counts)])
        else:
            conv = fed[:, t:] if t <= SCAN_ROWS else fed[:, t:].clone()  # a view would hold every row of a long forward
        kept = states if columns else ()
        plane.put(conv, state, DeltaInputs(fed[:, window:], k, v, beta, decay, kept, tuple(counts)))
        return self.finish(o, z, x_BTH.dtype, num)

    def forward_train(self, x_BTH: Tensor, num: Numerics) -> Tensor:
        """Whole sequences from a zero state by the chunked form; differentiable."""
        window = x_BTH.new_zeros(x_BTH.shape[0], self.taps - 1, self.c)
        _, q, k, v, beta, g, z = self.project(x_BTH, window, num)
        with torch.autocast(x_BTH.device.type, enabled=False):
            o, _ = chunk(q, k, v.float(), beta, g, None)
        return self.finish(o, z, x_BTH.dtype, num)
