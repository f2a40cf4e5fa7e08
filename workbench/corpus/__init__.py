"""Corpora: documents from files, samples and datasets as tapes of token ids."""

from workbench.core.callable import make_callable
from workbench.corpus.asked import prompts
from workbench.corpus.build import corpus
from workbench.corpus.counts import token_counts
from workbench.corpus.fingerprint import corpus_fingerprint
from workbench.corpus.save import save_tapes
from workbench.corpus.splits import label_splits, of_split

__all__ = [
    "corpus",
    "corpus_fingerprint",
    "label_splits",
    "of_split",
    "prompts",
    "save_tapes",
    "token_counts",
]

make_callable(__name__, corpus)
