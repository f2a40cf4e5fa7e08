"""What the pieces of a shape's benchmark share: model, prompt, sizes, and each measurement once.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from workbench.bench.shape.primed import Primed
from workbench.bench.shape.timing import captured, seconds_of
from workbench.cache.hybrid import HybridCache
from workbench.core.errors import UserError, check_int
from workbench.core.records import RoundRecord, SetupTimes
from workbench.model.hybrid import HybridModel
from workbench.spec.options import named_options
from workbench.spec.proposers import SyntheticProposer, conditional
from workbench.spec.session import Session

STREAM_ROUNDS = 32  # rounds without read-back of the arm "streamed"
ARMS: dict[str, dict[str, object]] = {
    "eager": {},
    "graphed": {"graphs": True},
    "streamed": {"graphs": True, "stream_rounds": STREAM_ROUNDS},
}


@dataclass(frozen=True)
class Run:
    """Bursts of one session.

    Args:
        seconds: Of every burst after the first.
        text: Prompt and everything generated.
        records: Rounds of all bursts.
        warm: How many of them the first burst had.
        setup: Seconds of the session's stages, all bursts together.
    """

    seconds: list[float]
    text: list[int]
    records: list[RoundRecord]
    warm: int
    setup: SetupTimes

    @property
    def whole(self) -> list[RoundRecord]:
        """Rounds that no burst's end cut."""
        return [record for record in self.records if not record.cut]

    @property
    def timed(self) -> list[RoundRecord]:
        """Those of them after the first burst."""
        return [record for record in self.records[self.warm :] if not record.cut]


