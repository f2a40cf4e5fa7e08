"""On a GPU, exact: speculative text is plain text bit for bit, eager, graphed and streamed; faults are told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workbench.core.errors import NonFiniteError
from workbench.facade import demo_checkpoint
from workbench.model.hybrid import HybridModel
from workbench.model.shapes import random_model
from workbench.model.weights.load import load_model
from workbench.spec.device.graphs import Graphs, GraphWarning
from workbench.spec.device.planes import Planes
from workbench.spec.generate import generate
from workbench.spec.session import Session

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "eager": dict(stream_rounds=16),
    "graphed": dict(graphs=True),
    "streamed": dict(graphs=True, stream_rounds=32),
}
LONG = 2100  # past the first two rungs of the context that graphs are captured for


@pytest.fixture(scope="module")
def demo(device: torch.device) -> HybridModel:
    if device.type != "cuda":
        pytest.skip("rounds on the device need a GPU")
    return load_model(demo_checkpoint(), device=device, dtype="bfloat16", exact=True)


@pytest.fixture(scope="module")
def large(device: torch.device) -> HybridModel:
    if device.type != "cuda":
        pytest.skip("a 0.8B shape needs a GPU")
    model = random_model("0.8B", device=device, dtype="bfloat16")
    model.exact = True
    return model


@pytest.fixture(scope="module")
def plain(demo: HybridModel, prompts: list[list[int]]) -> tuple[int, ...]:
    return generate(demo, prompts[0], k=0, max_new_tokens=LONG, ignore_eos=True, graphs=True, stream_rounds=64).tokens


def planes_of(session: Session) -> list[torch.Tensor]:
    cache, length = session.state.cache, session.state.cache.lengths[0]
    return [x for plane in cache.planes for x in plane.parts(0, length).values()]


def test_the_hosts_own_rounds_give_the_same_text(
    demo: HybridModel, prompts: list[list[int]], plain: tuple[int, ...]
) -> None:
    for k in (0, 3):
        assert generate(demo, prompts[0], k=k, max_new_tokens=300, ignore_eos=True).tokens == plain[:300]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", range(1, 9))
def test_speculative_text_is_plain_text(
    demo: HybridModel, prompts: list[list[int]], plain: tuple[int, ...], mode: str, k: int,
    record: Callable[..., None],
) -> None:  # fmt: skip
    made = generate(demo, prompts[0], k=k, max_new_tokens=LONG, ignore_eos=True, **MODES[mode])
    assert made.tokens == plain
    assert sum(r.accepted for r in made.records) > 0 and len({r.accepted for r in made.records}) > 1
    record(
        "greedy identity, exact", model="demo", k=k, mode=mode, tokens=LONG, rounds=len(made.records),
        accepted=sum(r.accepted for r in made.records),
    )  # fmt: skip


@pytest.mark.parametrize(("mode", "k"), [("eager", 3), ("graphed", 3), *(("streamed", k) for k in range(1, 9))])
def test_a_random_08b_shape_decodes_exactly(
    large: HybridModel, mode: str, k: int, record: Callable[..., None], large_plain: tuple[int, ...]
) -> None:
    made = generate(large, list(range(5, 69)), k=k, max_new_tokens=LONG, ignore_eos=True, **MODES[mode])
    assert made.tokens == large_plain
    record("greedy identity, exact", model="random 0.8B", k=k, mode=mode, tokens=LONG, rounds=len(made.records))


@pytest.fixture(scope="module")
def large_plain(large: HybridModel) -> tuple[int, ...]:
    made = generate(large, list(range(5, 69)), k=0, max_new_tokens=LONG, ignore_eos=True, **MODES["streamed"])
    assert len(set(made.tokens)) > 20  # the text is no constant
    return made.tokens


SHAPINGS: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=0.9),
    "filters": dict(temperature=0.8, top_k=40, top_p=0.95),
    "penalties": dict(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={5: -4.0}),
    "greedy penalties": dict(repetition_penalty=1.3, frequency_penalty=0.1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shaping", SHAPINGS)
def test_coupled_text_is_plain_sampling(
    demo: HybridModel, prompts: list[list[int]], shaping: str, mode: str, record: Callable[..., None]
) -> None:
    options = dict(max_new_tokens=400, ignore_eos=True, seed=11, **SHAPINGS[shaping])
    own = generate(demo, prompts[1], k=0, **MODES["streamed"], **options).tokens
    made = generate(demo, prompts[1], k=3, **MODES[mode], **options)
    assert made.tokens == own
    if "greedy" not in shaping:
        assert own != generate(demo, prompts[1], k=0, **MODES["streamed"], **{**options, "seed": 12}).tokens
    record("coupled identity, exact", shaping=shaping, mode=mode, accepted=sum(r.accepted for r in made.records))


def test_a_burst_on_the_device_leaves_the_hosts_state(demo: HybridModel, prompts: list[list[int]]) -> None:
    host, device = (Session(demo, capacity=700) for _ in range(2))
    for step in (dict(k=3), dict(k=0), dict(k=5), dict(k=2)):
        extra = prompts[2][:20] if host.tokens else prompts[2]
        host.generate(extra, max_new_tokens=50, ignore_eos=True, **step)
        mode = MODES["streamed"] if step["k"] != 5 else MODES["graphed"]
        device.generate(extra, max_new_tokens=50, ignore_eos=True, **step, **mode)
        assert host.tokens == device.tokens
        assert all(torch.equal(a, b) for a, b in zip(planes_of(host), planes_of(device), strict=True))
    drafter = [s.state.proposer for s in (host, device)]
    for proposer in drafter:
        proposer.flush()  # type: ignore[union-attr]
    a, b = (p.cache.planes[0].parts(0, p.cache.lengths[0]) for p in drafter)  # type: ignore[union-attr]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_round_that_commits_a_row_too_many_is_seen(
    demo: HybridModel, prompts: list[list[int]], plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Planes.commit
    monkeypatch.setattr(Planes, "commit", lambda self, keep_B: right(self, (keep_B + 1).clamp(max=self.t)))
    made = generate(demo, prompts[0], k=3, max_new_tokens=200, ignore_eos=True, **MODES["eager"])
    assert made.tokens != plain[:200]


@pytest.mark.parametrize("chunk", [37, 512])
def test_a_prompt_in_chunks_leaves_the_same_bits(
    demo: HybridModel, prompts: list[list[int]], chunk: int, record: Callable[..., None]
) -> None:
    ids = (prompts[3] * 20)[:700]

    def fed(size: int, exact: bool) -> list[torch.Tensor]:
        demo.exact = exact
        try:
            session = Session(demo, capacity=800)
            session.options = type(session.options)(chunk=size)
            session.feed(ids)
            return planes_of(session)
        finally:
            demo.exact = True

    whole = fed(700, True)
    assert all(torch.equal(a, b) for a, b in zip(whole, fed(chunk, True), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, fed(700, False), strict=True))


@contextmanager
def poisoned(weight: torch.Tensor) -> Iterator[None]:
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[3] = math.nan
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["verify", "draft"])
def test_a_nan_is_told_with_its_place(demo: HybridModel, prompts: list[list[int]], mode: str, phase: str) -> None:
    assert demo.mtp is not None
    owners = {"verify": demo.blocks[3].ffn, "draft": demo.mtp}
    for name, weight in owners[phase].named_parameters():
        session = Session(demo, capacity=600)
        session.generate(prompts[4], max_new_tokens=8, ignore_eos=True, **MODES[mode])
        known = session.tokens
        with poisoned(weight), pytest.raises(NonFiniteError) as caught:
            session.generate(max_new_tokens=100, ignore_eos=True, **MODES[mode])
        assert caught.value.phase == phase, name
        assert caught.value.position == len(known) - 1 and session.tokens == known
        if mode == "eager":
            break  # the others differ in what is captured, not in what is poisoned


def test_a_failed_capture_is_said_once_and_tried_again(
    demo: HybridModel, prompts: list[list[int]], plain: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Graphs, part: Callable[[], None]) -> torch.cuda.CUDAGraph:
        raise RuntimeError("not today")

    session = Session(demo, capacity=1000)
    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "record", refuse)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            session.generate(prompts[0], max_new_tokens=60, ignore_eos=True, graphs=True)
        assert [w.category for w in told].count(GraphWarning) == 1 and "runs eagerly" in str(told[0].message)
        assert session.program is not None
        graphs = session.program[1].graphs
        assert graphs.eager > 0 and graphs.replays == 0
    session.generate(max_new_tokens=60, ignore_eos=True, graphs=True)
    graphs = session.program[1].graphs
    assert graphs.replays > 0
    assert tuple(session.tokens[len(prompts[0]) :]) == plain[:120]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shaping", ["greedy", *SHAPINGS])
def test_a_reset_session_answers_as_a_fresh_one_by_the_same_graphs(
    demo: HybridModel, prompts: list[list[int]], shaping: str, mode: str, record: Callable[..., None]
) -> None:
    options = dict(k=3, max_new_tokens=90, ignore_eos=True, seed=5, **SHAPINGS.get(shaping, {}), **MODES[mode])
    session = Session(demo, capacity=200)
    captured: list[int] = []
    for n, ids in enumerate(prompts[:4]):
        made = generate(demo, ids[: 64 - 9 * n], sequence=n, session=session, **options)
        fresh = generate(demo, ids[: 64 - 9 * n], sequence=n, **options)
        assert made.tokens == fresh.tokens
        assert [r.key() for r in made.records] == [r.key() for r in fresh.records]
        assert [r.draft_top1 for r in made.records] == [r.draft_top1 for r in fresh.records]
        assert session.program is not None
        captured.append(len(session.program[1].graphs.kept))
        assert made.setup.capture == 0 or not n, "the first answer captures what the others replay"
    assert len(set(captured)) == 1 and bool(captured[0]) == (mode != "eager")
    if "temperature" in SHAPINGS.get(shaping, {}):
        same = generate(demo, prompts[0], sequence=7, session=session, **options).tokens
        assert same != generate(demo, prompts[0], sequence=8, session=session, **options).tokens
    record("reset identity, exact", shaping=shaping, mode=mode, answers=4, graphs=captured[0])
