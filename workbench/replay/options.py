"""Options of a replay, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from workbench.cache.kv import BLOCK
from workbench.core.errors import UserError, check_choice, check_flag, check_int, check_real
from workbench.model.hybrid import CARRIERS
from workbench.replay.columns import Column, bytes_by_group, table_columns
from workbench.sampling.options import ORDERS, Shaping, shaping_of
from workbench.spec.choose import Chooser

SHADOW_LIMIT = 8
OVERLAP_LIMIT = 8


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
        forced: Record the chain fed with the tape's own tokens too: what it would draft, and the probabilities of the
            tape's tokens, shaped, or of softmax at T = 1 at temperature 0.
        shadow: The drafter's most likely tokens to record in every slot, at most 8; 0 for none.
        target: Record the target's two most likely tokens and its entropy.
        ranks: Record the rank and the log-probability that the target gives every draft, and the drafter's own.
        overlap: Temperatures of 1 - ||p - q||_1 / 2 at the first slot; none by default. It says what that slot accepts
            by the ratio rule at one start, and is never multiplied along a chain.
        batch: Documents that run together; None for one on a CPU, and on a GPU for as many as fill a forward. Draws and
            ranks go document by document.
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
    shadow: int = 0
    target: bool = False
    ranks: bool = False
    overlap: tuple[float, ...] = ()
    batch: int | None = None

    def __post_init__(self) -> None:
        check_int("k_max", self.k_max, low=1, high=BLOCK, hint="one chain fits two key blocks")
        check_int("stride", self.stride, low=1)
        check_int("chunk", self.chunk, low=2)
        check_int("shard_rows", self.shard_rows, low=1)
        check_choice("carrier", self.carrier, CARRIERS)
        check_choice("filter_order", self.filter_order, ORDERS)
        check_int("seed", self.seed, low=0)
        for name in ("forced", "target", "ranks"):
            check_flag(name, getattr(self, name))
        check_int("shadow", self.shadow, low=0, high=SHADOW_LIMIT, hint="0 records none")
        object.__setattr__(self, "overlap", temperatures(self.overlap))
        object.__setattr__(self, "logit_bias", self.shaping().logit_bias)
        if self.batch is not None and check_int("batch", self.batch, low=1) > 1 and (self.ranks or not self.plain):
            raise UserError(
                f"batch={self.batch} is not valid with draws or ranks, which go document by document: leave batch out"
            )

    def shaping(self) -> Shaping:
        """How logits become a law."""
        return shaping_of(self)

    @property
    def plain(self) -> bool:
        """True when every pick is the arg-max of its row, whatever came before."""
        return Chooser(self.shaping()).plain

    def columns(self) -> list[Column]:
        """Columns of the table."""
        return table_columns(
            self.k_max,
            drawn=not self.plain,
            forced=self.forced,
            shadow=self.shadow,
            target=self.target,
            ranks=self.ranks,
            overlap=len(self.overlap),
        )

    @property
    def bytes_per_row(self) -> dict[str, float]:
        """Bytes of values that a row of the table takes, by group of columns.

        "base", "drawn" (above temperature 0, with penalties or a bias) and the options that ask for more. Texts (ids,
        sources) come on top, and a bit per value where some are null.
        """
        return bytes_by_group(self.columns())

    def key(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest."""
        names = (
            "k_max",
            "stride",
            "chunk",
            "carrier",
            "shard_rows",
            "seed",
            "forced",
            "shadow",
            "target",
            "ranks",
            "batch",
        )
        more = {"overlap": list(self.overlap), "shaping": self.shaping().key()}
        return {name: getattr(self, name) for name in names} | more


def temperatures(given: float | Sequence[float]) -> tuple[float, ...]:
    """Temperatures of overlap, from one or several; a sentence when they are not valid."""
    if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, Real)):
        raise UserError(f"overlap={given!r} is not valid: give temperatures above 0, such as (0.7, 1.0)")
    several = [given] if isinstance(given, Real) else list(given)
    found = tuple(check_real("overlap", one, low=0, open_low=True) for one in several)
    if len(set(found)) < len(found) or len(found) > OVERLAP_LIMIT:
        raise UserError(f"overlap={given!r} is not valid: give at most {OVERLAP_LIMIT} temperatures, each of them once")
    return found
