"""The gated DeltaNet mixer: causal convolution, gated delta rule, gated norm.

Legend: B sequences, T rows, H hidden, C convolution channels, W window rows (taps - 1), N value heads,
K key width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbench.cache.recurrent import DeltaInputs, RecurrentPlane
from workbench.core.lanes import LANES
from workbench.model.config import ModelConfig
from workbench.model.ops import Derived, Numerics, inverse_norm, linear, mapped, rms_norm, widen
from workbench_kernels.gated_delta import chunk, scan

SCAN_ROWS = 16  # in fast mode, up to this many rows run as a scan, more as chunks


class Constants(NamedTuple):
    """What a delta layer computes from its parameters and shape alone, float32 but for the taps.

    Args:
        heads: Index that gives every value head its query, then its key.
        scale: 1/sqrt(K) for query heads and 1 for key heads, [2 Nk, 1].
        taps_WC: The convolution, oldest input first.
        bias: Added to the rows of b and a, [2 N, 1].
        sign: -1 for b and 1 for a, [2 N, 1].
        rate: Times softplus gives the logs of beta and of the decay, [2 N, 1].
        norm: Weight of the gated norm.
    """

    heads: Tensor
    scale: Tensor
    taps_WC: Tensor
    bias: Tensor
    sign: Tensor
    rate: Tensor
    norm: Tensor


def _constants(
    key_heads: int, key_width: int, conv_CW: Tensor, a_log_N: Tensor, dt_bias_N: Tensor, norm_V: Tensor
) -> Constants:
    one = torch.ones_like(a_log_N, dtype=torch.float32)
    scale = torch.tensor([key_width**-0.5, 1.0], device=one.device)
    return Constants(
        torch.arange(2 * key_heads, device=one.device).repeat_interleave(len(one) // key_heads),
        scale.repeat_interleave(key_heads)[:, None],
        conv_CW.t().contiguous(),
        torch.cat([torch.zeros_like(one), dt_bias_N.float()])[:, None],
        torch.cat([-one, one])[:, None],
        torch.cat([-one, -a_log_N.float().exp()])[:, None],
        norm_V.float(),
    )


class Inputs(NamedTuple):
    """Inputs of the recurrence, row by row.

    Args:
        fed_BSC: Window and new rows of the convolution's input, S = W + T.
        q_BTNK: Normalised and scaled queries.
        k_BTNK: Normalised keys.
        v_BTNV: Values.
        beta_BTN: Write strengths.
        decay_BTN: Decays.
        logs_BTM: Logs of [beta | decay], M = 2 N.
        z_BTV: Input of the output gate, V = all heads' widths.
    """

    fed_BSC: Tensor
    q_BTNK: Tensor
    k_BTNK: Tensor
    v_BTNV: Tensor
    beta_BTN: Tensor
    decay_BTN: Tensor
    logs_BTM: Tensor
    z_BTV: Tensor


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
        self._constants = Derived(partial(_constants, self.hk, self.dk))

    def constants(self) -> Constants:
        """What follows from the parameters."""
        return self._constants(self.conv, self.a_log, self.dt_bias, self.norm)

    def project(self, x_BTH: Tensor, window_BWC: Tensor, known: Constants, num: Numerics, live: int) -> Inputs:
        """Inputs of the recurrence for the first ``live`` rows of every sequence."""
        b, rows, h = x_BTH.shape
        packed = linear(x_BTH.reshape(b * rows, h), self.in_proj, num).view(b, rows, -1)
        t = live
        packed = (packed if t == rows else packed[:, :t]).contiguous()
        u, z, raw = torch.split_with_sizes(packed, (self.c, self.v, 2 * self.hv), 2)
        fed = torch.cat([window_BWC, u], 1)
        if t <= SCAN_ROWS or num.exact:
            mixed = (fed.unfold(1, self.taps, 1).transpose(2, 3) * known.taps_WC).sum(2)
        else:
            taps = known.taps_WC.unbind(0)
            mixed = fed[:, :t] * taps[0]
            for i in range(1, self.taps):
                mixed = torch.addcmul(mixed, fed[:, i : i + t], taps[i])
        mixed = mapped(nn.functional.silu, mixed, num).float()
        keys = self.hk * self.dk
        qk, v = torch.split_with_sizes(mixed, (2 * keys, self.v), 2)
        qk = qk.view(b, t, 2 * self.hk, self.dk)
        qk = qk * (inverse_norm(qk, 1e-6) * known.scale)
        if self.hv != self.hk:
            qk = qk.index_select(2, known.heads)
        q, k = qk.chunk(2, 2)
        logs, gates = self.gates(raw.float(), known, num)
        beta, decay = gates.chunk(2, 2)
        return Inputs(fed, q, k, v.view(b, t, self.hv, self.dv), beta, decay, logs, z)

    def gates(self, raw_BTN: Tensor, known: Constants, num: Numerics) -> tuple[Tensor, Tensor]:
        """Log and value of [beta | decay] of every row, [B, T, 2 N].

        beta is sigmoid(b) = exp(-softplus(-b)), so that both take the same maps. In exact mode every element is
        repeated until the maps' flat length leaves no tail.
        """
        spare = LANES // math.gcd(raw_BTN.numel(), LANES) if num.exact else 1
        x = torch.addcmul(known.bias, raw_BTN.unsqueeze(-1), known.sign.expand(-1, spare))
        logs = mapped(nn.functional.softplus, x, num) * known.rate
        return logs.select(-1, 0), mapped(torch.exp, logs, num).select(-1, 0)

    def finish(
        self, o_BTNV: Tensor, z_BTV: Tensor, known: Constants, num: Numerics, rows: int, dtype: torch.dtype
    ) -> Tensor:
        """Gated norm and output projection, [B, rows, H]; rows past the given ones are padding."""
        b, t = o_BTNV.shape[:2]
        gate = mapped(nn.functional.silu, z_BTV.float(), num).view(b, t, self.hv, self.dv)
        if dtype == torch.float32:
            o = rms_norm(o_BTNV, known.norm, self.eps) * gate
        else:
            o = rms_norm(o_BTNV, torch.ones_like(known.norm), self.eps).to(dtype)
            o = ((self.norm * o).float() * gate).to(dtype)
        if t == rows:
            return linear(o.reshape(b * t, self.v), self.out_proj, num).view(b, t, -1)
        if b == 1:
            return linear(widen(o.reshape(t, self.v), rows), self.out_proj, num).unsqueeze(0)
        out = linear(o.reshape(b * t, self.v), self.out_proj, num).view(b, t, -1)
        return nn.functional.pad(out, (0, 0, 0, rows - t))

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
        t = max(1, *counts)
        known = self.constants()
        fed, q, k, v, beta, decay, logs, z = self.project(x_BTH, plane.conv_BWC, known, num, t)
        ragged = any(n != t for n in counts)
        window = self.taps - 1
        columns = plane.keep_columns and plane.tape is not None
        if num.exact or t <= SCAN_ROWS or columns:
            o, states = scan(q, k, v, beta, decay, plane.state_BHKV, every=ragged or columns)
            state = states[-1]
            if ragged:
                before = [plane.state_BHKV, *states]
                state = torch.stack([before[n][i] for i, n in enumerate(counts)])
        else:
            states, g = [], logs.chunk(2, 2)[1]
            if ragged:
                live = torch.arange(t, device=g.device) < torch.tensor(list(counts), device=g.device)[:, None]
                beta, g = beta * live.unsqueeze(-1), g * live.unsqueeze(-1)
            o, state = chunk(q, k, v, beta, g, plane.state_BHKV)
        if ragged:
            conv = torch.stack([fed[i, n : n + window] for i, n in enumerate(counts)])
        else:
            conv = fed[:, t:] if t <= SCAN_ROWS else fed[:, t:].clone()  # a view would hold every row of a long forward
        kept = states if columns else ()
        recorded = plane.tape is not None
        inputs = DeltaInputs(fed[:, window:], k, v, beta, decay, kept, tuple(counts)) if recorded else None
        plane.put(conv, state, inputs)
        return self.finish(o, z, known, num, x_BTH.shape[1], x_BTH.dtype)

    def forward_train(self, x_BTH: Tensor, num: Numerics) -> Tensor:
        """Whole sequences from a zero state by the chunked form; differentiable."""
        window = x_BTH.new_zeros(x_BTH.shape[0], self.taps - 1, self.c)
        known, t = self.constants(), x_BTH.shape[1]
        _, q, k, v, beta, _, logs, z = self.project(x_BTH, window, known, num, t)
        with torch.autocast(x_BTH.device.type, enabled=False):
            o, _ = chunk(q, k, v.float(), beta, logs.chunk(2, 2)[1], None)
        return self.finish(o, z, known, num, t, x_BTH.dtype)
