"""Cache formats on a device: the CPU's bytes; windows equal to full attention under the mask up to rounding."""

from __future__ import annotations

import pytest
import torch

from workbench.cache.formats import FORMATS
from workbench.cache.kv import KVPlane
from workbench.model.hybrid import HybridModel

pytestmark = pytest.mark.gpu


def test_rows_pack_and_unpack_to_the_cpus_bits(on_device: HybridModel) -> None:
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 4, 500)[:, None]
    x[:3] = torch.tensor([0.0, 0.3, -2e-7])[:, None]
    for name, form in FORMATS.items():
        packed = form.encode(x.to(on_device.device))
        assert torch.equal(packed.cpu(), form.encode(x)), name
        values = form.decode(packed, torch.float32).cpu()
        assert torch.equal(values.view(torch.int32), form.decode(form.encode(x), torch.float32).view(torch.int32)), name


def test_a_ring_is_the_mask(on_device: HybridModel, on_cpu: HybridModel, prompts: list[list[int]]) -> None:
    ids = torch.tensor([(prompts[0] * 40)[:200]])
    masked = on_cpu.new_cache()
    for plane in masked.planes:
        if isinstance(plane, KVPlane):
            plane.window = 8
    expected = on_cpu.forward(ids, masked).logits_BTV
    cache = on_device.new_cache(window=8, widest=40)
    parts = [on_device.forward(part.to(on_device.device), cache).logits_BTV for part in ids.split(33, 1)]
    found = torch.cat([part for part in parts if part is not None], 1).cpu()
    assert expected is not None and float((found - expected).abs().max()) < 1e-3
    taken = cache.nbytes
    ckpt = cache.checkpoint(cut=False)
    for part in ids.split(40, 1):
        on_device.forward(part.to(on_device.device), cache, logits="none")
    assert cache.nbytes > taken
    cache.rollback(ckpt)
    again = on_device.forward(ids[:, :5].to(on_device.device), cache).logits_BTV
    known = on_cpu.forward(ids[:, :5], masked).logits_BTV
    assert again is not None and known is not None and float((again.cpu() - known).abs().max()) < 1e-3
