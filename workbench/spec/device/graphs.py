"""CUDA graphs of parts of a round, kept by everything that shapes them.

A part that cannot be captured runs eagerly from then on, which is said once, aloud, and is tried again when a later
burst begins.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from time import perf_counter

import torch


class GraphWarning(UserWarning):
    """A part of a round could not be captured and runs eagerly."""


class Graphs:
    """Captured parts.

    Args:
        device: Where they run; anything but a CUDA device runs eagerly.
        enabled: Capture at all.
        idle: Inside it, running a part changes nothing that a round reads; a part is run once there before its
            capture, so that its kernels are compiled and loaded.
    """

    def __init__(self, device: torch.device, enabled: bool, idle: Callable[[], AbstractContextManager[None]]) -> None:
        self.device, self.idle = device, idle
        self.enabled = enabled and device.type == "cuda"
        self.kept: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.failed: set[Hashable] = set()
        self.warned = False
        self.seconds = 0.0  # spent capturing
        self.replays = self.eager = 0
        self._stream = torch.cuda.Stream(device) if self.enabled else None
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    def resume(self) -> None:
        """Try failed captures again from here on, and warn again if they fail."""
        self.failed.clear()
        self.warned = False

    def run(self, key: Hashable, part: Callable[[], None]) -> None:
        """Run a part, as a graph where there is one or can be."""
        if self.enabled and key not in self.kept and key not in self.failed:
            self._capture(key, part)
        graph = self.kept.get(key)
        if graph is None:
            self.eager += 1
            part()
        else:
            self.replays += 1
            graph.replay()

    def _capture(self, key: Hashable, part: Callable[[], None]) -> None:
        began = perf_counter()
        try:
            with self.idle():
                stream = self._stream
                assert stream is not None
                stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(stream):
                    part()
                torch.cuda.current_stream(self.device).wait_stream(stream)
                torch.cuda.synchronize(self.device)
                self.kept[key] = self.record(part)
        except Exception as error:
            self.failed.add(key)
            if not self.warned:
                self.warned = True
                name = key[0] if isinstance(key, tuple) else key
                what = "a round" if name == "round" else f"the {name} of a round"
                warnings.warn(
                    f"{what} could not be captured as a CUDA graph ({error}): it runs eagerly in this "
                    "burst, slower and with the same result, and is tried again in the next",
                    GraphWarning,
                    stacklevel=3,
                )
        finally:
            self.seconds += perf_counter() - began

    def record(self, part: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a part that has run before."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # to free another graph's memory in between would end the capture
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                part()
        finally:
            if collects:
                gc.enable()
        return graph
