"""Benchmarks with rows to commit: each compares its arms side by side in one process, interleaved.

Quote ratios of one run, never absolute numbers of different runs. ``data/bench/README.md`` explains the columns.
"""

from workbench.bench.run import NAMES, run

__all__ = ["NAMES", "run"]
