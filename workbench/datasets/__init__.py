"""Datasets made from the target: which tapes and anchors, what a record keeps, and shards that survive a kill."""

from workbench.datasets.answers import answers_summary, generate_corpus, load_answers
from workbench.datasets.arrays import to_arrays
from workbench.datasets.clean import CleanOptions, clean
from workbench.datasets.extract import extract, load_anchors
from workbench.datasets.k_cost import topk_cost
from workbench.datasets.law_rows import topk_rows
from workbench.datasets.laws import bucket_divergence
from workbench.datasets.layouts import record_bytes
from workbench.datasets.left_out import load_quarantine
from workbench.datasets.norm import post_norm, rebuilt_logits
from workbench.datasets.options import ExtractOptions
from workbench.datasets.quarantine import quarantine
from workbench.datasets.sequence_options import SequenceOptions
from workbench.datasets.sequence_rows import SequenceRow, read_sequence, sequences
from workbench.datasets.sequence_store import extract_sequences, load_sequences

__all__ = [
    "CleanOptions",
    "ExtractOptions",
    "SequenceOptions",
    "SequenceRow",
    "answers_summary",
    "bucket_divergence",
    "clean",
    "extract",
    "extract_sequences",
    "generate_corpus",
    "load_anchors",
    "load_answers",
    "load_quarantine",
    "load_sequences",
    "post_norm",
    "quarantine",
    "read_sequence",
    "rebuilt_logits",
    "record_bytes",
    "sequences",
    "to_arrays",
    "topk_cost",
    "topk_rows",
]
