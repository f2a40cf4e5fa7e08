"""Stops, streams and cancellation in speculative decoding are plain decode's, wherever they fall in a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.cache.hybrid import HybridCache
from workbench.core.metrics import Telemetry
from workbench.model.config import FULL, LINEAR
from workbench.model.hybrid import HybridModel
from workbench.model.tokenizer import Tokenizer
from workbench.spec import round as rounds
from workbench.spec.generate import generate, stream
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import FixedK
from workbench.spec.proposers import ScriptedProposer
from workbench.spec.round import run_round
from workbench.spec.session import Session
from workbench.spec.sink import Cancelled

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"
PROMPT, NEW = "It was a bright cold day", 32
SHAPES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": dict(temperature=0.8, top_p=0.95, seed=3)}


@pytest.fixture(scope="module")
def demo(tiny) -> HybridModel:
    """A small random model whose ids are the demo tokenizer's."""
    model = tiny(vocab_size=4096, ratio=2, tied=False, layer_types=(LINEAR, FULL), seed=2)
    model.tokenizer = Tokenizer.load(DEMO)
    return model


@pytest.fixture(scope="module")
def texts(demo) -> dict[str, list[int]]:
    """Plain texts of the prompt, by shape."""
    return {
        name: list(generate(demo, PROMPT, k=0, max_new_tokens=NEW, ignore_eos=True, **shape).tokens)
        for name, shape in SHAPES.items()
    }


def perfect(model: HybridModel, own: list[int]) -> ScriptedProposer:
    truth = [*model.tokenizer.encode(PROMPT), *own]
    return ScriptedProposer.pattern("perfect", truth, vocab_size=model.config.vocab_size)


def begin(model: HybridModel, own: list[int], k: int, **options: Any) -> Session:
    opts = GenerateOptions(k=k, ignore_eos=True, **options)
    session = Session(model, options=opts, proposer=perfect(model, own) if k else None)
    return session


def decode(session: Session, n: int, cancel: Callable[[], bool] | None = None) -> tuple[Any, ...]:
    """Text, ids, reason and what a reader was shown, of one run into a sink of the session's."""
    sink = session.sink(n, cancel=cancel, text=True)
    session.feed(session.state.model.tokenizer.encode(PROMPT), sink=sink)
    finish = session.burst(n - 1, sink=sink)
    return sink.text, sink.tokens, finish, sink.finish, sink.matched


def stops_at(model: HybridModel, own: list[int], at: int) -> list[str]:
    """Strings that are complete with token ``at`` and not before: within it, and across one and two tokens."""
    decoded = model.tokenizer.decode
    before, upto = decode_len(model, own, at), decode_len(model, own, at + 1)
    text, found = decoded(own), []
    for back in (0, 1, 5):
        for end in {before + 1, upto}:
            stop = text[max(before - back, 0) : end]
            if stop and "\ufffd" not in stop and text.find(stop) + len(stop) == end:
                found.append(stop)
    return found


def decode_len(model: HybridModel, own: list[int], n: int) -> int:
    return len(model.tokenizer.decode(own[:n]))


def counters(session: Session) -> tuple[int, int]:
    """Emitted and accepted tokens; every round of a perfect drafter is right as far as it goes."""
    told = Telemetry.of(session.state.records)
    assert told.drafted == told.accepted
    return told.emitted, told.accepted


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("shape", ["sampled", pytest.param("greedy", marks=pytest.mark.full)])
def test_a_stop_string_at_every_offset_of_a_block(demo, texts, shape, k):
    """The first block holds tokens 1 to k + 1: a stop string ends in each of them, and in those of the next block."""
    own, tried = texts[shape], 0
    for at in range(1, k + 3):
        for stop in stops_at(demo, own, at)[at % 2 :: 2]:
            given = dict(stop=stop, **SHAPES[shape])
            plain, fast = begin(demo, own, 0, **given), begin(demo, own, k, **given)
            expected = decode(plain, NEW)
            assert decode(fast, NEW) == expected
            assert expected[2] == "stop_string" and len(expected[1]) == at + 1 and expected[4] == stop
            assert stop not in expected[0] and demo.tokenizer.decode(own).startswith(expected[0])
            assert fast.tokens == plain.tokens and fast.state.cache.first_difference(plain.state.cache) is None
            assert counters(fast)[0] == at
            last = fast.state.records[-1]
            inside = at % (k + 1) != 0
            assert last.round_stop == ("stop_string" if inside else "") and (last.bonus is None) == inside
            fast.burst(7)
            plain.burst(7)
            assert fast.tokens == plain.tokens == [*demo.tokenizer.encode(PROMPT), *own][: len(plain.tokens)]
            tried += 1
    assert tried > k


