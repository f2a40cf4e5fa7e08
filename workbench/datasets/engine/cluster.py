"""The Ray cluster of a run: the one at an address, the one of this process, or one of its own on this machine."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.core.errors import CapabilityError, UserError
from workbench.datasets.engine.options import EngineOptions

SPARE_CPUS = 2  # logical ones that workers leave to Ray's own tasks: without any, a run waits for ever
PATIENCE = 10.0  # seconds in which an address answers; Ray itself would try for minutes
LEAST_STORE = 256 << 20  # bytes of a local cluster's object store


@contextmanager
def cluster(engine: EngineOptions, *, gpus: float, threads: int, shards: int, nbytes: int) -> Iterator[int]:
    """A cluster for the length of a block; one that was started or joined for it is left at its end.

    Args:
        engine: Which cluster, and how many workers.
        gpus: GPUs per worker.
        threads: Threads per worker.
        shards: Shards to make; no more workers are started than there are.
        nbytes: Bytes of what all workers are sent.

    Yields:
        The number of workers.

    Raises:
        CapabilityError: Ray's data library is not installed.
        UserError: The cluster does not answer, or has no room for the workers.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise CapabilityError(
            f"engine='ray' needs Ray's data library, which cannot be imported here ({error}): pip install "
            "'specdec-workbench[ray]'"
        ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody of itself
    if ray.is_initialized():
        if engine.ray_address is not None:
            raise UserError(
                f"ray_address={engine.ray_address!r} is not valid here: this process has joined a Ray cluster already; "
                "leave it out to use that one, or call ray.shutdown() first"
            )
        yield _room(engine, gpus, shards)
    elif engine.ray_address is not None:
        with _joined(engine.ray_address):
            yield _room(engine, gpus, shards)
    else:
        wanted = min(engine.workers or _fits_here(gpus, threads), shards)
        with _own(wanted + SPARE_CPUS, max(LEAST_STORE, 2 * nbytes)):
            yield _room(engine, gpus, wanted)


@contextmanager
def _own(cpus: int, store_bytes: int) -> Iterator[None]:
    """A cluster on this machine, whose files go away with it, but for the token that Ray keeps in the home."""
    import ray

    with tempfile.TemporaryDirectory(prefix="wb-ray-", ignore_cleanup_errors=True) as folder:
        try:
            try:
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    object_store_memory=store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=folder,
                )
            except (OSError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"Ray could not start on this machine ({_said(error)}): make room in memory and in the temporary "
                    "directory, whose path must be short, or use engine='local'"
                ) from error
            yield
        finally:
            ray.shutdown()


@contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has no common class for what may be wrong with an address
        raise UserError(
            f"ray_address={address!r} could not be joined ({_said(error)}): start a cluster with `ray "
            "start --head`, with the same Python and Ray as here, or leave it out for one on this machine; one that "
            "asks for a token needs RAY_AUTH_MODE=token here"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _said(error: Exception) -> str:
    """An error of Ray's in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _fits_here(gpus: float, threads: int) -> int:
    """Workers that this machine has room for."""
    if gpus:
        return max(1, int(torch.cuda.device_count() / gpus))
    return max(1, len(os.sched_getaffinity(0)) // threads)


def _room(engine: EngineOptions, gpus: float, shards: int) -> int:
    """Workers to start in the cluster that was joined; a sentence when it has no room for them."""
    import ray

    has = ray.cluster_resources()
    cpus, cards = int(has.get("CPU", 0)), has.get("GPU", 0.0)
    fits = min([cpus - 1, *([int(cards / gpus)] if gpus else [])])
    workers = min(engine.workers or max(fits, 1), shards)
    if workers > cpus - 1:
        raise UserError(
            f"workers={workers} is too many for this Ray cluster of {cpus} CPUs: each worker takes one and one is left "
            f"to Ray's own tasks; give workers={max(cpus - 1, 1)}, or start Ray with --num-cpus={workers + 1}"
        )
    if workers * gpus > cards:
        raise UserError(
            f"{workers} workers of {gpus:g} GPUs are too many for this Ray cluster of {cards:g} GPUs: give fewer "
            "workers, a smaller num_gpus, or start Ray where the GPUs are"
        )
    return workers
