"""A worker: one model, one shard at a time, by the code that writes shards in a run of one process.

It writes into a directory of its own and never into the dataset: what it made becomes part of the dataset when the
process that holds the directory's lock says so. So a worker may be stopped, or repeat a shard, at any time. Directories
of workers that died stay until the run ends, and tell the next ones when to give up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from workbench.core.errors import UserError
from workbench.core.manifest import Manifest
from workbench.core.progress import quiet
from workbench.datasets.engine.errors import packed
from workbench.datasets.shards import ShardDirectory

if TYPE_CHECKING:
    from workbench.datasets.engine.job import Job
    from workbench.datasets.engine.ship import ShippedModel


TRIES = 10  # workers that may die over one shard, or while they start, before the run gives up


class Unlisted(Manifest):
    """A manifest that stays in memory: the dataset's own is kept by whoever holds its directory."""

    def list_shard(self, directory: Path, shard: Mapping[str, Any]) -> None:
        """List a shard here alone."""
        self.shards.append(dict(shard))


class OneShard(ShardDirectory):
    """One shard of somebody else's dataset, written under its name into a directory of its own.

    Args:
        out: That directory.
        index: Which shard of the plan.
        plan: Document range [first, last) of every shard.
        schema: Columns.
    """

    def __init__(self, out: Path, index: int, *, plan: Sequence[tuple[int, int]], schema: Any) -> None:
        super().__init__(out, Unlisted(kind="", parameters={}), plan=plan, schema=schema)
        self.index = index

    @property
    def pending(self) -> list[int]:
        """The shard, until it is written."""
        return [] if self.manifest.shards else [self.index]


class ShardWriter:
    """What a worker does; Ray makes one per process.

    Args:
        shipped: The model.
        job: The run.
        plan: Document range [first, last) of every shard.
        stage: Directory, shared with the asking process, in which to make directories.
        workers: How many of them there are.
    """

    def __init__(self, shipped: Any, job: Any, plan: Sequence[tuple[int, int]], stage: str, workers: int) -> None:
        quiet()
        self.plan, self.stage = plan, Path(stage)
        self.refused: UserError | None = None
        try:
            if not self.stage.is_dir():
                raise UserError(
                    f"{self.stage.parent} is not the same directory on a worker's machine: give an out that all "
                    "machines of the cluster share"
                )
            mine = self.claim("start", TRIES + workers - 1, what="started")
            given: ShippedModel = _got(shipped)
            self.job: Job[Any] = _got(job)
            self.model = given.build()
            mine.rmdir()
        except UserError as error:
            self.refused = error

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write one shard.

        Args:
            batch: One row, ``shard``: which of the plan.

        Returns:
            One row, ``said``, as JSON: where the shard is and what a manifest says of it, or the sentence that tells
            why there is none; which shard it is, and when the work on it began.
        """
        began, index = time(), int(batch["shard"][0])
        try:
            if self.refused is not None:
                raise self.refused
            said = self.write(index)
        except UserError as error:
            said = {"error": packed(error)}
        return {"said": np.array([json.dumps(said | {"shard": index, "began": began})])}

    def claim(self, name: str, tries: int, *, what: str) -> Path:
        """Make a directory for a piece of work, unless too many have been left behind by workers that died at it.

        Args:
            name: Of the work.
            tries: How many that may be.
            what: The work, in words.

        Returns:
            The directory.

        Raises:
            UserError: There are as many, or none can be made.
        """
        if len(list(self.stage.glob(f"{name}-*"))) >= tries:
            raise UserError(
                f"{TRIES} workers died while they {what}, which happens when memory runs out: finished shards are "
                "kept; give fewer workers, a smaller chunk or batch, and run again to go on"
            )
        out = self.stage / f"{name}-{uuid4().hex}"
        try:
            out.mkdir()
        except OSError as error:
            raise UserError(
                f"{out} could not be made ({error}): finished shards are kept; make room there and run again to go on"
            ) from error
        return out

    def write(self, index: int) -> dict[str, Any]:
        """Write a shard into a directory of its own, and describe it."""
        out = self.claim(f"{index}", TRIES, what=f"made shard {index}")
        shard = OneShard(out, index, plan=self.plan, schema=self.job.schema)
        shard.batch_rows = self.job.batch_rows
        shard.stream(
            lambda documents, bar: self.job.items(self.model, documents, bar),
            self.job.parts,
            sizes=self.job.sizes,
            desc=self.job.desc,
        )
        (entry,) = shard.manifest.shards
        return {"file": f"{out.name}/{entry['file']}", "entry": entry}


def _got(reference: Any) -> Any:
    """What a reference into the object store stands for."""
    import ray

    return ray.get(reference)
