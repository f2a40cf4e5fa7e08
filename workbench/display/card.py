"""Cards: a title, rows of name and value, a note; the ``_repr_html_`` of models, generations, corpora and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.display.markup import STYLE


@dataclass(frozen=True, slots=True)
class Card:
    """A small table; Jupyter shows it as HTML, a terminal as lines.

    Args:
        title: What it describes.
        rows: (name, text) pairs.
        note: A sentence under the table; "" for none.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    note: str = ""

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left">'
        rows = "".join(f"<tr>{cell}{escape(name)}</td>{cell}{escape(text)}</td></tr>" for name, text in self.rows)
        note = f'<div class="wb-note">{escape(self.note)}</div>' if self.note else ""
        title = f'<div class="wb-title"><strong>{escape(self.title)}</strong></div>'
        table = f'<table class="wb-rows"><tbody>{rows}</tbody></table>' if rows else ""
        return f'{STYLE}<div class="wb wb-card">{title}{table}{note}</div>'

    def __repr__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        lines = [self.title, *(f"  {name:<{width}}  {text}" for name, text in self.rows)]
        return "\n".join(lines + ([f"  {self.note}"] if self.note else []))


def card(title: str, rows: Mapping[str, Any] | Sequence[tuple[str, Any]], note: str = "") -> Card:
    """A card of named values.

    Args:
        title: What it describes.
        rows: Names and values; numbers get thousands separators or four significant figures, None a dash.
        note: A sentence under the table; default "".

    Returns:
        The card; ``card(...)._repr_html_()`` is what an object's own ``_repr_html_`` returns.
    """
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    return Card(title, tuple((str(name), shown(value)) for name, value in pairs), note)


def shown(value: Any) -> str:
    """A value as a reader wants to see it.

    Args:
        value: Anything.

    Returns:
        Text: "–" for None, "yes" or "no", 12,345, 0.6667, "a, b" for sequences, else its ``str``.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(shown, value))
    return str(value)
