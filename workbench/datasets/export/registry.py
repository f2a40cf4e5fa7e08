"""Exporters by name: what every one of them takes, gives back and checks.

A module of this package that holds an exporter registers it under its name with ``register``; ``__init__`` imports
every module here, so nothing else has to be told of a new one. This module knows no format.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from workbench.core.errors import UserError, check_choice

if TYPE_CHECKING:
    from workbench.datasets.export.parts import ModelParts
    from workbench.model.hybrid import HybridModel

HIDDEN_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class ExportOptions:
    """What every export takes.

    Args:
        layers: Tapped layers to export, ascending, each named by the layer whose output rows it is, counted from 0;
            default None, for all that the data hold.
        hidden_dtype: Type of exported rows, "bfloat16" or "float32"; default "bfloat16".

    Raises:
        UserError: A value is not valid.
    """

    layers: Sequence[int] | None = None
    hidden_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_choice("hidden_dtype", self.hidden_dtype, HIDDEN_DTYPES)
        if self.layers is None:
            return
        listed = self.layers
        good = isinstance(listed, Sequence) and not isinstance(listed, str)
        good = good and all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in listed)
        if not good or any(a >= b for a, b in pairwise(listed)):
            raise UserError(
                f"layers={listed!r} is not valid: give layers counted from 0, ascending and none of them twice"
            )
        object.__setattr__(self, "layers", tuple(int(i) for i in listed))


@dataclass(frozen=True)
class ExportReport:
    """What one export wrote.

    Args:
        format: Name of the exporter.
        out: The directory.
        documents: Documents written.
        tokens: Their tokens.
        bytes: Bytes of the directory.
        layers: Exported layers, as the layer whose output rows they are, counted from 0.
        layer_ids: The same layers in the numbering of the format.
        norm: "pre" or "post": whether the last hidden rows lie before or after the final norm; "" where there are none.
        left_out: Document ids that the format cannot hold, and why.
        notes: What the user must know to train from it, a sentence each.
        parts_bytes: Bytes of the model's parts among ``bytes``, which do not grow with the documents.
        rounding: Types of the last rows on their way, how often they were rounded, and how far the logits that a sample
            of them gives lie from the model's, as ``fidelity.Rounding`` has it; empty where there are no such rows.
    """

    format: str
    out: str
    documents: int
    tokens: int
    bytes: int
    layers: Sequence[int] = ()
    layer_ids: Sequence[int] = ()
    norm: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    parts_bytes: int = 0
    rounding: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the directory without the model's parts, over tokens written."""
        return (self.bytes - self.parts_bytes) / self.tokens if self.tokens else float("nan")


class Exporter(ABC):
    """Writes a dataset in the form that another project's trainer reads, and checks such a directory."""

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    options: ClassVar[type[Any]] = ExportOptions

    @abstractmethod
    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write an export, whole or not at all.

        Args:
            data_dir: The dataset.
            out: Directory to make; it must not hold anything.
            parts: Embedding, head and final norm of the model that the data were made with; they are written beside
                the export.
            model: That model, to compare a few documents with what is written of them; None, the default, for no
                comparison.
            **options: Fields of ``options``.

        Returns:
            What was written.

        Raises:
            UserError: The data, the model or an option does not fit the format, or ``out`` is taken.
        """

    @abstractmethod
    def validate(self, out: str | Path) -> list[str]:
        """Problems of an export, a sentence each; empty when it is sound."""


REGISTRY: dict[str, Exporter] = {}

T = TypeVar("T", bound=Exporter)


def register(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: make one exporter of this class available under ``name``."""

    def inner(kind: type[T]) -> type[T]:
        assert name not in REGISTRY, f"two exporters are named {name}"
        kind.name = name
        REGISTRY[name] = kind()
        return kind

    return inner


def exporter(name: str) -> Exporter:
    """The exporter of this name.

    Raises:
        UserError: There is none.
    """
    if name not in REGISTRY:
        near = get_close_matches(str(name), REGISTRY, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"to={name!r} is not valid: {hint}choose one of {', '.join(map(repr, sorted(REGISTRY)))}")
    return REGISTRY[name]
