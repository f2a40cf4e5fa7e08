"""Columns that other projects write: prompts with completions, ids with loss masks, Parquet and saved datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from workbench.core.errors import CheckpointError, UserError
from workbench.corpus import corpus, corpus_fingerprint, prompts
from workbench.model.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def test_a_prompt_and_its_completion_are_encoded_each_alone(tokenizer: Tokenizer) -> None:
    (tape,) = corpus([{"prompt": "th", "completion": "e end"}], tokenizer=tokenizer)
    prompt, completion = tokenizer.encode("th"), tokenizer.encode("e end")
    assert tape.tokens.tolist() == [*prompt, *completion] != tokenizer.encode("the end")
    assert tape.supervised.tolist() == [False] * len(prompt) + [True] * len(completion)
    assert tape.prompt_len == len(prompt) and tape.n_bytes == len("the end")
    (short,) = corpus([{"prompt": "th", "completion": "e end"}], tokenizer=tokenizer, max_tokens=3, overflow="truncate")
    assert short.tokens.tolist() == tape.tokens.tolist()[:3] and short.n_bytes == 4


def test_a_prompt_of_messages_is_history(tokenizer: Tokenizer) -> None:
    more = [*CHAT, {"role": "user", "content": "And?"}]
    answer = [{"role": "assistant", "content": "No."}]
    (tape,) = corpus([{"prompt": more, "completion": answer}], tokenizer=tokenizer)
    (all_of_it,) = corpus([{"messages": more + answer}], tokenizer=tokenizer)
    assert tape.tokens.tolist() == all_of_it.tokens.tolist()
    assert tokenizer.decode(tape.tokens[tape.supervised].tolist()) == "No.<|im_end|>"
    assert tokenizer.decode(all_of_it.tokens[all_of_it.supervised].tolist()) == "Yes.<|im_end|>No.<|im_end|>"


def test_ids_are_never_encoded_again(tokenizer: Tokenizer) -> None:
    ids = [token for letter in "the end" for token in tokenizer.encode(letter)]
    assert tokenizer.encode(tokenizer.decode(ids)) != ids, "the text of these ids encodes to others"
    row = {"input_ids": ids, "loss_mask": [0, 0, 1, 1, 1, 0, 1], "messages": CHAT, "seq_len": 7}
    (tape,) = corpus([row], tokenizer=tokenizer)
    assert tape.tokens.tolist() == ids and tape.prompt_len == 2
    assert tape.supervised.tolist() == [False, False, True, True, True, False, True]
    (plain,) = corpus([{"input_ids": ids}])
    assert plain.supervised is None and plain.prompt_len == 0


def test_padding_is_taken_off() -> None:
    row = {"input_ids": [0, 5, 6, 7, 0], "loss_mask": [1, 0, 0, 1, 1], "attention_mask": [0, 1, 1, 1, 0]}
    (tape,) = corpus([row])
    assert tape.tokens.tolist() == [5, 6, 7] and tape.supervised.tolist() == [False, False, True]
    assert tape.prompt_len == 2


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "loss_mask mask that is all false"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "loss_mask that is all true"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one entry per token"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "true and false"),
        ({"input_ids": [1, 2], "loss_mask": [0.0, 1.0]}, "true and false"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "false everywhere"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1], "prompt_len": 1}, "one or the other"),
        ({"input_ids": [1.0, 2.0]}, "input_ids must be a list of token ids"),
        ({"prompt": "a", "completion": ""}, "empty completion.*all false"),
        ({"prompt": "", "completion": "a"}, "empty prompt.*all true"),
        ({"prompt": CHAT[:1], "completion": "a"}, "two texts or two lists"),
        ({"prompt": CHAT, "completion": CHAT[:1]}, "no assistant message"),
        ({"prompt": "a"}, "no completion"),
        ({"messages": CHAT, "tools": "{"}, "tools is not valid JSON"),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools of type dict"),
        ({"messages": CHAT, "chat_template_kwargs": [1]}, "must be a mapping"),
    ],
)
def test_bad_rows_are_sentences_and_go_to_quarantine(tokenizer: Tokenizer, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"document 'x'.*{says}"):
        corpus([{"id": "x", **row}], tokenizer=tokenizer)
    aside: list[tuple[str, str]] = []
    tapes = corpus([{"id": "x", **row}, "fine", "well"], tokenizer=tokenizer, quarantine=aside)
    assert len(tapes) + len(aside) == 3 and aside[0][0] == "x"


def test_nothing_left_names_the_quarantine(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        UserError, match=r"none of its 1 documents could be kept.*; 1 in quarantine, such as: document 'x' has a prompt"
    ):
        corpus([{"id": "x", "prompt": "a"}], tokenizer=tokenizer, quarantine=[])


def test_lines_and_items_that_hold_no_document_go_to_quarantine(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"tokens": [1]}\n{"id": "x"}\n\nnot json\n[1]\n{"tokens": [2]}\n', "utf-8")
    items = [{"tokens": [1]}, {"id": "x"}, 5, {"tokens": [2]}]
    for read in (corpus, prompts):
        with pytest.raises(UserError, match=r"a\.jsonl line 2 has the columns 'id'"):
            read(file)
        aside: list[tuple[str, str]] = []
        assert [tape.tokens.tolist() for tape in read(file, quarantine=aside)] == [[1], [2]]
        assert [place for place, _ in aside] == ["a.jsonl:2", "a.jsonl:4", "a.jsonl:5"]
        assert "line 4 is not valid JSON" in aside[1][1] and "line 5 holds a list" in aside[2][1]
        with pytest.raises(UserError, match="document 1 has the columns 'id'"):
            read(items)
        aside = []
        assert len(read(items, quarantine=aside)) == 2 and [place for place, _ in aside] == ["doc-000001", "doc-000002"]
        with pytest.raises(UserError, match=r"needs at least one .*; 2 in quarantine, such as: document 1 holds a int"):
            read(items[1:3], quarantine=[])


def test_tables_hold_null_where_a_message_has_no_such_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Arrow gives every message every key; a template that asks whether a key is there must not see those."""
    from datasets import Dataset

    template = (
        "{% for m in messages %}<{{ m.role }}{% if m.extra is defined %}!{% endif %}>{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rows = [{"id": "a", "messages": CHAT}, {"id": "b", "messages": [{**CHAT[0], "extra": "x"}, CHAT[1]]}]
    plain = corpus(rows, tokenizer=tokenizer, chat_template=template)
    table = Dataset.from_list(rows)
    assert table[0]["messages"][0]["extra"] is None
    table.to_parquet(str(tmp_path / "rows.parquet"))
    for source in (table, tmp_path / "rows.parquet"):
        tapes = corpus(source, tokenizer=tokenizer, chat_template=template)
        assert [tape.tokens.tolist() for tape in tapes] == [tape.tokens.tolist() for tape in plain]


def test_saved_datasets_are_sources(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    table = Dataset.from_dict({"text": ["ab", "cde"], "doc_id": ["a", "b"]})
    table.save_to_disk(str(tmp_path / "one"))
    DatasetDict({"train": table.select([0]), "test": table.select([1])}).save_to_disk(str(tmp_path / "two"))
    saved = corpus(tmp_path / "one", tokenizer=tokenizer)
    assert saved.name == "one" and corpus_fingerprint(saved) == corpus_fingerprint(corpus(table, tokenizer=tokenizer))
    (test,) = corpus(tmp_path / "two", tokenizer=tokenizer, split="test")
    assert test.doc_id == "b" and test.split == "test"
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(CheckpointError, match="not a dataset that can be read"):
        corpus(tmp_path / "one", tokenizer=tokenizer)
