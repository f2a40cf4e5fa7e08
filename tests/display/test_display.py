"""Strips and cards: spans follow the rounds, text is escaped, white space shows, positions are true."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import pytest

from workbench.core.errors import UserError
from workbench.core.records import RoundRecord
from workbench.display import card, kinds_from_rounds, strip_from_rounds, token_strip
from workbench.display.card import shown
from workbench.display.markup import FILLS
from workbench.display.spans import KINDS, STRUCK


def record(index, start, drafts, accepted, emitted, stop=""):
    n = len(drafts)
    top1 = tuple(0.9 - 0.1 * j for j in range(n))
    return RoundRecord(index, start, 1, n, tuple(drafts), top1, accepted, emitted, None, "k", stop)


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(html):
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    return html


def body(strip):
    return check(strip._repr_html_()).partition("<pre ")[2].partition(">")[2]


def titles(strip):
    return [unescape(title) for title in re.findall(r'title="([^"]*)"', body(strip))]


def test_spans_of_rounds():
    # Prompt 0-2, the pending token at 3; then a part-accepted, a fully rejected, an undrafted and a full round.
    rounds = [
        record(0, 3, (5, 6, 7), 2, 3),
        record(1, 6, (8, 9), 0, 1),
        record(2, 7, (), 0, 1),
        record(3, 8, (4,), 1, 2),
    ]
    got = [(span.kind, span.position) for span in kinds_from_rounds(3, rounds)]
    assert got == [
        *[("prompt", p) for p in range(3)],
        ("plain", 3),
        ("accepted", 4),
        ("accepted", 5),
        ("rejected", 6),
        ("bonus", 6),
        ("rejected", 7),
        ("rejected", 8),
        ("bonus", 7),
        ("plain", 8),
        ("accepted", 9),
        ("bonus", 10),
    ]
    rejected = [span for span in kinds_from_rounds(3, rounds) if span.kind == "rejected"]
    assert [(span.token, span.slot, span.round) for span in rejected] == [(7, 3, 0), (8, 1, 1), (9, 2, 1)]
    assert rejected[0].confidence == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("stop", "accepted", "emitted", "expected"),
    [
        ("stop", 3, 2, ["accepted", "accepted", "dropped"]),
        ("forced", 2, 2, ["accepted", "dropped", "rejected", "forced"]),
        ("forced", 1, 2, ["accepted", "rejected", "rejected", "forced"]),
        ("", 3, 4, ["accepted", "accepted", "accepted", "bonus"]),
    ],
)
def test_cut_and_forced_rounds(stop, accepted, emitted, expected):
    spans = kinds_from_rounds(1, [record(0, 0, (5, 6, 7), accepted, emitted, stop)])[1:]
    assert [span.kind for span in spans] == expected
    assert [span.position for span in spans if span.kind not in STRUCK] == list(range(1, emitted + 1))


def test_strip_titles_give_position_round_and_probability():
    rounds = [record(0, 1, (5, 6, 7), 1, 2)]
    strip = strip_from_rounds([10, 11, 5, 12, 13], 1, rounds, lambda i: f"<{i}>")
    assert strip.counts == {"prompt": 1, "plain": 2, "accepted": 1, "bonus": 1, "rejected": 2}
    assert repr(strip) == "TokenStrip(1 prompt, 2 plain, 1 accepted, 1 bonus, 2 rejected)"
    assert titles(strip) == [
        "'<10>'\nprompt\nposition 0",
        "'<11>'\ntarget's token, nothing drafted\nposition 1",
        "'<5>'\naccepted draft\nposition 2\nround 0\ndrafter's top-1 probability 0.900",
        "'<6>'\nrejected draft\ndrafted for position 3\nround 0\ndrafter's top-1 probability 0.800",
        "'<7>'\nrejected draft\ndrafted for position 4\nround 0\ndrafter's top-1 probability 0.700",
        "'<12>'\nbonus (target's own token)\nposition 3\nround 0",
        "'<13>'\ntarget's token, nothing drafted\nposition 4",
    ]
    with pytest.raises(UserError, match="up to position 3"):
        strip_from_rounds([10, 11, 5], 1, rounds, str)


def test_strip_escapes_and_shows_white_space():
    texts = ['<script>alert("x")</script>', " &amp;", "\n\n", "\ta\r", "\x07", "", "'\"\n"]
    html = body(token_strip(texts, ["plain"] * len(texts)))
    assert "<script" not in html
    assert "&lt;script&gt;" in html and "&amp;amp;" in html
    assert html.count("↵</span>\n") == 3 and "→" in html and "\\u0007" in html and "∅" in html
    assert html.count('<span class="s"> </span>') == 1
    assert "alert(&quot;x&quot;)" in html
    # A struck line end must not break the line of the text that replaced it.
    struck = body(token_strip(["a\n"], ["rejected"]))
    assert struck.startswith("<del") and "↵</span></del>" in struck


def test_strip_legend_names_the_kinds_present():
    html = token_strip(["a", "b"], ["prompt", "bonus"]).html
    legend = html.partition("<pre")[0].partition("</style>")[2]
    assert "bonus" in legend and "rejected" not in legend
    check(token_strip([], []).html)
    assert repr(token_strip([], [])) == "TokenStrip(empty)"


def test_kinds_look_different_without_the_style_sheet():
    # JupyterLab drops style sheets from a notebook that its reader has not run.
    html = token_strip(list("abcdefg"), list(FILLS)).html
    bare = html.partition("</style>")[2]
    looks = dict(re.findall(r'class="t (\w+)" style="([^"]+)" title', bare))
    assert list(looks) == list(KINDS) and len({*looks.values()}) == len(KINDS)
    assert all("background-color" in look for kind, look in looks.items() if kind != "prompt")
    assert 'style="text-align:left"' in card("a", {"b": 1})._repr_html_()


def test_strip_refuses_what_does_not_fit():
    with pytest.raises(UserError, match="2 texts, 1 kinds"):
        token_strip(["a", "b"], ["plain"])
    with pytest.raises(UserError, match="'draft' is not valid"):
        token_strip(["a"], ["draft"])


def test_card():
    made = card("A <b>", {"rows": 12345, "tau": 1.51234, "exact": True, "bytes": None, "shape": (2, 3)}, "see & ask")
    html = check(made._repr_html_())
    assert "A &lt;b&gt;" in html and "see &amp; ask" in html
    assert [text for _, text in made.rows] == ["12,345", "1.512", "yes", "–", "2, 3"]
    assert repr(made).splitlines()[:2] == ["A <b>", "  rows   12,345"]
    check(card("empty", [])._repr_html_())
    assert [shown(x) for x in (0.0, 123456.7, float("nan"), "x")] == ["0", "123,457", "nan", "x"]
