"""Where the state of a sequence lies while its rounds run on the device: at addresses that stay.

K/V rows are written where the session keeps them; windows and delta states of all layers lie in one slab each, so that
a round commits them in one launch. Legend: L delta layers, T places of a verify, H hidden, S slots, N key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.cache.kv import KVPlane
from workbench.model import kernel_path
from workbench.model.attention import GatedAttention
from workbench.model.delta import GatedDeltaNet
from workbench.model.hybrid import HybridModel
from workbench_kernels.causal_conv import conv_commit
from workbench_kernels.gated_delta import Tape, gated_delta_commit


class Planes:
    """The target's and the drafter's state of one sequence.

    Args:
        model: The target.
        cache: Its cache, of dense planes and one sequence.
        drafts: The drafter's cache; None for none.
        t: Places of a verify.
        rows: Rows per sequence that K/V planes must have room for.
    """

    def __init__(self, model: HybridModel, cache: HybridCache, drafts: HybridCache | None, t: int, rows: int) -> None:
        self.model, self.t, self.rows = model, t, rows
        self.rebind(cache, drafts)
        self.tables = model.rotary.table(rows, model.device)
        mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, GatedDeltaNet)]
        self.deltas = {i: n for n, i in enumerate(i for i, p in enumerate(cache.planes) if i not in self.kv)}
        first, layers = mixers[0], len(mixers)
        plane_conv, plane_state = cache.recurrent[0].conv_BWC, cache.recurrent[0].state_BHKV
        self.conv_LWC = plane_conv.new_empty(layers, *plane_conv.shape[1:])
        self.state_LHKV = plane_state.new_empty(layers, *plane_state.shape[1:])
        wide: dict = dict(dtype=torch.float32, device=model.device)
        self.fed_LTP = plane_conv.new_empty(layers, t, len(first.in_proj))
        self.tape = Tape(
            torch.empty(layers, t, first.hk, first.dk, **wide), torch.empty(layers, t, first.hv, first.dv, **wide),
            torch.empty(layers, t, first.hv, **wide), torch.empty(layers, t, first.hv, **wide),
        )  # fmt: skip

    def rebind(self, cache: HybridCache, drafts: HybridCache | None) -> None:
        """Use the planes that these caches hold now, with room for all rows; a cache replaces planes when it grows."""
        self.cache, self.drafts = cache, drafts
        self.kv = {i: plane for i, plane in enumerate(cache.planes) if isinstance(plane, KVPlane)}
        self.draft_kv: KVPlane | None = None
        if drafts is not None:
            plane = drafts.planes[0]
            assert isinstance(plane, KVPlane)
            self.draft_kv = plane
        for plane in self.attention:
            plane.reserve(self.rows)

    @property
    def attention(self) -> list[KVPlane]:
        """K/V planes of the target and of the drafter."""
        return [*self.kv.values(), *self._draft()]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the K/V rows lie."""
        return tuple(x.data_ptr() for plane in self.attention for x in (plane.k_BNSD, plane.v_BNSD))

    def load(self) -> None:
        """Take in the cache's windows and states."""
        torch.cat([plane.conv_BWC for plane in self.cache.recurrent], out=self.conv_LWC)
        torch.cat([plane.state_BHKV for plane in self.cache.recurrent], out=self.state_LHKV)

    def store(self, length: int, slots: int) -> None:
        """Leave the cache, and the drafter's, as if rows had been fed to them by forwards.

        Args:
            length: Rows of the target.
            slots: Final rows of the drafter.
        """
        conv_LWC, state_LHKV = self.conv_LWC.clone(), self.state_LHKV.clone()
        for n, plane in enumerate(self.cache.recurrent):
            plane.put(conv_LWC[n : n + 1], state_LHKV[n : n + 1], None)
        self.cache.lengths = [length]
        if self.drafts is not None:
            self.drafts.lengths = [slots]

    def scrub(self, length: int, slots: int) -> None:
        """Free rows of every K/V plane hold zeros again, after a round whose rows were not finite."""
        for plane, held in [*((kv, length) for kv in self.kv.values()), *((kv, slots) for kv in self._draft())]:
            plane.k_BNSD[:, :, held:] = 0
            plane.v_BNSD[:, :, held:] = 0

    def _draft(self) -> list[KVPlane]:
        return [] if self.draft_kv is None else [self.draft_kv]

    def mixer(self, lengths_B: Tensor, longest: int, way: kernel_path.Way) -> kernel_path.Mix:
        """Runs one of the target's mixers over a verify's rows; states stay as they are, tapes are kept.

        States are steady once ``assemble_verify`` has begun, which waits for the commit of the round before.
        """

        def mix(i: int, mixer: GatedAttention | GatedDeltaNet, h_RH: Tensor) -> Tensor:
            if isinstance(mixer, GatedAttention):
                kv = self.kv[i]
                return kernel_path.attend(
                    mixer, h_RH, kv.k_BNSD, kv.v_BNSD, lengths_B, self.tables, way=way, longest=longest
                )
            n = self.deltas[i]
            one = slice(n, n + 1)
            made = kernel_path.delta(
                mixer, h_RH, self.conv_LWC[one], self.state_LHKV[one], way=way, write="none", window=False,
                steady=True, tape=Tape(*(x[one] for x in self.tape)), fed_RP=self.fed_LTP[n],
            )  # fmt: skip
            return made.rows_RH

        return mix

    def draft_mixer(
        self, lengths_B: Tensor, longest: int, counts_B: Tensor | None, way: kernel_path.Way
    ) -> kernel_path.Mix:
        """Runs the drafter's attention over pairs."""
        kv = self.draft_kv
        assert kv is not None

        def mix(i: int, mixer: GatedAttention | GatedDeltaNet, h_RH: Tensor) -> Tensor:
            assert isinstance(mixer, GatedAttention)
            return kernel_path.attend(
                mixer, h_RH, kv.k_BNSD, kv.v_BNSD, lengths_B, self.tables, way=way, longest=longest,
                counts_B=counts_B,
            )  # fmt: skip

        return mix

    def commit(self, keep_B: Tensor) -> None:
        """Leave every window and state after the first ``keep`` rows of the verify."""
        conv_commit(self.fed_LTP, self.conv_LWC, keep_B)
        gated_delta_commit(self.tape, self.state_LHKV, keep_B)
