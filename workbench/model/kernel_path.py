"""The layers through workbench_kernels: what runs on a GPU.

Few rows, and in exact mode any number, take products over fixed row blocks, attention over fixed key blocks and the
delta rule row by row, so that a row's bits depend on nothing but its text. In fast mode a handful of rows take smaller
weights through registers, and many rows take the library's products, the chunk form of the rule and an online softmax.

How a layer's state is kept is the caller's: it gives a function that runs one mixer on normed rows.
Legend: B sequences, T rows, R = B T, H hidden, K inputs, N outputs, P columns of a delta layer's projection, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.model.attention import GatedAttention
from workbench.model.delta import GatedDeltaNet
from workbench.model.ffn import SwiGLU
from workbench_kernels.causal_conv import causal_conv
from workbench_kernels.direct_linear import direct_linear, takes
from workbench_kernels.dispatch import chosen
from workbench_kernels.gated_delta import Tape, delta_inputs, gated_delta_chunk, gated_delta_step
from workbench_kernels.rmsnorm import add_rmsnorm, embed_rmsnorm, gated_rmsnorm, rmsnorm
from workbench_kernels.rope_store import rope_store
from workbench_kernels.skinny_linear import skinny_linear
from workbench_kernels.swiglu import swiglu
from workbench_kernels.verify_attention import prefill_attention, verify_attention

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

FEW = 16  # up to this many rows per sequence run through the ops for few rows in fast mode too
SLICE = 16  # rows of a long exact forward that attend at a time: their parts are kept in memory until merged

# H200: in fast mode up to this many rows in all take weights up to this many values through registers. A decode step of
# 0.8B takes 0.78 ms so, 0.97 otherwise, and a verify of 4 rows 1.08 and 1.04; more rows, or larger weights with more
# than one row, are faster by skinny_linear. A verify of up to four rows goes the way of a decode step, and has its bits
HANDFUL, DIRECT = 4, 12 << 20

Mix = Callable[[int, GatedAttention | GatedDeltaNet, Tensor], Tensor]


class Way(Enum):
    """Which ops a forward takes: for many rows, for few, or for few whose products may have other bits than those."""

    MANY = "many"
    FEW = "few"
    DIRECT = "direct"

    @property
    def few(self) -> bool:
        """Whether attention and the delta rule take their ops for few rows."""
        return self is not Way.MANY


def way_of(exact: bool, rows: int, t: int) -> Way:
    """The way of a forward.

    Args:
        exact: A row's bits must not depend on how many come together.
        rows: Rows of all sequences, padding included.
        t: Rows of each.

    Returns:
        Which ops it takes.
    """
    if not exact and rows <= HANDFUL:
        return Way.DIRECT
    return Way.FEW if exact or t <= FEW else Way.MANY


def applies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether forwards there go through the kernels: on a GPU below float64, or inside ``workbench_kernels.use``."""
    return dtype != torch.float64 and (device.type == "cuda" or chosen() is not None)


def linear(x_RK: Tensor, weight_NK: Tensor, way: Way, *, out_RN: Tensor | None = None) -> Tensor:
    """Rows times a weight, [R, N], in a new tensor or where it is asked for; few rows alone take an ``out_RN``."""
    if _direct(way, x_RK, weight_NK):
        return direct_linear(x_RK, weight_NK, out_MN=out_RN)
    if way.few:
        out = skinny_linear(x_RK, weight_NK, out_MN=out_RN)
        assert isinstance(out, Tensor)
        return out
    return torch.nn.functional.linear(x_RK, weight_NK)


def _direct(way: Way, x_RK: Tensor, weight_NK: Tensor) -> bool:
    return way is Way.DIRECT and weight_NK.numel() <= DIRECT and takes(len(x_RK), weight_NK)


def logits_of(normed_RH: Tensor, head_VH: Tensor, few: bool) -> Tensor:
    """Float32 logits [R, V], never rounded to the weights' type."""
    if few:
        out = skinny_linear(normed_RH.contiguous(), head_VH, wide=True)
        assert isinstance(out, Tensor)
        return out
    if head_VH.dtype == torch.float32 or normed_RH.device.type != "cuda":
        return torch.nn.functional.linear(normed_RH, head_VH).float()
    return torch.mm(normed_RH, head_VH.t(), out_dtype=torch.float32)


