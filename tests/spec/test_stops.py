"""Stop strings and incremental text: nothing is shown too early, nothing is taken back, splits do not matter."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import UserError
from workbench.model.tokenizer import Tokenizer
from workbench.spec.stops import StopMatcher, TextStream

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


def search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What a reader may see of a whole text: up to the match that is complete first, the longest of them."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


class Eager(StopMatcher):
    """A matcher that withholds nothing: the control."""

    def push(self, text: str) -> str:
        return super().push(text) + self.finish()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


def test_the_vector_of_the_seed():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("hello E", "N", "D x")] == ["hello ", "", ""]
    assert matcher.stopped and matcher.matched == "END" and matcher.finish() == ""
    assert matcher.push("more") == ""


def test_what_turns_out_to_be_no_stop_is_released():
    matcher = StopMatcher(["END", ""])
    assert [matcher.push(piece) for piece in ("E", "N", "E", "N!")] == ["", "", "EN", "EN!"]
    assert matcher.push("EN") == "" and matcher.finish() == "EN" and not matcher.stopped


def test_the_match_complete_first_wins_and_of_those_the_longest():
    for pieces in (["xENDy"], list("xENDy")):
        matcher = StopMatcher(["xENDy", "END"])
        assert "".join(map(matcher.push, pieces)) == "x" and matcher.matched == "END"
    matcher = StopMatcher(["D", "END"])
    assert matcher.push("aEND") == "a" and matcher.matched == "END"


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", max_size=4), max_size=3),
    st.lists(st.integers(0, 24), max_size=6),
)
def test_splits_do_not_matter(text, stops, cuts):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    matcher, shown = StopMatcher(stops), ""
    expected, matched = search(text, stops)
    for a, b in itertools.pairwise(edges):
        shown += matcher.push(text[a:b])
        assert expected.startswith(shown)  # nothing shown is ever taken back
    assert shown + matcher.finish() == expected and matcher.matched == matched


def test_every_offset_of_a_stop():
    text = "one two STOP three"
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            matcher = StopMatcher(["STOP"])
            shown = "".join(map(matcher.push, (text[:a], text[a:b], text[b:])))
            assert shown == "one two " and matcher.stopped


def test_a_matcher_that_does_not_withhold_shows_part_of_a_stop():
    """Control: the properties above can fail."""
    matcher = Eager(["END"])
    assert matcher.push("hello E") + matcher.push("ND") != "hello "


def test_rewinding_the_matcher_is_never_having_gone_on():
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choices("abEND", k=12))
        cut = rng.randrange(13)
        matcher = StopMatcher(["END", "ab"])
        shown = matcher.push(text[:cut])
        mark = matcher.mark()
        matcher.push(text[cut:])
        matcher.finish()
        matcher.rewind(mark)
        assert shown + matcher.push(text[cut:]) + matcher.finish() == search(text, ["END", "ab"])[0]


@pytest.mark.parametrize("bad", ["END", [1], [None]])
def test_stops_that_are_no_list_of_strings_are_a_sentence(bad):
    with pytest.raises(UserError, match="list of strings"):
        StopMatcher(bad)


TEXTS = [
    "plain words, twice: plain words",
    "naïve café, Ωmega, 漢字仮名, ру́сский",
    "flags 🇩🇪 families 👨‍👩‍👧‍👦 thumbs 👍🏽 end",
    "a\ufffdb\ufffd",
    "tabs\tand\n\n  indents\r\n",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    stream, shown = TextStream(tokenizer), ""
    for n, token in enumerate(ids, 1):
        shown += stream.push(token)
        assert tokenizer.decode(ids[:n]).rstrip("\ufffd") == shown.rstrip("\ufffd")
        assert tokenizer.decode(ids).startswith(shown)
    assert shown + stream.flush() == tokenizer.decode(ids) == text


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text's single bytes, which cut every character of more than one."""
    from workbench.spec.matchers import token_bytes

    single = {piece: i for i, piece in enumerate(token_bytes(tokenizer)) if len(piece) == 1}
    return [single[bytes([b])] for b in text.encode()]


def test_bytes_of_a_character_are_held_back_until_it_is_whole(tokenizer):
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in bytewise(tokenizer, "a👍é")] == ["a", "", "", "", "👍", "", "é"]
    assert stream.flush() == ""
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, bytewise(tokenizer, "a👍")[:3])) == "a" and stream.flush() == "\ufffd"


def test_random_ids_and_every_mark(tokenizer):
    """Random ids hold every kind of broken character; a rewound stream goes on as if it had never been used."""
    rng = random.Random(5)
    pieces = bytewise(tokenizer, "a👍é")
    for _ in range(40):
        ids = [rng.choice(pieces) if rng.random() < 0.7 else rng.randrange(4200) for _ in range(24)]
        whole = tokenizer.decode(ids)
        stream, deltas, marks = TextStream(tokenizer), [], []
        for token in ids:
            marks.append(stream.mark())
            deltas.append(stream.push(token))
            assert whole.startswith("".join(deltas))
        assert "".join(deltas) + stream.flush() == whole
        for n in reversed(range(len(ids))):
            stream.rewind(marks[n])
            assert stream.push(ids[n]) == deltas[n]
            stream.rewind(marks[n])
        assert [stream.push(token) for token in ids] == deltas


def test_no_tokenizer_no_text():
    stream = TextStream(None)
    assert stream.push(7) == "" and stream.flush() == ""
