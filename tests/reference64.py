"""An independent float64 evaluation of the decoder and its MTP head from published tensors: loops, no cache.

Written from the formulas alone and sharing no code with the library: rows are one sequence [T, H], every layer walks
its positions one by one, and attention forms each row from all rows before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Get = Callable[[str], Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm with weight 1 + w."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def turn(x_NTD: Tensor, theta: float, rd: int) -> Tensor:
    """Rotate the first rd dimensions of every head, halves convention, as complex numbers."""
    t, half = x_NTD.shape[1], rd // 2
    rates = torch.tensor([theta ** (-2 * i / rd) for i in range(half)], dtype=torch.float64)
    spin = torch.polar(torch.ones(t, half, dtype=torch.float64), torch.arange(t).double()[:, None] * rates)
    z = torch.complex(x_NTD[..., :half].contiguous(), x_NTD[..., half:rd].contiguous()) * spin
    return torch.cat([z.real, z.imag, x_NTD[..., rd:]], -1)


def attention(x: Tensor, get: Get, c: Mapping[str, Any]) -> Tensor:
    """Gated grouped-query attention of one sequence."""
    t, heads, kv, d, eps = len(x), c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]
    rope = c["rope_parameters"]
    rd = int(d * rope["partial_rotary_factor"])
    packed = (x @ get("self_attn.q_proj.weight").T).view(t, heads, 2 * d)
    q, gate = packed[..., :d], packed[..., d:].reshape(t, heads * d)
    k = (x @ get("self_attn.k_proj.weight").T).view(t, kv, d)
    v = (x @ get("self_attn.v_proj.weight").T).view(t, kv, d)
    q = turn(norm(q, get("self_attn.q_norm.weight"), eps).transpose(0, 1), rope["rope_theta"], rd)
    k = turn(norm(k, get("self_attn.k_norm.weight"), eps).transpose(0, 1), rope["rope_theta"], rd)
    out = torch.zeros(t, heads, d, dtype=torch.float64)
    for n in range(heads):
        group = n // (heads // kv)
        for i in range(t):
            weight = (k[group, : i + 1] @ q[n, i] * d**-0.5).softmax(0)
            out[i, n] = weight @ v[: i + 1, group]
    return (out.view(t, -1) / (1 + (-gate).exp())) @ get("self_attn.o_proj.weight").T


def delta(x: Tensor, get: Get, c: Mapping[str, Any]) -> Tensor:
    """Gated DeltaNet of one sequence, position by position."""
    hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    dk, dv, eps = c["linear_key_head_dim"], c["linear_value_head_dim"], c["rms_norm_eps"]
    u = x @ get("linear_attn.in_proj_qkv.weight").T
    conv = get("linear_attn.conv1d.weight")[:, 0]
    taps = conv.shape[1]
    mixed = torch.stack(
        [sum(conv[:, j] * u[i - taps + 1 + j] for j in range(taps) if i - taps + 1 + j >= 0) for i in range(len(x))]
    )
    mixed = silu(mixed)
    z = (x @ get("linear_attn.in_proj_z.weight").T).view(-1, hv, dv)
    beta = 1 / (1 + (-(x @ get("linear_attn.in_proj_b.weight").T)).exp())
    rate = torch.log1p((x @ get("linear_attn.in_proj_a.weight").T + get("linear_attn.dt_bias")).exp())
    decay = (-get("linear_attn.A_log").exp() * rate).exp()
    rows = []
    state = torch.zeros(hv, dk, dv, dtype=torch.float64)
    for i in range(len(x)):
        q, k, v = mixed[i].split([hk * dk, hk * dk, hv * dv])
        q, k, v = q.view(hk, dk), k.view(hk, dk), v.view(hv, dv)
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() * dk**-0.5
        k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        o = torch.zeros(hv, dv, dtype=torch.float64)
        for n in range(hv):
            key = n // (hv // hk)
            s = state[n] * decay[i, n]
            s = s + torch.outer(k[key], beta[i, n] * (v[n] - k[key] @ s))
            state[n], o[n] = s, q[key] @ s
        o = get("linear_attn.norm.weight") * o / (o.pow(2).mean(-1, keepdim=True) + eps).sqrt() * silu(z[i])
        rows.append(o.flatten())
    return torch.stack(rows) @ get("linear_attn.out_proj.weight").T


def layer(x: Tensor, get: Get, kind: str, c: Mapping[str, Any]) -> Tensor:
    """One decoder layer with its residuals."""
    h = norm(x, get("input_layernorm.weight"), c["rms_norm_eps"])
    x = x + (attention(h, get, c) if kind == "full_attention" else delta(h, get, c))
    h = norm(x, get("post_attention_layernorm.weight"), c["rms_norm_eps"])
    gated = silu(h @ get("mlp.gate_proj.weight").T) * (h @ get("mlp.up_proj.weight").T)
    return x + gated @ get("mlp.down_proj.weight").T


def head_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The vocabulary head, or the embedding when it is tied."""
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).double()


def evaluate(tensors: Mapping[str, Tensor], config: Mapping[str, Any], ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Trunk rows before the final norm, rows after it, and logits, all [T, ...] in float64."""
    x = tensors["model.embed_tokens.weight"].double()[ids]
    for i, kind in enumerate(config["layer_types"]):
        x = layer(x, lambda name, i=i: tensors[f"model.layers.{i}.{name}"].double(), kind, config)
    normed = norm(x, tensors["model.norm.weight"].double(), config["rms_norm_eps"])
    return x, normed, normed @ head_of(tensors).T


def mtp(tensors: Mapping[str, Tensor], config: Mapping[str, Any], ids: list[int], carriers: Tensor) -> Tensor:
    """Next carriers of the pairs (ids[i], carriers[i]), attending causally; the head reads them as they are."""

    def get(name: str) -> Tensor:
        return tensors[f"mtp.{name}"].double()

    eps = config["rms_norm_eps"]
    emb = norm(tensors["model.embed_tokens.weight"].double()[ids], get("pre_fc_norm_embedding.weight"), eps)
    hidden = norm(carriers.double(), get("pre_fc_norm_hidden.weight"), eps)
    x = torch.cat([emb, hidden], -1) @ get("fc.weight").T
    x = layer(x, lambda name: get(f"layers.0.{name}"), "full_attention", config)
    return norm(x, get("norm.weight"), eps)
