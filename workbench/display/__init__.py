"""HTML for notebooks, as pure string building: cards and the token strip; imports neither IPython nor torch."""

from workbench.display.card import Card, card
from workbench.display.spans import Span, kinds_from_rounds
from workbench.display.strip import TokenStrip, strip_from_rounds, token_strip

__all__ = ["Card", "Span", "TokenStrip", "card", "kinds_from_rounds", "strip_from_rounds", "token_strip"]
