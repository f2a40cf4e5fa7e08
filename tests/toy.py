"""A target and its head as tables: the row after a text is a function of the text alone. For laws by enumeration.

The real rounds and the real MTP proposer run on it. A hidden row holds the logits after a text, which the identity
unembeds, and the number of that text, from which the head's next row follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from workbench.model.draft_head import TrimmedDrafts
from workbench.model.hybrid import Rows
from workbench.model.ops import Numerics, linear

T = TypeVar("T")
Text = tuple[int, ...]


class Toy(TrimmedDrafts):
    """A model of tables.

    Args:
        vocab: Vocabulary size.
        seed: Of the tables.
        apart: How far the head's logits are from the target's.
    """

    def __init__(self, vocab: int, *, seed: int = 0, apart: float = 1.0) -> None:
        super().__init__()
        self.vocab, self.seed, self.apart = vocab, seed, apart
        self.device, self.head, self.tokenizer = torch.device("cpu"), None, None
        self.over: Text | None = None
        self.embed = torch.eye(vocab, vocab + 1)
        self.config = type("Config", (), {"vocab_size": vocab, "hidden_size": vocab + 1, "eos_token_id": ()})
        self._number: dict[Text, int] = {}
        self._texts: list[Text] = []
        self._hidden: dict[tuple[Text, bool], Tensor] = {}

    numerics, can_draft = Numerics(True), True

    def draft_over(self, ids: Text | None) -> None:
        """Draft these ids only; None for all."""
        if ids != self.over:
            self.over = ids
            self.untrim_draft_vocab() if ids is None else self.trim_draft_vocab(ids)

    def row(self, text: Text, head: bool = False) -> Tensor:
        """The target's logits after a text, or the head's."""
        return self.hidden(text, head)[: self.vocab]

    def hidden(self, text: Text, head: bool) -> Tensor:
        if (text, head) not in self._hidden:
            rows = np.random.default_rng([self.seed, *text]).normal(size=(2, self.vocab)).astype(np.float32)
            if text not in self._number:
                self._number[text] = len(self._texts)
                self._texts.append(text)
            logits = rows[0] * 1.3 + (self.apart * rows[1] if head else 0)
            self._hidden[text, head] = torch.tensor([*logits, self._number[text]], dtype=torch.float32)
        return self._hidden[text, head]

    def forward(self, tokens_BT: Tensor, cache: ToyCache, logits: str = "all") -> Rows:
        texts = []
        for token in tokens_BT[0].tolist():
            cache.tokens = (*cache.tokens, token)
            texts.append(cache.tokens)
        rows = torch.stack([self.hidden(text, False) for text in texts])[None]
        return Rows(rows, rows, rows[..., : self.vocab])

    def carrier(self, rows: Rows, kind: str) -> Tensor:
        return rows.normed_BTH

    def new_draft_cache(self, capacity: int | None = None, **formats: str) -> ToyCache:
        return ToyCache()

    def draft(self, tokens_BT: Tensor, carrier_BTH: Tensor, cache: ToyCache, probe: Any = None) -> Tensor:
        before = [self._texts[int(row[-1])] for row in carrier_BTH[0]]
        cache.tokens = (*cache.tokens, *tokens_BT[0].tolist())
        rows = [self.hidden((*text, token), True) for text, token in zip(before, tokens_BT[0].tolist(), strict=True)]
        return torch.stack(rows)[None]

    def _logits(self, hidden_BTH: Tensor, first: int, weight: Tensor | None = None) -> Tensor:
        assert weight is not None
        return linear(hidden_BTH[0], weight, self.numerics)[None, :first].float()

    def unembed(self, hidden_BTH: Tensor) -> Tensor:
        return hidden_BTH[..., : self.vocab]


@dataclass(eq=False)
class ToyCache:
    """What was fed; its own checkpoint."""

    tokens: Text = ()
    capacity: int = 64
    open: bool = False
    kept: Text = ()

    @property
    def lengths(self) -> list[int]:
        return [len(self.tokens)]

    def truncate(self, rows: int) -> None:
        self.tokens = self.tokens[:rows]

    def checkpoint(self) -> ToyCache:
        self.kept, self.open = self.tokens, True
        return self

    def commit(self, ckpt: ToyCache, *, keep: int) -> None:
        assert 0 <= keep <= len(self.tokens) - len(self.kept)
        self.tokens, self.open = self.tokens[: len(self.kept) + keep], False

    def rollback(self, ckpt: ToyCache) -> None:
        self.tokens, self.open = self.kept, False


@dataclass
class Fork:
    """One path through a tree of draws: the branches of a script, then first ones."""

    script: Sequence[int] = ()
    taken: list[tuple[int, int]] = field(default_factory=list)
    weight: float = 1.0
    used: set[Any] = field(default_factory=set)

    def pick(self, weights: Sequence[float]) -> int:
        """Index of the branch taken here; ``weights`` sum to 1, and branches of weight 0 are no branches."""
        open_ = [i for i, w in enumerate(weights) if w > 0]
        level = len(self.taken)
        branch = self.script[level] if level < len(self.script) else 0
        self.taken.append((branch, len(open_)))
        self.weight *= weights[open_[branch]]
        return open_[branch]

    def once(self, *key: Any) -> None:
        """A random number is used; each at most once."""
        assert key not in self.used, f"the random number of {key} is used twice"
        self.used.add(key)

    def following(self) -> list[int] | None:
        """The script of the next path; None after the last."""
        taken = list(self.taken)
        while taken:
            branch, count = taken.pop()
            if branch + 1 < count:
                return [*(b for b, _ in taken), branch + 1]
        return None


def paths(run: Callable[[Fork], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of a run that draws by ``fork.pick``, with its probability."""
    script: list[int] | None = []
    while script is not None:
        fork = Fork(script)
        out = run(fork)
        yield fork.weight, out
        script = fork.following()
