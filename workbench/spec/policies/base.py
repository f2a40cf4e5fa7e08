"""What a policy decides: the next draft length, whether a chain stops before it, and how much of a chain stays.

A policy is frozen data; ``start`` makes the mutable run that a session keeps. The same objects drive live rounds and
walks over a recorded draft table. They know nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workbench.core.errors import UserError


@dataclass(frozen=True)
class RoundView:
    """What a policy sees of a finished round.

    Args:
        drafted: Drafted tokens.
        accepted: Accepted ones.
        committed: Tokens known after the round, prompt included.
        steps: Drafter steps run, those of dropped tokens included; -1, the default, stands for ``drafted``.
        seconds: Duration of the round: live by the session's clock, in a walk by its cost model, else 0.
    """

    drafted: int
    accepted: int
    committed: int
    steps: int = -1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.steps == -1:
            object.__setattr__(self, "steps", self.drafted)


class PolicyRun(Protocol):
    """State of a policy over one sequence.

    A run may have an attribute ``statistic``: "drawn" (what a run without it reads) has ``drops`` read the drafter's
    probability of the token just drawn, "top" the largest of its row, which does not anticipate the draw. It may have
    a method ``trim(drafted, base)`` that says how many tokens of a finished chain stay; without it all do.

    A round that fails is as if it had not begun, so ``next_k``, ``drops`` and ``trim`` are to keep nothing that
    outlives their round. Sessions copy a run with ``copy.deepcopy`` to rewind and fork.
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
    keeps greedy and coupled output exact, and is refused by ratio acceptance. A policy may have an attribute ``timed``,
    True when its runs read ``RoundView.seconds``: a walk then needs a cost model.
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


def trimmed(run: PolicyRun, drafted: int, base: int) -> int:
    """How many tokens of a finished chain a policy keeps.

    Args:
        run: The policy's run.
        drafted: Tokens of the chain.
        base: 1 when the pending token rides in the verify, 0 when it was fed alone.

    Returns:
        A number from 0 to ``drafted``.

    Raises:
        UserError: The policy gave another number.
    """
    trim = getattr(run, "trim", None)
    if trim is None or drafted == 0:
        return drafted
    stays = trim(drafted, base)
    if not isinstance(stays, int) or not 0 <= stays <= drafted:
        raise UserError(
            f"{type(run).__name__}.trim returned {stays!r} for a chain of {drafted} tokens: it must say how many of "
            f"them stay, an integer from 0 to {drafted}"
        )
    return stays
