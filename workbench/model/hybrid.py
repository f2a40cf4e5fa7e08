"""The target: a hybrid decoder of gated DeltaNet and gated attention layers, with its MTP head.

Legend: B sequences, T rows, H hidden, V vocabulary, R rotated dimensions.
``forward`` is the one funnel: plain decode is T = 1, verify T = K + 1, extraction and replay T = chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.cache.hybrid import HybridCache
from workbench.cache.kv import AttentionPlane
from workbench.cache.recurrent import RecurrentPlane
from workbench.core.errors import CapabilityError, UserError, check_choice, check_int
from workbench.model import describe, kernel_forward, kernel_path
from workbench.model.attention import GatedAttention
from workbench.model.checks import check_ids, check_request
from workbench.model.config import LINEAR, ModelConfig
from workbench.model.delta import GatedDeltaNet
from workbench.model.draft_head import TrimmedDrafts
from workbench.model.ffn import SwiGLU
from workbench.model.memory import WIDEST, CacheShape
from workbench.model.mtp import MTPHead
from workbench.model.ops import Derived, Numerics, linear, plus_one, rms_norm, widen
from workbench.model.rotary import Rotary

if TYPE_CHECKING:
    from workbench.model.tokenizer import Tokenizer


CARRIERS = ("normed", "pre_norm")  # hidden rows a drafter may be fed


@dataclass(frozen=True, eq=False)
class Rows:
    """What one forward returns.

    Args:
        trunk_BTH: Rows before the final norm.
        normed_BTH: Rows after the final norm.
        logits_BTV: Requested logits in float32, [B, number of requested rows, V]; None for a headless forward.
        taps: Layer index to that layer's output rows [B, T, H].
    """

    trunk_BTH: Tensor
    normed_BTH: Tensor
    logits_BTV: Tensor | None
    taps: dict[int, Tensor] = field(default_factory=dict)

    def first(self, n: int) -> Rows:
        """The first n rows, without logits."""
        return Rows(self.trunk_BTH[:, :n], self.normed_BTH[:, :n], None, {i: x[:, :n] for i, x in self.taps.items()})

    def joined(self, other: Rows) -> Rows:
        """These rows followed by another forward's."""
        both = [x for x in (self.logits_BTV, other.logits_BTV) if x is not None]
        return Rows(
            torch.cat([self.trunk_BTH, other.trunk_BTH], 1),
            torch.cat([self.normed_BTH, other.normed_BTH], 1),
            torch.cat(both, 1) if len(both) == 2 else None,
            {i: torch.cat([x, other.taps[i]], 1) for i, x in self.taps.items() if i in other.taps},
        )


