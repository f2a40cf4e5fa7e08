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
from workbench.spec.compare import compare_sessions
from workbench.spec.session import Session
from workbench.spec.turns import rewind as plain_rewind

FIRST, SECOND, THIRD = "Write a function that adds two numbers.", "And one that multiplies?", "Thanks."


def fresh(chat: Chat, **options: Any) -> tuple[int, ...]:
    """The last reply by a run of its own."""
    ids, _ = chat._rendered(chat.messages[:-1])
    assert chat.replies[-1].prompt == tuple(ids)
    return wb.generate(chat.model, ids, **options).tokens


def anew(chat: Chat, options: dict[str, Any]) -> Session:
    """A session fed the text of the chat's."""
    assert chat.session is not None
    twin = Session(chat.model, options=wb.GenerateOptions(**options))
    twin.feed(chat.session.tokens[:-1], force=chat.session.tokens[-1])
    return twin


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
    session = chat.session
    again = say(chat, THIRD)
    assert again.how == "rewound" and again.saved >= second.saved and chat.session is session
    assert not compare_sessions(session, anew(chat, options))
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
    session, stable = chat.session, chat._rendered(chat.messages[:-1])[1]
    second = chat.say(SECOND)
    assert (second.how, second.saved) == ("rewound", stable - 1) and chat.session is session
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
    assert first.recomputed > stable and (second.how, second.saved) == ("rewound", stable - 1)
    assert second.tokens == fresh(chat, max_new_tokens=6)


def test_the_same_question_again_and_another_one_rewind_without_a_copy(demo: HybridModel) -> None:
    chat = Chat(demo, max_new_tokens=8)
    first, second = chat.say(FIRST), chat.say(SECOND)
    session = chat.session
    for message, how in ((SECOND, "rewound"), (SECOND, "rewound"), (THIRD, "rewound")):
        chat.undo()
        again = chat.say(message)
        assert again.how == how and chat.session is session and again.saved >= first.recomputed
        assert again.tokens == fresh(chat, max_new_tokens=8)
        assert message == THIRD or again.tokens == second.tokens
    held = sum(place.nbytes for place in chat._places)
    assert chat.nbytes == held > 0
    recurrent = sum(plane.nbytes for plane in session.state.cache.recurrent)
    config = demo.config
    row = 4 * (2 * config.hidden_size + config.vocab_size)
    assert held == len(chat._places) * (recurrent + row)


def test_a_rewind_that_a_ring_refuses_falls_back_and_says_so(demo: HybridModel) -> None:
    options = dict(window=8, chunk=128, max_new_tokens=200, ignore_eos=True)
    store = wb.PrefixStore(1 << 26)
    for where, how in ((store, "restored"), (None, "fresh")):
        chat = Chat(demo, where, **options)
        chat.say(FIRST)
        chat.messages[-1]["content"] = "No."
        second = chat.say(SECOND, max_new_tokens=6)
        assert second.how == how and "have been lapped" in second.refused[0] and "lapped" in second._repr_html_()
        assert second.tokens == fresh(chat, **{**options, "max_new_tokens": 6})


def test_negative_control_a_rewind_to_the_wrong_place_changes_the_reply(
    demo: HybridModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(session: Session, to: Any, capacity: int | None) -> None:
        windows = session.state.cache.save().recurrent
        plain_rewind(session, to, capacity)
        for plane, (conv, state) in zip(session.state.cache.recurrent, windows, strict=True):
            plane.conv_BWC, plane.state_BHKV = conv, state  # those of the reply that was dropped

    monkeypatch.setattr("workbench.spec.turns.rewind", late)
    chat = Chat(demo, max_new_tokens=8)
    chat.say(FIRST)
    chat.messages[-1]["content"] = "No."
    chat.say(SECOND)
    assert compare_sessions(chat.session, anew(chat, {}))


def test_an_interrupted_turn_is_taken_up_again(demo: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(demo, max_new_tokens=8)
    chat.say(FIRST)
    before, forward = list(chat.messages), HybridModel.forward
    for call in (2, 1, 0):  # a round, the prompt's end, its beginning
        count = iter(range(99))

        def failing(self: HybridModel, *args: Any, count: Any = count, call: int = call, **more: Any) -> Any:
            if next(count) == call:
                raise KeyboardInterrupt
            return forward(self, *args, **more)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(HybridModel, "forward", failing)
            chat.say(SECOND)
        assert chat.messages == before
    second = chat.say(SECOND)
    assert second.how in ("extended", "rewound") and second.tokens == fresh(chat, max_new_tokens=8)


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
