"""Policies that learn from what was accepted: an exponential mean, suspension, and goodput over a cost curve.

Source: seed 001 and its engine's suspension rule (mean of the last 12 accepts below 2, 256 serial tokens); goodput is
tokens per second, (1 + sum of joint acceptances) / t(K), as in Liu et al. 2024 (arXiv 2406.14066).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import UserError, check_int, check_real
from workbench.spec.policies.arrays import K_LIMIT, Threshold
from workbench.spec.policies.rules import CURVE

WINDOW_LIMIT = 128


@dataclass(frozen=True, kw_only=True)
class Ema(Threshold):
    """Draft somewhat more than is accepted on average: clamp(ceil(mean + margin), low, k).

    The mean is exponential over rounds that ran the drafter, starts with the first of them, and counts accepted tokens.

    Args:
        k: Longest draft, and the first.
        alpha: Weight of the newest round, in (0, 1].
        margin: Added to the mean, tokens.
        low: Shortest draft.
    """

    k: int = 7
    alpha: float = 0.3
    margin: float = 1.0
    low: int = 1
    family: ClassVar[str] = "ema"
    word: ClassVar[str] = "ema"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1, high=K_LIMIT)
        check_real("alpha", self.alpha, low=0.0, high=1.0, open_low=True)
        check_real("margin", self.margin, low=0.0)
        check_int("low", self.low, low=0, high=self.k, hint=f"k={self.k} is the longest draft")
        if self.low == 0 and self.margin == 0:
            raise UserError("low=0 with margin=0 would never draft again once nothing is accepted: raise one of them")

    def own(self, width: int) -> Sequence[float]:
        """Weight, margin, shortest draft."""
        return self.alpha, self.margin, self.low


@dataclass(frozen=True, kw_only=True)
class Suspend(Threshold):
    """Stop drafting when too little is accepted, and try again after some tokens.

    Args:
        k: Draft length.
        window: Rounds that the mean is taken over; nothing is suspended before as many have drafted.
        floor: Smallest mean of accepted tokens with which drafting goes on.
        reprobe_tokens: Tokens decoded without drafts before drafting is tried again, with an empty window.
    """

    k: int = 7
    window: int = 12
    floor: float = 2.0
    reprobe_tokens: int = 256
    family: ClassVar[str] = "suspend"
    word: ClassVar[str] = "suspend"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1, high=K_LIMIT)
        check_int("window", self.window, low=1, high=WINDOW_LIMIT)
        check_real("floor", self.floor, low=0.0, hint="it is a mean of accepted tokens per round")
        check_int("reprobe_tokens", self.reprobe_tokens, low=1)

    def own(self, width: int) -> Sequence[float]:
        """Window, smallest mean, serial tokens."""
        return self.window, self.floor, self.reprobe_tokens


@dataclass(frozen=True, kw_only=True)
class Goodput(Threshold):
    """Ask for the K with the most tokens per second: the largest (1 + a_1 + .. + a_K) / t(K).

    a_j, the share of rounds that accept slots 1..j, is a plain mean over the first 1/alpha rounds that tried slot j,
    and exponential from then on. Slots past the length asked for are not seen, so every ``reprobe`` rounds one round
    asks for k, after K = 0 as well.

    Args:
        k: Longest draft.
        seconds: t(0), t(1), .. t(k): duration of a round that drafts so many tokens, in any unit
            (``CostModel.curve``).
        alpha: Weight of the newest round, in (0, 1].
        hysteresis: The best K replaces the present one when it is better by this share.
        reprobe: Rounds from one that asks for k to the next.
        warmup: Rounds at the start that ask for k.
    """

    k: int = 7
    seconds: tuple[float, ...]
    alpha: float = 0.05
    hysteresis: float = 0.05
    reprobe: int = 32
    warmup: int = 8
    family: ClassVar[str] = "goodput"
    word: ClassVar[str] = "goodput"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1, high=K_LIMIT)
        object.__setattr__(self, "seconds", check_curve(self.seconds, self.k))
        check_real("alpha", self.alpha, low=0.0, high=1.0, open_low=True)
        check_real("hysteresis", self.hysteresis, low=0.0)
        check_int("reprobe", self.reprobe, low=1)
        check_int("warmup", self.warmup, low=1)

    def own(self, width: int) -> Mapping[int, float]:
        """Weight, hysteresis, rounds between probes, warm-up, and the cost curve."""
        own = dict(enumerate((self.alpha, self.hysteresis, self.reprobe, self.warmup), start=3))
        return {**own, **dict(enumerate(self.seconds, start=CURVE))}


def check_curve(seconds: Sequence[float], k: int) -> tuple[float, ...]:
    """Durations t(0), t(1), .. t(k) of a round by its drafted tokens, as a tuple.

    Raises:
        UserError: There are not k + 1 numbers, all above 0.
    """
    try:
        found = tuple(float(value) for value in seconds)
    except (TypeError, ValueError):
        found = ()
    if len(found) != k + 1:
        raise UserError(
            f"seconds={seconds!r} is not valid with k={k}: give {k + 1} durations t(0), t(1), .. t({k}) of a round, "
            f"such as cost.curve({k})"
        )
    for at, value in enumerate(found):
        check_real(f"seconds[{at}]", value, low=0.0, open_low=True)
    return found
