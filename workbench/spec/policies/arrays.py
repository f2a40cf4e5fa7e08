"""Policies as numbers: frozen fields that fill an array of parameters, and the run that drives the family's rules.

Every built-in policy but Oracle and Scripted is one of these, so that live rounds, plain walks and compiled walks
share one set of functions (``rules.FAMILIES``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from workbench.core.errors import check_choice, check_flag, check_real
from workbench.spec.policies.base import RoundView
from workbench.spec.policies.rules import FAMILIES, P_MIN, PARAMS, PMIN0, STATE, K

K_LIMIT = 64
STATISTICS = ("drawn", "top")


class Described:
    """A policy that can be written down: as a mapping, and as a short text.

    ``k`` is its longest draft, unless ``k_max`` says otherwise.
    """

    k: int
    family: ClassVar[str]
    word: ClassVar[str]

    @property
    def k_max(self) -> int:
        """Largest draft length it may ask for: k, where nothing else bounds it."""
        return self.k

    def spec(self) -> dict[str, Any]:
        """The policy as a mapping that JSON can hold; ``policy_from`` reads it back."""
        return {"family": self.family, **{name: _plain(value) for name, value in self._fields().items()}}

    @property
    def label(self) -> str:
        """Short text for legends and tables: K, and every field that is not its default."""
        given = {item.name: item.default for item in fields(self)}  # type: ignore[arg-type]
        parts = [f"K={self.k}"]
        for name, value in self._fields().items():
            if name != "k" and value != given[name]:
                parts.append(f"{name}={_text(value)}")
        return f"{self.word} {', '.join(parts)}".strip()

    def _fields(self) -> dict[str, Any]:
        """Fields by name, k first."""
        names = sorted((item.name for item in fields(self)), key=lambda name: name != "k")  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 4:
        return f"({value[0]:.3g}, .., {value[-1]:.3g})"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class ArrayPolicy(Described):
    """A policy of one of the families of ``rules``.

    Args:
        statistic: What thresholds test: "drawn", the probability of the drafted token, or "top", the largest of its
            row; under sampling only the latter does not anticipate the draw.
    """

    statistic: str = "drawn"
    timed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("statistic", self.statistic, STATISTICS)

    def own(self, width: int) -> Sequence[float] | Mapping[int, float]:
        """Parameters of the family's own: from place 3 on, or by place."""
        return ()

    def params(self, *, width: int) -> np.ndarray:
        """The parameters as the family's rules read them.

        Args:
            width: Width of the model's residual stream.

        Returns:
            Float64 [PARAMS].
        """
        out = np.zeros(PARAMS)
        out[K] = self.k_max
        own = self.own(width)
        for at, value in own.items() if isinstance(own, Mapping) else enumerate(own, start=3):
            out[at] = value
        return out

    def start(self, *, width: int) -> ArrayRun:
        """A run for a model of this width."""
        return ArrayRun(self, self.params(width=width))


@dataclass(frozen=True, kw_only=True)
class Threshold(ArrayPolicy):
    """Drop a drafted token, and end its chain, when the drafter's probability of it is below ``p_min``.

    Args:
        p_min: Threshold in [0, 1]; 0 never drops.
        pmin0: Apply it to slot 0 too; slot 0 stays exempt when the pending token was fed alone (base 0).
    """

    p_min: float = 0.0
    pmin0: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_real("p_min", self.p_min, low=0.0, high=1.0, hint="0 switches the threshold off")
        check_flag("pmin0", self.pmin0)

    @property
    def anticipating(self) -> bool:
        """Whether the threshold reads the token just drawn."""
        return self.p_min > 0 and self.statistic == "drawn"

    def params(self, *, width: int) -> np.ndarray:
        """See ``ArrayPolicy``."""
        out = super().params(width=width)
        out[P_MIN], out[PMIN0] = self.p_min, self.pmin0
        return out


class ArrayRun:
    """A policy over one sequence: its family's rules on an array of state.

    Args:
        policy: The policy.
        params: Its parameters, float64 [PARAMS]; only read.
    """

    def __init__(self, policy: ArrayPolicy, params: np.ndarray) -> None:
        self.policy, self.params, self.statistic = policy, params, policy.statistic
        self.rules = FAMILIES[policy.family]
        self.state = np.zeros(STATE)

    def next_k(self, committed: int) -> int:
        """Draft length wanted for the next round."""
        return self.rules.next_k(self.params, self.state, committed)

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """Why the token just drafted is dropped; None to keep it."""
        return self.rules.cause if self.rules.drops(self.params, self.state, slot, top1, base) else None

    def trim(self, drafted: int, base: int) -> int:
        """How many tokens of the finished chain stay."""
        return self.rules.trim(self.params, self.state, drafted)

    def observe(self, view: RoundView) -> None:
        """Learn the outcome of a round."""
        self.rules.observe(
            self.params, self.state, view.drafted, view.accepted, view.steps, view.committed, view.seconds
        )

    def __copy__(self) -> ArrayRun:
        """An independent run in the same state."""
        twin = ArrayRun(self.policy, self.params)
        twin.state = self.state.copy()
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ArrayRun:
        """The same: policy and parameters never change."""
        return self.__copy__()
