"""Every kernel under Triton's interpreter and through the compiler, the checks' own controls, dispatch and registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import workbench_kernels
from workbench_kernels import bench
from workbench_kernels.checks import KernelError
from workbench_kernels.dispatch import recorded, use
from workbench_kernels.errors import error_rows, moved_by_count, moved_by_place, relative_error
from workbench_kernels.gated_delta import delta_inputs, gated_delta_chunk, gated_delta_scan
from workbench_kernels.registry import FOLDERS, Case, Maker, Op, misses, ops
from workbench_kernels.rmsnorm import rmsnorm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def program(name: str, *arguments: str) -> dict:
    """What one of the programs beside this file found, in a process of its own."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / name), *arguments],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_interpreted_kernels_are_their_specification():
    found = program("checking.py")
    assert not found["failures"], "\n".join(found["failures"])
    assert found["cases"] > 100


def test_kernels_compile_for_gpus_that_are_not_here():
    found = program("compiling.py", "--once")
    assert not found["interpreted"] and found["launches"] > 25
    assert not found["failures"], "\n".join(found["failures"])


@pytest.mark.full
def test_every_launch_compiles():
    found = program("compiling.py")
    assert not found["failures"], "\n".join(found["failures"])


# ------------------------------------------------------------------------------------------ the checks can fail


def _make(make: Maker, r: int, d: int) -> dict:
    return {"x": make.normal(r, d)}


def mistaken(fault: str) -> Op:
    """An op that doubles its rows, with a mistake."""

    def doubled(*, x: torch.Tensor, impl: str | None = None) -> torch.Tensor:
        from workbench_kernels.checks import check_dense
        from workbench_kernels.dispatch import _listeners

        if fault != "takes strides":
            check_dense("double", x=x)
        for ran in _listeners.get():
            ran.append(("double", "ref" if fault == "fell back" else impl or "ref"))
        if impl == "ref":
            return 2 * x
        out = torch.empty_like(x)
        out[: len(x) - (fault == "leaves a row")] = 2 * x[: len(x) - (fault == "leaves a row")]
        if fault == "wrong":
            out *= 1 + 1e-3
        if fault == "place":
            out += 1e-7 * torch.arange(len(x))[:, None]
        if fault == "neighbours":
            out += 1e-7 * x.mean()
        return out

    class Wrapped(Op):
        call = staticmethod(doubled)

    case = Case(dict(r=5, d=7))
    return Wrapped(name="double", module="", make=_make, odd=(case,), real=(case,), rows="x")


@pytest.mark.parametrize("fault", ["", "leaves a row", "wrong", "fell back"])
def test_the_comparison_sees_mistakes(kernel_checking, fault):
    op = mistaken(fault)
    assert bool(list(kernel_checking.against_reference(op, op.odd[0], torch.float32, "cpu"))) == bool(fault)


@pytest.mark.parametrize("fault", ["", "place", "neighbours"])
def test_the_row_law_sees_mistakes(kernel_checking, fault):
    op = mistaken(fault)
    assert bool(list(kernel_checking.rows_alone(op, op.odd[0], torch.float32, "cpu"))) == bool(fault)


@pytest.mark.parametrize("fault", ["", "takes strides"])
def test_strides_taken_are_seen(kernel_checking, fault):
    op = mistaken(fault)
    assert bool(list(kernel_checking.strided_refused(op, op.odd[0], torch.float32, "cpu"))) == bool(fault)


def test_no_speed_up_without_a_passed_check(monkeypatch):
    monkeypatch.setattr(bench, "timed", lambda calls, **more: (1.0, 2.0, 3.0))
    for fault in ("", "wrong"):
        op = mistaken(fault)
        object.__setattr__(op, "baseline", lambda x: x)
        row = bench.measure(op, op.real[0], torch.float32, 1e12, device="cpu")
        assert ("speedup" in row) == (fault == "") == (row["check"] == "passed")
        assert (" ok" in bench.line(row)) == (fault == "")


