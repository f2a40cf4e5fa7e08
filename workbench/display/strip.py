"""The token strip: a generated text coloured by where each token came from, for notebooks; pure string building."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.core.errors import UserError
from workbench.core.records import RoundRecord
from workbench.display.markup import FILLS, STYLE, attribute, visible
from workbench.display.spans import KINDS, STRUCK, Span, kinds_from_rounds


@dataclass(frozen=True, slots=True)
class TokenStrip:
    """A coloured text; Jupyter shows it as HTML.

    Args:
        html: The strip with its legend and style sheet.
        counts: Tokens per kind.
    """

    html: str
    counts: dict[str, int]

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.items())
        return f"TokenStrip({kinds or 'empty'})"


def token_strip(
    tokens_text: Sequence[str],
    kinds: Sequence[str],
    *,
    confidences: Sequence[float | None] | None = None,
    rounds: Sequence[int | None] | None = None,
) -> TokenStrip:
    """Colour tokens by kind; struck drafts are shown where they were rejected and take no position.

    Args:
        tokens_text: Text of each token, struck drafts included.
        kinds: Kind of each token: "prompt", "plain", "accepted", "bonus", "forced", "rejected" or "dropped".
        confidences: The drafter's top-1 probability of each token, None where there is none.
        rounds: Round of each token, None outside rounds.

    Returns:
        An object that notebooks show; hovering a token gives its kind, position, round and probability.

    Raises:
        UserError: Lists of different lengths, or an unknown kind.
    """
    n = len(tokens_text)
    confidences = [None] * n if confidences is None else confidences
    rounds = [None] * n if rounds is None else rounds
    if not n == len(kinds) == len(confidences) == len(rounds):
        raise UserError(
            f"token_strip was given {n} texts, {len(kinds)} kinds, {len(confidences)} confidences and {len(rounds)} "
            "rounds: give one of each per token"
        )
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise UserError(f"kind {unknown[0]!r} is not valid: choose one of {', '.join(map(repr, KINDS))}")
    parts, position, ahead = [], 0, 0
    for text, kind, confidence, number in zip(tokens_text, kinds, confidences, rounds):
        struck = kind in STRUCK
        place = f"drafted for position {position + ahead}" if struck else f"position {position}"
        facts = [repr(text), KINDS[kind], place]
        facts += [] if number is None else [f"round {number}"]
        facts += [] if confidence is None else [f"drafter's top-1 probability {confidence:.3f}"]
        tag = "del" if struck else "span"
        body = visible(text, breaks=not struck) or '<span class="w">∅</span>'
        title = attribute("\n".join(facts))
        parts.append(f'<{tag} class="t {kind}" style="{FILLS[kind]}" title="{title}">{body}</{tag}>')
        # A run of struck drafts looks ahead of the text; the text goes on at the run's first position.
        position, ahead = (position, ahead + 1) if struck else (position + 1, 0)
    tally = Counter(kinds)
    counts = {kind: tally[kind] for kind in KINDS if tally[kind]}
    return TokenStrip(_page("".join(parts), counts), counts)


def strip_from_rounds(
    tokens: Sequence[int], prompt_len: int, records: Sequence[RoundRecord], decode: Callable[[int], str]
) -> TokenStrip:
    """The strip of one generation.

    Args:
        tokens: Token ids of prompt and output.
        prompt_len: Leading tokens that are prompt.
        records: The rounds of the generation, in order.
        decode: Text of one token id.

    Returns:
        The strip; a prompt without its rounds shows as prompt and plain tokens.

    Raises:
        UserError: The rounds do not end inside the tokens.
    """
    spans = kinds_from_rounds(prompt_len, records)
    end = 1 + max((span.position for span in spans if span.kind not in STRUCK), default=-1)
    if end > len(tokens):
        raise UserError(f"the rounds emit tokens up to position {end - 1}, and {len(tokens)} tokens were given")
    spans += [Span("plain", position) for position in range(end, len(tokens))]
    return token_strip(
        [decode(int(tokens[span.position] if span.token is None else span.token)) for span in spans],
        [span.kind for span in spans],
        confidences=[span.confidence for span in spans],
        rounds=[span.round for span in spans],
    )


def _page(text: str, counts: dict[str, int]) -> str:
    """The strip's HTML with a legend of the kinds in it."""
    keys = []
    for kind, count in counts.items():
        tag = "del" if kind in STRUCK else "span"
        sample = f'<{tag} class="t {kind}" style="{FILLS[kind]}">&nbsp;{KINDS[kind]}&nbsp;</{tag}>'
        keys.append(f'<span class="wb-key" style="display:inline-block;margin:0 14px 4px 0">{sample} {count:,}</span>')
    legend = f"<div>{''.join(keys)}</div>"
    return f'{STYLE}<div class="wb">{legend}<pre class="wb-text" style="line-height:1.75">{text}</pre></div>'
