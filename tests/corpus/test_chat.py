"""Loss masks of hand-written conversations, token for token, with and without marks in the template.

Expected masks are written out as pieces of text and whether the model generates them; each piece is encoded by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.core.errors import UserError
from workbench.core.tape import Tape
from workbench.corpus import chat as masks
from workbench.corpus import corpus, corpus_fingerprint, prompts, rows
from workbench.corpus.chat import end_of_turn
from workbench.model.tokenizer import Tokenizer

HEAD = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% set fresh = loop.index0 > ns.last %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
)
SAID = (
    "{% if fresh %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}"
)
TAIL = (
    "{{ '\\n' }}{% elif m.role == 'tool' %}{{ '<|im_start|>user\\n[' + m.content + ']<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}"
    "{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
THINKING = HEAD + SAID + TAIL  # takes the thinking of earlier turns away, as the published templates do
MARKED = HEAD + "{% generation %}" + SAID + "{% endgeneration %}" + TAIL
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
USER, REPLY, OPEN = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
END = "<|im_end|>"

Pieces = list[tuple[str, bool]]


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# name: template, messages, tools, and per tape its name's ending and its pieces
CHATS: dict[str, tuple[str, list[dict[str, Any]], Any, dict[str, Pieces]]] = {
    "several turns, one text": (
        PLAIN,
        [said("system", "Be kind."), said("user", "Hi"), said("assistant", "Hello."), said("user", "Bye"),
         said("assistant", "So long – the end.")],
        None,
        {"": [("<|im_start|>system\nBe kind.<|im_end|>\n" + USER + "Hi" + END + "\n" + REPLY, False),
              ("Hello." + END, True), ("\n" + USER + "Bye" + END + "\n" + REPLY, False),
              ("So long – the end." + END, True), ("\n", False)]},
    ),
    "thinking is taken out of history": (
        THINKING,
        [said("user", "Hi"), said("assistant", "Hello.", reasoning_content="hm"), said("user", "Bye"),
         said("assistant", "So long.", reasoning_content="so")],
        None,
        {"@1": [(USER + "Hi" + END + "\n" + OPEN, False), ("hm\n</think>\n\nHello." + END, True), ("\n", False)],
         "@3": [(USER + "Hi" + END + "\n" + REPLY + "Hello." + END + "\n" + USER + "Bye" + END + "\n" + OPEN, False),
                ("so\n</think>\n\nSo long." + END, True), ("\n", False)]},
    ),
    "a tool call and its result": (
        THINKING,
        [said("user", "1?"), said("assistant", None, tool_calls=[CALL], reasoning_content="add"), said("tool", "2"),
         said("assistant", "Two.")],
        [{"name": "add"}],
        {"": [('<|im_start|>system\n[{"name": "add"}]<|im_end|>\n' + USER + "1?" + END + "\n" + OPEN, False),
              ('add\n</think>\n\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' + END, True),
              ("\n" + USER + "[2]" + END + "\n" + OPEN, False), ("\n</think>\n\nTwo." + END, True), ("\n", False)]},
    ),
    "an empty answer is the end of its turn": (
        PLAIN,
        [said("user", "Hush"), said("assistant", "")],
        None,
        {"": [(USER + "Hush" + END + "\n" + REPLY, False), (END, True), ("\n", False)]},
    ),
    "a question without an answer at the end": (
        PLAIN,
        [said("user", "Hi"), said("assistant", "Yes?"), said("user", "No.")],
        None,
        {"": [(USER + "Hi" + END + "\n" + REPLY, False), ("Yes?" + END, True),
              ("\n" + USER + "No." + END + "\n", False)]},
    ),
    "two answers in a row": (
        PLAIN,
        [said("user", "Hi"), said("assistant", "One"), said("assistant", "Two")],
        None,
        {"": [(USER + "Hi" + END + "\n" + REPLY, False), ("One" + END, True), ("\n" + REPLY, False),
              ("Two" + END, True), ("\n", False)]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def row(name: str) -> dict[str, Any]:
    _, messages, tools, _ = CHATS[name]
    return {"id": "c", "messages": messages, **({"tools": tools} if tools else {})}


def check(tape: Tape, tokenizer: Tokenizer, pieces: Pieces) -> None:
    ids = [(i, generated) for text, generated in pieces for i in tokenizer.encode(text)]
    assert tape.tokens.tolist() == [i for i, _ in ids]
    assert tape.supervised is not None and tape.supervised.tolist() == [generated for _, generated in ids]
    assert tape.prompt_len == [generated for _, generated in ids].index(True)
    assert tape.n_bytes == len("".join(text for text, _ in pieces).encode())


@pytest.mark.parametrize("name", CHATS)
def test_masks_are_what_the_model_generates(tokenizer: Tokenizer, name: str) -> None:
    template, _, _, expected = CHATS[name]
    tapes = corpus([row(name)], tokenizer=tokenizer, chat_template=template)
    assert [tape.doc_id for tape in tapes] == ["c" + ending for ending in expected]
    for tape, pieces in zip(tapes, expected.values(), strict=True):
        check(tape, tokenizer, pieces)
        assert 0 not in tape.tokens, "no end of text is added to the end of a turn"


@pytest.mark.parametrize("name", [name for name, chat in CHATS.items() if chat[0] is THINKING])
def test_marks_say_the_same_as_the_comparison(tokenizer: Tokenizer, name: str) -> None:
    """The marks hold the opening of the thinking too, which a reply's opening gives and nobody generates."""
    made = [corpus([row(name)], tokenizer=tokenizer, chat_template=template) for template in (THINKING, MARKED)]
    assert corpus_fingerprint(made[0]) == corpus_fingerprint(made[1])