def test_a_stop_read_only_at_the_end_of_a_round_is_found(demo, texts, monkeypatch):
    """Control: the comparison above can fail."""
    own, k = texts["greedy"], 4
    stops = [stop for at in range(1, k + 1) for stop in stops_at(demo, own, at)[:1]]
    expected = [decode(begin(demo, own, 0, stop=stop), NEW) for stop in stops]
    monkeypatch.setattr(rounds, "cut", lambda verdict, kept, reason: verdict)
    sessions = [begin(demo, own, k, stop=stop) for stop in stops]
    assert len(stops) >= 3 and [decode(session, NEW) for session in sessions] == expected
    assert all(len(s.tokens) - len(demo.tokenizer.encode(PROMPT)) > len(e[1]) for s, e in zip(sessions, expected))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_stop_token_at_every_offset_of_a_block(demo, texts, k):
    own = texts["sampled"]
    for at in [i for i in range(1, 16) if own[i] not in own[:i]]:
        given = dict(stop_token_ids=(own[at],), **SHAPES["sampled"])
        plain, fast = begin(demo, own, 0, **given), begin(demo, own, k, **given)
        expected = decode(plain, NEW)
        assert decode(fast, NEW) == expected and expected[2] == "stop" and len(expected[1]) == at + 1
        assert fast.tokens == plain.tokens and fast.state.cache.first_difference(plain.state.cache) is None
        assert counters(fast)[0] == at


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_cancel_at_every_token_is_plain_decodes(demo, texts, k):
    """Asked once per chunk of the prompt and once per committed token."""
    own = texts["greedy"]
    for after in (1, 2, 3, 4, 6, 9, 13):
        session, asked = begin(demo, own, k), count()
        text, tokens, finish, *_ = decode(session, NEW, cancel=lambda asked=asked, after=after: next(asked) == after)
        assert list(tokens) == own[:after] and finish == "cancel" and text == demo.tokenizer.decode(own[:after])
        assert next(asked) == after + 1
        assert session.tokens == [*demo.tokenizer.encode(PROMPT), *own[:after]]
        session.burst(5)
        assert session.tokens[-5:] == own[after : after + 5]


def test_cancel_between_chunks_of_the_prompt_leaves_an_untouched_session(demo, texts):
    own = texts["greedy"]
    ids = demo.tokenizer.encode(PROMPT)
    assert len(ids) >= 5
    chunks = -(-len(ids) // 2)
    for at in range(chunks):
        session, asked = begin(demo, own, 2, chunk=2), count()
        sink = session.sink(NEW, cancel=lambda asked=asked, at=at: next(asked) == at)
        with pytest.raises(Cancelled):
            session.feed(ids, sink=sink)
        assert next(asked) == at + 1 and session.tokens == [] and session.state.cache.lengths == [0]
        assert sink.tokens == () and sink.finish is None
        session.feed(ids)
        session.burst(9)
        assert session.tokens == [*ids, *own[:10]]
    done = generate(demo, PROMPT, k=2, chunk=2, cancel=lambda: True)
    assert (done.finish, done.tokens, done.text, done.records) == ("cancel", (), "", ())


@pytest.mark.parametrize("k", [0, 4])
def test_stop_goes_before_length_and_length_before_cancel(demo, texts, k):
    own = texts["greedy"]
    at = next(i for i in range(5, NEW) if own[i] not in own[:i] and stops_at(demo, own, i))

    def run(n: int, stop_ids: tuple[int, ...], stop: tuple[str, ...], cancelled: bool) -> str:
        asked = count()
        done = generate(
            demo, PROMPT, k=k, max_new_tokens=n, stop_token_ids=stop_ids, stop=stop, ignore_eos=True,
            proposer=perfect(demo, own) if k else None, cancel=lambda: cancelled and next(asked) == at + 1,
        )  # fmt: skip
        assert list(done.tokens) == own[: at + 1]
        return done.finish

    string = (stops_at(demo, own, at)[0],)
    token = (own[at],)
    assert run(at + 1, token, string, True) == "stop"
    assert run(at + 1, (), string, True) == "stop_string"
    assert run(at + 1, (), (), True) == "length"
    assert run(NEW, (), (), True) == "cancel"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_chunks_joined_are_the_text(demo, texts, shape, k):
    own = texts[shape]
    stop = next(stop for at in range(9, NEW) for stop in stops_at(demo, own, at))
    for given in ({}, dict(stop=(stop,)), dict(stop_token_ids=(own[9],)), dict(max_new_tokens=1)):
        options = {**dict(k=k, max_new_tokens=30, ignore_eos=True), **SHAPES[shape], **given}
        whole = generate(demo, PROMPT, **options)
        shown, tokens, chunks = "", [], 0
        for chunk in stream(demo, PROMPT, **options):
            shown, chunks = shown + chunk.text, chunks + 1
            tokens += chunk.tokens
            assert whole.text.startswith(shown)
            last = chunk.generation
        assert last is not None and chunks == (1 if given.get("max_new_tokens") == 1 else len(last.records) + 1)
        assert shown == whole.text == last.text and tuple(tokens) == whole.tokens == last.tokens
        assert [r.key() for r in last.records] == [r.key() for r in whole.records] and last.finish == whole.finish


def test_a_stream_left_early_leaves_the_model_usable(demo):
    run = stream(demo, PROMPT, k=2, max_new_tokens=20)
    next(run)
    run.close()
    assert len(generate(demo, PROMPT, k=2, max_new_tokens=5, ignore_eos=True).tokens) == 5


def test_a_burst_goes_no_further_than_its_sink(demo, texts):
    """A sink that holds fewer tokens than the burst bounds the drafts, as a budget does."""
    session = begin(demo, texts["greedy"], 4)
    session.feed(demo.tokenizer.encode(PROMPT))
    assert session.burst(20, sink=session.sink(7)) == "length"
    assert session.tokens[-8:] == texts["greedy"][:8]
    assert [(r.k, r.round_stop) for r in session.state.records] == [(4, ""), (1, "budget")]


def test_a_given_text_that_is_cancelled_was_not_committed_to_its_end(demo, texts):
    asked, own = count(), texts["greedy"]
    done = generate(demo, PROMPT, k=2, force=own, cancel=lambda: next(asked) == 5)
    assert done.finish == "cancel" and list(done.tokens) == own[:5]
    assert generate(demo, PROMPT, k=2, force=own[:9]).finish == "forced"


class Interrupt(KeyboardInterrupt):
    """What a reader of a notebook does in the middle of a cell."""


@contextmanager
def raising(owner: Any, name: str, *, call: int = 0, after: bool = False) -> Iterator[None]:
    """``owner.name`` raises on its ``call``-th use, before or after doing its work."""
    original, uses = getattr(owner, name), count()

    def patched(*args: Any, **more: Any) -> Any:
        if next(uses) != call:
            return original(*args, **more)
        if after:
            original(*args, **more)
        raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, patched)
        yield
    assert next(uses) > call, f"{name} was never reached"


