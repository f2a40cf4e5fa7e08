"""Fixed K, the adaptive floor, and the ladder by width, all with an optional probability threshold.

Source: seed 002 (K, PMIN, PMIN0, adaptive depth with floor, floor context and cap); seed 001 (ladder, sequence cap).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import UserError, check_int
from workbench.spec.policies.arrays import K_LIMIT, Threshold


@dataclass(frozen=True, kw_only=True)
class FixedK(Threshold):
    """The same draft length every round.

    Args:
        k: Draft length; 0 is plain decode.
    """

    k: int = 3
    family: ClassVar[str] = "fixed"
    word: ClassVar[str] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=0, high=K_LIMIT, hint="k=0 is plain decode")


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
    family: ClassVar[str] = "floor"
    word: ClassVar[str] = "adaptive"

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

    def own(self, width: int) -> Sequence[float]:
        """Floor, and the committed length past which it is 1."""
        if self.floor is not None:
            return self.floor, math.inf
        default = 4 if width >= 3500 else 2 if width >= 2500 else 1
        return default, self.floor_context if default >= 4 else math.inf


def parse_ladder(steps: str) -> tuple[tuple[int, int], ...]:
    """Steps of a ladder, from text such as "4:3,8:2,16:1": up to 4 sequences draft 3 tokens each, up to 8 two.

    Args:
        steps: Pairs ``sequences:drafts`` in any order, spaces allowed around every number.

    Returns:
        The pairs, by number of sequences.

    Raises:
        UserError: Any part is malformed; no part of the text is used then.
    """
    found: dict[int, int] = {}
    for part in steps.split(",") if isinstance(steps, str) else [steps]:
        pair = [piece.strip() for piece in part.split(":")] if isinstance(part, str) else []
        good = len(pair) == 2 and all(piece.isascii() and piece.isdigit() and int(piece) > 0 for piece in pair)
        if not good or int(pair[0]) in found:
            raise UserError(
                f"steps={steps!r} is not valid at {part!r}: a ladder is a text of pairs sequences:drafts, both at "
                "least 1, each number of sequences once, such as '4:3,8:2,16:1'; max_lanes says where drafting ends"
            )
        found[int(pair[0])] = int(pair[1])
    return tuple(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class Ladder(Threshold):
    """Draft length by the number of sequences decoded side by side.

    The first step with room for ``lanes`` sequences counts, past the last step the last one; ``k`` is the ceiling.
    Above ``max_lanes`` nothing is drafted.

    Args:
        steps: Pairs ``sequences:drafts``; see ``parse_ladder``.
        k: Longest draft; 0 is plain decode.
        lanes: Sequences decoded side by side.
        max_lanes: Most sequences with which anything is drafted.
    """

    steps: str = "4:3,8:2,16:1"
    k: int = 3
    lanes: int = 1
    max_lanes: int = 32
    family: ClassVar[str] = "ladder"
    word: ClassVar[str] = "ladder"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=0, high=K_LIMIT, hint="k=0 is plain decode")
        check_int("lanes", self.lanes, low=1)
        check_int("max_lanes", self.max_lanes, low=0)
        parse_ladder(self.steps)

    @property
    def k_max(self) -> int:
        """The draft length at this number of sequences."""
        if self.lanes > self.max_lanes:
            return 0
        steps = parse_ladder(self.steps)
        return min(next((drafts for room, drafts in steps if self.lanes <= room), steps[-1][1]), self.k)
