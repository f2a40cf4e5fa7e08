"""Exports of a dataset to the formats that other projects train drafters from, one module each.

``REGISTRY`` holds an exporter per name; every module of this folder is imported here, and registers what it holds.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.datasets.export.registry import (
    REGISTRY,
    Exporter,
    ExportOptions,
    ExportReport,
    exporter,
    register,
)

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

__all__ = ["REGISTRY", "ExportOptions", "ExportReport", "Exporter", "export", "exporter", "register", "validate"]


def export(data: str | Path, *, to: str, model: HybridModel, out: str | Path, **options: Any) -> ExportReport:
    """Write a dataset in the form that another project's trainer reads.

    The export takes its name when it is whole, so a run that was killed leaves none under ``out``; what it leaves
    beside it is removed by the next export to the same ``out``. A few documents are run through the model again, to say
    how far the logits that exported rows give are from its own.

    Args:
        data: Directory of the dataset.
        to: Name of the format, such as "speculators" or "specforge-dspark"; ``REGISTRY`` lists all.
        model: The model that the data were made with: its embedding, head and final norm go with the export, and its
            trimmed draft head as the map between the two vocabularies.
        out: Directory to make.
        **options: Of the format, such as ``layers``.

    Returns:
        What was written: counts, bytes per token, layers in both numberings, and what the trainer must be told,
        and what rounding costs.

    Raises:
        UserError: The format is unknown, the data are of another model or do not hold what it needs, or ``out`` is
            taken.
    """
    from workbench.core.errors import UserError
    from workbench.core.manifest import Manifest
    from workbench.datasets.export.parts import ModelParts
    from workbench.model.fingerprint import fingerprint

    chosen = exporter(to)
    made, own = Manifest.read(data).model.get("fingerprint"), fingerprint(model)
    if made != own:
        raise UserError(
            f"{data} was made with model {made} and {own} was given: load the checkpoint that made the data, in the "
            "type it ran in"
        )
    return chosen.run(data, out, ModelParts.of(model), model=model, **options)


def validate(out: str | Path, *, to: str) -> list[str]:
    """Problems of an export, a sentence each; empty when it is sound.

    Args:
        out: The directory.
        to: Name of its format.

    Raises:
        UserError: The format is unknown.
    """
    return exporter(to).validate(out)


for _found in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    importlib.import_module(f"{__name__}.{_found.name}")