@dataclass(eq=False)
class Setting:
    """A model and how it is measured; what several pieces need is measured when first asked for.

    Args:
        model: The target with its head.
        shape: Its name in the rows.
        context: Tokens of the prompt; default 1024.
        acceptance: joint(j) of every draft slot: the share of rounds in which slots 1..j are accepted; their number is
            K.
        trim: Ids of a trimmed draft head; None for none.
        seed: Of prompt and acceptance.
        quick: Small sizes: a trial, no numbers to quote.
        note: Takes a sentence about what was left out.
    """

    model: HybridModel
    shape: str
    context: int = 1024
    acceptance: tuple[float, ...] = (0.87, 0.69, 0.53)
    trim: int | None = None
    seed: int = 0
    quick: bool = False
    note: Callable[[str], None] = print
    cond: tuple[float, ...] = field(init=False)  # chances of every slot, given the slots before it
    _plain: dict[str, Run] = field(default_factory=dict, init=False)
    _speculative: dict[tuple[str, bool], Run] = field(default_factory=dict, init=False)
    _phases: dict[tuple[str, bool], list[float]] = field(default_factory=dict, init=False)
    _chunks: dict[int, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        if not self.acceptance:
            raise UserError(
                "synthetic_acceptance is empty: give the joint acceptance of every draft slot, such as 0.87,0.69,0.53"
            )
        self.cond = conditional(self.acceptance)
        room = config.max_position_embeddings - self.burst * (self.timed_bursts + 1) - 2
        check_int(
            "context",
            self.context,
            low=self.k + 2,
            high=room,
            hint="the text after it must fit the model's context too",
        )
        if self.trim is not None:
            check_int("trim", self.trim, low=1, high=config.vocab_size, hint="it counts ids of the vocabulary")

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def k(self) -> int:
        """Draft slots."""
        return len(self.acceptance)

    @property
    def burst(self) -> int:
        """Tokens per reading of a decode; the last round of each is cut by its end."""
        return 8 if self.quick else 128

    @property
    def timed_bursts(self) -> int:
        """Readings of each decode."""
        return 3 if self.quick else 5

    @property
    def repeats(self) -> int:
        """Readings of each other figure."""
        return 3 if self.quick else 7

    @property
    def on_gpu(self) -> bool:
        """Whether CUDA graphs and their arms are measured."""
        return self.device.type == "cuda"

    @property
    def arms(self) -> tuple[str, ...]:
        """Ways of decoding that this device has."""
        return tuple(ARMS) if self.on_gpu else ("eager",)

    @property
    def mode(self) -> str:
        """ "exact" or "fast"."""
        return "exact" if self.model.exact else "fast"

    @cached_property
    def prompt(self) -> list[int]:
        """Random ids."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.model.config.vocab_size, (self.context,), generator=generator).tolist()

    @cached_property
    def copy_rates(self) -> list[float]:
        """Bytes per second of a large copy on the device, read and written bytes both counted."""
        n = 1 << (22 if self.quick else 32 if self.on_gpu else 28)
        source, target = (torch.zeros(n, dtype=torch.uint8, device=self.device) for _ in range(2))
        return [2 * n / t for t in self.time(lambda: target.copy_(source), warm=3, inner=1 if self.quick else 5)]

    @property
    def product_size(self) -> int:
        """Rows and columns of the product that forwards are held against."""
        return 64 if self.quick else 8192 if self.on_gpu else 1024

    @cached_property
    def product_rates(self) -> list[float]:
        """Operations per second of one large square product in the model's type."""
        n = self.product_size
        a, b = (torch.randn(n, n, device=self.device).to(self.model.dtype) for _ in range(2))
        seconds = self.time(lambda: torch.mm(a, b), warm=3, inner=1 if self.quick else 5)
        return [2 * n**3 / t for t in seconds]

    @contextmanager
    def optional(self, what: str) -> Iterator[None]:
        """Leave out, in a sentence, what this machine or version cannot do."""
        try:
            yield
        except UserError as error:
            self.note(f"{what} was left out: {error}")
        except torch.OutOfMemoryError as error:
            self.note(f"{what} was left out: the device has too little memory ({str(error).splitlines()[0]})")

    def time(self, call: Callable[[], Any], **options: Any) -> list[float]:
        """Readings of a call on this device."""
        return seconds_of(call, device=self.device, repeats=self.repeats, **options)

    def bursts(
        self, arm: str, *, proposer: SyntheticProposer | None = None, after: Callable[[], Any] | None = None
    ) -> Run:
        """Greedy bursts after the prompt, one session, the first burst untimed.

        Args:
            arm: One of ``ARMS``.
            proposer: The drafter; None for plain decode.
            after: Called at the end of every burst, within its time.

        Returns:
            Their times, text and rounds.

        Raises:
            UserError: This version does not have the arm, or the proposer's tape is not the text.
        """
        given = {"k": 0 if proposer is None else self.k, "ignore_eos": True, **ARMS[arm]}
        capacity = self.context + 1 + self.burst * (self.timed_bursts + 1)
        session = Session(self.model, options=named_options(None, given), proposer=proposer, capacity=capacity)
        session.feed(self.prompt)
        ends: list[int] = []

        def burst() -> None:
            session.generate(max_new_tokens=self.burst)
            ends.append(len(session.state.records))
            if after is not None:
                after()

        seconds = seconds_of(burst, device=self.device, repeats=self.timed_bursts)
        return Run(seconds, session.tokens, list(session.state.records), ends[0], session.times)

    def plain(self, arm: str) -> Run:
        """Plain decode, measured once per arm."""
        if arm not in self._plain:
            self._plain[arm] = self.bursts(arm)
        return self._plain[arm]

    def drafter(self, arm: str, **options: Any) -> SyntheticProposer:
        """A drafter of the given acceptance over the text of an arm's plain decode."""
        return SyntheticProposer(self.model, self.plain(arm).text, self.cond, seed=self.seed, **options)

    def speculative(self, arm: str, *, trimmed: bool = False) -> Run:
        """Speculative decode at the given acceptance, measured once per arm and head; note a text that is another."""
        if (arm, trimmed) not in self._speculative:
            with self.trimmed() if trimmed else nullcontext():
                run = self.bursts(arm, proposer=self.drafter(arm))
            if run.text != self.plain(arm).text:
                head = "trimmed head" if trimmed else "whole head"
                self.note(f"speculative decode, {arm}, {head}: its text is not plain decode's; do not quote it")
            self._speculative[arm, trimmed] = run
        return self._speculative[arm, trimmed]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the forwards in chunks."""
        return (32, 64) if self.quick else (2048, 8192)

    def tokens(self, length: int) -> Tensor:
        """Random ids [1, length] on the device."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(self.model.config.vocab_size, (1, length), generator=generator).to(self.device)

    def chunk(self, length: int) -> list[float]:
        """Readings of one forward of this many tokens from an empty cache, logits of the last row; measured once."""
        if length not in self._chunks:
            ids_1T = self.tokens(length)
            caches: list[HybridCache] = []

            def fresh() -> None:
                caches[:] = [self.model.new_cache(capacity=length)]

            with torch.inference_mode():
                call = partial(self._last_row, ids_1T, caches)
                self._chunks[length] = self.time(call, before=fresh, warm=2)
        return self._chunks[length]

    def _last_row(self, ids_1T: Tensor, caches: list[HybridCache]) -> None:
        self.model.forward(ids_1T, caches[0], logits="last")

    @contextmanager
    def trimmed(self) -> Iterator[None]:
        """The model with a draft head of the first ``trim`` ids; what they are makes no difference to speed."""
        if self.trim is None:
            raise UserError("no size of a trimmed head was given: give trim, or measure the whole head")
        self.model.trim_draft_vocab(range(self.trim))
        try:
            yield
        finally:
            self.model.untrim_draft_vocab()

    @cached_property
    def primed(self) -> Primed:
        """Caches that hold the prompt."""
        with torch.inference_mode():
            return Primed.of(self)

    def phase(self, name: str, *, graph: bool) -> list[float]:
        """Readings of one phase of a round at the prompt's end, measured once.

        Args:
            name: "decode", "verify" (K + 1 rows, all kept), "verify cut" (one row kept), "draft" or "draft trimmed":
                forward, pick and commit on the device.
            graph: Replay it as a CUDA graph, without the host's time.

        Returns:
            Seconds.

        Raises:
            CapabilityError: It cannot be recorded as a graph here.
        """
        if (name, graph) not in self._phases:
            with torch.inference_mode():
                call, before = self.primed.phase(self, name, graph=graph)
                if graph:
                    self._phases[name, graph] = self.time(captured(call, before=before), inner=1 if self.quick else 10)
                else:
                    self._phases[name, graph] = self.time(call, before=before, warm=2)
        return self._phases[name, graph]
