"""Forwards through the kernels over a cache whose lengths the host knows; see ``kernel_path``.

Legend: B sequences, T rows, H hidden, N key/value heads, G query heads per key/value head, D head width, Q = N G D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.cache.kv import BLOCK, AttentionPlane, KVPlane
from workbench.cache.recurrent import DeltaInputs, RecurrentPlane
from workbench.model import kernel_path
from workbench.model.attention import GatedAttention
from workbench.model.delta import GatedDeltaNet
from workbench.model.kernel_path import Way, way_of
from workbench.model.transfer import upload

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel


class Batch:
    """Where the rows of one forward lie, on the host and on the device.

    Args:
        lengths: Rows each sequence held before.
        counts: Valid rows of each, 0 to T.
        t: Rows of each, padding included.
        device: Where the forward runs.
    """

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], t: int, device: torch.device) -> None:
        self.lengths, self.counts, self.t, self.device = list(lengths), list(counts), t, device
        ragged = any(n != t for n in counts)
        both_2B = upload(np.array([self.lengths, self.counts], np.int32), device)
        self.lengths_B, self.counts_B = both_2B[0], both_2B[1] if ragged else None

    @property
    def longest(self) -> int:
        """Rows that any sequence holds afterwards, padding included."""
        return max(self.lengths) + self.t


def forward(
    model: HybridModel, tokens_BT: Tensor, cache: HybridCache, batch: Batch, *, taps: Sequence[int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Rows of the target, [B, T, H] each, and taps; the planes take them in."""
    way, shape = _way(model, batch), (*tokens_BT.shape, -1)
    tables = _tables(model, batch)

    def mix(i: int, mixer: GatedAttention | GatedDeltaNet, h_RH: Tensor) -> Tensor:
        plane = cache.planes[i]
        if isinstance(mixer, GatedDeltaNet):
            assert isinstance(plane, RecurrentPlane)
            return _delta(mixer, h_RH, plane, batch, way)
        assert isinstance(plane, AttentionPlane)
        return _attend(mixer, h_RH, plane, batch, tables, way)

    x, h, tapped = kernel_path.decoder(model, tokens_BT.reshape(-1), mix, way=way, taps=taps)
    return x.view(shape), h.view(shape), {i: y.view(shape) for i, y in tapped.items()}


def draft(
    model: HybridModel,
    tokens_BT: Tensor,
    carrier_BTH: Tensor,
    plane: AttentionPlane,
    batch: Batch,
    probe: Callable[[str], None] | None,
) -> Tensor:
    """Next carriers [B, T, H] of the MTP head; its plane takes the rows in."""
    way, tables = _way(model, batch), _tables(model, batch)

    def mix(i: int, mixer: GatedAttention | GatedDeltaNet, h_RH: Tensor) -> Tensor:
        assert isinstance(mixer, GatedAttention)
        return _attend(mixer, h_RH, plane, batch, tables, way)

    carrier = carrier_BTH.reshape(-1, carrier_BTH.shape[-1]).contiguous()
    out = kernel_path.draft_step(model, tokens_BT.reshape(-1), carrier, mix, way=way, probe=probe)
    return out.view(carrier_BTH.shape)


def _way(model: HybridModel, batch: Batch) -> Way:
    return way_of(model.exact, len(batch.lengths) * batch.t, batch.t)


def _tables(model: HybridModel, batch: Batch) -> tuple[Tensor, Tensor]:
    return model.rotary.table(batch.longest, batch.device)


def _delta(mixer: GatedDeltaNet, h_RH: Tensor, plane: RecurrentPlane, batch: Batch, way: Way) -> Tensor:
    recorded = plane.tape is not None
    columns = recorded and plane.keep_columns
    made = kernel_path.delta(
        mixer, h_RH, plane.conv_BWC.contiguous(), plane.state_BHKV, way=way, tape=recorded, columns=columns,
        counts_B=batch.counts_B,
    )  # fmt: skip
    inputs = None
    if made.tape is not None:
        states = made.states_BTHKV.unbind(1) if made.states_BTHKV is not None else ()
        inputs = DeltaInputs(made.fed_BTP[..., : mixer.c], *made.tape, states, tuple(batch.counts))
    assert made.conv_BWC is not None and made.state_BHKV is not None
    plane.put(made.conv_BWC, made.state_BHKV, inputs)
    return made.rows_RH


def _attend(
    mixer: GatedAttention,
    h_RH: Tensor,
    plane: AttentionPlane,
    batch: Batch,
    tables: tuple[Tensor, Tensor],
    way: Way,
) -> Tensor:
    if isinstance(plane, KVPlane):
        plane.reserve(batch.longest)
        return kernel_path.attend(
            mixer, h_RH, plane.k_BNSD, plane.v_BNSD, batch.lengths_B, tables, way=way, counts_B=batch.counts_B,
            longest=batch.longest,
        )  # fmt: skip
    # other planes pack or lap rows their own way: new rows come out of a ring of T slots, and attention reads what
    # the plane gives back
    shape = (len(batch.lengths), mixer.n, batch.t, mixer.d)
    k_BNTD, v_BNTD = (torch.zeros(shape, dtype=h_RH.dtype, device=h_RH.device) for _ in range(2))

    def through(q_BTNGD: Tensor, gate_BTQ: Tensor) -> Tensor:
        slots = (batch.lengths_B[:, None] + torch.arange(batch.t, device=q_BTNGD.device)) % batch.t
        index = slots.long()[:, :, None, None].expand(-1, -1, mixer.n, mixer.d)
        k, v = (x.transpose(1, 2).gather(1, index) for x in (k_BNTD, v_BNTD))
        plane.append(k, v, batch.lengths, batch.counts)
        out = torch.zeros_like(gate_BTQ)
        for b, (at, n) in enumerate(zip(batch.lengths, batch.counts, strict=True)):
            if n:
                base = plane.oldest(at) // BLOCK * BLOCK
                k, v = (x.unsqueeze(0).contiguous() for x in plane.read(b, base, at + n))
                here = upload(np.array([at - base], np.int32), q_BTNGD.device)
                q, gate = q_BTNGD[b : b + 1, :n].contiguous(), gate_BTQ[b : b + 1, :n].contiguous()
                out[b, :n] = kernel_path.attend_few(q, k, v, here, gate, window=plane.window)[0]
        return out

    return kernel_path.attend(
        mixer, h_RH, k_BNTD, v_BNTD, batch.lengths_B, tables, way=way, ring=True, after=through
    )  # fmt: skip
