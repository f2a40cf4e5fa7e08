"""Chains of the MTP head from many start positions at once, over the true rows of one sequence or of several.

The chain at start p continues the pair in slot p - 1, a true row, with private rows in slots p, p + 1, ... that no
other chain sees. Step j of every start runs together: attention over the true rows up to the start, plus the chain's
own. In exact mode the bits are those of a live chain, which keeps all rows in one cache: key blocks are cut at the
same slots and merged in the same order. Nothing is read back from a GPU within a chain.
Legend: P starts, N key/value heads, G query heads per key/value head, D head width, H hidden, S slots, J private rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from workbench.cache.kv import BLOCK, KVPlane
from workbench.core.errors import CapabilityError
from workbench.model.attention import NEG, GatedAttention, attend_chain
from workbench.model.delta import GatedDeltaNet
from workbench.model.hybrid import HybridModel
from workbench.model.kernel_path import draft_step, linear, way_of
from workbench.model.ops import Numerics, mapped
from workbench.model.transfer import upload
from workbench_kernels.rope_store import rope_store
from workbench_kernels.verify_attention import replay_attention

PRIVATE = 8  # private rows that a device makes room for at first


class Chains(Protocol):
    """Private rows of the chains of one sequence."""

    def attend(self, q_PNGD: Tensor, k_PND: Tensor, v_PND: Tensor, step: int, num: Numerics) -> Tensor:
        """Take each chain's row of a step and attend from it, [P, N*G*D]."""


