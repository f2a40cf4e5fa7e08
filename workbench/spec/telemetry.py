"""Timing of draft steps by part, synchronised where the device is asynchronous."""

from __future__ import annotations

from time import perf_counter

import torch

from workbench.core.records import DraftStepTimes


class StepProbe:
    """Adds up the time between marks of a proposer's steps.

    Args:
        device: Where the model runs; a GPU is synchronised at every mark, which slows the run that is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"glue": 0.0, "attention": 0.0, "ffn": 0.0, "head": 0.0}
        self.steps = 0
        self._last = 0.0

    @property
    def synchronised(self) -> bool:
        """True when marks wait for the device."""
        return self.device.type != "cpu"

    def __call__(self, part: str) -> None:
        """Mark the end of a part; "start" only sets the clock."""
        if self.synchronised:
            torch.cuda.synchronize(self.device)
        now = perf_counter()
        if part != "start":
            self.seconds[part] += now - self._last
            self.steps += part == "head"
        self._last = now

    def times(self) -> DraftStepTimes | None:
        """Mean seconds per draft step, or None when no step ran."""
        if not self.steps:
            return None
        mean = {part: seconds / self.steps for part, seconds in self.seconds.items()}
        return DraftStepTimes(**mean, steps=self.steps, synchronised=self.synchronised)