POINTS: dict[str, Callable[[Any], Any]] = {
    "draw of the drafter": lambda s: raising(type(s.chooser), "draft", call=1),
    "law of a row": lambda s: raising(type(s.chooser), "law", call=3),
    "draw of the target": lambda s: raising(type(s.chooser), "pick"),
    "judge, after": lambda s: raising(rounds, "judge", after=True),
    "sink, first token": lambda s: raising(s.sink, "commit", after=True),
    "sink, after": lambda s: raising(s.sink, "scan", after=True),
    "log-probabilities": lambda s: raising(rounds, "_logprobs"),
    "observe": lambda s: raising(s.proposer, "observe", after=True),
    "commit": lambda s: raising(HybridCache, "commit"),
}


@pytest.mark.parametrize("name", POINTS)
@torch.inference_mode()
def test_a_sampled_round_that_fails_leaves_everything_as_it_was(demo, parts, name):
    ids = demo.tokenizer.encode(PROMPT)
    options = GenerateOptions(k=3, temperature=0.7, logprobs=True, ignore_eos=True, stop="zzzz")

    def start() -> Session:
        session = Session(demo, options=options, policy=FixedK(k=3))
        session.feed(ids)
        session.state.sink = session.sink(25, text=True)
        return session

    whole, session = start(), start()
    while whole.state.sink.finish is None:
        run_round(whole.state, 25 - whole.state.sink.generated)
    state = session.state
    run_round(state, 25)
    shown = state.sink.take()
    for _ in range(2):
        before, sunk = parts.frozen.of(state), (state.sink.tokens, state.sink.text, state.sink.finish)
        with pytest.raises(Interrupt), POINTS[name](state):
            run_round(state, 25 - state.sink.generated)
        assert before.difference(parts.frozen.of(state)) is None
        assert (state.sink.tokens, state.sink.text, state.sink.finish) == sunk
    while state.sink.finish is None:
        run_round(state, 25 - state.sink.generated)
    assert session.tokens == whole.tokens and state.sink.text == whole.state.sink.text
    assert shown + state.sink.take() == state.sink.text
    assert [(r.key(), r.logprobs) for r in state.records] == [(r.key(), r.logprobs) for r in whole.state.records]
