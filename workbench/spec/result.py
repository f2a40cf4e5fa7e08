"""What a generation returns: tokens, text, records, and a summary and card drawn from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from workbench.core.metrics import Telemetry, acceptance, repeated_ngrams
from workbench.core.records import DraftStepTimes, RoundRecord, SetupTimes

if TYPE_CHECKING:
    import polars

    from workbench.model.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Generation:
    """One finished generation.

    Args:
        prompt: Prompt token ids.
        tokens: Generated token ids.
        records: One record per round.
        finish: Why it ended: "length", "stop" (a stop token, the last of the tokens), "stop_string" (the text ends
            before it), "cancel", or "forced" (a given text was committed to its end).
        setup: Seconds by stage.
        draft_steps: Anatomy of draft steps, when it was asked for.
        exact: Numerical class it ran in.
        tokenizer: Turns ids into text; None when the model has none.
        doc_id: Name of the prompt in frames.
        source: Register of the prompt in frames.
        first_logprob: The target's log-probability of the first token, when log-probabilities were asked for.
        cut_text: The text before a stop string, when there were stop strings.
        fed: Whether the prompt was fed for this generation, so that its first token is of no round; a burst that goes
            on from a session's pending token has none of those.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    records: tuple[RoundRecord, ...]
    finish: str
    setup: SetupTimes
    draft_steps: DraftStepTimes | None
    exact: bool
    tokenizer: Tokenizer | None = field(repr=False)
    doc_id: str = "prompt"
    source: str = ""
    first_logprob: float | None = None
    cut_text: str | None = field(default=None, repr=False)
    fed: bool = True

    @property
    def text(self) -> str:
        """The generated text, up to a stop token or string; empty when the model has no tokenizer."""
        if self.cut_text is not None:
            return self.cut_text
        shown = self.tokens[:-1] if self.finish == "stop" else self.tokens
        return self.tokenizer.decode(shown) if self.tokenizer else ""

    @cached_property
    def rounds(self) -> polars.DataFrame:
        """One row per round."""
        from workbench.core.frames import rounds_frame

        return rounds_frame(self.records, doc_id=self.doc_id, source=self.source)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The target's log-probability of every token, softmax at T = 1, unfiltered; empty unless asked for."""
        said = tuple(value for record in self.records for value in record.logprobs)
        if not self.fed:
            return said
        return () if self.first_logprob is None else (self.first_logprob, *said)

    @cached_property
    def token_frame(self) -> polars.DataFrame:
        """One row per token: position, token, kind ("first", "accepted", "bonus"), and both log-probabilities.

        ``logprob`` is the target's, null unless asked for; ``draft_logprob`` the drafter's, of accepted drafts.
        """
        import polars as pl

        told = self.logprobs or (None,) * len(self.tokens)
        rows: list[tuple[str, float | None]] = [("first", None)] if self.fed else []
        for record in self.records:
            kept = record.emitted - (record.bonus is not None)
            rows += [("accepted", math.log(p) if p > 0 else -math.inf) for p in record.draft_top1[:kept]]
            rows += [("bonus", None)] * (record.emitted - kept)
        columns = {
            "position": [len(self.prompt) + i for i in range(len(self.tokens))],
            "token": list(self.tokens),
            "kind": [kind for kind, _ in rows[: len(self.tokens)]],
            "logprob": list(told),
            "draft_logprob": [value for _, value in rows[: len(self.tokens)]],
        }
        schema = {"position": pl.Int32, "token": pl.Int32, "kind": pl.String}
        return pl.DataFrame(columns, schema={**schema, "logprob": pl.Float64, "draft_logprob": pl.Float64})

    @cached_property
    def phases(self) -> polars.DataFrame:
        """Milliseconds per part of a round, of a draft step and of the whole generation."""
        from workbench.core.frames import phases_frame

        return phases_frame(self.rounds, draft_steps=self.draft_steps or (), setup=self.setup)

    @property
    def telemetry(self) -> Telemetry:
        """Counters of these rounds."""
        return Telemetry.of(self.records)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Counts, acceptance (pooled over the rounds) and speed."""
        spent, drawn = self.setup.rounds, len(self.tokens) - self.fed
        return {
            "tokens": len(self.tokens),
            "finish": self.finish,
            "exact": self.exact,
            **acceptance(self.records).row(),
            "repeated_8grams": repeated_ngrams(self.tokens, n=8),
            "seconds": spent,
            "tokens_per_second": drawn / spent if spent > 0 and drawn > 0 else None,
        }

    def strip(self) -> Any:
        """The text as a strip of tokens coloured by accepted, rejected and bonus."""
        from workbench.display import strip_from_rounds

        def piece(i: int) -> str:
            return self.tokenizer.pieces([i])[0] if self.tokenizer else str(i)

        return strip_from_rounds([*self.prompt, *self.tokens], len(self.prompt), self.records, piece)

    def __repr__(self) -> str:
        mode = "exact" if self.exact else "fast"
        return f"Generation({len(self.tokens)} tokens in {len(self.records)} rounds, {self.finish}, {mode})"

    def _repr_html_(self) -> str:
        from workbench.display import card

        s = self.summary
        rows: Sequence[tuple[str, Any]] = [
            ("tokens", f"{s['tokens']} ({self.finish})"),
            ("rounds", len(self.records)),
            ("accepted / drafted", f"{s['accepted']} / {s['drafted']}"),
            ("speed", f"{s['tokens_per_second']:.1f} tokens/s" if s["tokens_per_second"] else "–"),
            ("numerics", "exact" if self.exact else "fast"),
        ]
        return card("Generation", rows)._repr_html_() + self.strip()._repr_html_()
