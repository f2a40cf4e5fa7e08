"""Rounds kept on the device, run by the ops' references: the text, records and state of the session's own rounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workbench.core.errors import CapabilityError, NonFiniteError, UserError
from workbench.model.hybrid import HybridModel
from workbench.spec.device.graphs import Graphs, GraphWarning
from workbench.spec.device.planes import Planes
from workbench.spec.generate import generate
from workbench.spec.options import HOST_ONLY, GenerateOptions
from workbench.spec.policies import AdaptiveFloor, FixedK
from workbench.spec.proposers import MTPProposer, SyntheticProposer
from workbench.spec.session import Session
from workbench_kernels.dispatch import use

PROMPT = [7, 61, 12, 80, 33, 5, 44, 19, 2, 71, 8, 8, 30, 66, 51, 24, 9]
STREAM, PARTS = dict(stream_rounds=4), dict(graphs=True)
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no end": dict(ignore_eos=True),
    "sampled": dict(temperature=1.0),
    "all of it": dict(
        temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={5: -3.0}
    ),
    "greedy, penalised": dict(repetition_penalty=1.4, frequency_penalty=0.2, penalty_last_n=9),
    "a threshold": dict(p_min=0.05),
    "a threshold from the first on": dict(p_min=0.05, pmin0=True, p_min_reads="top"),
    "another carrier": dict(carrier="pre_norm"),
}


@pytest.fixture
def model(tiny: Callable[..., HybridModel]) -> Iterator[HybridModel]:
    with use("ref"):
        yield tiny(exact=False, tied=False)  # a tied one repeats a token


def same_rounds(a: Any, b: Any) -> bool:
    facts = [[(r.key(), r.round_stop, r.draft_ids, r.emitted, r.bonus, r.k) for r in made.records] for made in (a, b)]
    return facts[0] == facts[1] and (a.tokens, a.finish) == (b.tokens, b.finish)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k", [0, 1, 3, pytest.param(5, marks=pytest.mark.full)])
def test_rounds_on_the_device_are_the_sessions_own(model: HybridModel, law: str, k: int) -> None:
    options = dict(k=k, max_new_tokens=40, **LAWS[law])
    host = generate(model, PROMPT, **options)
    assert len(set(host.tokens)) > 6
    for mode in (STREAM, PARTS):
        made = generate(model, PROMPT, **options, **mode)
        assert same_rounds(made, host), mode
        top = [[p for r in one.records for p in r.draft_top1] for one in (made, host)]
        assert top[0] == pytest.approx(top[1], abs=1e-5)
    if "temperature" in LAWS[law]:
        assert not same_rounds(generate(model, PROMPT, seed=1, **options, **STREAM), host)


def test_a_real_drafter_is_accepted_as_often(demo: HybridModel) -> None:
    ids = demo.tokenizer.encode("The committee met on Monday to")  # type: ignore[union-attr]
    for law in ({}, dict(temperature=0.7, top_k=30, repetition_penalty=1.2)):
        with use("ref"):
            host, made = (
                generate(demo, ids, k=3, max_new_tokens=40, ignore_eos=True, exact=False, **law, **mode)
                for mode in ({}, STREAM)
            )
        assert same_rounds(host, made)
        assert len({r.accepted for r in made.records}) > 2


def test_a_trimmed_head_drafts_its_own_ids(model: HybridModel) -> None:
    plain = generate(model, PROMPT, k=0, max_new_tokens=60, ignore_eos=True)
    model.trim_draft_vocab(range(1, 40))
    for law in ({}, dict(temperature=1.0)):
        host, made = (
            generate(model, PROMPT, k=3, max_new_tokens=60, ignore_eos=True, **law, **mode) for mode in ({}, STREAM)
        )
        assert same_rounds(host, made)
        assert {d for r in made.records for d in r.draft_ids} <= set(range(1, 40)) | {0}
    assert generate(model, PROMPT, k=3, max_new_tokens=60, ignore_eos=True, **STREAM).tokens == plain.tokens


def state_of(session: Session) -> list[torch.Tensor]:
    cache = session.state.cache
    return [x for plane in cache.planes for x in plane.parts(0, cache.lengths[0]).values()]


def test_bursts_of_both_kinds_follow_one_another(model: HybridModel) -> None:
    host, mixed = (Session(model, capacity=220) for _ in range(2))
    steps: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (PROMPT, {}, PARTS), (None, {}, {}), ([3, 4, 5], dict(k=2), STREAM), (None, dict(k=0), STREAM),
        (None, {}, {}), (None, dict(k=5), dict(stream_rounds=32)), ([6], {}, PARTS),
    ]  # fmt: skip
    for suffix, options, mode in steps:
        host.generate(suffix, max_new_tokens=17, ignore_eos=True, **options)
        mixed.generate(suffix, max_new_tokens=17, ignore_eos=True, **options, **mode)
        assert host.tokens == mixed.tokens
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(state_of(host), state_of(mixed), strict=True))
        assert host.state.boundary is not None and mixed.state.boundary is not None
        assert torch.allclose(host.state.boundary.logits_V, mixed.state.boundary.logits_V, atol=1e-4)
    for proposer in (p := [s.state.proposer for s in (host, mixed)]):
        assert isinstance(proposer, MTPProposer)
        proposer.flush()
    a, b = (x.cache.planes[0].parts(0, x.held) for x in p)  # type: ignore[union-attr]
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    twin = mixed.fork()
    twin.generate(max_new_tokens=9, ignore_eos=True, **STREAM)
    host.generate(max_new_tokens=9, ignore_eos=True)
    assert twin.tokens == host.tokens and len(mixed.tokens) + 9 == len(twin.tokens)


@pytest.mark.parametrize("wrong", [1, -1])
def test_a_commit_of_the_wrong_rows_is_seen(model: HybridModel, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    plain = generate(model, PROMPT, k=0, max_new_tokens=40, ignore_eos=True)
    right = Planes.commit
    monkeypatch.setattr(Planes, "commit", lambda self, keep_B: right(self, (keep_B + wrong).clamp(0, self.t)))
    assert generate(model, PROMPT, k=3, max_new_tokens=40, ignore_eos=True, **STREAM).tokens != plain.tokens


def test_a_stream_ends_with_the_budget_the_context_and_a_stop(model: HybridModel) -> None:
    whole = generate(model, PROMPT, k=3, max_new_tokens=60, ignore_eos=True)
    for budget in (1, 2, 3, 7):
        made = generate(model, PROMPT, k=3, max_new_tokens=budget, ignore_eos=True, stream_rounds=64)
        assert made.tokens == whole.tokens[:budget] and made.finish == "length"
    full = Session(model, capacity=len(PROMPT) + 11)
    burst = full.generate(PROMPT, max_new_tokens=60, ignore_eos=True, stream_rounds=64)
    assert burst.tokens == whole.tokens[:11] and burst.finish == "context"
    for at in (4, 5, 6, 7):
        ends = whole.tokens[at]
        host, made = (
            generate(model, PROMPT, k=3, max_new_tokens=60, ignore_eos=True, stop_token_ids=(ends,), **mode)
            for mode in ({}, dict(stream_rounds=64))
        )
        assert same_rounds(host, made) and made.finish == "stop" and made.tokens[-1] == ends


def test_cancelling_ends_between_readings(model: HybridModel) -> None:
    asked: list[int] = []
    session = Session(model, capacity=200)
    burst = session.generate(
        PROMPT, max_new_tokens=100, ignore_eos=True, cancel=lambda: len(asked) > 2 or bool(asked.append(1)), **STREAM
    )
    assert burst.finish == "cancel" and 0 < len(burst.tokens) < 100
    assert list(burst.tokens) == session.tokens[len(PROMPT) :]


def test_a_scripted_acceptance_is_kept(model: HybridModel) -> None:
    plain = generate(model, PROMPT, k=0, max_new_tokens=150, ignore_eos=True)
    text = [*PROMPT, *plain.tokens]
    host, made = (
        generate(
            model, PROMPT, max_new_tokens=150, k=3, ignore_eos=True,
            proposer=SyntheticProposer(model, text, (0.9, 0.7, 0.5)), **mode,
        )
        for mode in ({}, STREAM)
    )  # fmt: skip
    assert same_rounds(host, made) and sum(r.accepted for r in made.records) > 40


@contextmanager
def poisoned(weight: torch.Tensor) -> Iterator[None]:
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.view(-1)[1] = math.nan
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("mode", [STREAM, PARTS])
@pytest.mark.parametrize("phase", ["verify", "draft"])
def test_a_nan_is_told_with_phase_and_place(model: HybridModel, mode: dict[str, Any], phase: str) -> None:
    assert model.mtp is not None
    weight = model.blocks[1].ffn.down if phase == "verify" else model.mtp.fc
    session = Session(model, capacity=200)
    session.generate(PROMPT, max_new_tokens=8, ignore_eos=True, **mode)
    known = session.tokens
    with poisoned(weight), pytest.raises(NonFiniteError, match=f"the {'target' if phase == 'verify' else 'drafter'}'s"):
        session.generate(max_new_tokens=20, ignore_eos=True, **mode)
    assert session.tokens == known
    host = Session(model, capacity=200)
    host.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    with poisoned(weight), pytest.raises(NonFiniteError) as caught:
        host.generate(max_new_tokens=20, ignore_eos=True)
    assert caught.value.position == len(known) - 1
    if phase == "draft":
        session.generate(max_new_tokens=20, ignore_eos=True, **mode)
        host.generate(max_new_tokens=20, ignore_eos=True)
        assert session.tokens == host.tokens


VALUES: dict[str, Any] = dict(
    adaptive=True, carry=False, refresh=False, shift=1, k_format="q8_0", v_format="q8_0", window=64, rowwise=True,
    stop="x", logprobs=True, anatomy=True,
)  # fmt: skip


@pytest.mark.parametrize("name", HOST_ONLY)
def test_what_needs_the_host_is_refused_in_a_sentence(name: str) -> None:
    for mode in (STREAM, PARTS):
        with pytest.raises(UserError, match=f"{name}=.* needs the host in every round"):
            GenerateOptions(**{name: VALUES[name]}, **mode)


def test_policies_texts_and_places_that_need_the_host_are_refused(model: HybridModel) -> None:
    with pytest.raises(UserError, match="accept='ratio' draws on the host"):
        GenerateOptions(accept="ratio", temperature=1.0, p_min_reads="top", **STREAM)
    for given in (dict(policy=AdaptiveFloor(k=3)), dict(force=[1, 2, 3])):
        with pytest.raises(UserError, match="needs the host in every round"):
            generate(model, PROMPT, max_new_tokens=9, **given, **PARTS)
    named = generate(model, PROMPT, max_new_tokens=20, policy=FixedK(k=2), ignore_eos=True, **STREAM)
    assert {r.k for r in named.records} <= {0, 1, 2} and max(r.k for r in named.records) == 2
    with use("ref"):
        pass
    for bad in (0, 4097, 1.5):
        with pytest.raises(UserError, match="stream_rounds"):
            GenerateOptions(stream_rounds=bad)


def test_a_cpu_has_no_rounds_on_the_device(tiny: Callable[..., HybridModel]) -> None:
    with pytest.raises(CapabilityError, match="run on a CUDA GPU"):
        generate(tiny(), PROMPT, max_new_tokens=4, **PARTS)


class Refusing(Graphs):
    """Captures that fail, as on a device that has none."""

    def _capture(self, key: Any, part: Callable[[], None]) -> None:
        self._stream = None
        super()._capture(key, part)


def test_a_capture_that_fails_is_said_once_and_tried_again() -> None:
    ran: list[str] = []

    @contextmanager
    def idle() -> Iterator[None]:
        yield

    graphs = Refusing(torch.device("cpu"), False, idle)
    graphs.run(("round",), lambda: ran.append("eager"))
    assert ran == ["eager"] and graphs.eager == 1
    graphs.enabled = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for part in ("round", "draft", "round"):
            graphs.run((part,), lambda: ran.append("again"))
    assert len(ran) == 4 and [w.category for w in told] == [GraphWarning]
    assert "a round could not be captured" in str(told[0].message)
    graphs.resume()
    with pytest.warns(GraphWarning):
        graphs.run(("round",), lambda: ran.append("tried"))
