"""Sweeps: policies by the grid over recorded draft tables, kept in a store, compared and recommended from."""

from workbench.core.callable import make_callable
from workbench.sweep.compare import compare_tables
from workbench.sweep.grid import grid
from workbench.sweep.recommend import Recommendation, recommend
from workbench.sweep.runner import load_sweep, sweep
from workbench.sweep.summary import summary

__all__ = ["Recommendation", "compare_tables", "grid", "load_sweep", "recommend", "summary", "sweep"]

make_callable(__name__, sweep)
