"""Datasets made from the target: which tapes and anchors, what a record keeps, and shards that survive a kill."""

from workbench.datasets.arrays import to_arrays
from workbench.datasets.clean import CleanOptions, clean
from workbench.datasets.extract import extract, load_anchors
from workbench.datasets.norm import post_norm
from workbench.datasets.options import ExtractOptions
from workbench.datasets.quarantine import quarantine

__all__ = [
    "CleanOptions",
    "ExtractOptions",
    "clean",
    "extract",
    "load_anchors",
    "post_norm",
    "quarantine",
    "to_arrays",
]
