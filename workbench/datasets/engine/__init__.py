"""Where the shards of a run are made: in this process, or by workers of a Ray cluster; the bytes are the same."""

from workbench.datasets.engine.job import Job, fill
from workbench.datasets.engine.options import ENGINES, EngineOptions

__all__ = ["ENGINES", "EngineOptions", "Job", "fill"]
