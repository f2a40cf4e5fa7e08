"""Documents become tapes: every source, cutting, limits, masks of conversations, and sentences for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.core.errors import UserError
from workbench.core.tape import Own, Tape
from workbench.corpus import corpus, corpus_fingerprint, label_splits, of_split, save_tapes
from workbench.corpus.chat import supervised_tokens
from workbench.model.tokenizer import Tokenizer

CHAT = [
    {"role": "user", "content": "What is the time?"},
    {"role": "assistant", "content": "Half past ten – the bell rang."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "the end"},
]


@pytest.fixture
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


# ---------------------------------------------------------------- sources


def test_a_text_file_is_one_tape_and_no_token_is_invented(tmp_path, tokenizer):
    text = "the thing – naïve\n"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    (tape,) = corpus(tmp_path / "a.txt", tokenizer=tokenizer)
    assert tape.doc_id == "a.txt" and tape.source == "a" and tape.prompt_len == 0 and tape.supervised is None
    assert tape.n_bytes == len(text.encode())
    assert tokenizer.decode(tape.tokens.tolist()) == text


def test_a_bos_of_the_tokenizer_is_not_added(tiny_dir, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.load(tiny_dir)
    tokenizer.backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer.backend.encode("ab").ids[0] == 0
    assert 0 not in corpus(["ab"], tokenizer=tokenizer)[0].tokens
    assert 0 not in corpus([{"messages": CHAT}], tokenizer=tokenizer)[0].tokens


def test_a_folder_reads_text_and_lines_in_order_and_names_registers(tmp_path, tokenizer):
    (tmp_path / "code").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "code" / "b.py").write_text("x = 1\n")
    (tmp_path / "a.md").write_text("# a\n")
    (tmp_path / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "image.bin").write_bytes(b"\xff\xfe")
    write_lines(tmp_path / "rows.jsonl", {"text": "one"}, {"text": "two", "id": 7, "source": "s", "split": "train"})
    tapes = corpus(tmp_path, tokenizer=tokenizer)
    assert [t.doc_id for t in tapes] == ["a.md", "code/b.py", "rows.jsonl:1", "7"]
    assert [t.source for t in tapes] == [tmp_path.name, "code", tmp_path.name, "s"]
    assert tapes.name == tmp_path.name and tapes.tokenizer == tokenizer.fingerprint


def test_token_lines_need_no_tokenizer_and_round_trip(tmp_path):
    mask = np.array([0, 0, 1, 1, 0], dtype=bool)
    tapes = corpus([{"tokens": [1, 2, 3], "doc_id": "a"}, {"tokens": [5, 6, 7, 8, 9], "prompt_len": 2}])
    assert tapes.tokenizer == "" and tapes[1].prompt_len == 2 and tapes[1].n_bytes is None
    tapes = type(tapes)([tapes[0], Tape("b", np.arange(5), prompt_len=2, supervised=mask, own=Own("greedy", "m"))])
    again = corpus(save_tapes(tapes, tmp_path / "own.jsonl"))
    assert corpus_fingerprint(again) == corpus_fingerprint(tapes)
    assert again[1].own == Own("greedy", "m") and np.array_equal(again[1].supervised, mask)


def test_a_hugging_face_dataset(tokenizer):
    from datasets import Dataset, DatasetDict

    plain = Dataset.from_dict({"body": ["ab", "cde"], "n": [1, 2]})
    tapes = corpus(plain, tokenizer=tokenizer, text_column="body")
    assert [len(t) for t in tapes] == [2, 3] and len({t.doc_id for t in tapes}) == 2
    with pytest.raises(UserError, match=r"columns 'body', 'n'.*text_column"):
        corpus(plain, tokenizer=tokenizer)
    chats = corpus(Dataset.from_list([{"messages": CHAT, "id": "c"}]), tokenizer=tokenizer)
    assert chats[0].doc_id == "c" and chats[0].supervised is not None
    both = DatasetDict({"train": plain, "test": plain})
    assert len(corpus(both, tokenizer=tokenizer, text_column="body", split="test")) == 2
    ids = corpus(Dataset.from_dict({"tokens": [[4, 5, 6]], "prompt_len": [2]}))
    assert ids[0].prompt_len == 2


def test_the_shipped_samples_share_a_limit_between_registers(tokenizer):
    tapes = corpus("demo", split="heldout", tokenizer=tokenizer, limit=10, max_tokens=64, overflow="truncate")
    counts = {name: sum(t.source == name for t in tapes) for name in {t.source for t in tapes}}
    assert counts == dict.fromkeys(["novels", "pycode", "pydocs", "speeches", "sqlite"], 2)
    again = corpus("demo", tokenizer=tokenizer, limit=10, max_tokens=64, overflow="truncate")
    other = corpus("demo", tokenizer=tokenizer, limit=10, max_tokens=64, overflow="truncate", seed=1)
    assert [t.doc_id for t in tapes] == [t.doc_id for t in again] != [t.doc_id for t in other]
    assert {t.source for t in corpus("demo/novels", tokenizer=tokenizer, limit=2)} == {"novels"}


# ---------------------------------------------------------------- length


def test_slices_keep_every_token_and_byte_under_unique_ids(tokenizer):
    texts = ["the – bell – rang " * 9, "short"]
    whole = corpus(texts, tokenizer=tokenizer)
    cut = corpus(texts, tokenizer=tokenizer, max_tokens=32)
    parts = [t for t in cut if t.doc_id.startswith("doc-000000")]
    assert np.array_equal(np.concatenate([t.tokens for t in parts]), whole[0].tokens)
    assert sum(t.n_bytes for t in parts) == whole[0].n_bytes == len(texts[0].encode())
    assert [t.doc_id for t in parts] == [f"doc-000000@{at}" for at in range(0, len(whole[0]), 32)]
    assert cut[-1].doc_id == "doc-000001", "a document that fits keeps its id"
    assert "max_tokens=32" in cut.name


def test_truncate_skip_and_too_short(tokenizer):
    texts = ["abcdefgh", "abc", ""]
    tapes = corpus(texts, tokenizer=tokenizer, max_tokens=4, overflow="truncate", min_tokens=1)
    assert [(len(t), t.n_bytes) for t in tapes] == [(4, 4), (3, 3)]
    skipped = corpus(texts, tokenizer=tokenizer, max_tokens=4, overflow="skip", min_tokens=1)
    assert [t.doc_id for t in skipped] == ["doc-000001"]
    assert [len(t) for t in corpus(texts, tokenizer=tokenizer, max_tokens=5, min_tokens=4)] == [5]
    with pytest.raises(UserError, match=r"min_tokens=99.*longest tape had 8 tokens"):
        corpus(texts[:2], tokenizer=tokenizer, min_tokens=99)
    short = corpus([{"tokens": [1] * 9, "prompt_len": 7}, {"tokens": [1] * 9, "prompt_len": 3}], min_response=5)
    assert [t.prompt_len for t in short] == [3]


# ---------------------------------------------------------------- conversations


def test_a_conversation_keeps_its_prompt_length_and_mask(tokenizer):
    (tape,) = corpus([{"messages": CHAT}], tokenizer=tokenizer)
    ids, mask = tape.tokens.tolist(), tape.supervised
    rendered = "".join(text for text, _ in tokenizer.render(CHAT))
    assert ids == tokenizer.encode(rendered) and tape.n_bytes == len(rendered.encode())
    runs = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int))).reshape(-1, 2)
    said = [tokenizer.decode(ids[a:b]) for a, b in runs]
    assert said == [m["content"] + "<|im_end|>" for m in CHAT if m["role"] == "assistant"]
    assert tape.prompt_len == runs[0][0]
    assert tokenizer.decode(ids[: tape.prompt_len]).endswith("assistant\n")


def test_a_token_that_straddles_a_boundary_is_not_supervised():
    numbers = np.array([0, 0, 2, 2, 2, 3, 3, 0], dtype=np.int32)  # two generated spans that touch
    offsets = np.array([[0, 1], [1, 3], [3, 5], [4, 6], [5, 7], [6, 8], [2, 2], [2, 3]])
    assert supervised_tokens(offsets, numbers).tolist() == [False, False, True, False, True, False, False, True]
    assert supervised_tokens(np.array([[0, 1]]), np.array([2], dtype=np.int32)).tolist() == [True]


def test_a_mask_without_a_true_is_refused(tokenizer):
    with pytest.raises(UserError, match="no assistant message"):
        corpus([{"messages": CHAT[:1]}], tokenizer=tokenizer)
    with pytest.raises(UserError, match="all false"):
        corpus([{"tokens": [1, 2], "supervised": [False, False]}])
    with pytest.raises(UserError, match=r"no supervised token.*overflow='skip'"):
        corpus([{"messages": CHAT}], tokenizer=tokenizer, max_tokens=8, overflow="truncate")
    with pytest.raises(UserError, match=r"overflow='truncate'"):
        corpus([{"messages": CHAT}], tokenizer=tokenizer, max_tokens=40)
    with pytest.raises(UserError, match="document 'doc-000000': message 0"):
        corpus([{"messages": [{"content": "x"}]}], tokenizer=tokenizer)


# ---------------------------------------------------------------- names and splits


def test_the_fingerprint_covers_what_a_tape_holds():
    base = Tape("a", np.arange(4), prompt_len=1, source="s", split="t")
    others = [
        Tape("b", np.arange(4), prompt_len=1, source="s", split="t"),
        Tape("a", np.arange(1, 5), prompt_len=1, source="s", split="t"),
        Tape("a", np.arange(4), prompt_len=2, source="s", split="t"),
        Tape("a", np.arange(4), prompt_len=1, source="s", split="t", supervised=np.ones(4, bool)),
        Tape("a", np.arange(4), prompt_len=1, source="s", split="t", own=Own("greedy", "m")),
        Tape("a", np.arange(4), prompt_len=1, source="s", split="t", own=Own("greedy", "other")),
        Tape("a", np.arange(4), prompt_len=1, source="s", split="t", own=Own("sampled", "m", seed=1, sequence=0)),
        Tape("a", np.arange(4), prompt_len=1, source="s", split="t", own=Own("sampled", "m", seed=1, sequence=1)),
    ]
    seen = {corpus_fingerprint([t]) for t in [base, *others]}
    assert len(seen) == 9 and corpus_fingerprint([base, others[0]]) != corpus_fingerprint([others[0], base])


def test_labels_depend_on_the_document_alone_and_keep_slices_together(tokenizer):
    tapes = corpus([{"tokens": [1] * 9, "id": f"d{i}"} for i in range(200)], max_tokens=4)
    labelled = label_splits(tapes, heldout=0.25)
    by_document: dict[str, set[str]] = {}
    for tape in labelled:
        by_document.setdefault(tape.doc_id.partition("@")[0], set()).add(tape.split)
    assert all(len(labels) == 1 for labels in by_document.values())
    assert 0.15 < sum("heldout" in labels for labels in by_document.values()) / 200 < 0.35
    assert {t.split for t in of_split(labelled, "heldout")} == {"heldout"}
    with pytest.raises(UserError, match="empty"):
        of_split(labelled, "test")


# ---------------------------------------------------------------- sentences


def test_a_line_that_cannot_be_read_is_named(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": \n')
    with pytest.raises(UserError, match=r"rows\.jsonl line 3 is not valid JSON"):
        corpus(path, tokenizer=tokenizer)
    path.write_text("[1]\n")
    with pytest.raises(UserError, match="line 1 holds a list"):
        corpus(path, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("nowhere.txt", {}, "does not exist"),
        ("demo/poems", {}, "choose 'demo' or one of demo/novels"),
        ([], {}, "is empty"),
        (7, {}, "of type int"),
        ([3], {}, "document 0 holds a int"),
        ([{"title": "x"}], {}, "columns 'title'"),
        (["text"], {"tokenizer": None}, "needs a tokenizer"),
        (["text"], {"tokenizer": "gpt2"}, "give model.tokenizer"),
        ([{"text": 5}], {}, "holds a int in 'text'"),
        (["\ud800"], {}, "lone surrogate"),
        (["a", ""], {}, "is empty.*min_tokens=1"),
        (["a"], {"limit": 0}, "limit=0"),
        (["a"], {"max_tokens": -1}, "max_tokens=-1"),
        (["a"], {"overflow": "wrap"}, "overflow='wrap'"),
        (["a"], {"split": "train"}, "carry no split"),
        ([{"text": "a", "split": "x"}], {"split": "train"}, "choose one of 'x'"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": 1}], {}, "holds doc_id '1' twice"),
        ([{"tokens": []}], {}, "at least one"),
        ([{"tokens": [1, -2]}], {}, "integers from 0 on"),
        ([{"tokens": [1.5]}], {}, "integers from 0 on"),
        ([{"tokens": [1, 2], "prompt_len": 3}], {}, "prompt_len=3"),
        ([{"tokens": [1, 2], "supervised": [True]}], {}, "one entry per token"),
        ([{"tokens": [1, 2], "own": {"who": 1}}], {}, "cannot be used"),
        ([{"messages": []}], {}, "at least one"),
    ],
)
def test_bad_input_is_a_sentence(tokenizer, source, options, says):
    with pytest.raises(UserError, match=says):
        corpus(source, **{"tokenizer": tokenizer, **options})


def test_bad_files_are_sentences(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        corpus(tmp_path / "a.txt", tokenizer=tokenizer)
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a Parquet file"):
        corpus(tmp_path / "b.parquet", tokenizer=tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no document"):
        corpus(tmp_path / "empty", tokenizer=tokenizer)
    with pytest.raises(UserError, match="JSON lines"):
        save_tapes(corpus(["a"], tokenizer=tokenizer), tmp_path / "x.json")
