"""A drafter of a given acceptance: the MTP head runs in full, and only its pick is replaced.

What a drafter costs and how often it is right then come apart, so that the speed at a stated acceptance can be measured
on weights that know nothing. Legend: L tokens of a tape, K slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError, check_int, check_real
from workbench.model.hybrid import HybridModel
from workbench.sampling.philox import DRAFT, TAG, Noise, philox, uniform
from workbench.spec.choose import Choice
from workbench.spec.proposers.base import DraftContext, Proposal
from workbench.spec.proposers.mtp import MTPProposer

PLAN = TAG - 1  # first counter word of these decisions: no draw of the engine has it


def synthetic_drafts(
    tape: Sequence[int], acceptance: Sequence[float], *, vocab_size: int, seed: int = 0, sequence: int = 0
) -> Tensor:
    """Drafts of every round that may begin on a known text, right as often as asked for.

    In the round whose pending token lies at P, slot j drafts the tape's token at P + 1 + j with chance
    ``acceptance[j]``, and any other id else. Decisions are independent and functions of P and j alone, not of the
    order of calls; so the share of slot j among rounds whose earlier slots were all right, cond(j), is that chance.

    Args:
        tape: The whole text, prompt included, as plain greedy decode commits it.
        acceptance: cond(j) of every slot, each from 0 to 1; their number is K.
        vocab_size: Ids below this are drafted; at least 2.
        seed: Of the decisions.
        sequence: Which of the texts under this seed.

    Returns:
        Int64 [L, K] on the CPU; 0 in slots that lie past the end of the tape.

    Raises:
        UserError: An argument is not valid.
    """
    chances = [check_real(f"acceptance of slot {j + 1}", p, low=0.0, high=1.0) for j, p in enumerate(acceptance)]
    check_int("vocab_size", vocab_size, low=2, hint="a wrong draft needs another id")
    if not chances or not len(tape):
        raise UserError(
            f"{len(tape)} tokens and {len(chances)} chances of acceptance were given: at least one of each is needed"
        )
    text = np.asarray(tape, np.int64)
    if text.min() < 0 or text.max() >= vocab_size:
        raise UserError(f"a token of the tape is out of range: ids are 0 to {vocab_size - 1}")
    at, slot = np.arange(len(text))[:, None], np.arange(len(chances))[None]
    drafted = at + 1 + slot
    words = philox((PLAN, drafted, DRAFT, at), Noise(seed, sequence).key)
    known = drafted < len(text)
    right = np.where(known, text[np.minimum(drafted, len(text) - 1)], 0)
    wrong = (right + 1 + words[1] % (vocab_size - 1)) % vocab_size
    drafts = np.where(uniform(words[0]) < np.asarray(chances), right, wrong)
    return torch.from_numpy(np.where(known, drafts, 0))


def conditional(joint: Sequence[float]) -> tuple[float, ...]:
    """Chances of every slot, given the slots before it, that joint acceptance amounts to.

    Args:
        joint: joint(j) of every slot: the share of rounds in which slots 1..j were accepted.

    Returns:
        cond(j) = joint(j) / joint(j - 1), with joint(0) = 1; 0 after a slot that is never accepted.

    Raises:
        UserError: A share is not from 0 to 1, or one rises above the share before it.
    """
    before, found = 1.0, []
    for j, share in enumerate(joint, start=1):
        check_real(f"joint acceptance of slot {j}", share, low=0.0, high=1.0)
        if share > before:
            raise UserError(
                f"joint acceptance {', '.join(map(str, joint))} is not valid: slot {j} cannot stand in more rounds "
                f"than slot {j - 1}; give shares of all rounds that never rise, such as 0.87,0.69,0.53"
            )
        found.append(share / before if before else 0.0)
        before = share
    return tuple(found)


class SyntheticProposer(MTPProposer):
    """The MTP head with its pick replaced, step by step, by a tape's token as often as asked for.

    Every step embeds the replaced token, runs the layer and the vocabulary head and takes the pick, as in any chain.
    For greedy decoding; the probabilities it reports are those of the head's own picks.

    Args:
        model: The target with its head.
        tape: The whole text, as in ``synthetic_drafts``.
        acceptance: Chance of every slot, given the slots before it.
        seed: Of the decisions.
        sequence: Which of the texts under this seed.
        **options: As of ``MTPProposer``.

    Raises:
        UserError: An argument is not valid.
    """

    name = "synthetic"

    def __init__(
        self,
        model: HybridModel,
        tape: Sequence[int],
        acceptance: Sequence[float],
        *,
        seed: int = 0,
        sequence: int = 0,
        **options: object,
    ) -> None:
        super().__init__(model, **options)  # type: ignore[arg-type]
        size = model.config.vocab_size
        self.tape = tuple(tape)
        self.override_LK = synthetic_drafts(self.tape, acceptance, vocab_size=size, seed=seed, sequence=sequence)
        self._plan = self.override_LK.tolist()

    def propose(self, ctx: DraftContext) -> Proposal:
        """The head's chain with the planned tokens.

        Raises:
            UserError: More slots are asked for than were given, or the text is not the tape.
        """
        slots = self.override_LK.shape[1]
        if ctx.k > slots:
            raise UserError(f"k={ctx.k} is not valid here: acceptance was given for {slots} slots; use k={slots}")
        if ctx.position >= len(self.tape) or self.tape[ctx.position] != ctx.pending:
            raise UserError(
                f"the text and the tape part at position {ctx.position}: make the tape by plain greedy decode in the "
                "same numerical class, or use exact=True"
            )
        row = self._plan[ctx.position]

        def planned(logits_V: Tensor, drafted: Sequence[int]) -> Choice | None:
            own = ctx.choose(logits_V, drafted)
            return None if own is None else replace(own, token=row[len(drafted)], q=None)

        return super().propose(replace(ctx, choose=planned))
