"""The fast path on a GPU: equal to the CPU up to rounding, speculation token for token up to rounding-level ties."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from workbench.core.errors import CapabilityError
from workbench.core.tape import Tape
from workbench.facade import demo_checkpoint
from workbench.model.hybrid import HybridModel
from workbench.model.ops import Numerics
from workbench.model.weights.load import load_model
from workbench.replay.options import ReplayOptions
from workbench.replay.run import chain_tape
from workbench.spec.generate import generate
from workbench.train.demo import DemoRecipe, initialise
from workbench.train.losses import joint_loss

pytestmark = pytest.mark.gpu


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def logits_of(model: HybridModel, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    cache = model.new_cache()
    parts = [model.forward(ids[:, a:b].to(model.device), cache).logits_BTV for a, b in pairwise(cuts)]
    return torch.cat([part for part in parts if part is not None], 1).cpu()


@pytest.fixture(scope="module")
def text(prompts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([list(chain.from_iterable(prompts))[:300]])


@pytest.fixture(scope="module")
def gap(on_device: HybridModel, on_cpu: HybridModel, text: torch.Tensor) -> float:
    """Largest logit difference between one forward and a step-by-step run on the device."""
    whole = logits_of(on_device, text[:, :128], [0, 128])
    steps = logits_of(on_device, text[:, :128], list(range(129)))
    return float((whole - steps).abs().max())


def test_logits_equal_the_cpus(
    on_device: HybridModel, on_cpu: HybridModel, text: torch.Tensor, gap: float, record: Callable[..., None]
) -> None:
    ours, theirs = logits_of(on_device, text, [0, 300]), logits_of(on_cpu, text, [0, 300])
    difference = float((ours - theirs).abs().max())
    record("logits against the CPU, float32", max_abs=difference, scale=float(theirs.abs().max()), chunking=gap)
    assert difference < 1e-3
    assert not torch.allclose(ours[:, 1:], theirs[:, :-1], atol=1e-1)  # a shifted row would be seen


def test_chunked_forwards_agree(on_device: HybridModel, text: torch.Tensor) -> None:
    whole, cut = logits_of(on_device, text, [0, 300]), logits_of(on_device, text, [0, 37, 38, 46, 200, 300])
    assert float((whole - cut).abs().max()) < 1e-3


@pytest.mark.parametrize("strategy", ["tape", "columns", "snapshot"])
def test_commit_leaves_the_state_of_the_kept_rows(on_device: HybridModel, text: torch.Tensor, strategy: str) -> None:
    ids = text.to(on_device.device)
    for rows, keep in [(1, 0), (1, 1), (4, 2), (9, 1), (9, 3), (9, 9)]:
        cache, fresh = on_device.new_cache(strategy=strategy), on_device.new_cache()
        on_device.forward(ids[:, :50], cache, logits="none")
        on_device.forward(ids[:, :50], fresh, logits="none")
        ckpt = cache.checkpoint()
        on_device.forward(ids[:, 50 : 50 + rows], cache, logits="none")
        cache.commit(ckpt, keep=keep)
        if keep:
            on_device.forward(ids[:, 50 : 50 + keep], fresh, logits="none")
        assert cache.lengths == fresh.lengths
        for ours, theirs in zip(cache.recurrent, fresh.recurrent, strict=True):
            torch.testing.assert_close(ours.state_BHKV, theirs.state_BHKV, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(ours.conv_BWC, theirs.conv_BWC, atol=1e-4, rtol=1e-4)


def test_speculative_text_is_plain_text_up_to_rounding(
    on_device: HybridModel, prompts: list[list[int]], gap: float, record: Callable[..., None]
) -> None:
    same, ties = 0, []
    for ids, k in zip(prompts[:16], [1, 2, 3, 4, 5, 6, 7, 8] * 2, strict=False):
        plain = generate(on_device, ids, k=0, max_new_tokens=96)
        spec = generate(on_device, ids, k=k, max_new_tokens=96)
        if spec.tokens == plain.tokens:
            same += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain.tokens, spec.tokens, strict=True)) if a != b)
        known = torch.tensor([[*ids, *plain.tokens[:at]]])
        best = logits_of(on_device, known, [0, known.shape[1]])[0, -1].topk(2).values
        ties.append({"k": k, "at": at, "margin": float(best[0] - best[1])})
    record("greedy identity, float32", prompts=16, identical=same, differences=ties, rounding=gap)
    assert all(tie["margin"] <= 4 * max(gap, 1e-5) for tie in ties), ties


def test_replayed_chains_are_live_chains(on_device: HybridModel, prompts: list[list[int]], gap: float) -> None:
    ids = prompts[0]
    live = generate(on_device, ids, k=4, max_new_tokens=64)
    tape = Tape("own", np.array([*live.prompt, *live.tokens]), len(ids))
    chunks = list(chain_tape(on_device, tape, ReplayOptions(k_max=4, chunk=64)))
    drafts = np.concatenate([part.columns["draft_ids"] for part in chunks])
    margins = np.concatenate([part.columns["draft_margin"] for part in chunks])
    compared = 0
    for r in live.records:
        for slot, token in enumerate(r.draft_ids):
            if drafts[r.start, slot] != token:
                assert margins[r.start, slot] <= 4 * max(gap, 1e-5)
                break
            compared += 1
    assert compared > 20


def test_exact_numerics_are_refused_in_float64(device: torch.device) -> None:
    assert Numerics.of(True, device).exact
    with pytest.raises(CapabilityError, match="exact=True does not hold in float64"):
        Numerics.of(True, device, torch.float64)


def test_draft_anatomy_is_synchronised(
    on_device: HybridModel, prompts: list[list[int]], record: Callable[..., None]
) -> None:
    made = generate(on_device, prompts[1], k=3, max_new_tokens=32, anatomy=True)
    steps = made.draft_steps
    assert steps is not None and steps.synchronised == (on_device.device.type == "cuda") and steps.steps > 0
    record(
        "draft-step anatomy, float32",
        **{f"{p}_us": 1e6 * getattr(steps, p) for p in ("glue", "attention", "ffn", "head")},
    )


def test_training_lowers_the_loss(device: torch.device) -> None:
    recipe = DemoRecipe(hidden=64, layers=4, intermediate=128)
    model = HybridModel(recipe.config(512), exact=False)
    initialise(model, 0)
    model.to(device).train()
    tokens = torch.arange(256, device=device).repeat(2, 1) % 37
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        lm, mtp = joint_loss(model, tokens, steps=4, stride=1)
        (lm + mtp).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append((lm + mtp).item())
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speed_rows(
    on_device: HybridModel, device: torch.device, prompts: list[list[int]], dtype: str, record: Callable[..., None]
) -> None:
    model = on_device
    if dtype == "bfloat16":
        model = load_model(demo_checkpoint(), device=device, dtype=dtype, exact=False)
    speeds: dict[str, list[float]] = {}
    for ids in [prompts[0], *prompts[2:6]]:  # the first is a warm-up
        for k in (0, 3):
            made = generate(model, ids, k=k, max_new_tokens=64)
            speeds.setdefault(f"k={k}", []).append(made.summary["tokens_per_second"] or 0.0)
    for name, values in speeds.items():
        record(f"decode {name}, {dtype}", tok_s=float(np.median(values[1:])), low=min(values[1:]), high=max(values[1:]))
    tape = Tape("t", np.array((list(chain.from_iterable(prompts)) * 4)[:2049]))
    ids_1T = torch.from_numpy(tape.tokens[:2048].astype(np.int64))[None].to(device)
    for name in ("forward", "replay"):
        times = []
        for _ in range(3):
            sync(device)
            began = time.perf_counter()
            if name == "forward":
                model.forward(ids_1T, model.new_cache())
            else:
                list(chain_tape(model, tape, ReplayOptions(k_max=8)))
            sync(device)
            times.append(time.perf_counter() - began)
        record(f"{name} of 2,048 tokens, {dtype}", tok_s=2048 / min(times), seconds=sorted(times))
        assert min(times) > 0