def feed_forward(ffn: SwiGLU, x_RH: Tensor, way: Way) -> Tensor:
    """The SwiGLU block, [R, H]."""
    if _direct(way, x_RH, ffn.gate_up):
        hidden = direct_linear(x_RH, ffn.gate_up, swiglu=True)
    elif way.few:
        made = skinny_linear(x_RH, ffn.gate_up, swiglu=True)
        assert isinstance(made, Tensor)
        hidden = made
    else:
        hidden = swiglu(linear(x_RH, ffn.gate_up, way))
    return linear(hidden, ffn.down, way)


def decoder(
    model: HybridModel, tokens_R: Tensor, mix: Mix, *, way: Way, taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Every layer of the target.

    Args:
        model: The target.
        tokens_R: Ids.
        mix: Called with (layer, mixer, normed rows [R, H]); gives the mixer's rows [R, H].
        way: Which ops to take.
        taps: Layers whose output rows are wanted.

    Returns:
        Trunk rows and normed rows [R, H], and taps.
    """
    eps, blocks = model.config.rms_norm_eps, model.blocks
    scales = [block.scales() for block in blocks]
    tapped: dict[int, Tensor] = {}
    x, h = embed_rmsnorm(tokens_R, model.embed, scales[0][0], eps=eps)
    for i, block in enumerate(blocks):
        x, h = add_rmsnorm(mix(i, block.mixer, h), x, scales[i][1], eps=eps)
        after = scales[i + 1][0] if i + 1 < len(blocks) else model.final_scale
        x, h = add_rmsnorm(feed_forward(block.ffn, h, way), x, after, eps=eps)
        if i in taps:
            tapped[i] = x
    return x, h, tapped


def draft_step(
    model: HybridModel,
    tokens_R: Tensor,
    carrier_RH: Tensor,
    mix: Mix,
    *,
    way: Way,
    probe: Callable[[str], None] | None = None,
) -> Tensor:
    """Pairs through the MTP head.

    Args:
        model: The target with its head.
        tokens_R: The pairs' tokens.
        carrier_RH: Their carriers.
        mix: As for ``decoder``, with layer 0.
        way: Which ops to take.
        probe: Called with the name of each part when it has been issued.

    Returns:
        Next carriers [R, H].
    """
    mtp = model.mtp
    assert mtp is not None
    eps, scales = mtp.eps, mtp.scales()
    left = embed_rmsnorm(tokens_R, model.embed, scales[0], eps=eps)[1]
    right = rmsnorm(carrier_RH, scales[1], eps=eps)
    x = linear(torch.cat([left, right], 1), mtp.fc, way)
    h = rmsnorm(x, scales[2], eps=eps)
    if probe:
        probe("glue")
    mixed = mix(0, mtp.attention, h)
    if probe:
        probe("attention")
    x, h = add_rmsnorm(mixed, x, scales[3], eps=eps)
    _, out = add_rmsnorm(feed_forward(mtp.ffn, h, way), x, scales[4], eps=eps)
    if probe:
        probe("ffn")
    return out


def attend(
    mixer: GatedAttention,
    h_RH: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    way: Way,
    counts_B: Tensor | None = None,
    longest: int | None = None,
    ring: bool = False,
    after: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """One attention layer over rows, whose keys and values are written where they are kept.

    Args:
        mixer: Its weights.
        h_RH: Normed rows.
        k_BNSD: Kept keys, dense.
        v_BNSD: Kept values.
        lengths_B: Rows each sequence held, int32.
        tables: Cosines and signed sines by position.
        way: Which ops to take.
        counts_B: Valid rows per sequence; None for all.
        longest: Rows that any sequence holds afterwards, at most; None for all that are kept.
        ring: Position p is kept in slot p mod S.
        after: Given queries [B, T, N, G, D] and gates [B, T, Q], attends in another way; None for this one.

    Returns:
        Rows [R, H].
    """
    b, width = len(lengths_B), mixer.d
    t = len(h_RH) // b
    packed = linear(h_RH, mixer.qkv, way).view(b, t, -1)
    scales = mixer.scales()
    q, gate, _, _ = rope_store(
        packed, k_BNSD, v_BNSD, lengths_B, *tables, scales[0], scales[1], heads=mixer.n * mixer.g, ring=ring,
        counts_B=counts_B, eps=mixer.eps,
    )  # fmt: skip
    q = q.view(b, t, mixer.n, mixer.g, width)
    if after is not None:
        out = after(q, gate)
    elif way.few:
        out = attend_few(q, k_BNSD, v_BNSD, lengths_B, gate, longest=longest)
    else:
        out = prefill_attention(q, k_BNSD, v_BNSD, lengths_B, gate_BTQ=gate)
    return linear(out.view(b * t, -1), mixer.o_proj, way)


def attend_few(
    q_BTNGD: Tensor,
    k_BNSD: Tensor,
    v_BNSD: Tensor,
    lengths_B: Tensor,
    gate_BTQ: Tensor,
    *,
    longest: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of rows over kept keys, with bits that do not depend on how many rows come together."""
    t = q_BTNGD.shape[1]
    if t <= SLICE:
        return verify_attention(q_BTNGD, k_BNSD, v_BNSD, lengths_B, gate_BTQ=gate_BTQ, longest=longest, window=window)
    parts = []
    for at in range(0, t, SLICE):
        rows = slice(at, at + SLICE)
        q, gate = q_BTNGD[:, rows].contiguous(), gate_BTQ[:, rows].contiguous()
        far = None if longest is None else min(longest - t + at + SLICE, longest)
        parts.append(verify_attention(q, k_BNSD, v_BNSD, lengths_B + at, gate_BTQ=gate, longest=far, window=window))
    return torch.cat(parts, 1)


class DeltaRows(NamedTuple):
    """What one delta layer made of some rows.

    Args:
        rows_RH: Its output.
        fed_BTP: Its projection; the convolution's inputs are the first columns.
        conv_BWC: The window afterwards; None where it was not asked for.
        state_BHKV: The state afterwards; None where it was not written.
        tape: Inputs of the rule; None where not recorded.
        states_BTHKV: State after every row; None where not asked for.
    """

    rows_RH: Tensor
    fed_BTP: Tensor
    conv_BWC: Tensor | None
    state_BHKV: Tensor | None
    tape: Tape | None
    states_BTHKV: Tensor | None


def delta(
    mixer: GatedDeltaNet,
    h_RH: Tensor,
    conv_BWC: Tensor,
    state_BHKV: Tensor,
    *,
    way: Way,
    write: str = "new",
    window: bool = True,
    steady: bool = False,
    tape: bool | Tape = False,
    columns: bool = False,
    counts_B: Tensor | None = None,
    fed_RP: Tensor | None = None,
) -> DeltaRows:
    """One delta layer over rows.

    Args:
        mixer: Its weights.
        h_RH: Normed rows.
        conv_BWC: Window before them; not written.
        state_BHKV: State before them.
        way: Which ops to take.
        write: Where the state afterwards goes: "new", "in place" or "none"; many rows always give a new one.
        window: Give the window afterwards.
        steady: Nothing that may still run writes window or state.
        tape: Record the rule's inputs, in new tensors or in these.
        columns: Give the state after every row.
        counts_B: Valid rows per sequence; None for all.
        fed_RP: Where the projection goes; None for a new tensor.

    Returns:
        Rows and what follows from them.
    """
    b = len(conv_BWC)
    t, known, few = len(h_RH) // b, mixer.constants(), way.few
    packed = linear(h_RH, mixer.in_proj, way, out_RN=fed_RP)
    fed = packed.view(b, t, -1)
    together = few and not window and t <= FEW  # the step convolves too
    mixed, conv = fed[..., : mixer.c], None
    if not together:
        mixed, conv = causal_conv(fed, conv_BWC, known.taps_WC, counts_B=counts_B, after=window)
    gates = fed[..., mixer.c + mixer.v :]
    if few or columns:
        made = gated_delta_step(
            mixed,
            gates,
            mixer.a_log,
            mixer.dt_bias,
            state_BHKV,
            key_heads=mixer.hk,
            write=write,
            tape=tape,
            columns=columns,
            counts_B=counts_B,
            conv=(conv_BWC, known.taps_WC) if together else None,
            steady=steady,
        )
        out, after, record, states = made
    else:
        narrow = mixed.dtype == torch.bfloat16 and not tape  # a tape is float32
        q, k, v, beta, decay, log = delta_inputs(
            mixed, gates.contiguous(), mixer.a_log, mixer.dt_bias, key_heads=mixer.hk, key_width=mixer.dk,
            dtype=torch.bfloat16 if narrow else torch.float32,
        )  # fmt: skip
        out, after = gated_delta_chunk(q, k, v, beta, log, state_BHKV, counts_B=counts_B)
        record, states = Tape(k, v, beta, decay) if tape else None, None
    z = packed[:, mixer.c : mixer.c + mixer.v]
    rows = gated_rmsnorm(out.reshape(-1, mixer.dv).contiguous(), z, mixer.norm, eps=mixer.eps)
    return DeltaRows(linear(rows.view(b * t, -1), mixer.out_proj, way), fed, conv, after, record, states)
