"""Options of a replay, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.cache.kv import BLOCK
from workbench.core.errors import UserError, check_choice, check_flag, check_int
from workbench.model.hybrid import CARRIERS
from workbench.sampling.options import ORDERS, Shaping, shaping_of
from workbench.spec.choose import Chooser


@dataclass(frozen=True)
class ReplayOptions:
    """What a draft table records.

    Args:
        k_max: Draft slots per start.
        stride: Every how many positions a chain starts; 1 for all, which walks need.
        chunk: Tokens per forward.
        carrier: Hidden rows the MTP head is fed: "normed" or "pre_norm".
        shard_rows: Rows after which a shard ends, at the end of a document.
        temperature: 0 records the most likely tokens; above, what target and drafter draw with the same noise.
        top_k: Keep the k most likely tokens, ties at the boundary included; 0 keeps all.
        top_p: Keep the most likely tokens that hold this share of the mass; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely; 0 keeps all.
        filter_order: In which order the filters act: "chain", "joint" or "temperature_last".
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the text; 1 is none.
        frequency_penalty: Taken off a token's logit per occurrence in the text; 0 is none.
        presence_penalty: Taken off the logit of every token in the text; 0 is none.
        penalty_last_n: Tokens at the end of the text that penalties see; None for all, the prompt included.
        logit_bias: Added to the logits of token ids; -inf forbids one.
        seed: Of every draw; each document draws from a stream of its own under it.
        forced: Record the chain fed with the tape's own tokens too, and the probabilities of these; needs
            ``temperature`` above 0.
    """

    k_max: int = 8
    stride: int = 1
    chunk: int = 512
    carrier: str = "normed"
    shard_rows: int = 65_536
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    filter_order: str = "chain"
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0
    forced: bool = False

    def __post_init__(self) -> None:
        check_int("k_max", self.k_max, low=1, high=BLOCK, hint="one chain fits two key blocks")
        check_int("stride", self.stride, low=1)
        check_int("chunk", self.chunk, low=2)
        check_int("shard_rows", self.shard_rows, low=1)
        check_choice("carrier", self.carrier, CARRIERS)
        check_choice("filter_order", self.filter_order, ORDERS)
        check_int("seed", self.seed, low=0)
        check_flag("forced", self.forced)
        object.__setattr__(self, "logit_bias", self.shaping().logit_bias)
        if self.forced and self.temperature == 0:
            raise UserError(
                "forced=True with temperature=0 is not valid: a greedy law gives a token all of its mass or none; give "
                "the temperature of the text, or leave forced out"
            )

    def shaping(self) -> Shaping:
        """How logits become a law."""
        return shaping_of(self)

    @property
    def plain(self) -> bool:
        """True when every pick is the arg-max of its row, whatever came before."""
        return Chooser(self.shaping()).plain

    def key(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest."""
        names = ("k_max", "stride", "chunk", "carrier", "shard_rows", "seed", "forced")
        return {**{name: getattr(self, name) for name in names}, "shaping": self.shaping().key()}
