"""The process that asks: it sends shards to workers and takes what they made into the dataset, one at a time.

It alone holds the directory's lock, renames files into it and writes the manifest, after reading a shard back and
finding its hash. So a shard is whole or absent whatever happens to workers, and made again by the next run at most.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any
from uuid import uuid4

import torch

from workbench.core.errors import UserError
from workbench.core.manifest import sha256_file
from workbench.core.progress import progress
from workbench.datasets.engine.cluster import cluster
from workbench.datasets.engine.errors import unpacked
from workbench.datasets.engine.job import STAGE, Job
from workbench.datasets.engine.options import EngineOptions
from workbench.datasets.engine.ship import ShippedModel
from workbench.datasets.engine.worker import ShardWriter
from workbench.datasets.shardfile import refusing, temporary_name
from workbench.datasets.shards import ShardDirectory
from workbench.model.hybrid import HybridModel

log = logging.getLogger("workbench.datasets.engine")

PER_TOKEN = 16  # bytes of a tape in the object store, at most


def fill_on_ray(directory: ShardDirectory, job: Job[Any], model: HybridModel, engine: EngineOptions) -> None:
    """Write every pending shard of a directory by workers of a Ray cluster.

    Args:
        directory: The directory, entered.
        job: Makes its rows.
        model: The target, in the numerical class of the run.
        engine: Which cluster, and how many workers.

    Raises:
        UserError: A shard could not be made or written, or workers keep dying; finished shards stay.
        CapabilityError: Ray is not installed.
    """
    gpus = engine.gpus(model.device.type)
    while pending := directory.pending or directory.recheck():
        _fill(directory, pending, job, model, engine, gpus)


def _fill(
    directory: ShardDirectory,
    pending: Sequence[int],
    job: Job[Any],
    model: HybridModel,
    engine: EngineOptions,
    gpus: float,
) -> None:
    """Write some shards, in one cluster."""
    tokens = {index: sum(job.sizes[slice(*directory.plan[index])]) for index in pending}
    shipped = ShippedModel.of(model)
    nbytes = shipped.nbytes + PER_TOKEN * sum(job.sizes)
    asked = time()
    with (
        progress(sum(tokens.values()), desc=job.desc, unit="tok") as bar,
        cluster(engine, gpus=gpus, threads=torch.get_num_threads(), shards=len(pending), nbytes=nbytes) as workers,
    ):
        bar.set_postfix_str(f"starting {workers} workers")
        stage = directory.out.resolve() / f"{STAGE}{uuid4().hex}"
        stage.mkdir()
        began = []
        for said in _said(pending, workers, gpus, shipped, job, directory.plan, stage):
            if "error" in said:
                raise unpacked(said["error"])
            began.append(said["began"])
            if admit(directory, stage / said["file"], said["entry"]):
                bar.set_postfix_str(directory.note)
                bar.update(tokens[said["shard"]])
        if directory.pending:
            raise UserError(f"{len(directory.pending)} shards did not come back from the workers: run again to go on")
        first, now = min(began), time()
        log.info(
            "%d workers began after %.3f s; %d shards took %.3f s", workers, first - asked, len(pending), now - first
        )


def admit(directory: ShardDirectory, made: Path, entry: dict[str, Any]) -> bool:
    """Take a shard that a worker made into the dataset: read back, renamed, listed.

    Args:
        directory: The dataset's directory, entered.
        made: The file that the worker wrote, on the same file system.
        entry: What the manifest is to say of it.

    Returns:
        False when the shard is there already, because it was made twice; it is left as it is then.

    Raises:
        UserError: The file is not what the worker wrote, or cannot be moved.
    """
    final = directory.out / entry["file"]
    if any(shard["file"] == entry["file"] for shard in directory.manifest.shards):
        return False
    with refusing(final):
        if sha256_file(made) != entry["sha256"]:
            raise UserError(
                f"{final.name} does not read back as a worker wrote it: check the file system that the machines share; "
                "finished shards are kept, run again to go on"
            )
        os.replace(made, temporary_name(final))
        made.parent.rmdir()
        directory.place(entry)
    return True


def _said(
    pending: Sequence[int],
    workers: int,
    gpus: float,
    shipped: ShippedModel,
    job: Job[Any],
    plan: Sequence[tuple[int, int]],
    stage: Path,
) -> Iterator[dict[str, Any]]:
    """What workers say of every shard, as they finish."""
    import ray

    with _still():
        rows = ray.data.from_items([{"shard": index} for index in pending], override_num_blocks=len(pending))
        made = rows.map_batches(
            ShardWriter,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            fn_constructor_args=(ray.put(shipped), ray.put(job), list(plan), str(stage), workers),
            num_cpus=1,
            num_gpus=gpus or None,
        )
        try:
            for batch in made.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"):
                for text in batch["said"]:
                    yield json.loads(str(text))
        except ray.exceptions.RayActorError as error:
            raise UserError(
                f"a worker could not start, or is lost ({_last_line(error)}): the machines of a cluster need the same "
                "workbench installed; finished shards are kept, run again to go on"
            ) from error


def _last_line(error: Exception) -> str:
    """What a remote traceback ends with."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()[:200]


@contextmanager
def _still() -> Iterator[None]:
    """Without Ray Data's own bars and notes; there is one bar, and it is ours."""
    import ray

    context = ray.data.DataContext.get_current()
    before = {name: getattr(context, name) for name in ("enable_progress_bars", "print_on_execution_start")}
    logger = logging.getLogger("ray.data")
    level = logger.level
    for name in before:
        setattr(context, name, False)
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
        logger.setLevel(level)
