"""Runs commands in this process, with checkpoints loaded once; a tiny checkpoint on disk for what needs no text."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from workbench.cli.main import main

matplotlib.use("Agg")


@dataclass(frozen=True)
class Ran:
    """What one command left: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object that stdout holds."""
        return json.loads(self.out)


@pytest.fixture
def run(capsys, monkeypatch) -> Callable[..., Ran]:
    """``run(*argv, stdin="")``: a command in this process, with nothing on stdin unless told otherwise."""

    def inner(*argv: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main(list(map(str, argv)))
        return Ran(code, *capsys.readouterr())

    return inner


@pytest.fixture
def refused(run) -> Callable[..., str]:
    """``refused(*argv)``: the sentence of a command that must end with 2, one line on stderr and nothing on stdout."""

    def inner(*argv: str, stdin: str = "") -> str:
        ran = run(*argv, "--quiet", stdin=stdin)
        assert ran.code == 2, ran
        assert ran.out == "" and "Traceback" not in ran.err
        last = ran.err.strip().splitlines()[-1]
        assert last.startswith("workbench: ")
        return last.removeprefix("workbench: ")

    return inner


_LOADED: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def loads_once(monkeypatch):
    """The demo checkpoint is read once per process and numerical class."""
    from workbench import facade

    load = facade.load

    def cached(source="demo", **options: Any):
        if str(source) != "demo":
            return load(source, **options)
        key = tuple(sorted(options.items(), key=str))
        if key not in _LOADED:
            _LOADED[key] = load(source, **options)
        return _LOADED[key]

    monkeypatch.setattr(facade, "load", cached)


@pytest.fixture
def tiny_checkpoint(tiny, tmp_path) -> Callable[..., Path]:
    """``tiny_checkpoint(name, spoil=None, **fields)``: a random model on disk, without tokenizer, changed by spoil."""

    def inner(name: str = "tiny", spoil: Callable[[Any], None] | None = None, **fields: Any) -> Path:
        from workbench.model.weights.save import save_model

        model = tiny(**fields)
        if spoil is not None:
            spoil(model)
        save_model(model, tmp_path / name)
        return tmp_path / name

    return inner


@pytest.fixture
def ids(tmp_path) -> Callable[..., Path]:
    """``ids([...], [...])``: documents given as token ids, one per line of a JSON-lines file."""

    def inner(*documents: list[int]) -> Path:
        path = tmp_path / "ids.jsonl"
        path.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in documents), "utf-8")
        return path

    return inner
