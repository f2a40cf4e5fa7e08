"""Run the committed notebooks again, in place: ``python notebooks/execute.py [NOTEBOOK ...] [-p NAME=VALUE ...]``.

What is written back holds results and figures only: no progress bars, run times or paths of the machine. A notebook
that fails, or warns, is left as it was.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
BAR = "application/vnd.jupyter.widget-view+json"


def with_parameters(notebook: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a notebook whose parameters are replaced, by a cell after the one tagged ``parameters``.

    Args:
        notebook: The notebook.
        values: New values by name; every name must be assigned in the parameters cell.

    Returns:
        The copy.

    Raises:
        ValueError: There is no such cell, or it does not know a name.
    """
    copy = nbformat.from_dict(notebook)
    at = [i for i, cell in enumerate(copy.cells) if "parameters" in cell.metadata.get("tags", [])]
    if len(at) != 1:
        raise ValueError(f"{len(at)} cells are tagged 'parameters': exactly one is needed")
    nodes = ast.walk(ast.parse(copy.cells[at[0]].source))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if unknown := sorted(set(values) - names):
        raise ValueError(f"unknown parameter {unknown[0]!r}: this notebook has {', '.join(sorted(names))}")
    if values:
        source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["injected-parameters"]})
        copy.cells.insert(at[0] + 1, cell)
    return copy


def execute(notebook: Any, *, folder: Path = HERE, timeout: float = 900) -> Any:
    """Run a notebook in a fresh kernel and tidy its outputs.

    Args:
        notebook: The notebook; it is changed.
        folder: Working directory of the kernel.
        timeout: Seconds a cell may take.

    Returns:
        The same notebook, run.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
        ValueError: A cell wrote to stderr, or an output names a path of this machine.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
    )
    client.execute()
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Take progress bars and machine detail out of a run notebook, in place, and return it."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if BAR not in output.get("data", {})]
        for output in cell.outputs:
            if output.get("name") == "stderr":
                raise ValueError(f"cell {number} wrote to stderr: {output.text.strip()}")
    text = nbformat.writes(notebook)
    for path in {str(HERE.parent), str(Path.home()), sys.prefix}:
        if path in text:
            line = next(line for line in text.splitlines() if path in line)
            raise ValueError(f"an output names {path}, a path of this machine: {line.strip()[:200]}")
    return notebook


def main(arguments: list[str] | None = None) -> None:
    """Run the notebooks named, or all of them."""
    parser = argparse.ArgumentParser(description="Run notebooks in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all beside this file")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME=VALUE", help="override one")
    parser.add_argument("--out", type=Path, help="folder to write to, instead of in place")
    args = parser.parse_args(arguments)
    values = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in args.parameter)}
    for path in args.notebooks or sorted(HERE.glob("*.ipynb")):
        began = time.perf_counter()
        notebook = execute(with_parameters(nbformat.read(path, as_version=4), values))
        target = path if args.out is None else args.out / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        print(f"{target.name}: {time.perf_counter() - began:.0f} s, {target.stat().st_size / 1024:,.0f} kB", flush=True)


if __name__ == "__main__":
    main()
