"""Datasets made from the target: which anchors, what a record keeps, and shards that survive a kill."""

from workbench.datasets.answers import answers_summary, generate_corpus, load_answers
from workbench.datasets.arrays import to_arrays
from workbench.datasets.extract import extract, load_anchors
from workbench.datasets.norm import post_norm
from workbench.datasets.options import ExtractOptions

__all__ = [
    "ExtractOptions",
    "answers_summary",
    "extract",
    "generate_corpus",
    "load_anchors",
    "load_answers",
    "post_norm",
    "to_arrays",
]
