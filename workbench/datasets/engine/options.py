"""Options that say where a run is done; none of them changes what is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from workbench.core.errors import CapabilityError, UserError, check_choice, check_int, check_real

_ADDRESS = re.compile(r"auto|[^\s/]+:\d+")
ENGINES = ("local", "ray")
OF_RAY = ("workers", "ray_address", "num_gpus")


@dataclass(frozen=True)
class EngineOptions:
    """Where the shards of a run are made.

    Args:
        engine: "local", in this process, or "ray", by workers of a Ray cluster that hold one model each; default
            "local". In exact mode the bytes do not depend on it.
        workers: Processes that hold a model, with engine ray; None, the default, for as many as the machine or the
            cluster has room for.
        ray_address: Address of a running Ray cluster, such as "auto" or "HOST:6379", whose machines share the output
            directory; None, the default, for the Ray of this process, or a cluster of its own on this machine.
        num_gpus: GPUs that each worker asks for, from 0 to 1; None, the default, for 1 when the model is on a GPU and 0
            when it is not.

    Raises:
        UserError: A value is not valid, or goes with the other engine.
        CapabilityError: Ray is not installed.
    """

    engine: str = "local"
    workers: int | None = None
    ray_address: str | None = None
    num_gpus: float | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        if self.engine == "local":
            for name in OF_RAY:
                if (value := getattr(self, name)) is not None:
                    raise UserError(f"{name}={value!r} goes with engine='ray': give that as well, or leave it out")
            return
        if self.workers is not None:
            check_int("workers", self.workers, low=1)
        if self.num_gpus is not None:
            check_real("num_gpus", self.num_gpus, low=0, high=1)
        if self.ray_address is not None and not _ADDRESS.fullmatch(str(self.ray_address)):
            raise UserError(
                f"ray_address={self.ray_address!r} is not valid: give auto or HOST:PORT, or leave it out for a cluster "
                "on this machine"
            )
        try:
            version("ray")
        except PackageNotFoundError:
            raise CapabilityError(
                "engine='ray' needs Ray, which is not installed here: pip install 'specdec-workbench[ray]', or use "
                "engine='local'"
            ) from None

    def gpus(self, device: str) -> float:
        """GPUs that each worker asks for.

        Args:
            device: Kind of device that the model is on, "cpu" or "cuda".

        Returns:
            Their number, 0 to 1.

        Raises:
            UserError: The model is on a GPU and workers are to have none.
        """
        if device != "cuda":
            return self.num_gpus or 0.0
        if self.num_gpus == 0:
            raise UserError(
                "num_gpus=0 is not valid here: the model is on a GPU, so its workers need one; give a share above 0, "
                "or load the model with device='cpu'"
            )
        return 1.0 if self.num_gpus is None else self.num_gpus
