"""Draft lengths that are known beforehand: the best there are for a recorded text, and a schedule given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.spec.policies.adaptive import check_curve
from workbench.spec.policies.arrays import K_LIMIT, Described
from workbench.spec.policies.base import RoundView


@dataclass(frozen=True, kw_only=True)
class Oracle(Described):
    """The draft lengths of one who knows what will be accepted: no policy of up to k drafts does better.

    A walk finds them for every recorded text: the fewest rounds, and of these the fewest drafts, or the least time when
    durations are given. To run them live, take ``wb.oracle_schedules(table, oracle)``.

    Args:
        k: Longest draft.
        seconds: t(0), t(1), .. t(k): duration of a round that drafts so many tokens, in any unit; None counts rounds.
    """

    k: int = 7
    seconds: tuple[float, ...] | None = None
    family: ClassVar[str] = "oracle"
    word: ClassVar[str] = "oracle"
    anticipating: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int("k", self.k, low=0, high=K_LIMIT)
        if self.seconds is not None:
            object.__setattr__(self, "seconds", check_curve(self.seconds, self.k))

    def start(self, *, width: int) -> ScriptedRun:
        """An oracle knows recorded texts only.

        Raises:
            CapabilityError: Always.
        """
        raise CapabilityError(
            "an Oracle knows what recorded texts accept, and nothing of a live one: walk(table, policy=Oracle(..)) "
            "gives its rounds, and oracle_schedules(table, oracle) the Scripted policy of each text, which runs live"
        )


@dataclass(frozen=True, kw_only=True)
class Scripted(Described):
    """Given draft lengths, by the place where a round starts or by the number of the round.

    It reads nothing of a run, so the ratio rule takes it; a schedule made from the very draws it is then used on does
    anticipate them, which no policy can see.

    Args:
        ks: A mapping from the absolute position of a round's pending token to its draft length, 0 elsewhere; or one
            length per round, the last of them for all later rounds.
    """

    ks: Mapping[int, int] | Sequence[int]
    family: ClassVar[str] = "scripted"
    word: ClassVar[str] = "scripted"
    anticipating: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given: Any = self.ks
        pairs = not isinstance(given, Mapping) and len(given) and all(isinstance(one, tuple) for one in given)
        if isinstance(given, Mapping) or pairs:
            found = sorted(given.items() if isinstance(given, Mapping) else given)
            for start, k in found:
                check_int("start", start, low=0)
                check_int(f"ks[{start}]", k, low=0, high=K_LIMIT)
            object.__setattr__(self, "ks", tuple((int(start), int(k)) for start, k in found))
            return
        for at, k in enumerate(given):
            check_int(f"ks[{at}]", k, low=0, high=K_LIMIT)
        if not len(given):
            raise UserError("ks=() is not valid: give one draft length per round, or a mapping from starts to lengths")
        object.__setattr__(self, "ks", tuple(int(k) for k in given))

    @property
    def by_start(self) -> dict[int, int] | None:
        """Draft length by start; None when it goes by rounds."""
        ks: Any = self.ks
        return dict(ks) if not ks or isinstance(ks[0], tuple) else None

    @property
    def k_max(self) -> int:
        """The longest draft of all."""
        found = self.by_start
        return max(self.ks if found is None else found.values(), default=0)  # type: ignore[type-var]

    def spec(self) -> dict[str, Any]:
        """The policy as a mapping that JSON can hold."""
        found = self.by_start
        ks = list(self.ks) if found is None else {str(start): k for start, k in found.items()}
        return {"family": self.family, "ks": ks}

    @property
    def label(self) -> str:
        """Short text: how many rounds or starts have a length, and the longest."""
        return f"scripted K<={self.k_max} ({len(self.ks)} {'rounds' if self.by_start is None else 'starts'})"

    def start(self, *, width: int) -> ScriptedRun:
        """A run from the first round on."""
        return ScriptedRun(self)


class ScriptedRun:
    """Run of Scripted."""

    def __init__(self, policy: Scripted) -> None:
        self.policy, self.by_start, self.rounds = policy, policy.by_start, 0

    def next_k(self, committed: int) -> int:
        """The length given for this start or round."""
        if self.by_start is not None:
            return self.by_start.get(committed - 1, 0)
        return self.policy.ks[min(self.rounds, len(self.policy.ks) - 1)]

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """Nothing is dropped."""
        return None

    def observe(self, view: RoundView) -> None:
        """Count rounds."""
        self.rounds += 1