def _no_opening(self: Any, tokenizer: Tokenizer, upto: int, *, opened: bool = False) -> str:
    return "".join(piece for piece, _ in self.spans(tokenizer, upto))


MISTAKES = {
    "what follows the turn is supervised": (masks, "turn_end", lambda text, start, tokenizer: len(text)),
    "the opening of a reply is supervised": (masks.Conversation, "text", _no_opening),
    "the mask is one token late": (
        rows, "supervised_tokens", lambda offsets, numbers: np.roll(masks.supervised_tokens(offsets, numbers), 1),
    ),
    "the first turn alone is marked": (
        masks, "_numbers", lambda text, places, own=masks._numbers: own(text, places[:1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    where, attribute, wrong = MISTAKES[mistake]
    monkeypatch.setattr(where, attribute, wrong)
    name = "several turns, one text"
    (tape,) = corpus([row(name)], tokenizer=tokenizer, chat_template=PLAIN)
    with pytest.raises(AssertionError):
        check(tape, tokenizer, CHATS[name][3][""])


def test_one_text_of_a_rewriting_template_would_lose_what_was_generated(tokenizer: Tokenizer) -> None:
    name = "thinking is taken out of history"
    whole = "".join(piece for piece, _ in tokenizer.with_template(THINKING).render(row(name)["messages"]))
    assert "hm" not in whole and "so\n</think>" in whole
    tapes = corpus([row(name)], tokenizer=tokenizer, chat_template=THINKING)
    assert "hm\n</think>" in tokenizer.decode(tapes[0].tokens[tapes[0].supervised].tolist())


def test_variables_reach_the_template_and_a_row_may_hold_its_own(tokenizer: Tokenizer) -> None:
    talk = {"messages": [said("user", "Hi"), said("assistant", "Yes.")]}
    pieces = [(USER + "Hi" + END + "\n" + OPEN + "\n</think>\n\n", False), ("Yes." + END, True), ("\n", False)]
    quiet = {"enable_thinking": False}
    (one,) = corpus([talk], tokenizer=tokenizer, chat_template=THINKING, template_options=quiet)
    (two,) = corpus([{**talk, "chat_template_kwargs": quiet}], tokenizer=tokenizer, chat_template=THINKING)
    (other,) = corpus([talk], tokenizer=tokenizer, chat_template=THINKING)
    check(one, tokenizer, pieces)
    check(two, tokenizer, pieces)
    assert one.prompt_len > other.prompt_len, "with thinking its end is generated"


def test_a_token_across_the_opening_is_not_supervised(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}th{{ m.content }}<|im_end|>{% else %}{{ m.content }} "
        "{% endif %}{% endfor %}{% if add_generation_prompt %}th{% endif %}"
    )
    talk = [said("user", "x"), said("assistant", "e end")]
    (tape,) = corpus([{"messages": talk}], tokenizer=tokenizer, chat_template=template)
    check(tape, tokenizer, [("x the", False), (" end<|im_end|>", True)])


def test_the_end_of_a_turn_is_told_from_the_end_of_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2]) == "<|im_end|>" and tokenizer.decode([0]) == "<|endoftext|>"
    for template in (PLAIN, THINKING, MARKED):
        assert end_of_turn(tokenizer.with_template(template)) == 2
    bare = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert end_of_turn(tokenizer.with_template(bare)) is None
    with pytest.raises(UserError, match="does not render an answer after its own opening"):
        end_of_turn(tokenizer.with_template("{{ messages | length }}{% if add_generation_prompt %}:{% endif %}"))


REFUSED = {
    "no assistant message": (PLAIN, [said("system", "Be kind.")]),
    "no assistant message, so no token of it": (PLAIN, [said("user", "Hi")]),
    "begins with an assistant message": (PLAIN, [said("assistant", "Hi")]),
    "marks no assistant text": (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if 0 %}{% generation %}{% endgeneration %}{% endif %}",
        [said("user", "Hi"), said("assistant", "Yes")],
    ),
    "whole conversation as generated": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        [said("assistant", "Hi")],
    ),
    "render as nothing": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
        [said("user", "Hi"), said("assistant", "Yes")],
    ),
    "does not begin with the template's opening": (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        [said("user", "Hi"), said("assistant", "Yes")],
    ),
    "changes what the chat template marks": (
        "{% for m in messages %}({% generation %}{{ messages | length }}{{ m.role }}{% endgeneration %}){% endfor %}",
        [said("user", "Hi"), said("assistant", "Yes")],
    ),
    "template fails on this conversation": ("{{ messages[0].content.nothing.more }}", [said("assistant", "Hi")]),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_cannot_be_told_is_refused_or_set_aside(tokenizer: Tokenizer, says: str) -> None:
    template, messages = REFUSED[says]
    bad, good = {"id": "bad", "messages": messages}, {"id": "good", "tokens": [3, 4]}
    with pytest.raises(UserError, match=f"document 'bad': .*{says}"):
        corpus([good, bad], tokenizer=tokenizer, chat_template=template)
    aside: list[tuple[str, str]] = []
    tapes = corpus([bad, good], tokenizer=tokenizer, chat_template=template, quarantine=aside)
    assert [tape.doc_id for tape in tapes] == ["good"] and [doc_id for doc_id, _ in aside] == ["bad"]
    assert says in aside[0][1]