def test_a_miss_is_a_sentence_for_every_kind_of_output():
    op = mistaken("")
    x, whole = torch.ones(3), torch.arange(3)
    for made, truth in [(x, x * 1.1), (x * float("nan"), x), (whole, whole + 1), (x, torch.ones(4))]:
        assert list(misses(op, [made], [truth], torch.float32))
    assert not list(misses(op, [x, whole], [x, whole], torch.float32))
    assert list(misses(op, [x], [x, x], torch.float32))


# ------------------------------------------------------------------------------------------------------ delta chunks


def chunk_inputs(counts: list[int], t: int) -> dict[str, torch.Tensor]:
    """Float64 inputs of ``gated_delta_chunk`` whose rows past a count are NaN."""
    sizes = dict(b=len(counts), t=t, n=1, h=2, k=5, v=7)
    given = ops()["gated_delta_chunk"].inputs(Case(sizes), dtype=torch.float32, device="cpu")
    given = {name: x.double() for name, x in given.items()}
    for name, x in given.items():
        for b, n in enumerate(counts):
            if name != "state_BHKV":
                x[b, n:] = float("nan")
    return given


def test_the_specification_of_counts_is_each_sequence_scanned_alone():
    counts = [0, 3, 64, 70]
    given = chunk_inputs(counts, 70)
    held = torch.tensor(counts, dtype=torch.int32)
    out, after = gated_delta_chunk(**given, counts_B=held)
    less = gated_delta_chunk(**given, counts_B=(held - 1).clamp(min=0))[1]
    for b, n in enumerate(counts):
        q, k, v, beta, log, state = (x[b : b + 1, : n if x.shape[1] == 70 else None] for x in given.values())
        want, last = gated_delta_scan(*(x.contiguous() for x in (q, k, v, beta, log.exp(), state)))
        assert torch.allclose(out[b, :n], want[0], rtol=0, atol=1e-12)
        assert torch.allclose(after[b], last[0], rtol=0, atol=1e-12)
        assert n == 0 or not torch.allclose(less[b], last[0], rtol=0, atol=1e-6)


def test_chunks_refuse_mixed_types_and_counts_of_another_kind():
    given = {name: x.float().nan_to_num() for name, x in chunk_inputs([2, 3], 4).items()}
    with pytest.raises(KernelError, match="k is float32 and must be one of bfloat16"):
        gated_delta_chunk(**{**given, "q_BTNK": given["q_BTNK"].bfloat16()})
    with pytest.raises(KernelError, match="q is float16"):
        gated_delta_chunk(**{**given, "q_BTNK": given["q_BTNK"].half()})
    with pytest.raises(KernelError, match="counts is int64 and must be one of int32"):
        gated_delta_chunk(**given, counts_B=torch.tensor([1, 2]))
    raw = ops()["delta_inputs"].inputs(ops()["delta_inputs"].odd[-1], dtype=torch.float32, device="cpu")
    with pytest.raises(KernelError, match="choose torch"):
        delta_inputs(**{**raw, "dtype": torch.float16})
    narrow = {n: x.bfloat16() if n[0] in "qkv" else x for n, x in given.items()}
    assert gated_delta_chunk(**narrow)[0].dtype == torch.bfloat16
    assert [x.dtype for x in delta_inputs(**{**raw, "dtype": torch.bfloat16})] == 3 * [torch.bfloat16] + 3 * [
        torch.float32
    ]


@pytest.mark.parametrize("op", ["conv_commit", "gated_delta_commit"])
def test_commits_take_a_number_per_sequence_or_one_for_all(op: str):
    one = ops()[op]
    case = next(case for case in one.odd if case.sizes["b"] > 1 and "shared" not in case.sizes)
    given, b = one.inputs(case, dtype=torch.float32, device="cpu"), case.sizes["b"]
    for n in (1, b):
        one.call(**{**given, "keep_B": torch.ones(n, dtype=torch.int32)})
    for keep in (torch.ones((), dtype=torch.int32), torch.ones(b + 7, dtype=torch.int32), torch.ones(1, 1).int()):
        with pytest.raises(KernelError, match=f"{op}: keep has shape"):
            one.call(**{**given, "keep_B": keep})


