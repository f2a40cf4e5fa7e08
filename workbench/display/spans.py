"""Spans: what each place of a generated text is (prompt, accepted draft, bonus, ...), from round records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.records import RoundRecord

KINDS = {
    "prompt": "prompt",
    "plain": "target's token, nothing drafted",
    "accepted": "accepted draft",
    "bonus": "bonus (target's own token)",
    "forced": "set by the forced text",
    "rejected": "rejected draft",
    "dropped": "accepted, not kept (stop or forced text)",
}
STRUCK = ("rejected", "dropped")  # drafts that did not enter the text


@dataclass(frozen=True, slots=True)
class Span:
    """One token of a strip.

    Args:
        kind: One of ``KINDS``.
        position: Absolute position in the text; for a struck draft, the position it was drafted for.
        round: Number of the round, None outside rounds.
        slot: Draft slot from 1, None for tokens that were not drafted.
        token: Id of a struck draft, which the text does not hold; None for tokens of the text.
        confidence: The drafter's top-1 probability, None for tokens that were not drafted.
    """

    kind: str
    position: int
    round: int | None = None
    slot: int | None = None
    token: int | None = None
    confidence: float | None = None


def kinds_from_rounds(prompt_len: int, records: Sequence[RoundRecord]) -> list[Span]:
    """Lay the rounds of one generation out as spans, in reading order.

    Struck drafts follow the accepted prefix of their round, before the token that took their place. Positions between
    prompt and rounds (the first pending token) are "plain", as are rounds that drafted nothing.

    Args:
        prompt_len: Tokens of prompt.
        records: The rounds, in order.

    Returns:
        Spans that cover positions 0 to the last emitted one, each once, with struck drafts between.
    """
    out = [Span("prompt", position) for position in range(prompt_len)]
    at = prompt_len
    for record in records:
        first = record.start + 1
        out += [Span("plain", position) for position in range(at, first)]
        # A forced round's last token is the tape's, even where a draft was accepted there.
        kept = min(record.accepted, record.emitted - (record.round_stop == "forced"))
        for slot in range(kept):
            out.append(_draft(record, slot, "accepted"))
        for slot in range(kept, record.drafted):
            kind = "dropped" if slot < record.accepted else "rejected"
            out.append(_draft(record, slot, kind, record.draft_ids[slot]))
        own = "forced" if record.round_stop == "forced" else "bonus" if record.drafted else "plain"
        out += [Span(own, first + n, record.index) for n in range(kept, record.emitted)]
        at = first + record.emitted
    return out


def _draft(record: RoundRecord, slot: int, kind: str, token: int | None = None) -> Span:
    """The span of a drafted token; ``slot`` counts from 0."""
    return Span(kind, record.start + 1 + slot, record.index, slot + 1, token, record.draft_top1[slot])
