"""A model on its way to workers: its configuration and the bytes of its weights, checked by fingerprint on arrival.

Weights travel as arrays through the cluster's object store, once per machine; no module is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.core.errors import UserError
from workbench.core.manifest import library_versions, machine
from workbench.model.config import ModelConfig
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import device_of


@dataclass(frozen=True, eq=False)
class ShippedModel:
    """A model as plain data, and what its bits depend on.

    Args:
        config: Shape and constants.
        exact: Numerical class.
        device: Kind of device, "cpu" or "cuda".
        weights: By parameter: name of its type, shape, bytes as uint8.
        draft_ids: Ids of a trimmed draft head; None for the whole vocabulary.
        fingerprint: Of the model.
        threads: Of torch.
        place: Kind of machine, from ``place_of``.
        versions: Of the libraries.
    """

    config: ModelConfig
    exact: bool
    device: str
    weights: Mapping[str, tuple[str, tuple[int, ...], np.ndarray]]
    draft_ids: list[int] | None
    fingerprint: str
    threads: int
    place: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def of(cls, model: HybridModel) -> ShippedModel:
        """The model of this process."""
        weights = {name: _as_bytes(value) for name, value in model.named_parameters()}
        head = model.draft_head
        return cls(
            config=model.config,
            exact=model.exact,
            device=model.device.type,
            weights=weights,
            draft_ids=None if head is None else head.ids_D.tolist(),
            fingerprint=fingerprint(model),
            threads=torch.get_num_threads(),
            place=place_of(model.device),
            versions=library_versions(),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(data.nbytes for _, _, data in self.weights.values())

    def build(self) -> HybridModel:
        """Make the model in this process, which takes the thread count of the one that shipped it.

        Returns:
            The model, with the fingerprint of the one that was shipped.

        Raises:
            UserError: The device is not there, or this machine is of another kind or has other libraries.
        """
        torch.set_num_threads(self.threads)
        where = device_of(self.device)
        check_same(self.place, place_of(where), what="runs on another kind of machine")
        check_same(self.versions, library_versions(), what="has other libraries")
        with torch.device(where):
            model = HybridModel(self.config, exact=self.exact)
        for name, value in model.named_parameters():
            kind, shape, data = self.weights[name]
            value.data = torch.from_numpy(data.copy()).view(getattr(torch, kind)).reshape(shape).to(where)
        if self.draft_ids is not None:
            model.trim_draft_vocab(self.draft_ids)
        assert fingerprint(model) == self.fingerprint, "the weights that arrived are not those that were sent"
        return model.requires_grad_(False).eval()


def place_of(device: torch.device) -> dict[str, Any]:
    """Kind of machine and thread count that bits belong to, as manifests name them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return machine(device=device.type, device_name=name, threads=torch.get_num_threads())


def check_same(driver: Mapping[str, Any], worker: Mapping[str, Any], *, what: str) -> None:
    """Refuse a worker whose bits could be others than those of the process that asked for it.

    Args:
        driver: Facts of the asking process.
        worker: Facts of the worker.
        what: What differs, in words.

    Raises:
        UserError: A fact differs.
    """
    for name in dict.fromkeys([*driver, *worker]):
        here, there = driver.get(name), worker.get(name)
        if here != there:
            raise UserError(
                f"a worker {what} ({name} is {there!r} there and {here!r} here): a dataset is made by one kind of "
                "machine with one set of libraries, so start the run and its workers on equal ones"
            )


def _as_bytes(value: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.view(torch.uint8).numpy()
