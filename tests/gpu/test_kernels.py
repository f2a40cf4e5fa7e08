"""Every op of the registry natively on a GPU: against its specification in float64, row by row, and its laws."""

from __future__ import annotations

import pytest
import torch

from workbench_kernels.registry import ops

pytestmark = pytest.mark.gpu

ALL = [(name, case, dtype) for name, op in ops().items() for case in (*op.odd, *op.real) for dtype in op.dtypes]
ROWS = [(name, case, dtype) for name, op in ops().items() if op.rows for case in op.real[:4] for dtype in op.dtypes]


def ids(cases):
    return [f"{name}-{case.name}-{str(dtype)[6:]}" for name, case, dtype in cases]


@pytest.fixture(autouse=True)
def exact_products(device):
    if device.type != "cuda":
        pytest.skip("kernels run natively on a GPU; the interpreter has tests of its own")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("name", "case", "dtype"), ALL, ids=ids(ALL))
def test_kernels_are_their_specification(kernel_checking, name, case, dtype):
    assert not list(kernel_checking.against_reference(ops()[name], case, dtype, "cuda", seed=7))


@pytest.mark.parametrize(("name", "case", "dtype"), ROWS, ids=ids(ROWS))
def test_rows_stand_alone(kernel_checking, name, case, dtype):
    assert not list(kernel_checking.rows_alone(ops()[name], case, dtype, "cuda"))


def test_delta_commits_are_bit_equal(kernel_checking):
    assert not kernel_checking.delta_laws("cuda", b=3, t=6, n=4, h=8, k=128, v=128)
    assert not kernel_checking.embed_laws("cuda")


def test_ragged_chunks_are_those_of_each_sequence(kernel_checking):
    assert not kernel_checking.chunk_laws("cuda", t=300, h=4, k=128, v=128)


@pytest.mark.parametrize("vocab", [1021, 50_257])
def test_draws_are_those_of_the_sampling_package(kernel_checking, vocab):
    assert not kernel_checking.sampling_laws("cuda", vocab)


def test_nuclei_do_not_depend_on_the_search(kernel_checking):
    assert not kernel_checking.nucleus_laws("cuda", 248_320)


def test_tokens_do_not_depend_on_the_margin(kernel_checking):
    assert not kernel_checking.margin_laws("cuda", 248_320, rows=8)


def test_packed_rows_are_the_caches(kernel_checking):
    assert not kernel_checking.packed_stores("cuda")
