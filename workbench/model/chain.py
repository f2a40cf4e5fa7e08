"""Chains of the MTP head from many start positions at once, over one sequence's true rows.

The chain at start p continues the pair in slot p - 1, a true row, with private rows in slots p, p + 1, ... that no
other chain sees. Step j of every start runs together: attention over the true rows up to the start, plus the chain's
own. In exact mode the bits are those of a live chain, which keeps all rows in one cache: key blocks are cut at the
same slots and merged in the same order.
Legend: P starts, N key/value heads, G query heads per key/value head, D head width, H hidden, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from workbench.cache.kv import BLOCK, KVPlane
from workbench.model.attention import NEG, attend_chain
from workbench.model.hybrid import HybridModel
from workbench.model.ops import Numerics, mapped


class ChainBatch:
    """Private rows of the chains of many starts.

    Args:
        model: The target with its head.
        plane: True rows of the head's cache, of one sequence; slots below the largest start must be filled.
        starts: Start positions p, each with its true rows in slots 0..p-1.
    """

    def __init__(self, model: HybridModel, plane: KVPlane, starts: Sequence[int]) -> None:
        self.model, self.plane = model, plane
        self.starts = torch.tensor(list(starts), device=model.device)
        self.steps = 0
        top = int(self.starts.max())
        if model.exact:
            self.blocks = [_Group(plane, m, rows) for m, rows in _by_block(self.starts)]
            return
        k, v = plane.rows(0, top)
        self.shared = (k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0))
        self.seen = torch.arange(top, device=model.device) < self.starts[:, None]
        self.private: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def step(self, tokens_P: Tensor, carrier_PH: Tensor) -> Tensor:
        """Feed every chain's last draft: next carriers [P, H].

        Args:
            tokens_P: The token each chain drafted last.
            carrier_PH: The carrier it was drafted from.

        Returns:
            Carriers that ``unembed_draft`` turns into the next draft's logits.
        """
        model = self.model
        mtp = model.mtp
        assert mtp is not None
        num = model.numerics
        slots = self.starts + self.steps
        cos, sin = model.rotary.table(int(slots.max()) + 1, model.device)
        x, h = mtp.enter(embedding(tokens_P, model.embed).unsqueeze(0), carrier_PH.unsqueeze(0), num)
        q, k, v, gate = mtp.attention.project(h, model.rotary, cos[slots].unsqueeze(0), sin[slots].unsqueeze(0), num)
        if model.exact:
            out = torch.empty_like(gate)
            for group in self.blocks:
                at = group.rows
                out[0, at] = group.attend(q[0, at], k[0, at], v[0, at], slots[at], num)
        else:
            self.private.append((k, v))
            out = attend_chain(q, *self.shared, self.seen, self.private)
        self.steps += 1
        return mtp.after(x, mtp.attention.finish(out, gate, num), num)[0]


def _by_block(starts: Tensor) -> list[tuple[int, Tensor]]:
    """Starts grouped by the number of whole key blocks of true rows before them: (blocks, indices)."""
    whole = starts // BLOCK
    return [(int(m), (whole == m).nonzero()[:, 0]) for m in whole.unique()]


class _Group:
    """Starts whose true rows fill the same m whole key blocks; the block after them is private, and one more."""

    def __init__(self, plane: KVPlane, m: int, rows: Tensor) -> None:
        self.m, self.rows = m, rows
        n, _, d = plane.k_BNSD.shape[1:]
        self.k_shared = plane.k_BNSD[0, :, : m * BLOCK].reshape(n * m, BLOCK, d)
        self.v_shared = plane.v_BNSD[0, :, : m * BLOCK].reshape(n * m, BLOCK, d)
        held = plane.k_BNSD.shape[2]
        tail = slice(m * BLOCK, min((m + 1) * BLOCK, held))
        width = tail.stop - tail.start
        self.k_tail = plane.k_BNSD.new_zeros(len(rows), n, 2 * BLOCK, d)
        self.v_tail = torch.zeros_like(self.k_tail)
        if width > 0:
            # rows past a start are other chains' business: they are overwritten or masked, and finite
            self.k_tail[:, :, :width] = plane.k_BNSD[0, :, tail]
            self.v_tail[:, :, :width] = plane.v_BNSD[0, :, tail]

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
