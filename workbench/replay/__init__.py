"""Replay: the draft table of a corpus, its walks and estimators, scores, costs, predicted
speeds, and comparison with live rounds."""

from workbench.core.callable import make_callable
from workbench.replay.compare import compare_rounds, live_rounds
from workbench.replay.cost import CostModel
from workbench.replay.options import ReplayOptions
from workbench.replay.own import own_tapes
from workbench.replay.predict import Prediction, predict
from workbench.replay.published import published_costs
from workbench.replay.ratio import expected_rounds
from workbench.replay.score import score
from workbench.replay.table import DraftTable, load_table, replay
from workbench.replay.walk import slot_rates, walk

__all__ = [
    "CostModel",
    "DraftTable",
    "Prediction",
    "ReplayOptions",
    "compare_rounds",
    "expected_rounds",
    "live_rounds",
    "load_table",
    "own_tapes",
    "predict",
    "published_costs",
    "replay",
    "score",
    "slot_rates",
    "walk",
]

make_callable(__name__, replay)
