"""The repository keeps its shape: short documented files, a small tree, a light import, two source roots."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted([*(ROOT / "workbench").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])

MAX_LINES = 500
MAX_TREE_BYTES = 45 * 2**20
MAX_IMPORT_SECONDS = 0.3

# What a GPU machine may lack. The packages of RUNS_WITHOUT must import with all of these absent.
FRAMES_AND_NOTEBOOKS = (
    "polars pyarrow datasets pandas matplotlib IPython ipywidgets jupyterlab transformers gguf llguidance xgrammar "
    "ray datasketch"
).split()
RUNS_WITHOUT = ("core", "sampling", "cache", "model", "spec", "train")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree() -> list[Path]:
    """The files git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return [path for name in sorted(set(listing.split("\0")) - {""}) if (path := ROOT / name).is_file()]


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_library_is_found():
    roots = {path.relative_to(ROOT).parts[0] for path in LIBRARY}
    assert roots == {"workbench", "kernels"}


def test_every_file_is_short_documented_and_finished():
    problems = []
    for path in LIBRARY:
        source = path.read_text(encoding="utf-8")
        if (lines := len(source.splitlines())) > MAX_LINES:
            problems.append(f"{relative(path)} has {lines} lines: past {MAX_LINES} it is two files")
        if (not path.stem.startswith("_") or path.stem == "__init__") and not ast.get_docstring(ast.parse(source)):
            problems.append(f"{relative(path)} has no docstring that says what it is")
        if unfinished := re.search(r"\b(TODO|FIXME|NotImplementedError)\b", source):
            problems.append(f"{relative(path)} holds {unfinished.group()}: finish it, or refuse in a sentence")
    assert not problems, "\n".join(problems)


def test_the_tree_is_small():
    sizes = {relative(path): path.stat().st_size for path in tree()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_TREE_BYTES, f"the tree passes {MAX_TREE_BYTES} bytes; the largest: {largest}"


def test_no_file_names_a_home_or_scratch_directory():
    pattern = re.compile(r"(?<![\w.~<>-])/(home|root|Users|tmp)/[\w.]+")
    prose = [path for path in tree() if path.suffix in {".md", ".ipynb"}]
    found = [
        f"{relative(path)}: {match.group()}"
        for path in [*LIBRARY, *prose]
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"paths of somebody's machine: {found[:5]}"


def test_kernels_is_a_source_root_and_not_a_package():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a package named kernels shadows another library's"
    assert (ROOT / "kernels" / "workbench_kernels" / "__init__.py").is_file()
    assert (ROOT / "workbench" / "py.typed").is_file()


def test_workbench_kernels_imports_only_torch_and_triton():
    allowed = {*sys.stdlib_module_names, "torch", "triton", "workbench_kernels"}
    found = []
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            found += [f"{relative(path)}: {name}" for name in names if name.partition(".")[0] not in allowed]
    assert not found


def test_import_workbench_is_light():
    code = (
        "import sys, time; start = time.perf_counter(); import workbench; end = time.perf_counter();"
        "print(end - start, *sorted(set(sys.modules) & {'torch', 'triton', 'polars', 'pyarrow', 'datasets'}))"
    )
    seconds = []
    for _ in range(3):
        taken, *heavy = python(code).split()
        assert not heavy, f"import workbench imported {heavy}"
        seconds.append(float(taken))
    assert min(seconds) < MAX_IMPORT_SECONDS, f"import workbench took {seconds} s"


def test_both_roots_come_from_this_tree():
    code = "import workbench, workbench_kernels; print(workbench.__file__); print(workbench_kernels.__file__)"
    assert python(code).splitlines() == [
        str(ROOT / "workbench" / "__init__.py"),
        str(ROOT / "kernels" / "workbench_kernels" / "__init__.py"),
    ]


def test_the_engine_imports_without_frames_and_notebooks():
    code = f"""
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FRAMES_AND_NOTEBOOKS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (absent in this test)", name=name)

sys.meta_path.insert(0, Absent())
import workbench
for package in {RUNS_WITHOUT!r}:
    root = importlib.import_module(f"workbench.{{package}}")
    for module in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
        importlib.import_module(module.name)
"""
    python(code)


def test_the_licence_is_apache():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
