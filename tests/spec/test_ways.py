"""Which ops a forward takes: by numerical class, rows and weights."""

from __future__ import annotations

import pytest
import torch

from workbench.model import kernel_path
from workbench.model.kernel_path import FEW, HANDFUL, Way, way_of
from workbench.model.shapes import random_model
from workbench_kernels.checks import KernelError
from workbench_kernels.direct_linear import direct_linear, takes
from workbench_kernels.dispatch import recorded, use


@pytest.mark.parametrize(
    ("exact", "rows", "t", "way"),
    [
        (False, 1, 1, Way.DIRECT),
        (False, HANDFUL, HANDFUL, Way.DIRECT),
        (False, HANDFUL + 1, HANDFUL + 1, Way.FEW),
        (False, 2 * FEW, FEW, Way.FEW),
        (False, FEW + 1, FEW + 1, Way.MANY),
        (True, 1, 1, Way.FEW),
        (True, 4 * FEW, 4 * FEW, Way.FEW),
    ],
)
def test_the_way_of_a_forward(exact, rows, t, way):
    assert way_of(exact, rows, t) is way
    assert way.few == (way is not Way.MANY)


@torch.inference_mode()
def products(model, rows: int) -> tuple[set[str], torch.Tensor]:
    """Ops of products that a forward takes, and its logits."""
    ids = torch.arange(rows).unsqueeze(0)
    with use("ref"), recorded() as ran:
        logits = model.forward(ids, model.new_cache()).logits_BTV
    return {op for op, _ in ran if op.endswith("_linear")}, logits


def test_rows_take_weights_through_registers_in_fast_mode_alone(monkeypatch):
    model = random_model("tiny", seed=1, device="cpu", dtype="bfloat16", exact=False)
    found, direct = products(model, 2)
    assert found == {"direct_linear", "skinny_linear"}  # the head is never read so
    assert products(model, HANDFUL + 1)[0] == {"skinny_linear"}
    monkeypatch.setattr(kernel_path, "DIRECT", 0)
    found, skinny = products(model, 2)
    assert found == {"skinny_linear"}, "control: no weight is small enough"
    assert torch.equal(direct, skinny)  # one specification
    monkeypatch.undo()
    model.exact = True
    assert products(model, 2)[0] == {"skinny_linear"}


@pytest.mark.parametrize(
    ("rows", "k", "taken"), [(8, 64, True), (9, 64, False), (1, 63, False), (1, 17408, True), (1, 6464, False)]
)
def test_rows_and_inputs_that_registers_take(rows, k, taken):
    x, weight = (torch.ones(n, k, dtype=torch.bfloat16) for n in (rows, 2))
    assert takes(rows, weight) == taken and not takes(rows, weight.float())
    if taken:
        assert torch.equal(direct_linear(x, weight), x @ weight.t())
    else:
        with pytest.raises(KernelError, match=f"{rows} rows of {k} inputs are not valid.*skinny_linear takes others"):
            direct_linear(x, weight)
