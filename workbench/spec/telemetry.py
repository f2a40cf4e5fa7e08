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
        self.clear()

    def clear(self) -> None:
        """Forget what was timed."""
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

    def reading(self) -> tuple[int, dict[str, float]]:
        """Steps and seconds by part so far."""
        return self.steps, dict(self.seconds)

    def times(self, since: tuple[int, dict[str, float]] | None = None) -> DraftStepTimes | None:
        """Mean seconds per draft step, or None when no step ran.

        Args:
            since: Leave out what an earlier ``reading`` held.
        """
        steps, seconds = since or (0, dict.fromkeys(self.seconds, 0.0))
        if self.steps == steps:
            return None
        mean = {part: (now - seconds[part]) / (self.steps - steps) for part, now in self.seconds.items()}
        return DraftStepTimes(**mean, steps=self.steps - steps, synchronised=self.synchronised)
