"""A chat's replies are those of fresh runs, whichever way it came by the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench.core.errors import UserError
from workbench.model.hybrid import HybridModel
from workbench.model.tokenizer import Tokenizer
from workbench.spec.chat import Chat, Reply

FIRST, SECOND, THIRD = "Write a function that adds two numbers.", "And one that multiplies?", "Thanks."


def fresh(chat: Chat, **options: Any) -> tuple[int, ...]:
    """The last reply by a run of its own."""
    ids, _ = chat._rendered(chat.messages[:-1])
    return wb.generate(chat.model, ids, **options).tokens


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2}, {"k": 0}],
    ids=["greedy", "drawn", "plain"],
)
def test_turns_extend_rewind_and_restore(demo: HybridModel, options: dict[str, Any], tmp_path: Path) -> None:
    options = {"max_new_tokens": 8, **options}
    store = wb.PrefixStore(1 << 26, tmp_path)
    chat = wb.Chat(demo, store, **options)
    seen: list[Reply] = []

    def say(on: Chat, text: str) -> Reply:
        seen.append(on.say(text))
        assert seen[-1].tokens == fresh(on, **options)
        assert seen[-1].saved + seen[-1].recomputed == len(on._rendered(on.messages[:-1])[0])
        return seen[-1]

    first = say(chat, FIRST)
    assert (first.how, first.saved) == ("fresh", 0)
    second = say(chat, SECOND)
    assert second.how in ("extended", "rewound") and second.saved > first.recomputed // 2
    chat.undo()
    again = say(chat, THIRD)
    assert again.how == "rewound" and again.saved >= second.saved
    other = wb.Chat(demo, wb.PrefixStore(1 << 26, tmp_path), **options)
    back = say(other, FIRST)
    assert (back.how, back.recomputed, back.text) == ("restored", 0, first.text)
    chat.messages[0]["content"] = "Write nothing at all."
    assert say(chat, SECOND).how in ("fresh", "restored")
    assert "tokens saved" in chat._repr_html_() and "computed" in seen[0]._repr_html_()


def test_a_reply_that_encodes_to_other_ids_is_taken_up_at_the_turns_start(demo: HybridModel) -> None:
    chat = Chat(demo, max_new_tokens=8)
    first = chat.say(FIRST)
    chat.messages[-1]["content"] = first.text[:4] + " otherwise"
    second = chat.say(SECOND)
    assert second.how == "rewound" and second.saved >= first.recomputed - 4
    assert second.tokens == fresh(chat, max_new_tokens=8)


def test_a_generation_tail_that_later_turns_drop_is_rewound(demo: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    own = demo.tokenizer
    assert own is not None
    template = own.config["chat_template"]
    tail = "{% if add_generation_prompt %}"
    assert tail in template
    template = template + tail + "Let me think.\n{% endif %}"
    monkeypatch.setattr(demo, "tokenizer", Tokenizer(own.backend, {**own.config, "chat_template": template}, "other"))
    chat = Chat(demo, max_new_tokens=6)
    first = chat.say(FIRST)
    _, stable = chat._rendered(chat.messages[:-1])
    second = chat.say(SECOND)
    assert first.recomputed > stable and (second.how, second.saved) == ("rewound", stable)
    assert second.tokens == fresh(chat, max_new_tokens=6)


def test_without_a_store_or_a_common_prefix_the_conversation_is_fed_anew(demo: HybridModel) -> None:
    chat = Chat(demo, max_new_tokens=4, messages=[{"role": "system", "content": "Be brief."}], primed=False)
    chat.say(FIRST)
    chat.messages[0]["content"] = "Be long."
    assert chat.say(SECOND).how == "fresh"
    assert chat.say(THIRD).how == "extended"


def test_a_refused_turn_leaves_the_conversation(demo: HybridModel) -> None:
    chat = Chat(demo, max_new_tokens=4, capacity=60)
    chat.say(FIRST)
    before = list(chat.messages)
    with pytest.raises(UserError, match="do not fit"):
        chat.say(SECOND * 20)
    assert chat.messages == before
    assert chat.say(THIRD).how == "extended" and chat.messages[:2] == before
    with pytest.raises(UserError, match="max_new_tokens=0"):
        chat.say(SECOND, max_new_tokens=0)


def test_a_chat_needs_a_tokenizer_and_something_to_undo(lively, demo: HybridModel) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        Chat(lively.model)
    with pytest.raises(UserError, match="no reply to undo"):
        Chat(demo).undo()
    with pytest.raises(UserError, match="unknown option 'temprature'"):
        Chat(demo, temprature=1.0)
