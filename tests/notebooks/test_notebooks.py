"""The committed notebooks: whole, short, executed, free of machine detail, and ending in a claim that is checked."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = (
    "01_quickstart",
    "02_extracting_anchors",
    "03_replay_against_live",
    "04_where_acceptance_is_lost",
    "05_sampled_acceptance",
    "06_conversations",
    "07_choosing_k",
    "08_p_min",
    "09_adaptive_floor",
    "10_trees",
    "11_predicted_against_live",
    "12_explore",
    "13_what_bounds_a_round",
    "14_from_prompts_to_a_training_set",
    "15_which_k_to_keep",
    "16_can_the_files_be_trusted",
)

MAX_LINES = 15
MAX_BYTES = 4_000_000
PATHS = re.compile(r"(?<![\w.~<>-])/(work|home|root|Users|tmp|opt|private)/")
QUICK: dict[str, dict[str, Any]] = {"01_quickstart": dict(MAX_NEW_TOKENS=24, DOCUMENTS=2)}


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell.outputs]


def test_these_are_all_and_they_are_small():
    found = sorted(FOLDER.glob("*.ipynb"))
    assert [path.stem for path in found] == sorted(NAMES)
    assert sum(path.stat().st_size for path in found) <= MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_short(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    long = [cell.source.splitlines()[0] for cell in code(notebook) if len(cell.source.splitlines()) > MAX_LINES]
    assert not long, f"cells of more than {MAX_LINES} lines, whose logic belongs into the library: {long}"
    tagged = [cell for cell in code(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and tagged[0] is code(notebook)[0]
    assert all(isinstance(node, ast.Assign) for node in ast.parse(tagged[0].source).body)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_whole_and_without_complaint(name):
    notebook = read(name)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    kinds = {(output.output_type, output.get("name")) for output in outputs(notebook)}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}, kinds
    shown = {kind for output in outputs(notebook) for kind in output.get("data", {})}
    assert "image/png" in shown, "a notebook is committed with its figures"
    assert not any("widget" in kind for kind in shown), "progress bars do not survive in a file"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_ends_with_its_claim(name):
    notebook = read(name)
    last = ast.parse(code(notebook)[-1].source)
    assert notebook.cells[-1].cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in last.body)
    assert notebook.cells[-2].cell_type == "markdown" and "claims" in notebook.cells[-2].source


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_names_no_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    pictures = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not (found := PATHS.search(pictures)), pictures[max(0, found.start() - 80) : found.end() + 80]
    assert "execution" not in json.dumps([cell.metadata for cell in read(name).cells]), "run times of cells"


def test_parameters_are_replaced_after_their_cell_and_unknown_ones_refused(runner):
    notebook = read("01_quickstart")
    changed = runner.with_parameters(notebook, {"K": 2, "PROMPT": "it's"})
    at = next(i for i, cell in enumerate(changed.cells) if "parameters" in cell.metadata.get("tags", []))
    assert changed.cells[at + 1].source == 'K = 2\nPROMPT = "it\'s"'
    assert changed.cells[at + 1].metadata.tags == ["injected-parameters"]
    assert len(notebook.cells) + 1 == len(changed.cells) == len(runner.with_parameters(notebook, {}).cells) + 1
    with pytest.raises(ValueError, match="unknown parameter 'KK': this notebook has CHECKPOINT"):
        runner.with_parameters(notebook, {"KK": 2})


def test_outputs_that_do_not_belong_into_a_file_are_dropped_or_refused(runner):
    def notebook(*made: Any) -> Any:
        cell = nbformat.v4.new_code_cell("1", outputs=list(made), metadata={"execution": {}})
        return nbformat.v4.new_notebook(cells=[cell])

    bar = nbformat.v4.new_output("display_data", {runner.BAR: {"model_id": "1"}, "text/plain": "0 %"})
    text = nbformat.v4.new_output("stream", text="fine\n")
    tidy = runner.tidy(notebook(bar, text))
    assert tidy.cells[0].outputs == [text] and not tidy.cells[0].metadata
    with pytest.raises(ValueError, match="cell 0 wrote to stderr: careful"):
        runner.tidy(notebook(nbformat.v4.new_output("stream", name="stderr", text="careful\n")))
    with pytest.raises(ValueError, match="a path of this machine"):
        runner.tidy(notebook(nbformat.v4.new_output("stream", text=f"see {ROOT}/data\n")))


def test_the_quickstart_runs(runner):
    began = time.perf_counter()
    made = runner.execute(runner.with_parameters(read("01_quickstart"), QUICK["01_quickstart"]), timeout=120)
    assert "24 tokens, equal to plain decode's" in outputs(made)[-1].text
    print(f"{time.perf_counter() - began:.1f} s")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_committed(name, tmp_path, runner):
    notebook = read(name)
    values = {"OUT": str(tmp_path)} if "OUT = " in code(notebook)[0].source else {}
    runner.execute(runner.with_parameters(notebook, values), timeout=800)
