"""Replay: the draft table of a corpus, its walks and estimators, scores, and comparison with live rounds."""

from workbench.core.callable import make_callable
from workbench.replay.compare import compare_rounds, live_rounds
from workbench.replay.options import ReplayOptions
from workbench.replay.oracle import oracle_schedules
from workbench.replay.own import own_tapes
from workbench.replay.ratio import expected_rounds
from workbench.replay.score import score
from workbench.replay.table import DraftTable, load_table, replay
from workbench.replay.walk import slot_rates, walk

__all__ = [
    "DraftTable",
    "ReplayOptions",
    "compare_rounds",
    "expected_rounds",
    "live_rounds",
    "load_table",
    "oracle_schedules",
    "own_tapes",
    "replay",
    "score",
    "slot_rates",
    "walk",
]

make_callable(__name__, replay)