def test_a_template_is_a_file_or_a_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN, "utf-8")
    talk = [{"messages": [said("user", "Hi"), said("assistant", "Yes")]}]
    by = [corpus(talk, tokenizer=tokenizer, chat_template=t) for t in (PLAIN, tmp_path / "t.jinja")]
    assert corpus_fingerprint(by[0]) == corpus_fingerprint(by[1])
    for given, says in ((str(tmp_path / "none.jinja"), "no such file"), (5, "of type int")):
        with pytest.raises(UserError, match=says):
            corpus(talk, tokenizer=tokenizer, chat_template=given)
    with pytest.raises(UserError, match="needs a tokenizer"):
        corpus(talk, chat_template=PLAIN)
    with pytest.raises(UserError, match="'tools', which the conversation itself gives"):
        corpus(talk, tokenizer=tokenizer, template_options={"tools": []})


# ---------------------------------------------------------------- prompts


def test_prompts_end_with_the_opening_of_a_reply(tokenizer: Tokenizer) -> None:
    talk = [said("user", "Hi"), said("assistant", "Hello.", reasoning_content="hm"), said("user", "Bye"),
            said("assistant", "Left out")]  # fmt: skip
    asked = prompts(
        [{"messages": talk}, {"prompt": talk[:1]}, {"prompt": "the"}, "the", {"tokens": [5, 6, 7], "prompt_len": 2}],
        tokenizer=tokenizer,
        chat_template=THINKING,
    )
    said_so = [tokenizer.decode(tape.tokens.tolist()) for tape in asked][:4]
    assert said_so[0] == USER + "Hi" + END + "\n" + REPLY + "Hello." + END + "\n" + USER + "Bye" + END + "\n" + OPEN
    assert said_so[1:] == [USER + "Hi" + END + "\n" + OPEN, "the", "the"]
    assert asked[4].tokens.tolist() == [5, 6]
    assert all(tape.prompt_len == len(tape) for tape in asked)
    (asked_so,) = prompts(["the"], tokenizer=tokenizer, chat=True, chat_template=THINKING)
    assert tokenizer.decode(asked_so.tokens.tolist()) == USER + "the" + END + "\n" + OPEN


def test_prompts_that_cannot_be_used_are_refused_or_set_aside(tokenizer: Tokenizer) -> None:
    bad = [{"messages": [said("system", "Be kind.")]}, {"prompt": 5}, "", "abcdef"]
    for source in bad:
        with pytest.raises(UserError, match="document 'doc-000000'"):
            prompts([source], tokenizer=tokenizer, max_prompt=4)
    aside: list[tuple[str, str]] = []
    asked = prompts([*bad, "abc"], tokenizer=tokenizer, max_prompt=4, quarantine=aside)
    assert len(asked) + len(aside) == len(bad) + 1 and [len(tape) for tape in asked] == [3]
    with pytest.raises(UserError, match="holds no prompt that can be used"):
        prompts(bad, tokenizer=tokenizer, max_prompt=4, quarantine=[])


def test_the_shipped_prompts_and_a_limit(tokenizer: Tokenizer) -> None:
    asked = prompts("demo", tokenizer=tokenizer, limit=5, prompt_tokens=16)
    assert len({tape.source for tape in asked}) == 5 and {len(tape) for tape in asked} == {16}
    assert asked.name == "prompts(demo (limit=5))"
    with pytest.raises(UserError, match=r"prompt_tokens=4 cuts plain texts"):
        prompts("demo", tokenizer=tokenizer, chat=True, prompt_tokens=4)
