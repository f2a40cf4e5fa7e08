"""Options of a generation, checked once, shared by the Python API and the CLI."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.cache.hybrid import STRATEGIES
from workbench.core.errors import UserError, check_choice, check_flag, check_int
from workbench.model.hybrid import CARRIERS
from workbench.spec.policies import AdaptiveFloor, FixedK, Policy


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to decode.

    Args:
        max_new_tokens: Tokens to generate, unless a stop token comes first.
        k: Draft length per round; 0 is plain decode.
        p_min: Drop a drafted token below this probability and end its chain; 0 never drops.
        pmin0: Apply p_min to the first draft of a round too.
        adaptive: Draft one more than was last accepted, up to k, instead of k every round.
        floor: Smallest adaptive draft length; None goes by the model's width.
        cap: Largest adaptive draft length.
        floor_context: Committed length past which a default floor of 4 or more becomes 1.
        carry: Feed the pending token as row 0 of the verify; False feeds it alone first.
        carrier: Hidden rows the MTP head is fed: "normed" or "pre_norm".
        refresh: Rewrite drafter rows of committed tokens from true rows.
        primed: Fill the drafter's cache over the prompt.
        shift: Pair tokens with carriers this many positions too early; a control, 0 is right.
        strategy: How a partly accepted verify is cut: "tape", "columns", "snapshot"; None takes "columns" on a CPU,
            where keeping the state of every row is free, and "tape" elsewhere.
        rowwise: Verify one row at a time, as an oracle.
        ignore_eos: Go on after an end-of-text token.
        chunk: Prompt tokens per prefill forward.
        anatomy: Time the parts of every draft step.
    """

    max_new_tokens: int = 128
    k: int = 3
    p_min: float = 0.0
    pmin0: bool = False
    adaptive: bool = False
    floor: int | None = None
    cap: int = 7
    floor_context: int = 1024
    carry: bool = True
    carrier: str = "normed"
    refresh: bool = True
    primed: bool = True
    shift: int = 0
    strategy: str | None = None
    rowwise: bool = False
    ignore_eos: bool = False
    chunk: int = 512
    anatomy: bool = False

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, low=1)
        check_int("k", self.k, low=0, high=64, hint="k=0 is plain decode")
        check_int("chunk", self.chunk, low=1)
        check_int("shift", self.shift, low=0, high=4)
        check_choice("carrier", self.carrier, CARRIERS)
        if self.strategy is not None:
            check_choice("strategy", self.strategy, STRATEGIES)
        if self.adaptive and self.k == 0:
            raise UserError("adaptive=True with k=0 is not valid: give k of at least 1, the longest draft")
        if self.floor is not None and not self.adaptive:
            raise UserError(f"floor={self.floor!r} needs adaptive=True: a fixed k has no floor")
        for name in ("pmin0", "adaptive", "carry", "refresh", "primed", "rowwise", "ignore_eos", "anatomy"):
            check_flag(name, getattr(self, name))
        self.policy()

    def policy(self) -> Policy:
        """The policy these options describe."""
        if self.adaptive:
            return AdaptiveFloor(
                k=self.k,
                floor=self.floor,
                cap=self.cap,
                floor_context=self.floor_context,
                p_min=self.p_min,
                pmin0=self.pmin0,
            )
        return FixedK(k=self.k, p_min=self.p_min, pmin0=self.pmin0)
