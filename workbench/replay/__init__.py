"""Replay: the draft table of a corpus, its walks and estimators, scores, and comparison with live rounds."""

from workbench.core.callable import make_callable
from workbench.replay.compare import compare_rounds, live_rounds
from workbench.replay.counts import WalkCounts, counts_of
from workbench.replay.fast import walk_counts
from workbench.replay.options import ReplayOptions
from workbench.replay.oracle import oracle_schedules
from workbench.replay.own import own_tapes
from workbench.replay.ratio import expected_rounds
from workbench.replay.score import score
from workbench.replay.synthetic import Profile, synthetic_table
from workbench.replay.table import DraftTable, load_table, replay
from workbench.replay.walk import slot_rates, walk

__all__ = [
    "DraftTable",
    "Profile",
    "ReplayOptions",
    "WalkCounts",
    "compare_rounds",
    "counts_of",
    "expected_rounds",
    "live_rounds",
    "load_table",
    "oracle_schedules",
    "own_tapes",
    "replay",
    "score",
    "slot_rates",
    "synthetic_table",
    "walk",
    "walk_counts",
]

make_callable(__name__, replay)