class ChainBatch:
    """Private rows of the chains of many starts.

    Args:
        model: The target with its head.
        plane: True rows of the head's cache; slots below the largest start of a sequence must be filled.
        starts: Start positions p, each with its true rows in slots 0..p-1.
        sequences: The sequence of the plane that each start belongs to, those of one side by side; None for the first.

    Raises:
        CapabilityError: The model is exact and on a GPU, where chains of many starts are not those of a live chain bit
            for bit.
    """

    def __init__(
        self, model: HybridModel, plane: KVPlane, starts: Sequence[int], *, sequences: Sequence[int] | None = None
    ) -> None:
        self.model, self.plane = model, plane
        self.starts = upload(starts, model.device)
        self.steps, self.top = 0, max(starts)
        make = chains_for(model)
        self.by_ops = make is DeviceChains
        self.parts: list[tuple[slice, Chains]] = []
        places = range(len(starts))
        for b, members in groupby(places, key=lambda i: 0 if sequences is None else sequences[i]):
            group = list(members)
            part = slice(group[0], group[-1] + 1)
            self.parts.append((part, make(plane, b, self.starts[part], max(starts[part]))))

    @torch.no_grad()
    def step(self, tokens_P: Tensor, carrier_PH: Tensor) -> Tensor:
        """Feed every chain's last draft: next carriers [P, H].

        Args:
            tokens_P: The token each chain drafted last.
            carrier_PH: The carrier it was drafted from.

        Returns:
            Carriers that ``unembed_draft`` turns into the next draft's logits.
        """
        if self.by_ops:
            return self._step_by_ops(tokens_P, carrier_PH)
        model = self.model
        mtp = model.mtp
        assert mtp is not None
        num = model.numerics
        slots = self.starts + self.steps
        cos, sin = model.rotary.table(self.top + self.steps + 1, model.device)
        x, h = mtp.enter(embedding(tokens_P, model.embed).unsqueeze(0), carrier_PH.unsqueeze(0), num)
        q, k, v, gate = mtp.attention.project(h, model.rotary, cos[slots].unsqueeze(0), sin[slots].unsqueeze(0), num)
        outs = [chains.attend(q[0, part], k[0, part], v[0, part], self.steps, num) for part, chains in self.parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        self.steps += 1
        return mtp.after(x, mtp.attention.finish(out.unsqueeze(0), gate, num), num)[0]

    def _step_by_ops(self, tokens_P: Tensor, carrier_PH: Tensor) -> Tensor:
        model, p = self.model, len(tokens_P)
        slots_P, way = self.starts.int() + self.steps, way_of(model.exact, p, p)
        tables = model.rotary.table(self.top + self.steps + 1, model.device)

        def mix(i: int, mixer: GatedAttention | GatedDeltaNet, h_PH: Tensor) -> Tensor:
            assert isinstance(mixer, GatedAttention)
            packed = linear(h_PH, mixer.qkv, way).unsqueeze(1)
            k_PN1D, v_PN1D = (packed.new_empty(p, mixer.n, 1, mixer.d) for _ in range(2))  # rings of one slot
            q, gate_P1Q, _, _ = rope_store(
                packed, k_PN1D, v_PN1D, slots_P, *tables, *mixer.scales(), heads=mixer.n * mixer.g, ring=True,
                eps=mixer.eps,
            )  # fmt: skip
            q_PNGD, gate_PQ = q.view(p, mixer.n, mixer.g, mixer.d), gate_P1Q[:, 0]
            outs = []
            for part, chains in self.parts:
                assert isinstance(chains, DeviceChains)
                k, v = k_PN1D[part, :, 0], v_PN1D[part, :, 0]
                outs.append(chains.attend(q_PNGD[part], k, v, self.steps, model.numerics, gate_PQ[part]))
            out = outs[0] if len(outs) == 1 else torch.cat(outs)
            return linear(out, mixer.o_proj, way)

        out = draft_step(model, tokens_P, carrier_PH.contiguous(), mix, way=way)
        self.steps += 1
        return out


def chains_for(model: HybridModel) -> type[ExactChains] | type[FastChains] | type[DeviceChains]:
    """How a model's chains keep their rows, by its numerical class and device."""
    if model.device.type == "cpu":
        return ExactChains if model.exact else FastChains
    if model.exact:
        raise CapabilityError(
            "exact=True is not valid for chains of many starts on a GPU, which merge keys in another order than a "
            "live chain: use exact=False, or device='cpu'"
        )
    return DeviceChains


class FastChains:
    """By stock operations: the scores of all true rows, masked, beside those of the private rows."""

    def __init__(self, plane: KVPlane, b: int, starts: Tensor, top: int) -> None:
        k, v = plane.rows(b, top)
        self.shared = (k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
        self.seen = torch.arange(top, device=starts.device) < starts[:, None]
        self.private: list[tuple[Tensor, Tensor]] = []

    def attend(self, q_PNGD: Tensor, k_PND: Tensor, v_PND: Tensor, step: int, num: Numerics) -> Tensor:
        """Take each chain's row of a step and attend from it, [P, N*G*D]."""
        self.private.append((k_PND.unsqueeze(0), v_PND.unsqueeze(0)))
        return attend_chain(q_PNGD.unsqueeze(0), *self.shared, self.seen, self.private)[0]


class DeviceChains:
    """By the op of the same purpose: true rows are read where they lie, private rows from one tensor."""

    impl: str | None = None  # of the op; None goes by the device

    def __init__(self, plane: KVPlane, b: int, starts: Tensor, top: int) -> None:
        self.k_NSD, self.v_NSD, self.starts = plane.k_BNSD[b], plane.v_BNSD[b], starts.int()
        p, n, d = len(starts), self.k_NSD.shape[0], self.k_NSD.shape[2]
        self.own_k = self.k_NSD.new_zeros(p, PRIVATE, n, d)
        self.own_v = torch.zeros_like(self.own_k)

    def attend(
        self, q_PNGD: Tensor, k_PND: Tensor, v_PND: Tensor, step: int, num: Numerics, gate_PQ: Tensor | None = None
    ) -> Tensor:
        """Take each chain's row of a step and attend from it, gated where a gate is given, [P, N*G*D]."""
        if step == self.own_k.shape[1]:
            self.own_k, self.own_v = (torch.cat([x, torch.zeros_like(x)], 1) for x in (self.own_k, self.own_v))
        self.own_k[:, step], self.own_v[:, step] = k_PND, v_PND
        return replay_attention(
            q_PNGD.contiguous(), self.k_NSD, self.v_NSD, self.starts, self.own_k, self.own_v, steps=step + 1,
            gate_PQ=gate_PQ, impl=self.impl,
        )  # fmt: skip


class ExactChains:
    """By key blocks merged in order, starts grouped by the whole blocks of true rows before them."""

    def __init__(self, plane: KVPlane, b: int, starts: Tensor, top: int) -> None:
        self.starts = starts
        self.groups = [_Group(plane, m, rows, b) for m, rows in _by_block(starts)]

    def attend(self, q_PNGD: Tensor, k_PND: Tensor, v_PND: Tensor, step: int, num: Numerics) -> Tensor:
        """Take each chain's row of a step and attend from it, [P, N*G*D]."""
        slots, out = self.starts + step, q_PNGD.new_empty(len(q_PNGD), q_PNGD[0].numel())
        for group in self.groups:
            at = group.rows
            out[at] = group.attend(q_PNGD[at], k_PND[at], v_PND[at], slots[at], num)
        return out


def _by_block(starts: Tensor) -> list[tuple[int, Tensor]]:
    """Starts grouped by the number of whole key blocks of true rows before them: (blocks, indices)."""
    whole = starts // BLOCK
    return [(int(m), (whole == m).nonzero()[:, 0]) for m in whole.unique()]


class _Group:
    """Starts whose true rows fill the same m whole key blocks; the block after them is private, and one more."""

    def __init__(self, plane: KVPlane, m: int, rows: Tensor, b: int) -> None:
        self.m, self.rows = m, rows
        k_NSD, v_NSD = plane.k_BNSD[b], plane.v_BNSD[b]
        n, held, d = k_NSD.shape
        self.k_shared = k_NSD[:, : m * BLOCK].reshape(n * m, BLOCK, d)
        self.v_shared = v_NSD[:, : m * BLOCK].reshape(n * m, BLOCK, d)
        tail = slice(m * BLOCK, min((m + 1) * BLOCK, held))
        width = tail.stop - tail.start
        self.k_tail = k_NSD.new_zeros(len(rows), n, 2 * BLOCK, d)
        self.v_tail = torch.zeros_like(self.k_tail)
        if width > 0:
            # rows past a start are other chains' business: they are overwritten or masked, and finite
            self.k_tail[:, :, :width] = k_NSD[:, tail]
            self.v_tail[:, :, :width] = v_NSD[:, tail]

    def attend(self, q_PNGD: Tensor, k_PND: Tensor, v_PND: Tensor, slots_P: Tensor, num: Numerics) -> Tensor:
        """Write each chain's row into its slot and attend from it, [P, N*G*D]."""
        local = slots_P - self.m * BLOCK
        index = torch.arange(len(local), device=local.device)
        self.k_tail[index, :, local], self.v_tail[index, :, local] = k_PND, v_PND
        p, n, g, d = q_PNGD.shape
        q_PNGD = q_PNGD * d**-0.5
        out = q_PNGD.new_empty(p, n * g * d)
        for blocks in (1, 2):
            pick = (local // BLOCK == blocks - 1).nonzero()[:, 0]
            if len(pick):
                out[pick] = self._merge(q_PNGD[pick], pick, local[pick], blocks, num)
        return out

    def _merge(self, q_PNGD: Tensor, pick: Tensor, local_P: Tensor, blocks: int, num: Numerics) -> Tensor:
        p, n, g, d = q_PNGD.shape
        block, m = num.row_block, self.m
        # shared blocks: ``block`` starts share a row block, as ``block`` rows of one verify would
        q = pad(q_PNGD, (0, 0, 0, 0, 0, 0, 0, -p % block))
        packs = q.shape[0] // block
        q_row = q.view(packs, block, n, g, d).transpose(1, 2).reshape(packs, n, 1, block * g, d)
        shape = (packs, n, m, block * g)
        k = self.k_shared.view(1, n, m, BLOCK, d).expand(packs, n, m, BLOCK, d).reshape(-1, BLOCK, d)
        v = self.v_shared.view(1, n, m, BLOCK, d).expand(packs, n, m, BLOCK, d).reshape(-1, BLOCK, d)
        shared = torch.bmm(q_row.expand(packs, n, m, block * g, d).reshape(-1, block * g, d), k.transpose(1, 2))
        shared = shared.float().view(*shape, BLOCK)
        # private blocks: one start per row block
        q_own = pad(q_PNGD.unsqueeze(2), (0, 0, 0, 0, 0, block - 1)).reshape(p * n, 1, block * g, d)
        k_own = self.k_tail[pick, :, : blocks * BLOCK].reshape(p * n * blocks, BLOCK, d)
        v_own = self.v_tail[pick, :, : blocks * BLOCK].reshape(p * n * blocks, BLOCK, d)
        q_own = q_own.expand(p * n, blocks, block * g, d).reshape(-1, block * g, d)
        own = torch.bmm(q_own, k_own.transpose(1, 2)).float().view(p, n, blocks, block * g, BLOCK)
        keys = torch.arange(blocks * BLOCK, device=own.device).view(blocks, 1, BLOCK)
        own = own.masked_fill(keys > local_P.view(p, 1, 1, 1, 1), NEG)
        # the softmax runs over both: one peak, then sums block by block in order
        peak_own = own.amax((2, 4))
        peak_own = peak_own[:, :, :g]
        if m:
            peak_shared = shared.amax((2, 4)).view(packs, n, block, g).transpose(1, 2).reshape(-1, n, g)[:p]
            peak = torch.maximum(peak_own, peak_shared)
        else:
            peak = peak_own
        outs, totals = [], []
        if m:
            tall = pad(peak, (0, 0, 0, 0, 0, -p % block)).view(packs, block, n, g).transpose(1, 2)
            weight = mapped(torch.exp, shared - tall.reshape(packs, n, 1, block * g, 1), num)
            part = torch.bmm(weight.view(-1, block * g, BLOCK).to(v.dtype), v).view(*shape, d)
            total = weight.sum(-1)
            part = part.view(packs, n, m, block, g, d).permute(2, 0, 3, 1, 4, 5).reshape(m, -1, n, g, d)[:, :p]
            total = total.view(packs, n, m, block, g).permute(2, 0, 3, 1, 4).reshape(m, -1, n, g)[:, :p]
            outs += list(part.unbind(0))
            totals += list(total.unbind(0))
        tall = peak.repeat(1, 1, block).view(p, n, 1, block * g, 1)
        weight = mapped(torch.exp, own - tall, num)
        part = torch.bmm(weight.view(-1, block * g, BLOCK).to(v_own.dtype), v_own)
        part = part.view(p, n, blocks, block * g, d)[:, :, :, :g]
        total = weight.sum(-1)[:, :, :, :g]
        outs += list(part.unbind(2))
        totals += list(total.unbind(2))
        out, norm = outs[0].float(), totals[0]
        for more, weight_sum in zip(outs[1:], totals[1:], strict=True):
            out, norm = out + more, norm + weight_sum
        return (out / norm.unsqueeze(-1)).to(v_own.dtype).reshape(p, n * g * d)
