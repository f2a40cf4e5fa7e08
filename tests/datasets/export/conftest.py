"""One tiny model and one store of its rows, for every export; exports are copied before they are harmed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import exporter

TAPS = (0, 2, 3)


@pytest.fixture(scope="session")
def model(tiny):
    return tiny(tied=False)


@pytest.fixture(scope="session")
def trimmed(tiny):
    """The same weights with a draft head of every third id."""
    other = tiny(tied=False)
    other.trim_draft_vocab(list(range(1, 83, 3)))
    return other


@pytest.fixture(scope="session")
def parts(model) -> ModelParts:
    return ModelParts.of(model)


@pytest.fixture(scope="session")
def tapes(sequence_rows):
    return sequence_rows.documents(83)


@pytest.fixture(scope="session")
def store(sequence_rows, model, tapes, tmp_path_factory) -> Callable[..., Path]:
    """Factory of stores, each made once."""
    made: dict[str, Path] = {}

    def build(**options: Any) -> Path:
        key = repr(sorted(options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp("store") / "data"
            made[key] = sequence_rows.write_sequences(model, tapes, path, **{"taps": TAPS, "top_k": 12, **options})
        return made[key]

    return build


@pytest.fixture
def harmed(tmp_path, sequence_rows) -> Callable[..., list[str]]:
    """Problems of a copy of an export after a change, with its seal taken again so that only the content tells."""
    count = [0]

    def run(out: Path, name: str, change: Callable[[Path], None], *, sealed_again: bool = True) -> list[str]:
        count[0] += 1
        copy = tmp_path / f"copy{count[0]}"
        shutil.copytree(out, copy)
        change(copy)
        if sealed_again:
            sequence_rows.reseal(copy)
        return exporter(name).validate(copy)

    return run
