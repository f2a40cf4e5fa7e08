"""What tokens a grammar lets follow, and how a round walks it along a draft.

A constraint is a state that moves with the text: ``consume`` after each token, ``rollback`` with the cache. ``mask`` is
the one oracle; what it says is what ``allowed`` and ``consume`` go by, since grammar libraries disagree with themselves
elsewhere. This file knows no library; ``grammars`` holds the adapters.

Legend: V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from workbench.core.errors import UserError


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may come next; one per text.

    The ``draft_*`` methods walk ahead of the text for the drafter. Any other method first undoes that walk, so that an
    aborted chain leaves nothing behind. Their bodies here are those of a constraint that leaves the drafter unmasked;
    inherit to keep them.
    """

    @property
    def finished(self) -> bool:
        """Nothing but end of text may follow."""
        ...

    def mask(self) -> torch.Tensor:
        """bool [V], on the CPU, not to be written to: True where the token may come next."""
        ...

    def allowed(self, token: int) -> bool:
        """``mask()[token]``; False outside [0, V)."""
        ...

    def consume(self, token: int) -> None:
        """Move past a token, which must be allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` consumed tokens, an end of text among them or not."""
        ...

    def draft_begin(self) -> None:
        """Put the drafter's walk at the end of the consumed text."""
        return None

    def draft_mask(self) -> torch.Tensor | None:
        """bool [V] for the drafter's next token; None, or all False, leaves it unmasked."""
        return None

    def draft_advance(self, token: int) -> bool:
        """Move the drafter's walk past a token; False, and no move, ends the chain before that token."""
        return True


def mask_rows(constraint: Constraint, drafted: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Masks for the rows of one verify.

    Args:
        constraint: At the place after the pending token; left there, also by an exception.
        drafted: Drafted ids d_1..d_k.

    Returns:
        (masks, legal): ``masks[r]`` is the mask after d_1..d_r, for r up to ``legal``; d_1..d_legal are allowed one
        after the other. The walk ends at the first draft that is not allowed, and once the grammar is finished.
    """
    masks, taken = [constraint.mask()], 0
    try:
        for token in drafted:
            if constraint.finished or not constraint.allowed(token):
                break
            constraint.consume(token)
            taken += 1
            masks.append(constraint.mask())
    finally:
        constraint.rollback(taken)
    return masks, taken


class Matcher(Protocol):
    """What a grammar library's matcher must do here; end-of-text tokens are never given to it."""

    def bits(self) -> np.ndarray:
        """uint8, little-endian bits: which ids may come next, end of text where the grammar is complete.

        Raises:
            UserError: The library gave up, with its reason.
        """
        ...

    def advance(self, token: int) -> bool:
        """Move past a token; False when the library refuses it, in whatever state that leaves the matcher."""
        ...

    def back(self, n: int) -> bool:
        """Undo ``n`` tokens; False when the library cannot."""
        ...

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        ...


class GrammarConstraint(Constraint):
    """A library's matcher, made to keep the rules of ``Constraint``.

    End-of-text tokens are counted here, not given to the library: after one, and whenever the grammar is complete and
    cannot go on, exactly ``eos_ids`` are allowed, so that no mask is ever empty. Where a library refuses to roll back
    (one in an error state does), the matcher is made again from the consumed tokens.

    Args:
        fresh: Makes a matcher at the start of the grammar.
        vocab_size: V of the target; ids the library does not know are never allowed.
        eos_ids: End-of-text tokens.
    """

    def __init__(self, fresh: Callable[[], Matcher], *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._fresh, self._matcher, self._vocab_size = fresh, fresh(), vocab_size
        self._eos = torch.zeros(vocab_size, dtype=torch.bool)
        self._eos[list(eos_ids)] = True
        self._tokens: list[int] = []
        self._ended = 0  # the last tokens that are ends of text
        self._drafted = 0  # the last tokens that are the drafter's
        self._row: torch.Tensor | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Consumed tokens."""
        self.draft_begin()
        return tuple(self._tokens)

    @property
    def finished(self) -> bool:
        """Nothing but end of text may follow."""
        return not bool((self.mask() & ~self._eos).any())

    def mask(self) -> torch.Tensor:
        """bool [V], True where the token may come next; never all False.

        Raises:
            UserError: The library gave up, or no token of the vocabulary fits.
        """
        self.draft_begin()
        return self._mask()

    def allowed(self, token: int) -> bool:
        """``mask()[token]``; False outside [0, V)."""
        self.draft_begin()
        return self._allowed(token)

    def consume(self, token: int) -> None:
        """Move past a token.

        Raises:
            UserError: The token is not allowed here; nothing has changed.
        """
        self.draft_begin()
        if not self._allowed(token):
            raise UserError(
                f"token {token} is not allowed by the grammar after {len(self._tokens)} tokens: consume only ids that "
                "the mask allows"
            )
        self._push(token)

    def rollback(self, n: int) -> None:
        """Undo the last ``n`` consumed tokens."""
        self.draft_begin()
        self._undo(n)

    def fork(self) -> GrammarConstraint:
        """An independent constraint at the same place."""
        self.draft_begin()
        twin = GrammarConstraint.__new__(GrammarConstraint)
        twin.__dict__.update(self.__dict__, _matcher=self._matcher.copy(), _tokens=list(self._tokens))
        return twin

    def draft_begin(self) -> None:
        """Undo the drafter's walk."""
        drafted, self._drafted = self._drafted, 0
        if drafted:
            self._undo(drafted)

    def draft_mask(self) -> torch.Tensor:
        """The mask after the tokens the drafter walked past."""
        return self._mask()

    def draft_advance(self, token: int) -> bool:
        """Walk past a token if it is allowed there; else False."""
        if not self._allowed(token):
            return False
        self._push(token)
        self._drafted += 1
        return True

    def _mask(self) -> torch.Tensor:
        if self._ended:
            return self._eos
        if self._row is None:
            bits = np.unpackbits(self._matcher.bits(), bitorder="little", count=self._vocab_size)
            row = torch.from_numpy(bits.view(np.bool_))
            if not row.any():
                raise UserError(
                    f"no token of this vocabulary can follow after {len(self._tokens)} tokens of the grammar: loosen "
                    "the grammar there, or use characters the tokenizer knows"
                )
            self._row = row
        return self._row

    def _allowed(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and bool(self._mask()[token])

    def _push(self, token: int) -> None:
        """Move past a token the mask allows."""
        if self._eos[token]:
            self._ended += 1
        elif not self._matcher.advance(token):
            self._restart()
            raise UserError(
                f"the grammar library allows token {token} after {len(self._tokens)} tokens and then refuses it, which "
                "is a fault of the library: use the other engine"
            )
        else:
            self._row = None
        self._tokens.append(token)

    def _undo(self, n: int) -> None:
        assert 0 <= n <= len(self._tokens), f"cannot undo {n} of {len(self._tokens)} tokens"
        ends = min(n, self._ended)
        self._ended -= ends
        if n:
            del self._tokens[-n:]
        if n > ends:
            self._row = None
            if not self._matcher.back(n - ends):
                self._restart()

    def _restart(self) -> None:
        """Make the matcher again from the consumed tokens."""
        self._matcher, self._row = self._fresh(), None
        for token in self._tokens[: len(self._tokens) - self._ended]:
            assert self._matcher.advance(token), "tokens consumed once are consumed again"
