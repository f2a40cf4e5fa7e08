"""The sink: order of reasons, text and tokens at the end, and marks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.core.errors import UserError
from workbench.model.tokenizer import Tokenizer
from workbench.spec.sink import Sink

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def state(sink: Sink) -> tuple[Any, ...]:
    return sink.tokens, sink.generated, sink.text, sink.finish, sink.matched


class CancelFirst(Sink):
    """A sink that asks ``cancel`` before anything else: the control."""

    def commit(self, token: int) -> str | None:
        return self.poll() or super().commit(token)


@pytest.mark.parametrize("stop, string, length, cancel", list(itertools.product([False, True], repeat=4)))
def test_precedence(tokenizer, stop, string, length, cancel):
    """Every set of reasons that holds at once: stop > stop_string > length > cancel."""
    (token,) = tokenizer.encode("x")
    given = dict(
        tokenizer=tokenizer,
        stop_ids=[token] if stop else [],
        stop_strings=["x"] if string else [],
        max_new_tokens=1 if length else 9,
        cancel=lambda: cancel,
    )
    holding = [
        name
        for name, holds in zip(("stop", "stop_string", "length", "cancel"), (stop, string, length, cancel))
        if holds
    ]
    sink = Sink(**given)
    assert sink.commit(token) == sink.finish == (holding[0] if holding else None)
    assert sink.tokens == (token,) and sink.text == ("" if stop or string else "x")
    if cancel and len(holding) > 1:
        assert CancelFirst(**given).commit(token) == "cancel" != holding[0]


def test_a_stop_token_is_kept_shows_nothing_and_releases_the_tail(tokenizer):
    sink = Sink(tokenizer=tokenizer, stop_ids={0}, stop_strings=["END"], max_new_tokens=99)
    ids = tokenizer.encode("the E")
    assert sink.scan([*ids, 0, 7, 8]) == (len(ids) + 1, "stop")
    assert sink.tokens == (*ids, 0) and sink.text == "the E" and sink.matched is None
    with pytest.raises(AssertionError):
        sink.commit(7)
    with pytest.raises(AssertionError):
        sink.poll()


@pytest.mark.parametrize("reason", ["length", "cancel"])
def test_the_tail_is_released_at_every_other_end(tokenizer, reason):
    ids = tokenizer.encode("the E")
    asked = iter([False] * (len(ids) - 1) + [True])
    sink = Sink(
        tokenizer=tokenizer,
        stop_strings=["END"],
        max_new_tokens=len(ids) if reason == "length" else 99,
        cancel=(lambda: next(asked)) if reason == "cancel" else None,
    )
    assert sink.scan(ids) == (len(ids), reason) and sink.text == "the E"


def test_half_a_character_at_the_end_is_what_decode_writes(tokenizer):
    ids = tokenizer.encode("漢")
    assert len(ids) > 1
    sink = Sink(tokenizer=tokenizer, max_new_tokens=1)
    assert sink.commit(ids[0]) == "length" and sink.text == tokenizer.decode(ids[:1])


def test_cancel_is_asked_once_per_token_and_not_after_another_reason(tokenizer):
    asked: list[int] = []
    sink = Sink(tokenizer=tokenizer, stop_ids={0}, max_new_tokens=9, cancel=lambda: bool(asked.append(1)))
    assert sink.scan([7, 8, 9]) == (3, None) and len(asked) == 3
    assert sink.commit(0) == "stop" and len(asked) == 3


def test_poll_ends_before_the_first_token():
    sink = Sink(max_new_tokens=4, cancel=lambda: True)
    assert sink.poll() == sink.finish == "cancel" and sink.generated == 0
    assert Sink(max_new_tokens=4).poll() is None
    assert Sink(max_new_tokens=0).finish == "length"


def pieces(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """A random tokenisation: cut the text anywhere, then encode the parts."""
    cuts = sorted({0, len(text), *rng.sample(range(len(text)), k=rng.randrange(6))})
    return [token for a, b in itertools.pairwise(cuts) for token in tokenizer.encode(text[a:b])]


@pytest.mark.parametrize("stop", ["END", "\n\n", "漢字", "👍", "a stop of several words"])
def test_a_stop_string_across_tokens_of_every_split(tokenizer, stop):
    rng, before = random.Random(1), "Some text, 漢 E EN \n then "
    for _ in range(60):
        ids = pieces(tokenizer, before + stop + " and more", rng)
        sink = Sink(tokenizer=tokenizer, stop_strings=[stop], max_new_tokens=999)
        kept, reason = sink.scan(ids)
        assert reason == "stop_string" and sink.text == before and sink.matched == stop
        assert stop in tokenizer.decode(ids[:kept]) and stop not in tokenizer.decode(ids[: kept - 1])
        assert sink.tokens == tuple(ids[:kept])


def test_blocks_of_every_size_at_every_offset_are_one_by_one(tokenizer):
    ids = tokenizer.encode("words before the stop END and words after it")

    def make() -> Sink:
        return Sink(tokenizer=tokenizer, stop_strings=["END"], max_new_tokens=99)

    plain = make()
    for token in ids:
        if plain.commit(token):
            break
    for size in range(1, 9):
        for first in range(size):
            sink, shown = make(), ""
            for block in [ids[:first], *(ids[a : a + size] for a in range(first, len(ids), size))]:
                _, reason = sink.scan(block)
                shown += sink.take()
                assert plain.text.startswith(shown)
                if reason:
                    break
            assert state(sink) == state(plain) and shown == plain.text and sink.take() == ""


def walk(make: Callable[[], Sink], ids: list[int], cut: int) -> tuple[Sink, Sink]:
    """A sink that went on from ``cut``, was rewound and went on again, and one that never was."""
    sinks = make(), make()
    for sink in sinks:
        sink.scan(ids[:cut])
    mark, before = sinks[0].mark(), state(sinks[0])
    if sinks[0].finish is None:
        sinks[0].scan(ids[cut:])
        sinks[0].rewind(mark)
        assert state(sinks[0]) == before
    for sink in sinks:
        if sink.finish is None:
            sink.scan(ids[cut:])
    return sinks


@pytest.mark.parametrize("given", [{}, {"stop_strings": ["EN D"]}, {"stop_ids": {0}}, {"max_new_tokens": 9}])
def test_rewinding_at_every_place_is_never_having_gone_on(tokenizer, given):
    ids = [*tokenizer.encode("漢字 E EN 👍 EN D"), 0, 7]
    for cut in range(len(ids)):
        again, plain = walk(lambda: Sink(tokenizer=tokenizer, **{"max_new_tokens": 99, **given}), ids, cut)
        assert state(again) == state(plain) and again.take() == plain.take()


def test_taken_text_cannot_be_rewound(tokenizer):
    sink = Sink(tokenizer=tokenizer, max_new_tokens=9)
    mark = sink.mark()
    sink.scan(tokenizer.encode("some words"))
    sink.take()
    with pytest.raises(AssertionError, match="taken"):
        sink.rewind(mark)


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    sink = Sink(stop_ids={5}, max_new_tokens=9)
    assert sink.scan([1, 2, 5, 3]) == (3, "stop") and sink.text == "" and sink.tokens == (1, 2, 5)
    with pytest.raises(UserError, match="no tokenizer"):
        Sink(stop_strings=["x"], max_new_tokens=9)
    with pytest.raises(UserError, match="max_new_tokens"):
        Sink(max_new_tokens=-1)
