"""The tokenizer wrapper: round trips, no invented tokens, and chat spans with {% generation %} marks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import CheckpointError, UserError
from workbench.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_dir) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def with_template(tiny_dir: Path, tmp_path: Path, template: str | None) -> Tokenizer:
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy", dirs_exist_ok=True))
    file = path / "chat_template.jinja"
    file.unlink() if template is None else file.write_text(template, "utf-8")
    return Tokenizer.load(path)


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode("utf-8")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_nothing_is_invented_and_special_tokens_are_seen(tokenizer):
    assert tokenizer.encode("") == []
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.decode([0]) == "<|endoftext|>"
    assert tokenizer.vocab_size == 261


def test_a_beginning_that_the_file_would_add_is_not_added(tiny_dir, tmp_path):
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy"))
    raw = json.loads((path / "tokenizer.json").read_text("utf-8"))
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    (path / "tokenizer.json").write_text(json.dumps(raw), "utf-8")
    again = Tokenizer.load(path)
    assert again.backend.encode("a").ids[0] == 0, "the file does add one when asked"
    assert again.encode("a") == Tokenizer.load(tiny_dir).encode("a")


def test_pieces_are_the_tokens_alone(tokenizer):
    ids = tokenizer.encode("the th é")
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == len(ids)
    assert pieces[0] == "the" and pieces[2] == "th" and pieces[-1] == "\ufffd"


def test_the_fingerprint_is_of_the_file(tiny_dir, tmp_path):
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy"))
    first = Tokenizer.load(path).fingerprint
    assert first == Tokenizer.load(tiny_dir).fingerprint and len(first) == 16
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text("utf-8") + "\n", "utf-8")
    assert Tokenizer.load(path).fingerprint != first


def test_assistant_text_is_marked(tokenizer):
    spans = tokenizer.render(CHAT)
    assert [text for text, generated in spans if generated] == ["Hello.<|im_end|>", "So long.<|im_end|>"]
    assert "".join(text for text, _ in spans) == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT
    )
    opened = tokenizer.render(CHAT[:1], add_generation_prompt=True)
    assert opened == [("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False)]


def test_spans_are_those_of_transformers(tokenizer, tiny_dir):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tiny_dir)
    out = theirs.apply_chat_template(CHAT, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = [], []
    for text, generated in tokenizer.render(CHAT):
        part = tokenizer.encode(text)
        ids += part
        mask += [int(generated)] * len(part)
    assert ids == out["input_ids"]
    assert mask == out["assistant_masks"]


def test_private_characters_in_a_message_are_text(tokenizer):
    """The marks are characters that neither the template nor the conversation holds."""
    content = "".join(chr(c) for c in range(0xE000, 0xE010))
    spans = tokenizer.render([{"role": "user", "content": content}, {"role": "assistant", "content": content}])
    assert [generated for _, generated in spans] == [False, True, False]
    assert spans[1][0] == content + "<|im_end|>"
    assert content in spans[0][0]


def test_templates_may_use_what_transformers_offers(tiny_dir, tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=None) }}{% endfor %}"
    )
    chat = [{"role": "user", "content": "é"}, {"role": "user", "content": "b"}]
    assert with_template(tiny_dir, tmp_path, template).render(chat) == [('{"role": "user", "content": "é"}', False)]
    ascii_only = "{{ messages[0].content | tojson(ensure_ascii=True) }}{{ eos_token }}{{ pad_token }}"
    spans = with_template(tiny_dir, tmp_path, ascii_only).render(chat)
    assert spans == [('"\\u00e9"<|endoftext|><|endoftext|>', False)]


def test_templates_are_sandboxed(tiny_dir, tmp_path):
    for template in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(UserError, match="chat template fails on this conversation"):
            with_template(tiny_dir, tmp_path, template).render(CHAT)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [{"role": 3, "content": "hi"}]])
def test_a_message_of_another_shape_is_a_sentence(tokenizer, messages):
    with pytest.raises(UserError, match=r"message 0 is .*: each message must be a mapping with a role and a content"):
        tokenizer.render(messages)


def test_a_refusal_of_the_template_is_a_sentence(tokenizer, tiny_dir, tmp_path):
    with pytest.raises(UserError, match="chat template refuses this conversation: unknown role tool"):
        tokenizer.render([{"role": "tool", "content": "x"}])
    with pytest.raises(UserError, match=r"has no chat_template: give plain text, or add chat_template\.jinja"):
        with_template(tiny_dir, tmp_path, None).render(CHAT)
    with pytest.raises(UserError, match="chat template of this checkpoint is not valid Jinja"):
        with_template(tiny_dir, tmp_path, "{% for m in messages %}").render(CHAT)


def test_damage_names_the_file(tiny_dir, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; text needs one \(token ids can be given"):
        Tokenizer.load(tmp_path)
    path = Path(shutil.copytree(tiny_dir, tmp_path / "copy"))
    (path / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(path)
    (path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(path)
