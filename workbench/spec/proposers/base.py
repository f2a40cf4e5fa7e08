"""What a proposer must do. A wrong proposer may only ever cost acceptance, never change output.

Legend: B sequences, T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.core.errors import CapabilityError
from workbench.model.hybrid import Rows
from workbench.sampling.law import Law
from workbench.spec.choose import Choice, choose_top


@dataclass(frozen=True)
class DraftContext:
    """What one round asks of a proposer.

    Args:
        k: Tokens wanted, at least 1.
        pending: The last known token; the chain continues it.
        position: Its absolute position.
        drops: ``drops(slot, p)`` or ``drops(slot, p, top)`` says why a token just drafted is dropped, which ends the
            chain; None keeps it. ``p`` is its probability, ``top`` the largest of its row when that is another.
        choose: ``choose(logits_V, drafted)`` turns the drafter's row over the target's ids (-inf where it has none)
            after the tokens drafted so far into the next one; None when no token may follow.
    """

    k: int
    pending: int
    position: int
    drops: Callable[..., str | None]
    choose: Callable[[Tensor, Sequence[int]], Choice | None] = choose_top


@dataclass(frozen=True)
class Proposal:
    """A drafted chain.

    Args:
        tokens: Kept token ids.
        top1: The drafter's probability of each, softmax at T = 1, unfiltered.
        stop_cause: "k", "p_min", "policy", "constraint", or "proposer" when it had no more to offer.
        q: The law each token was drawn from; None where a token is the proposer's only candidate.
        steps: Drafter steps run, those of dropped tokens included; the round counts them.
    """

    tokens: tuple[int, ...]
    top1: tuple[float, ...]
    stop_cause: str
    q: tuple[Law | None, ...] | None = None
    steps: int = 0

    def first(self, n: int, cause: str) -> Proposal:
        """The first n tokens, ended there by ``cause``."""
        return Proposal(self.tokens[:n], self.top1[:n], cause, None if self.q is None else self.q[:n], self.steps)


class Proposer:
    """Base of proposers; keeps the state of one sequence.

    ``has_q`` says that it draws through ``ctx.choose`` and gives the laws it drew from; one without is taken at its
    word, each of its tokens a point mass. ``taps`` says which target layers it reads, ``block`` that it drafts all
    slots in one pass.
    """

    name = "proposer"
    has_q = False
    taps: tuple[int, ...] = ()
    block = False
    cache: HybridCache | None = None  # its own planes, if it has any

    def reset(self) -> None:
        """Forget the sequence."""

    def clear(self) -> None:
        """Forget the sequence as ``reset`` does, and keep what memory the next one can use."""
        self.reset()

    def prime(self, tokens_BT: Tensor, rows: Rows) -> None:
        """Take in prompt tokens and their true rows, in order, chunk by chunk."""
        self.observe(tokens_BT, rows)

    def observe(self, tokens_BT: Tensor, rows: Rows) -> None:
        """Take in the tokens a round committed and their true rows, in order."""

    def propose(self, ctx: DraftContext) -> Proposal:
        """Draft up to ``ctx.k`` tokens after the pending one."""
        raise AssertionError(f"{type(self).__name__} must define propose")

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """Draft for several sequences; proposers with one state each answer one context at a time."""
        return [self.propose(ctx) for ctx in contexts]

    def mark(self) -> Any:
        """A handle on the present state, which stays good until the proposer is reset or rewound to before it."""
        return None

    def rewind(self, to: Any) -> None:
        """Return to a state that ``mark`` named."""

    def flush(self) -> None:
        """Write everything observed so far into the proposer's own cache."""

    def grow(self, capacity: int) -> None:
        """Make room for texts of this many tokens; an exception changes nothing."""

    def fork(self) -> Proposer:
        """An independent proposer in the same state."""
        raise CapabilityError(f"{type(self).__name__} does not define fork, so its session cannot be forked")

    def tensors(self) -> dict[str, Tensor]:
        """What later drafts depend on besides the flushed cache, by name, for comparisons; the row first."""
        return {}