# -------------------------------------------------------------------------------------------- dispatch and registry


def test_the_argument_then_the_context_then_the_device_decide():
    x, scale = torch.randn(2, 8), torch.ones(8)
    with recorded() as ran:
        rmsnorm(x, scale)
        with use("ref"), recorded() as inner:
            rmsnorm(x, scale)
        with use("triton"):
            rmsnorm(x, scale, impl="ref")
            with pytest.raises(KernelError, match="needs tensors on a GPU"):
                rmsnorm(x, scale)
        with pytest.raises(KernelError, match="needs tensors on a GPU"):
            rmsnorm(x, scale, impl="triton")
    assert ran == [("rmsnorm", "ref")] * 3 and inner == ran[:1]
    with pytest.raises(KernelError, match="choose 'ref' or 'triton'"), use("cuda"):
        pass
    with pytest.raises(KernelError, match="does not run in float64"):
        rmsnorm(x.double(), scale, impl="triton")


def test_every_folder_is_an_op_with_its_specification_kernel_and_cases():
    package = Path(workbench_kernels.__file__).parent
    assert {p.name for p in package.iterdir() if (p / "cases.py").is_file()} == set(FOLDERS)
    table = ops()
    for folder in FOLDERS:
        assert all((package / folder / name).is_file() for name in ("__init__.py", "ref.py", "kernel.py"))
        assert any(op.module == folder for op in table.values())
    for op in table.values():
        assert op.call.__doc__ and "Args:" in op.call.__doc__ and "Returns:" in op.call.__doc__
        assert any(0 in case.sizes.values() for case in op.odd), f"{op.name} is not tried on nothing"


def test_import_is_light():
    code = (
        "import sys, workbench_kernels; print(*sorted({'torch', 'triton'} & set(sys.modules)), '|');"
        "from workbench_kernels.registry import ops; ops(); print('triton' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["|", "False"]


def test_packed_rows_are_those_of_the_cache_formats():
    from workbench.cache.formats import FORMATS
    from workbench_kernels.rope_store.ref import PACK, unpack

    x = torch.randn(7, 3, 96, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0] = 0.0
    for name in ("q8_0", "q5_1"):
        packed = PACK[name](x)
        assert torch.equal(packed, FORMATS[name].encode(x))
        assert torch.equal(unpack(packed, name), FORMATS[name].decode(packed, torch.float32))


# ------------------------------------------------------------------------------------------------- errors, as rows


def test_errors_are_rows_and_the_librarys_product_moves_with_its_count():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "workbench_kernels.errors", "skinny_linear"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    op = ops()["skinny_linear"]
    assert len(rows) == len(op.odd) * len(op.dtypes)
    assert all(row["check"] == "passed" and row["error"] <= row["allowed"] for row in rows)
    assert not any(row["moved_by_count"] for row in rows) and sum(row["rows"] for row in rows) > 50
    assert sum(row["stock_moved_by_count"] for row in rows) > 0, "the law sees a product whose bits change with rows"


@pytest.mark.parametrize("fault", ["", "neighbours"])
def test_rows_that_move_are_counted(fault):
    op = mistaken(fault)
    given = op.inputs(op.odd[0], dtype=torch.float32, device="cpu")
    assert (moved_by_count(op.call, given, ["x"]) > 0) == bool(fault)
    assert (moved_by_place(op.call, given, ["x"]) > 0) == bool(fault)
    placed = mistaken("place").call
    assert moved_by_place(placed, given, ["x"]) > 0 and moved_by_count(placed, given, ["x"]) == 0


def test_a_relative_error_is_one_of_norms():
    truth = torch.full((4,), 2.0, dtype=torch.float64)
    assert relative_error([truth.float() * 1.01], [truth]) == pytest.approx(0.01, rel=1e-4)
    assert relative_error([torch.zeros(0)], [torch.zeros(0, dtype=torch.float64)]) == 0
    with pytest.raises(KernelError, match="op 'skinny' is not valid: choose one of rmsnorm"):
        next(error_rows("skinny", device="cpu"))
