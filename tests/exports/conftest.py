"""A tiny model, a sequence store of it, and its exports, made once and copied by tests that spoil them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.datasets.export import export


@pytest.fixture(scope="session")
def stores(request: pytest.FixtureRequest) -> Any:
    """The helpers of tests/exports/stores.py."""
    import importlib.util
    import sys

    name = "workbench_tests_exports_stores"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("stores.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def trimmed(tiny: Callable[..., Any]) -> Any:
    """The tiny model with 20 ids in its draft head."""
    model = tiny(tied=False)
    model.trim_draft_vocab(list(range(3, 83, 4)))
    return model


@pytest.fixture(scope="session")
def made(trimmed: Any, stores: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``made(to, hidden_dtype=, **options)``: an export of the tiny store: out, truth by document, and its report."""
    known: dict[str, Any] = {}
    held: dict[str, Any] = {}

    def inner(to: str, *, stored: str = "bfloat16", **options: Any) -> Any:
        if stored not in known:
            data = tmp_path_factory.mktemp("store") / stored
            known[stored] = data, stores.make_store(trimmed, stores.documents(), data, hidden_dtype=stored)
        data, truth = known[stored]
        key = repr((to, stored, sorted(options.items())))
        if key not in held:
            out = tmp_path_factory.mktemp("export") / to
            held[key] = SimpleNamespace(
                out=out, data=data, truth=truth, report=export(data, to=to, model=trimmed, out=out, **options)
            )
        return held[key]

    return inner


@pytest.fixture
def copied(made: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """``copied(to, **options)``: a copy of such an export, to be spoilt."""

    def inner(to: str, **options: Any) -> Path:
        return Path(shutil.copytree(made(to, **options).out, tmp_path / to))

    return inner
