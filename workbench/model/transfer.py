"""Values on their way between host and device, without either waiting for the other.

Columns go to the host by pinned copies on a stream of their own, waited for by whoever reads them. The pinned buffers
come from torch's cache of pinned memory, which hands one out again once its copy is done and its reader has let go of
it; how many are in flight is bounded by the queue that landings wait in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


class Landing:
    """Columns of which some may still be on their way.

    Args:
        columns: Host tensors by name.
        arrived: Event after which they hold their values; None when they do.
    """

    def __init__(self, columns: Mapping[str, Tensor], arrived: torch.cuda.Event | None) -> None:
        self._columns, self._arrived = dict(columns), arrived

    def arrays(self) -> dict[str, np.ndarray]:
        """The columns as arrays of their own; waits for them."""
        if self._arrived is None:
            return {name: x.numpy() for name, x in self._columns.items()}
        self._arrived.synchronize()
        return {name: x.numpy().copy() for name, x in self._columns.items()}


class HostCopies:
    """Sends columns to the host without stopping the device or the caller.

    Args:
        device: Where the columns are made; on a CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, columns: Mapping[str, Tensor]) -> Landing:
        """Begin to copy columns.

        Args:
            columns: Tensors by name, of types that NumPy has; those on the host already stay as they are.

        Returns:
            Where they arrive.
        """
        if self.stream is None:
            return Landing(columns, None)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        landed: dict[str, Tensor] = {}
        with torch.cuda.stream(self.stream):
            for name, x in columns.items():
                if x.device.type == "cpu":
                    landed[name] = x
                    continue
                landed[name] = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
                landed[name].copy_(x, non_blocking=True)
                x.record_stream(self.stream)  # its memory is not given out before the copy is done
            arrived = torch.cuda.Event()
            arrived.record(self.stream)
        return Landing(landed, arrived)


def upload(x: np.ndarray | Sequence[int], device: torch.device) -> Tensor:
    """An array, or integers, on a device; from pinned memory to a GPU, so that the caller does not wait."""
    host = torch.from_numpy(x if isinstance(x, np.ndarray) else np.array(x, np.int64))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
