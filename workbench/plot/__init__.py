"""Figures drawn from frames: every function takes a frame and ``ax=None`` and returns the axes it drew on."""

from workbench.plot.acceptance import acceptance_by_position, accepted_histogram, depth
from workbench.plot.calibration import acceptance_by_class, reliability
from workbench.plot.heatmaps import heatmap
from workbench.plot.hygiene import contamination, duplicates
from workbench.plot.kept import topk_cost
from workbench.plot.likelihood import nll, nll_by_position
from workbench.plot.measures import differences, rate_by
from workbench.plot.ops import op_errors, op_speeds
from workbench.plot.phases import phase_anatomy
from workbench.plot.roofline import roofline
from workbench.plot.sampling import by_setting, laws
from workbench.plot.stacks import stacked
from workbench.plot.sweeps import pareto, predicted_vs_measured, speedup_by_k, survival
from workbench.plot.trees import tree_gain, tree_shapes

__all__ = [
    "acceptance_by_class",
    "acceptance_by_position",
    "accepted_histogram",
    "by_setting",
    "contamination",
    "depth",
    "differences",
    "duplicates",
    "heatmap",
    "laws",
    "nll",
    "nll_by_position",
    "op_errors",
    "op_speeds",
    "pareto",
    "phase_anatomy",
    "predicted_vs_measured",
    "rate_by",
    "reliability",
    "roofline",
    "speedup_by_k",
    "stacked",
    "survival",
    "topk_cost",
    "tree_gain",
    "tree_shapes",
]
