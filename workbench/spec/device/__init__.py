"""Rounds of one sequence that run on the device without a read-back: eager, as CUDA graphs, or in streams of many."""

from workbench.spec.device.rounds import DeviceRounds

__all__ = ["DeviceRounds"]
