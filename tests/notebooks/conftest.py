"""What the notebook tests share: where notebooks lie, and the program that runs them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="session")
def folder() -> Path:
    """notebooks/."""
    return FOLDER


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    """notebooks/execute.py as a module."""
    spec = importlib.util.spec_from_file_location("workbench_notebooks_execute", FOLDER / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
