"""Proposers that know the truth and err where they are told to: for tests and demonstrations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from workbench.core.errors import UserError, check_choice
from workbench.model.hybrid import Rows
from workbench.spec.proposers.base import DraftContext, Proposal, Proposer

PATTERNS = ("perfect", "useless", "alternating", "random")


class ScriptedProposer(Proposer):
    """Drafts the true continuation, replaced by a wrong id where ``errs`` says so.

    Args:
        truth: The whole sequence, prompt included, as plain decode gives it.
        errs: ``errs(position, slot)`` is True where the draft is to be wrong; ``position`` is the drafted token's.
        vocab_size: Ids below this are drafted.
        confidence: Probability reported for every draft, or ``confidence(position, slot)``.
    """

    name = "scripted"

    def __init__(
        self,
        truth: Sequence[int],
        errs: Callable[[int, int], bool],
        *,
        vocab_size: int,
        confidence: float | Callable[[int, int], float] = 1.0,
    ) -> None:
        self.truth, self.errs = list(truth), errs
        self.vocab_size, self.confidence = vocab_size, confidence

    @classmethod
    def pattern(cls, kind: str, truth: Sequence[int], *, vocab_size: int, seed: int = 0) -> ScriptedProposer:
        """One of the named patterns.

        Args:
            kind: "perfect", "useless", "alternating" (every other position is wrong) or "random" (a third is).
            truth: The whole sequence.
            vocab_size: Size of the vocabulary.
            seed: Of "random".

        Returns:
            The proposer.
        """
        check_choice("kind", kind, PATTERNS)
        rules: dict[str, Callable[[int, int], bool]] = {
            "perfect": lambda position, slot: False,
            "useless": lambda position, slot: True,
            "alternating": lambda position, slot: position % 2 == 1,
            "random": lambda position, slot: random.Random(f"{seed}:{position}:{slot}").random() < 1 / 3,
        }
        return cls(truth, rules[kind], vocab_size=vocab_size)

    def propose(self, ctx: DraftContext) -> Proposal:
        """Draft from the script; it ends where the truth does."""
        drafted: list[int] = []
        seen: list[float] = []
        for slot in range(ctx.k):
            at = ctx.position + 1 + slot
            if at >= len(self.truth):
                return Proposal(tuple(drafted), tuple(seen), "proposer")
            p = self.confidence(at, slot) if callable(self.confidence) else self.confidence
            cause = ctx.drops(slot, p)
            if cause is not None:
                return Proposal(tuple(drafted), tuple(seen), cause)
            wrong = self.errs(at, slot)
            drafted.append((self.truth[at] + 1) % self.vocab_size if wrong else self.truth[at])
            seen.append(p)
        return Proposal(tuple(drafted), tuple(seen), "k")

    def fork(self) -> ScriptedProposer:
        """A copy; the script is shared."""
        return copy.copy(self)


class GivenProposer(Proposer):
    """Drafts the chains it was given, one per round, in order; then nothing.

    Args:
        chains: Token ids per round.
        confidences: Probabilities reported, same shape; None for ones.
    """

    name = "given"

    def __init__(self, chains: Sequence[Sequence[int]], confidences: Sequence[Sequence[float]] | None = None) -> None:
        self.chains = [tuple(chain) for chain in chains]
        self.confidences = [tuple(c) for c in confidences] if confidences is not None else None
        if self.confidences is not None and [*map(len, self.chains)] != [*map(len, self.confidences)]:
            raise UserError("confidences must have one number per given draft token, in the same shape")
        self.round = 0

    def reset(self) -> None:
        """Start again with the first chain."""
        self.round = 0

    def propose(self, ctx: DraftContext) -> Proposal:
        """The next chain, cut to ``ctx.k``."""
        at, self.round = self.round, self.round + 1
        chain = self.chains[at][: ctx.k] if at < len(self.chains) else ()
        seen = self.confidences[at][: ctx.k] if self.confidences and at < len(self.chains) else (1.0,) * len(chain)
        for slot, p in enumerate(seen):
            cause = ctx.drops(slot, p)
            if cause is not None:
                return Proposal(chain[:slot], seen[:slot], cause)
        return Proposal(chain, seen, "k" if len(chain) == ctx.k else "proposer")

    def observe(self, tokens_BT: Tensor, rows: Rows) -> None:
        """Rows do not matter to a script."""

    def mark(self) -> Any:
        """Number of the next chain."""
        return self.round

    def rewind(self, to: Any) -> None:
        """Offer that chain again."""
        self.round = to

    def fork(self) -> GivenProposer:
        """A copy that offers the same chain next."""
        return copy.copy(self)
