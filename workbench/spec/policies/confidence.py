"""Policies that read the confidence of a chain as a whole: its weakest token, or the product of its probabilities.

Source: seed 001 (``draft_conf_tau``); the product is the drafter's own estimate that the chain survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import check_int, check_real
from workbench.spec.policies.arrays import K_LIMIT, ArrayPolicy


@dataclass(frozen=True, kw_only=True)
class MinConfidence(ArrayPolicy):
    """Drop a whole chain when its weakest token is below ``tau``; its k drafter steps have been run all the same.

    Args:
        k: Draft length; 0 is plain decode.
        tau: Threshold in [0, 1]; 0 never drops.
    """

    k: int = 3
    tau: float = 0.0
    family: ClassVar[str] = "min_confidence"
    word: ClassVar[str] = "weakest"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=0, high=K_LIMIT, hint="k=0 is plain decode")
        check_real("tau", self.tau, low=0.0, high=1.0, hint="0 switches the threshold off")

    @property
    def anticipating(self) -> bool:
        """A row after the first follows tokens drawn before it, so whether slot 0 stays hangs on its own draw; only a
        single slot judged by the largest probability of its row is free of that."""
        return self.tau > 0 and (self.statistic == "drawn" or self.k > 1)

    def own(self, width: int) -> Sequence[float]:
        """The threshold."""
        return (self.tau,)


@dataclass(frozen=True, kw_only=True)
class Cumulative(ArrayPolicy):
    """End the chain before the token at which the product of its probabilities falls below ``threshold``.

    The first slot is tested like the others.

    Args:
        k: Draft length; 0 is plain decode.
        threshold: Threshold in [0, 1]; 0 never drops.
    """

    k: int = 7
    threshold: float = 0.0
    family: ClassVar[str] = "cumulative"
    word: ClassVar[str] = "product"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=0, high=K_LIMIT, hint="k=0 is plain decode")
        check_real("threshold", self.threshold, low=0.0, high=1.0, hint="0 switches the threshold off")

    @property
    def anticipating(self) -> bool:
        """Whether the product holds the probability of the token just drawn; rows up to a slot precede its draw."""
        return self.threshold > 0 and self.statistic == "drawn"

    def own(self, width: int) -> Sequence[float]:
        """The threshold."""
        return (self.threshold,)
