"""Kernels that start early: what they do before they wait for the kernels in front of them, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench_kernels

SOURCES = sorted(Path(workbench_kernels.__file__).parent.rglob("*.py"))
WEIGHTS = {"scale_ptr", "weight_ptr", "w_ptr", "a_log_ptr", "bias_ptr"}  # no kernel writes them


def functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def early(sources: list[str]) -> dict[str, ast.FunctionDef]:
    """Kernels that may start early, by name; each has a flag EARLY."""
    found = {}
    for source in sources:
        for name, made in functions(ast.parse(source)).items():
            if name.endswith("_kernel") and any(arg.arg == "EARLY" for arg in made.args.args):
                found[name] = made
    return found


def called(node: ast.AST) -> str:
    """Last name of a call's function."""
    func = node.func if isinstance(node, ast.Call) else None
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def faults(kernel: ast.FunctionDef) -> Iterator[str]:
    """What a kernel does too soon."""
    nodes = list(ast.walk(kernel))
    waits = [node.lineno for node in nodes if called(node) in ("begin", "gdc_wait")]  # type: ignore[attr-defined]
    if not waits:
        yield "never waits"
        return
    before = [node for node in nodes if getattr(node, "lineno", waits[0]) < min(waits)]
    asked = [top for top in before if isinstance(top, ast.If) and ast.unparse(top.test) == "STEADY"]
    steady = [node for top in asked for node in ast.walk(top)]
    typed = [node.value for node in nodes if isinstance(node, ast.Attribute)]  # a pointer's type is no memory
    for node in before:
        if isinstance(node, ast.Return):
            yield "may end without waiting"
        if called(node) == "store" or called(node).startswith("atomic"):
            yield f"writes before it waits: {ast.unparse(node)}"
        named = isinstance(node, ast.Name) and node.id.endswith("_ptr") and node not in typed
        if named and node.id not in WEIGHTS and not (node.id == "state_ptr" and node in steady):
            yield f"reads {node.id} before it waits"


def test_kernels_read_weights_alone_before_they_wait():
    kernels = early([path.read_text("utf-8") for path in SOURCES])
    assert {"delta_kernel", "direct_kernel", "skinny_kernel", "add_rmsnorm_kernel", "keep_kernel"} <= set(kernels)
    assert [f"{name} {fault}" for name, kernel in kernels.items() for fault in faults(kernel)] == []


def test_the_launch_that_steady_states_rely_on_waits_for_all_before_it():
    flags = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if called(node) == "launch" and isinstance(node, ast.Call) and isinstance(node.args[0], ast.Name):
                flags[node.args[0].id] = any(keyword.arg == "early" for keyword in node.keywords)
    assert flags["assemble_kernel"] is False
    assert {name for name, flag in flags.items() if flag} == set(early([p.read_text("utf-8") for p in SOURCES]))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("x = tl.load(x_ptr)\n begin(EARLY)", "reads x_ptr before it waits"),
        ("x = _rows(w_ptr, x_ptr + 1)\n begin(EARLY)", "reads x_ptr before it waits"),
        ("s = tl.load(state_ptr)\n begin(EARLY)", "reads state_ptr before it waits"),
        ("if COUNTED:\n  s = tl.load(state_ptr)\n begin(EARLY)", "reads state_ptr before it waits"),
        ("if done:\n  return\n begin(EARLY)", "may end without waiting"),
        ("tl.store(w_ptr, 1)\n if EARLY:\n  tl.extra.cuda.gdc_wait()", "writes before it waits: tl.store(w_ptr, 1)"),
        ("tl.store(out_ptr, tl.load(x_ptr))", "never waits"),
    ],
)
def test_control_what_comes_too_soon_is_seen(lines, says):
    head = "def some_kernel(x_ptr, w_ptr, state_ptr, out_ptr, EARLY: tl.constexpr):\n "
    assert says in list(faults(early([head + lines])["some_kernel"]))
    fine = (
        "w = tl.load(w_ptr)\n if STEADY:\n  s = tl.load(state_ptr)\n begin(EARLY)\n tl.store(out_ptr, tl.load(x_ptr))"
    )
    assert list(faults(early([head + fine])["some_kernel"])) == []
