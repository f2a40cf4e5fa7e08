"""A run over documents as a value: what makes and writes their rows, wherever that is done."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from workbench.datasets.engine.options import EngineOptions
from workbench.datasets.shards import Part, ShardDirectory
from workbench.model.hybrid import HybridModel

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

STAGE = ".parts-"  # directories inside the output in which workers write what is not yet part of it


@dataclass(frozen=True, eq=False)
class Job(ABC, Generic[T]):
    """A run over documents; it holds no model and pickles, so that any process can do any shard of it.

    Args:
        desc: Name on the progress bar.
        sizes: Tokens to run per document.
        schema: Columns of the rows.
    """

    batch_rows: ClassVar[int | None] = None  # rows of a record batch; None for those of every dataset

    desc: str
    sizes: Sequence[int]
    schema: pa.Schema

    @abstractmethod
    def items(self, model: HybridModel, documents: Sequence[int], bar: Any) -> Iterable[T]:
        """What the model makes of some documents.

        Args:
            model: The target.
            documents: Their indices.
            bar: Progress, counted in tokens.

        Returns:
            Items, in an order that depends on all documents and not on which are wanted.
        """

    @abstractmethod
    def parts(self, items: Iterator[T], documents: Sequence[int]) -> Iterable[Part]:
        """The rows that the items hold.

        Args:
            items: As ``items`` made them.
            documents: The same indices.

        Returns:
            Parts of these documents, in their order.
        """


def fill(directory: ShardDirectory, job: Job[Any], model: HybridModel, engine: EngineOptions) -> None:
    """Write every pending shard of a directory.

    Args:
        directory: The directory, entered.
        job: Makes its rows.
        model: The target, in the numerical class of the run.
        engine: Where to do it.

    Raises:
        UserError: A shard could not be made or written; finished ones stay.
    """
    directory.batch_rows = job.batch_rows
    with _swept(directory.out):
        if engine.engine == "ray":
            from workbench.datasets.engine.driver import fill_on_ray

            fill_on_ray(directory, job, model, engine)
            return
        directory.stream(
            lambda documents, bar: job.items(model, documents, bar), job.parts, sizes=job.sizes, desc=job.desc
        )


@contextmanager
def _swept(out: Path) -> Iterator[None]:
    """Without what workers left half done, before and after; the caller holds the directory's lock."""
    _sweep(out)
    try:
        yield
    finally:
        _sweep(out)


def _sweep(out: Path) -> None:
    for stage in out.glob(f"{STAGE}*"):
        shutil.rmtree(stage, ignore_errors=True)  # a worker that is being stopped may still write here
        if stage.exists():
            shutil.rmtree(stage)
