"""Corpora: documents from files, samples and datasets as tapes of token ids, cleaned and split."""

from workbench.core.callable import make_callable
from workbench.corpus.asked import prompts
from workbench.corpus.build import corpus
from workbench.corpus.counts import token_counts
from workbench.corpus.fingerprint import corpus_fingerprint
from workbench.corpus.hygiene import Cleaned, Contamination, contamination, dedup, drop_overlap, near_dedup
from workbench.corpus.save import save_tapes
from workbench.corpus.splits import label_splits, of_split, split

__all__ = [
    "Cleaned",
    "Contamination",
    "contamination",
    "corpus",
    "corpus_fingerprint",
    "dedup",
    "drop_overlap",
    "label_splits",
    "near_dedup",
    "of_split",
    "prompts",
    "save_tapes",
    "split",
    "token_counts",
]

make_callable(__name__, corpus)
