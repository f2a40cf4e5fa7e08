"""Figures drawn from frames: every function takes a frame and ``ax=None`` and returns the axes it drew on."""

from workbench.plot.acceptance import acceptance_by_position, accepted_histogram, depth
from workbench.plot.likelihood import nll, nll_by_position
from workbench.plot.measures import differences, grid, rate_by
from workbench.plot.phases import phase_anatomy
from workbench.plot.sampling import by_setting, laws
from workbench.plot.stacks import stacked

__all__ = [
    "acceptance_by_position",
    "accepted_histogram",
    "by_setting",
    "depth",
    "differences",
    "grid",
    "laws",
    "nll",
    "nll_by_position",
    "phase_anatomy",
    "rate_by",
    "stacked",
]
