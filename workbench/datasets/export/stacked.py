"""safetensors files of samples stacked along a first axis, written one sample at a time and padded with zeros.

A whole shard never lies in memory: the file is made at its full size, and samples are written into their places.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

KINDS = {
    torch.int64: ("I64", "<i8"),
    torch.float32: ("F32", "<f4"),
    torch.int32: ("I32", "<i4"),
    torch.bfloat16: ("BF16", "<u2"),
    torch.bool: ("BOOL", "?"),
}  # by falling width, in which order the tensors lie, so that each is aligned


class StackedFile:
    """A safetensors file in the making; use it as a context manager.

    Args:
        path: The file.
        samples: Samples in it.
        fields: Per name the type and the shape of one sample.
    """

    def __init__(self, path: Path, samples: int, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path, self.samples, self.fields = path, samples, dict(fields)
        self._planes: dict[str, np.memmap] = {}

    def __enter__(self) -> Self:
        order = sorted(self.fields, key=lambda name: list(KINDS).index(self.fields[name][0]))
        header: dict[str, Any] = {}
        at = 0
        for name in order:
            kind, shape = self.fields[name]
            whole = [self.samples, *shape]
            size = int(np.prod(whole)) * kind.itemsize
            header[name] = {"dtype": KINDS[kind][0], "shape": whole, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path, "wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + at)
        for name, entry in header.items():
            offset, shape = 8 + len(text) + entry["data_offsets"][0], tuple(entry["shape"])
            self._planes[name] = np.memmap(self.path, KINDS[self.fields[name][0]][1], "r+", offset, shape)
        return self

    def put(self, sample: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a sample's tensors at the beginning of their first axis; what is behind them stays zero.

        Args:
            sample: Its place in the file.
            tensors: One per field, of the field's type and trailing shape.
        """
        assert set(tensors) == set(self.fields)
        for name, value in tensors.items():
            kind, shape = self.fields[name]
            assert value.dtype is kind and tuple(value.shape[1:]) == shape[1:] and len(value) <= shape[0], name
            bits = value.contiguous().view(torch.uint16) if kind is torch.bfloat16 else value
            self._planes[name][sample, : len(value)] = bits.numpy()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for plane in self._planes.values():
            plane.flush()
        self._planes.clear()
        with open(self.path, "rb") as handle:
            os.fsync(handle.fileno())
