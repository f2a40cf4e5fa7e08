"""Draft with the checkpoint's own MTP head, one token at a time.

A pair (token x_p, carrier of h_{p-1}) fills slot p - 1 of the head's cache. Observed tokens wait in a queue and run
together with the first draft step, whose own pair is a true row too: refreshing costs no extra pass.
Legend: B sequences (1 here), T rows, H hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.core.errors import NonFiniteError, check_choice
from workbench.model.hybrid import CARRIERS, HybridModel, Rows
from workbench.sampling.law import Law
from workbench.spec.proposers.base import DraftContext, Proposal, Proposer


class MTPProposer(Proposer):
    """The MTP head as a proposer.

    Args:
        model: The target with its head.
        carrier: Hidden rows it is fed: "normed" (after the final norm, as released checkpoints are served) or
            "pre_norm".
        refresh: Rewrite rows of accepted drafts from true rows; False keeps the draft rows, as a control.
        capacity: Slots of its cache; None for the model's longest context.
        shift: Pair a token with the carrier this many positions too early; a control, 0 is right.
        primed: Fill the cache over the prompt; False starts empty, as a control.
        probe: Called with "start" and then with the name of every part that has run ("glue", "attention", "ffn",
            "head"); see ``StepProbe``.
        k_format: How its keys are kept; see ``new_cache``.
        v_format: How its values are kept.
    """

    name = "mtp"
    has_q = True

    def __init__(
        self,
        model: HybridModel,
        *,
        carrier: str = "normed",
        refresh: bool = True,
        capacity: int | None = None,
        shift: int = 0,
        primed: bool = True,
        probe: Callable[[str], None] | None = None,
        k_format: str = "dense",
        v_format: str = "dense",
    ) -> None:
        self.model = model
        self.carrier = check_choice("carrier", carrier, CARRIERS)
        self.refresh, self.shift, self.primed, self.probe = refresh, shift, primed, probe
        self.capacity = capacity
        self.k_format, self.v_format = k_format, v_format
        self.reset()

    def reset(self) -> None:
        """A new cache, and an empty queue."""
        self.cache: HybridCache = self.model.new_draft_cache(
            capacity=self.capacity, k_format=self.k_format, v_format=self.v_format
        )
        self.position = 0  # tokens observed
        self.skipped = 0  # pairs left out at the start
        self.held = 0  # slots whose rows are final
        self.tail: Tensor | None = None  # carriers of the last observed rows
        self.queue: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        """As ``reset``, whatever a subclass adds to it, with the rows' memory kept."""
        kept = self.cache
        kept.clear()
        self.reset()
        self.cache = kept

    def prime(self, tokens_BT: Tensor, rows: Rows) -> None:
        """Take in prompt tokens; an unprimed proposer only remembers where the prompt ended."""
        if self.primed:
            self.observe(tokens_BT, rows)
            return
        self.position += tokens_BT.shape[1]
        self.skipped = max(0, self.position - 1 - self._ready())
        self.tail = self.model.carrier(rows, self.carrier)[:, -1 - self.shift :]

    def observe(self, tokens_BT: Tensor, rows: Rows) -> None:
        """Queue the pairs of newly committed tokens whose slots do not hold final rows yet."""
        carriers = self.model.carrier(rows, self.carrier)
        t = carriers.shape[1]
        known = carriers if self.tail is None else torch.cat([self.tail, carriers], 1)
        begin = self.position + t - known.shape[1]  # position of the first known carrier
        if not self.refresh:
            self.held = max(self.held, min(self.cache.lengths[0], self.position + t - 1 - self.skipped))
        self.cache.truncate(self.held)
        first = max(self.position, self._ready() + 1 + self.skipped)
        if first < self.position + t:
            at = torch.arange(first, self.position + t, device=carriers.device)
            paired = known[:, (at - 1 - self.shift - begin).clamp(min=0)]
            self.queue.append((tokens_BT[:, first - self.position :], paired))
        self.position += t
        self.tail = known[:, -1 - self.shift :]

    def _ready(self) -> int:
        """Slots that are final or queued."""
        return self.held + sum(tokens.shape[1] for tokens, _ in self.queue)

    def _run(self, tokens_BT: Tensor, carrier_BTH: Tensor) -> Tensor:
        return self.model.draft(tokens_BT, carrier_BTH, self.cache, probe=self.probe)

    def flush(self) -> None:
        """Run every queued pair; an exception leaves them all queued."""
        try:
            for tokens, carrier in self.queue:
                self.model.draft(tokens, carrier, self.cache)
        except BaseException:
            self.cache.truncate(self.held)
            raise
        self.queue = []
        self.held = self.cache.lengths[0]

    def logits(self, hidden_B1H: Tensor) -> Tensor:
        """The drafter's row over the target's ids, [V]; -inf where a trimmed head has none."""
        return self.model.unembed_draft(hidden_B1H)[0, 0]

    def propose(self, ctx: DraftContext) -> Proposal:
        """Chain ``ctx.k`` steps from the pending token; the first also runs what is queued."""
        assert self.tail is not None and ctx.position == self.position
        device = self.tail.device
        if self.probe is not None:
            self.probe("start")
        pending = torch.tensor([[ctx.pending]], device=device)
        tokens = torch.cat([*(q[0] for q in self.queue), pending], 1)
        carrier = torch.cat([*(q[1] for q in self.queue), self.tail[:, :1]], 1)
        drafted: list[int] = []
        seen: list[float] = []
        laws: list[Law | None] = []
        hidden = self._run(tokens, carrier)[:, -1:]
        self.queue = []
        self.held = self.cache.lengths[0]
        while True:
            choice = ctx.choose(self.logits(hidden), drafted)
            if self.probe is not None:
                self.probe("head")
            if choice is None:
                return _proposal(drafted, seen, laws, "constraint")
            if choice.p != choice.p:
                raise NonFiniteError(ctx.position + len(drafted), "NaN", phase="draft")
            cause = ctx.drops(len(drafted), choice.p, choice.top)
            if cause is not None:
                return _proposal(drafted, seen, laws, cause)
            drafted.append(choice.token)
            seen.append(choice.p)
            laws.append(choice.q)
            if len(drafted) == ctx.k:
                return _proposal(drafted, seen, laws, "k")
            hidden = self._run(torch.tensor([[choice.token]], device=device), hidden)

    @property
    def terms(self) -> str:
        """What else than the text its rows over a prompt depend on, in words; a trimmed head is no part of it."""
        return f"mtp, carrier {self.carrier}, shift {self.shift}, {'primed' if self.primed else 'not primed'}"

    def shapes(self, length: int, held: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what ``export`` gives after ``length`` tokens."""
        tail = {"tail": (min(length, 1 + self.shift), self.model.config.hidden_size)}
        return {**self.cache.shapes(held), **tail}

    def export(self) -> tuple[dict[str, Tensor], tuple[int, int, int]]:
        """Copies of its rows and the last carriers, and (position, skipped, held); what is queued runs first."""
        self.flush()
        assert self.tail is not None and self.held == self.cache.lengths[0]
        return {**self.cache.export(), "tail": self.tail[0].clone()}, (self.position, self.skipped, self.held)

    def adopt(self, state: Mapping[str, Tensor], counts: tuple[int, int, int]) -> None:
        """Take the place of the proposer that exported this."""
        self.reset()
        self.cache.adopt(state, counts[2])
        self.position, self.skipped, self.held = counts
        self.tail = state["tail"].to(self.model.device, copy=True).unsqueeze(0)

    def mark(self) -> Any:
        """Counters, queue and tail."""
        return (self.position, self.skipped, self.held, list(self.queue), self.tail)

    def rewind(self, to: Any) -> None:
        """Forget every pair after the mark; rows before it stand."""
        self.position, self.skipped, self.held, queue, self.tail = to
        self.queue = list(queue)
        self.cache.truncate(self.held)

    def grow(self, capacity: int) -> None:
        """Let the cache hold this many slots, if it may not yet."""
        if capacity > self.cache.capacity:
            self.cache.grow(capacity)
            self.capacity = capacity

    def fork(self) -> MTPProposer:
        """A copy with a cache and a queue of its own."""
        twin = copy.copy(self)
        twin.cache, twin.queue = self.cache.fork(), list(self.queue)
        return twin

    def tensors(self) -> dict[str, Tensor]:
        """The carriers that the next token is paired with."""
        return {} if self.tail is None else {"carrier": self.tail[0]}


def _proposal(drafted: list[int], seen: list[float], laws: list[Law | None], cause: str) -> Proposal:
    drawn = any(law is not None for law in laws)
    return Proposal(tuple(drafted), tuple(seen), cause, tuple(laws) if drawn else None)
