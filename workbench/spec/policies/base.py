"""What a policy decides: the next draft length, and whether a chain stops before it.

A policy is frozen data; ``start`` makes the mutable run that a session keeps. The same objects drive live rounds and
walks over a recorded draft table. They know nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RoundView:
    """What a policy sees of a finished round.

    Args:
        drafted: Drafted tokens.
        accepted: Accepted ones.
        committed: Tokens known after the round, prompt included.
    """

    drafted: int
    accepted: int
    committed: int


class PolicyRun(Protocol):
    """State of a policy over one sequence.

    A run may have an attribute ``statistic``: "drawn" (what a run without it reads) has ``drops`` read the drafter's
    probability of the token just drawn, "top" the largest of its row, which does not anticipate the draw.
    """

    def next_k(self, committed: int) -> int:
        """Draft length wanted for the next round; 0 drafts nothing.

        Args:
            committed: Tokens known so far, the pending one included.
        """
        ...

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        """Why the token just drafted at ``slot`` is dropped and the chain ends; None to keep it.

        Args:
            slot: Slot of the token, from 0.
            top1: The drafter's probability of it, or the largest of its row (see ``statistic``), softmax at T = 1,
                unfiltered; one and the same where the arg-max is drafted.
            base: 1 when the pending token rides in the verify, 0 when it was fed alone.
        """
        ...

    def observe(self, view: RoundView) -> None:
        """Learn the outcome of a round."""
        ...


class Policy(Protocol):
    """Frozen description of a policy.

    ``anticipating`` is True when a decision about slot j reads a token drawn at or after that slot; such a policy
    keeps greedy and coupled output exact, and is refused by ratio acceptance.
    """

    @property
    def k_max(self) -> int:
        """Largest draft length it may ask for."""
        ...

    @property
    def anticipating(self) -> bool:
        """See the class."""
        ...

    def start(self, *, width: int) -> PolicyRun:
        """State for a new sequence on a model whose residual stream is ``width`` wide."""
        ...
