"""Options of a replay, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cache.kv import BLOCK
from workbench.core.errors import check_choice, check_int
from workbench.model.hybrid import CARRIERS


@dataclass(frozen=True)
class ReplayOptions:
    """What a draft table records.

    Args:
        k_max: Draft slots per start.
        stride: Every how many positions a chain starts; 1 for all, which walks need.
        chunk: Tokens per forward.
        carrier: Hidden rows the MTP head is fed: "normed" or "pre_norm".
        shard_rows: Rows after which a shard ends, at the end of a document.
    """

    k_max: int = 8
    stride: int = 1
    chunk: int = 512
    carrier: str = "normed"
    shard_rows: int = 65_536

    def __post_init__(self) -> None:
        check_int("k_max", self.k_max, low=1, high=BLOCK, hint="one chain fits two key blocks")
        check_int("stride", self.stride, low=1)
        check_int("chunk", self.chunk, low=2)
        check_int("shard_rows", self.shard_rows, low=1)
        check_choice("carrier", self.carrier, CARRIERS)
