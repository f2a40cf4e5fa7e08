"""How rows of logits become tokens in one sequence: the target's picks and the drafter's draws, from one place.

Target and drafter share shaping, history and noise. Under ``coupled`` acceptance both draw with the noise of the
token's absolute position, so that the drafter guesses the very token the target will draw; under ``ratio`` the drafter
draws with noise of its own, and its law travels with the token.
Legend: T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch
from torch import Tensor

from workbench.core.errors import NonFiniteError
from workbench.sampling.draw import draw, inverse_cdf
from workbench.sampling.law import Law
from workbench.sampling.options import Shaping
from workbench.sampling.philox import ACCEPT, DRAFT, RESIDUAL, TARGET, Noise
from workbench.sampling.pick import picks
from workbench.sampling.residual import ratio_test, residual
from workbench.sampling.shaping import law
from workbench.spec.constraint import Constraint

ACCEPT_RULES = ("coupled", "ratio")


@dataclass(frozen=True, eq=False)
class Choice:
    """A token drawn by the drafter.

    Args:
        token: Its id.
        p: The drafter's probability of it, softmax at T = 1, unfiltered.
        top: Largest such probability of the row: what a policy may read without anticipating the draw.
        q: The law it was drawn from; None for the arg-max of a row.
    """

    token: int
    p: float
    top: float
    q: Law | None = None


def choose_top(logits_V: Tensor, drafted: Sequence[int]) -> Choice:
    """The arg-max of a row, whatever was drafted before."""
    picked = picks(logits_V.unsqueeze(0))
    p = float(picked.top1[0])
    return Choice(int(picked.ids[0]), p, p)


@dataclass(frozen=True, eq=False)
class Chooser:
    """The choices of one sequence.

    Args:
        shaping: How logits become a law.
        noise: The sequence's random stream.
        accept: "coupled" or "ratio".
    """

    shaping: Shaping = field(default_factory=Shaping)
    noise: Noise = field(default_factory=lambda: Noise(0))
    accept: str = "coupled"

    @cached_property
    def plain(self) -> bool:
        """True when a pick is the arg-max of its row, whatever came before."""
        return self.shaping.greedy and not self.shaping.penalised and not self.shaping.bias

    @cached_property
    def by_ratio(self) -> bool:
        """True when drafts are judged by the ratio of the two laws."""
        return self.accept == "ratio" and not self.shaping.greedy

    @cached_property
    def barred(self) -> tuple[int, ...]:
        """Ids that the bias forbids."""
        return tuple(i for i, bias in self.shaping.bias if bias == -inf)

    def can_draft(self, logits_V: Tensor, mask_V: Tensor | None) -> bool:
        """Whether bias and mask leave a drafter any id of its own; one of few ids may have none."""
        if not self.barred:
            return True
        left_V = torch.isfinite(logits_V) if mask_V is None else torch.isfinite(logits_V) & mask_V
        left_V[list(self.barred)] = False
        return bool(left_V.any())

    def law(self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None) -> Law:
        """Law of a row after a history."""
        return law(logits_V, self.shaping, history=history, mask=mask_V)

    def pick(self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None = None) -> int:
        """The target's token after a history, drawn with the noise of its position."""
        if self.plain and mask_V is None:
            return int(logits_V.argmax(-1))
        return draw(self.law(logits_V, history, mask_V), self.noise, len(history), TARGET)

    def draft(self, logits_V: Tensor, history: Sequence[int], mask_V: Tensor | None, start: int) -> Choice:
        """The drafter's token after a history, in a round whose pending token lies at ``start``."""
        if self.plain and mask_V is None:
            return choose_top(logits_V, ())
        found = picks(logits_V.unsqueeze(0))
        top = float(found.top1[0])
        if top != top:
            raise NonFiniteError(len(history), "NaN", phase="draft")
        q = self.law(logits_V, history, mask_V)
        if self.by_ratio:
            token = draw(q, self.noise, len(history), DRAFT, start)
        else:
            token = draw(q, self.noise, len(history), TARGET)
        p = float(torch.exp(logits_V[token].double() - found.logsumexp[0].double()))
        return Choice(token, p, top, q)

    def accepts(self, p: Law, q: Law, token: int, position: int, start: int) -> bool:
        """The ratio test of a drafted token."""
        return ratio_test(p, q, token, self.noise.uniform(position, ACCEPT, start))

    def redraw(self, p: Law, q: Law, position: int, start: int) -> int:
        """The token in place of a rejected one: from the residual, or from p where that vanishes."""
        rest = residual(p, q)
        return inverse_cdf(p if rest is None else rest, self.noise.uniform(position, RESIDUAL, start))


class Walk:
    """A constraint led along tokens that may yet be taken back.

    Args:
        constraint: The matcher; at the end of the committed text before and after.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.path: list[int] = []

    def goto(self, tokens: Sequence[int]) -> None:
        """Stand after these tokens; each must be allowed."""
        same = 0
        while same < min(len(tokens), len(self.path)) and tokens[same] == self.path[same]:
            same += 1
        if len(self.path) > same:
            self.constraint.rollback(len(self.path) - same)
            del self.path[same:]
        for token in tokens[same:]:
            self.constraint.consume(token)
            self.path.append(token)

    def mask(self, tokens: Sequence[int]) -> Tensor:
        """Ids allowed after these tokens, bool [V]."""
        self.goto(tokens)
        return self.constraint.mask()

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow one another from here."""
        for n, token in enumerate(tokens):
            self.goto(tokens[:n])
            if not self.constraint.allowed(token):
                return n
        return len(tokens)

    def settle(self, tokens: Sequence[int]) -> None:
        """Keep these tokens for good."""
        self.goto(tokens)
        self.path = []

    def undo(self) -> None:
        """Return to the committed text."""
        self.goto(())


class TargetRows(Sequence[int]):
    """The target's own tokens for the rows of one verify, row r after the first r drafts; computed when asked for.

    Args:
        chooser: Shaping and noise.
        logits_TV: Rows of the verify.
        history: Committed tokens, the pending one last.
        drafts: Drafted tokens.
        walk: The constraint; None for none.
    """

    def __init__(
        self, chooser: Chooser, logits_TV: Tensor, history: Sequence[int], drafts: Sequence[int], walk: Walk | None
    ) -> None:
        self.chooser, self.logits_TV, self.walk = chooser, logits_TV, walk
        self.text, self.first = [*history, *drafts], len(history)
        self.known: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.logits_TV)

    def __getitem__(self, row: int) -> int:  # type: ignore[override]
        if row not in self.known:
            text = self.text[: self.first + row]
            self.known[row] = self.chooser.pick(self.logits_TV[row], text, self.mask(row))
        return self.known[row]

    def mask(self, row: int) -> Tensor | None:
        """Ids allowed in a row."""
        if self.walk is None:
            return None
        return self.walk.mask(self.text[self.first : self.first + row]).to(self.logits_TV.device)

    def law(self, row: int) -> Law:
        """The target's law of a row."""
        return self.chooser.law(self.logits_TV[row], self.text[: self.first + row], self.mask(row))
