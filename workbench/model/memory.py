"""The planes of a model's cache, and the bytes they take before any is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.cache.formats import Format, cache_format
from workbench.cache.kv import BLOCK, AttentionPlane, KVPlane, grown
from workbench.cache.quantised import PackedPlane
from workbench.cache.recurrent import RecurrentPlane
from workbench.cache.ring import RingPlane
from workbench.core.errors import UserError, check_int
from workbench.model.config import FULL, LINEAR, ModelConfig

WIDEST = 512  # rows that one forward may feed to a window, by default


@dataclass(frozen=True)
class CacheShape:
    """A cache as it is asked for.

    Args:
        config: The model's shape.
        dtype: Its type.
        batch: Sequences.
        capacity: Rows per sequence.
        k_format: How keys are kept.
        v_format: How values are kept.
        window: Rows that attention sees; None for all.
        widest: With a window, rows that one forward may feed.

    Raises:
        UserError: A format is unknown or does not fit the heads, or a number is not valid.
    """

    config: ModelConfig
    dtype: torch.dtype
    batch: int
    capacity: int
    k_format: str = "dense"
    v_format: str = "dense"
    window: int | None = None
    widest: int = WIDEST

    def __post_init__(self) -> None:
        self.codecs()
        if self.window is not None:
            check_int("window", self.window, low=1)
        check_int("widest", self.widest, low=1)

    def codecs(self) -> tuple[Format, Format]:
        """Formats of keys and values."""
        dim = self.config.head_dim
        return cache_format("k_format", self.k_format, dim), cache_format("v_format", self.v_format, dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one attention layer."""
        dim = self.config.head_dim
        return self.config.num_key_value_heads * sum(f.row_bytes(dim, self.dtype) for f in self.codecs())

    def attention_plane(self, device: torch.device) -> AttentionPlane:
        """Empty K/V rows of one layer."""
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        if self.window is None and self.k_format == self.v_format == "dense":
            return KVPlane(self.batch, heads, dim, dtype=self.dtype, device=device)
        k, v = self.codecs()
        if self.window is None:
            return PackedPlane(self.batch, heads, dim, k_format=k, v_format=v, dtype=self.dtype, device=device)
        return RingPlane(
            self.batch,
            heads,
            dim,
            window=self.window,
            widest=self.widest,
            capacity=self.capacity,
            k_format=k,
            v_format=v,
            dtype=self.dtype,
            device=device,
        )

    def recurrent_plane(self, device: torch.device) -> RecurrentPlane:
        """Empty state of one delta layer."""
        config = self.config
        return RecurrentPlane(
            self.batch,
            window=config.linear_conv_kernel_dim - 1,
            channels=config.conv_dim,
            heads=config.linear_num_value_heads,
            key_dim=config.linear_key_head_dim,
            value_dim=config.linear_value_head_dim,
            dtype=self.dtype,
            device=device,
        )

    def planes(self, device: torch.device) -> list[AttentionPlane | RecurrentPlane]:
        """Empty planes of every layer."""
        return [
            self.recurrent_plane(device) if kind == LINEAR else self.attention_plane(device)
            for kind in self.config.layer_types
        ]

    def rows(self, fed: Sequence[int]) -> int:
        """Rows per sequence that an attention plane holds after forwards of these many tokens each."""
        end, held, most = 0, BLOCK, None
        if self.window is not None:
            most = min(self.window - 1 + self.widest, self.capacity)
            held = min(BLOCK, most)
        for n in fed:
            end += check_int("tokens", n, low=0)
            held = grown(held, end) if most is None else min(grown(held, end), most)
        if end > self.capacity:
            raise UserError(f"tokens={end} is not valid: the cache has room for {self.capacity}")
        return held

    def nbytes(self, fed: Sequence[int], *, drafter: bool = False) -> int:
        """Bytes of the target's planes, or of the MTP head's own one, after forwards of these many tokens each."""
        kv = self.batch * self.rows(fed) * self.row_bytes
        if drafter:
            return kv
        config = self.config
        window = (config.linear_conv_kernel_dim - 1) * config.conv_dim * self.dtype.itemsize
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
        kinds = config.layer_types
        return kinds.count(FULL) * kv + kinds.count(LINEAR) * self.batch * (window + state)