class Block(nn.Module):
    """One decoder layer: a mixer and a feed-forward block, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.input_norm = nn.Parameter(torch.full((config.hidden_size,), torch.nan))
        self.post_norm = nn.Parameter(torch.full((config.hidden_size,), torch.nan))
        self.mixer: GatedDeltaNet | GatedAttention
        self.mixer = GatedDeltaNet(config) if kind == LINEAR else GatedAttention(config)
        self.ffn = SwiGLU(config)
        self._scales = Derived(plus_one)

    def feed(self, x_BTH: Tensor, mixed_BTH: Tensor, num: Numerics) -> Tensor:
        """Add the mixer's output, then the feed-forward block's."""
        x = x_BTH + mixed_BTH
        return x + self.ffn(rms_norm(x, self.scales()[1], self.eps), num)

    def forward_train(self, x_BTH: Tensor, rotary: Rotary, cos_BTR: Tensor, sin_BTR: Tensor, num: Numerics) -> Tensor:
        """The whole layer over whole sequences, without a cache; differentiable."""
        h = self.normed(x_BTH)
        if isinstance(self.mixer, GatedDeltaNet):
            return self.feed(x_BTH, self.mixer.forward_train(h, num), num)
        return self.feed(x_BTH, self.mixer.forward_train(h, rotary, cos_BTR, sin_BTR, num), num)

    def normed(self, x_BTH: Tensor) -> Tensor:
        """Input of the mixer."""
        return rms_norm(x_BTH, self.scales()[0], self.eps)

    def scales(self) -> tuple[Tensor, ...]:
        """1 + weight of the norm before the mixer and of the one after it, float32."""
        return self._scales(self.input_norm, self.post_norm)


class HybridModel(TrimmedDrafts):
    """A Qwen3.5-class decoder with an optional MTP head.

    Args:
        config: Shape and constants.
        exact: Numerical class of every forward; switch with the attribute ``exact``.
    """

    def __init__(self, config: ModelConfig, *, exact: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.full((config.vocab_size, config.hidden_size), torch.nan))
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.layer_types)
        self.norm = nn.Parameter(torch.full((config.hidden_size,), torch.nan))
        tied = config.tie_word_embeddings
        self.head = None if tied else nn.Parameter(torch.full((config.vocab_size, config.hidden_size), torch.nan))
        self.mtp = MTPHead(config) if config.mtp_num_hidden_layers else None
        self.rotary = Rotary(config.rotary_dim, config.rope_theta)
        self.exact = exact
        self._scale = Derived(plus_one)
        self.tokenizer: Tokenizer | None = None
        self.source: str = ""
        self.path: Path | None = None

    def __repr__(self) -> str:
        return describe.one_line(self)

    def _repr_html_(self) -> str:
        return describe.card_html(self)

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the residual stream."""
        return self.embed.dtype

    @property
    def numerics(self) -> Numerics:
        """The numerical class in force."""
        return Numerics.of(self.exact, self.device, self.dtype)

    @property
    def blocks(self) -> list[Block]:
        """The decoder layers, in order."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def through_kernels(self) -> bool:
        """Whether forwards go through ``workbench_kernels``: on a GPU."""
        return kernel_path.applies(self.device, self.dtype)

    @property
    def can_draft(self) -> bool:
        """True when the checkpoint has an MTP head."""
        return self.mtp is not None

    @property
    def final_scale(self) -> Tensor:
        """1 + weight of the final norm, float32."""
        return self._scale(self.norm)[0]

    def new_cache(
        self,
        *,
        batch: int = 1,
        capacity: int | None = None,
        strategy: str = "tape",
        k_format: str = "dense",
        v_format: str = "dense",
        window: int | None = None,
        widest: int = WIDEST,
    ) -> HybridCache:
        """An empty cache for this model.

        Args:
            batch: Sequences.
            capacity: Rows per sequence; None for the model's longest context.
            strategy: How a commit cuts a verify short: "tape", "columns" or "snapshot".
            k_format: How keys are kept: "dense", "q8_0", "q5_1" or "fp8"; attention reads what was kept.
            v_format: How values are kept, likewise.
            window: Attention sees this many rows, the row's own included, and older ones are dropped; None for all.
            widest: With a window, rows that one forward may feed and a verify may take back.

        Returns:
            The cache.

        Raises:
            UserError: The capacity is not within the model's context, the strategy or a format is unknown, or the
                heads do not divide into a format's blocks.
        """
        shape = self._cache_shape(batch, capacity, k_format, v_format, window, widest)
        return HybridCache(
            shape.planes(self.device), batch=batch, capacity=shape.capacity, strategy=strategy, refeed=self._refeed
        )

    def new_draft_cache(
        self,
        *,
        batch: int = 1,
        capacity: int | None = None,
        k_format: str = "dense",
        v_format: str = "dense",
        window: int | None = None,
        widest: int = WIDEST,
    ) -> HybridCache:
        """An empty cache for the MTP head's own K/V rows; arguments are those of ``new_cache``."""
        self._need_mtp()
        shape = self._cache_shape(batch, capacity, k_format, v_format, window, widest)
        return HybridCache([shape.attention_plane(self.device)], batch=batch, capacity=shape.capacity)

    def cache_bytes(
        self,
        tokens: int | Sequence[int],
        *,
        batch: int = 1,
        capacity: int | None = None,
        k_format: str = "dense",
        v_format: str = "dense",
        window: int | None = None,
        widest: int = WIDEST,
        drafter: bool = False,
    ) -> int:
        """Bytes that ``new_cache`` with these arguments has allocated once it has been fed.

        Storage starts with 64 rows and grows by doubling, so the bytes depend on the forwards that fed it.

        Args:
            tokens: Tokens of each forward so far, or one number for a single forward.
            batch: Sequences.
            capacity: Rows per sequence; None for the model's longest context.
            k_format: How keys are kept.
            v_format: How values are kept.
            window: Rows that attention sees; None for all.
            widest: With a window, rows that one forward may feed.
            drafter: Count ``new_draft_cache`` instead.

        Returns:
            What ``nbytes`` of that cache says, without an open checkpoint.

        Raises:
            UserError: An argument is not valid.
        """
        shape = self._cache_shape(batch, capacity, k_format, v_format, window, widest)
        return shape.nbytes([tokens] if isinstance(tokens, int) else list(tokens), drafter=drafter)

    def _cache_shape(
        self, batch: int, capacity: int | None, k_format: str, v_format: str, window: int | None, widest: int
    ) -> CacheShape:
        limit = self.config.max_position_embeddings
        return CacheShape(
            self.config,
            self.dtype,
            batch=check_int("batch", batch, low=1),
            capacity=limit if capacity is None else check_int("capacity", capacity, low=1, high=limit),
            k_format=k_format,
            v_format=v_format,
            window=window,
            widest=widest,
        )

    def _refeed(self, cache: HybridCache, tokens_BT: Tensor, counts: list[int]) -> None:
        self.forward(tokens_BT, cache, counts=counts, logits="none")

    def _need_mtp(self) -> MTPHead:
        if self.mtp is None:
            raise CapabilityError(
                f"checkpoint {self.source or 'in memory'} has no mtp.* weights, so it cannot draft: use k=0, or load "
                "a checkpoint that was saved with its MTP head"
            )
        return self.mtp

    def _positions(self, lengths: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary.table(max(lengths) + t, self.device)
        if len(lengths) == 1:
            at = lengths[0]
            return cos[None, at : at + t], sin[None, at : at + t]
        pairs = [(cos[at : at + t], sin[at : at + t]) for at in lengths]
        return torch.stack([c for c, _ in pairs]), torch.stack([s for _, s in pairs])

    def _widened(self, x_BTH: Tensor, num: Numerics) -> Tensor:
        """On a CPU, one sequence with rows added until its products need no more; the rows added mean nothing."""
        b, t, _ = x_BTH.shape
        if b > 1 or x_BTH.device.type != "cpu" or num.rows(t) == t:
            return x_BTH
        return widen(x_BTH[0], num.rows(t)).unsqueeze(0)

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        try:
            return torch.nn.functional.embedding(tokens_BT, self.embed)
        except IndexError:
            check_ids(tokens_BT, self.config.vocab_size)
            raise

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        cache: HybridCache,
        *,
        counts: Sequence[int] | None = None,
        logits: str | Sequence[int] = "all",
        taps: Sequence[int] = (),
        checked: bool = False,
    ) -> Rows:
        """Run T tokens per sequence at the cache's position and append their rows.

        Args:
            tokens_BT: Token ids, int64, padded on the right when ragged.
            cache: State to extend, of the same number of sequences.
            counts: Valid tokens per sequence; None for T each.
            logits: "all", "last" (the last valid row of each sequence), "none", or row indices.
            taps: Layers whose output rows to return.
            checked: The ids are known to be of the vocabulary, so that a GPU need not be waited for to check them.

        Returns:
            Trunk rows, normed rows, the requested logits in float32 and taps.

        Raises:
            UserError: An id is out of range, the cache is full, or the request is malformed.
        """
        b, t = tokens_BT.shape
        lengths = list(cache.lengths)
        n = [t] * b if counts is None else list(counts)
        check_request(logits, taps, rows=t, layers=self.config.num_layers)
        num = self.numerics
        if self.through_kernels:
            if not checked:
                check_ids(tokens_BT, self.config.vocab_size)
            cache.admit(tokens_BT, n)
            batch = kernel_forward.Batch(lengths, n, t, self.device)
            x, normed, tapped = kernel_forward.forward(self, tokens_BT, cache, batch, taps=taps)
            cache.advance(n)
            return self._rows(x, normed, logits, n, tapped)
        x = self._embedded(tokens_BT)
        cache.admit(tokens_BT, n)
        x = self._widened(x, num)
        cos, sin = self._positions(lengths, x.shape[1])
        tapped = {}
        for i, (layer, plane) in enumerate(zip(self.layers, cache.planes, strict=True)):
            assert isinstance(layer, Block)
            h = layer.normed(x)
            if isinstance(layer.mixer, GatedDeltaNet):
                assert isinstance(plane, RecurrentPlane)
                mixed = layer.mixer(h, plane, n, num)
            else:
                mixed = layer.mixer(h, plane, lengths, n, self.rotary, cos, sin, num)
            x = layer.feed(x, mixed, num)
            if i in taps:
                tapped[i] = x[:, :t]
        cache.advance(n)
        normed = rms_norm(x, self.final_scale, self.config.rms_norm_eps)
        if logits == "all":
            return Rows(x[:, :t], normed[:, :t], self._logits(normed, t), tapped)
        return self._rows(x[:, :t], normed[:, :t], logits, n, tapped)

    def _rows(
        self, x: Tensor, normed: Tensor, logits: str | Sequence[int], n: list[int], tapped: dict[int, Tensor]
    ) -> Rows:
        if logits == "all":
            return Rows(x, normed, self.unembed(normed), tapped)
        if logits == "none":
            return Rows(x, normed, None, tapped)
        if logits == "last":
            picked = torch.stack([normed[i, max(c - 1, 0)] for i, c in enumerate(n)]).unsqueeze(1)
        else:
            picked = normed[:, list(logits)]  # type: ignore[arg-type]
        return Rows(x, normed, self.unembed(picked), tapped)

    def forward_train(self, tokens_BT: Tensor, *, block: Callable[..., Tensor] | None = None) -> Tensor:
        """Final-normed rows [B, T, H] of whole sequences, by the chunked delta rule; differentiable.

        Args:
            tokens_BT: Token ids, int64.
            block: Replacement for ``Block.forward_train``, such as a compiled form; None for itself.

        Returns:
            Rows that ``unembed`` turns into logits.
        """
        num = Numerics(exact=False)
        x = torch.nn.functional.embedding(tokens_BT, self.embed)
        cos, sin = (table[: tokens_BT.shape[1]] for table in self.rotary.table(tokens_BT.shape[1], self.device))
        for layer in self.layers:
            assert isinstance(layer, Block)
            x = (block or Block.forward_train)(layer, x, self.rotary, cos, sin, num)
        return rms_norm(x, self.final_scale, self.config.rms_norm_eps)

    def unembed(self, normed_BTH: Tensor) -> Tensor:
        """Logits [B, T, V] in float32 of rows that carry the final norm already."""
        return self._logits(normed_BTH, normed_BTH.shape[1])

    def _logits(self, normed_BTH: Tensor, first: int, weight: Tensor | None = None) -> Tensor:
        b, t, h = normed_BTH.shape
        weight = (self.embed if self.head is None else self.head) if weight is None else weight
        rows = normed_BTH.reshape(b * t, h)
        if self.through_kernels:
            few = self.exact or b * t <= kernel_path.FEW
            return kernel_path.logits_of(rows, weight, few).view(b, t, -1)[:, :first]
        logits = linear(rows, weight, self.numerics).view(b, t, -1)
        return logits[:, :first].contiguous().float()

    def carrier(self, rows: Rows, kind: str = "normed") -> Tensor:
        """The hidden rows a drafter is fed: "normed" (default) or "pre_norm"."""
        check_choice("carrier", kind, CARRIERS)
        return rows.normed_BTH if kind == "normed" else rows.trunk_BTH

    @torch.no_grad()
    def draft(
        self,
        tokens_BT: Tensor,
        carrier_BTH: Tensor,
        cache: HybridCache,
        *,
        counts: Sequence[int] | None = None,
        probe: Callable[[str], None] | None = None,
        checked: bool = False,
    ) -> Tensor:
        """Run T pairs through the MTP head at the draft cache's position.

        Args:
            tokens_BT: Tokens x_p of the pairs.
            carrier_BTH: Carriers of the rows h_{p-1} before them.
            cache: From ``new_draft_cache``.
            counts: Valid pairs per sequence; None for T each.
            probe: Called with "glue", "attention" and "ffn" when that part has been issued.
            checked: As of ``forward``.

        Returns:
            Next carriers [B, T, H]; ``unembed_draft`` turns them into draft logits.

        Raises:
            CapabilityError: The checkpoint has no MTP head.
        """
        mtp = self._need_mtp()
        b, t = tokens_BT.shape
        lengths = list(cache.lengths)
        n = [t] * b if counts is None else list(counts)
        if (*tokens_BT.shape, self.config.hidden_size) != tuple(carrier_BTH.shape):
            raise UserError(
                f"carriers of shape {tuple(carrier_BTH.shape)} were given for {b} × {t} tokens: one carrier of width "
                f"{self.config.hidden_size} per token is needed"
            )
        num, plane = self.numerics, cache.planes[0]
        assert isinstance(plane, AttentionPlane)
        if self.through_kernels:
            if not checked:
                check_ids(tokens_BT, self.config.vocab_size)
            cache.admit(tokens_BT, n)
            batch = kernel_forward.Batch(lengths, n, t, self.device)
            out = kernel_forward.draft(self, tokens_BT, carrier_BTH, plane, batch, probe)
            cache.advance(n)
            return out
        embedding = self._embedded(tokens_BT)
        cache.admit(tokens_BT, n)
        embedding, carrier = self._widened(embedding, num), self._widened(carrier_BTH, num)
        cos, sin = self._positions(lengths, embedding.shape[1])
        out = mtp(embedding, carrier, plane, lengths, n, self.rotary, cos, sin, num, probe)
        cache.advance(n)
        return out[:, :t]

    def save(self, path: str | Path) -> Path:
        """Write a Hugging Face directory that transformers loads: config, safetensors, tokenizer, draft vocabulary.

        Args:
            path: Directory, made if needed.

        Returns:
            The directory.
        """
        from workbench.model.weights.save import save_model

        return save_model(self, Path(path))
