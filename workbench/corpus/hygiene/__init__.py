"""Hygiene of a corpus: what repeats another document, what the evaluation would see again, and what became of all."""

from workbench.corpus.hygiene.exact import dedup
from workbench.corpus.hygiene.near import near_dedup
from workbench.corpus.hygiene.outcome import Cleaned
from workbench.corpus.hygiene.overlap import Contamination, contamination, drop_overlap

__all__ = ["Cleaned", "Contamination", "contamination", "dedup", "drop_overlap", "near_dedup"]
