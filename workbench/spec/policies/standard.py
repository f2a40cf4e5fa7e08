"""The foundation's policies: fixed K and the adaptive floor, both with an optional probability threshold.

Source: seed 002 (K, PMIN, PMIN0, adaptive depth with floor, floor context and cap).
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.errors import check_choice, check_int, check_real
from workbench.spec.policies.base import RoundView

K_LIMIT = 64
STATISTICS = ("drawn", "top")


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Drop a drafted token, and end its chain, when the drafter's probability of it is below ``p_min``.

    Args:
        p_min: Threshold in [0, 1]; 0 never drops.
        pmin0: Apply it to slot 0 too; slot 0 stays exempt when the pending token was fed alone (base 0).
        statistic: "drawn" tests the probability of the drafted token, "top" the largest of its row; under sampling
            only the latter does not anticipate the draw.
    """

    p_min: float = 0.0
    pmin0: bool = False
    statistic: str = "drawn"

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)
        check_real("p_min", self.p_min, low=0.0, high=1.0, hint="0 switches the threshold off")

    @property
    def anticipating(self) -> bool:
        """Whether the threshold reads the token just drawn."""
        return self.p_min > 0 and self.statistic == "drawn"

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """ "p_min" when the token is dropped, else None."""
        tested = slot > 0 or (self.pmin0 and base == 1)
        return "p_min" if tested and top1 < self.p_min else None


@dataclass(frozen=True, kw_only=True)
class FixedK(Threshold):
    """The same draft length every round.

    Args:
        k: Draft length; 0 is plain decode.
    """

    k: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=0, high=K_LIMIT, hint="k=0 is plain decode")

    @property
    def k_max(self) -> int:
        """The draft length."""
        return self.k

    def start(self, *, width: int) -> FixedRun:
        """A run; it has no state beyond the policy."""
        return FixedRun(self)


class FixedRun:
    """Run of FixedK."""

    def __init__(self, policy: FixedK) -> None:
        self.policy, self.statistic = policy, policy.statistic

    def next_k(self, committed: int) -> int:
        """The fixed length."""
        return self.policy.k

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """The threshold's verdict."""
        return self.policy.drops(slot, top1, base)

    def observe(self, view: RoundView) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveFloor(Threshold):
    """Draft one more than was last accepted, between a floor and a cap.

    The first K is cap = min(k, cap); then clamp(accepted + 1, min(floor, cap), cap). A default floor goes by the
    model's width: 4 from 3,500, 2 from 2,500, else 1; a default floor of 4 or more relaxes to 1 once the committed
    length passes ``floor_context``. An explicit floor never relaxes.

    Args:
        k: Draft length asked for.
        floor: Smallest draft length; None for the default by width.
        cap: Largest draft length.
        floor_context: Committed length past which a default floor of 4 or more becomes 1.
    """

    k: int = 7
    floor: int | None = None
    cap: int = 7
    floor_context: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1, high=K_LIMIT)
        check_int("cap", self.cap, low=1, high=K_LIMIT)
        check_int("floor_context", self.floor_context, low=0)
        if self.floor is not None:
            check_int("floor", self.floor, low=1, high=K_LIMIT, hint="floor=None goes by the model's width")

    @property
    def k_max(self) -> int:
        """The effective cap."""
        return min(self.k, self.cap)

    def start(self, *, width: int) -> AdaptiveRun:
        """A run for a model of this width."""
        return AdaptiveRun(self, width)


class AdaptiveRun:
    """Run of AdaptiveFloor."""

    def __init__(self, policy: AdaptiveFloor, width: int) -> None:
        self.policy, self.statistic = policy, policy.statistic
        self.default_floor = 4 if width >= 3500 else 2 if width >= 2500 else 1
        self.accepted: int | None = None

    def floor(self, committed: int) -> int:
        """The floor in force at a committed length."""
        if self.policy.floor is not None:
            return self.policy.floor
        if self.default_floor >= 4 and committed > self.policy.floor_context:
            return 1
        return self.default_floor

    def next_k(self, committed: int) -> int:
        """clamp(accepted + 1, min(floor, cap), cap), or the cap before the first round."""
        cap = self.policy.k_max
        if self.accepted is None:
            return cap
        return max(min(self.floor(committed), cap), min(self.accepted + 1, cap))

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """The threshold's verdict."""
        return self.policy.drops(slot, top1, base)

    def observe(self, view: RoundView) -> None:
        """Remember how much was accepted."""
        self.accepted = view.accepted
