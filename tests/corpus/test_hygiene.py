"""Exact duplicates, contamination and splits against plain sets and tuples, each law with a mistake that breaks it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.corpus import Cleaned, corpus, corpus_fingerprint, drop_overlap, label_splits
from workbench.corpus.hygiene.grams import counted, gram_hashes, gram_ids
from workbench.corpus.hygiene.outcome import drop_frame
from workbench.corpus.splits import label

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=14), min_size=1, max_size=7)
SEVERAL = [[1, 2, 3, 1, 2], [2, 1, 3], [1, 2, 3, 1, 2], [3]]


def tapes_of(listed: Sequence[Sequence[int]], name: str = "d") -> Corpus:
    return Corpus([Tape(f"{name}{i}", np.array(tokens)) for i, tokens in enumerate(listed)])


def windows(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(int(t) for t in tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


# ---------------------------------------------------------------- n-grams


def told_apart(listed: Sequence[Sequence[int]], ids: Sequence[np.ndarray], n: int) -> bool:
    """Whether numbers are equal exactly where the n-grams are, text by text."""
    grams = [gram for tokens in listed for gram in windows(tokens, n)]
    numbers = [int(number) for one in ids for number in one]
    sizes = [len(one) == max(len(tokens) - n + 1, 0) for tokens, one in zip(listed, ids)]
    pairs = set(zip(grams, numbers))
    return all(sizes) and len(grams) == len(numbers) and len(pairs) == len(set(grams)) == len(set(numbers))


@given(texts, st.integers(1, 9))
def test_n_grams_are_numbered_exactly(listed, n):
    arrays = [np.array(tokens) for tokens in listed]
    assert told_apart(listed, gram_ids(arrays, n), n)
    assert told_apart(listed, [gram_hashes(tokens, n) for tokens in arrays], n)


def test_control_sums_and_windows_across_texts_are_no_numbers_of_n_grams():
    sums = [np.array([sum(gram) for gram in windows(tokens, 2)]) for tokens in SEVERAL]
    assert not told_apart(SEVERAL, sums, 2)
    flat = gram_ids([np.concatenate([np.array(t) for t in SEVERAL])], 2)[0]
    across = np.split(flat, np.cumsum([len(t) for t in SEVERAL])[:-1])
    assert not told_apart(SEVERAL, across, 2)


def test_hashes_depend_on_the_text_alone_and_numbers_on_no_vocabulary():
    text = np.array([5, 2**31 - 1, 0, 5, 2**31 - 1])
    ids = gram_ids([text, text[3:]], 2)
    assert ids[0][0] == ids[0][3] == ids[1][0] != ids[0][1]
    assert gram_hashes(text, 2).dtype == np.uint64 and gram_hashes(text, 2)[0] == gram_hashes(text[3:], 2)[0]
    assert gram_hashes(text, 9).shape == (0,)


def test_the_parts_of_a_tape():
    tape = Tape("a", np.arange(5), prompt_len=2, supervised=np.array([0, 0, 1, 0, 1], bool))
    found = {part: counted(tape, part).tolist() for part in ("all", "prompt", "output", "supervised")}
    assert found == {"all": [0, 1, 2, 3, 4], "prompt": [0, 1], "output": [2, 3, 4], "supervised": [2, 4]}
    assert counted(Tape("b", np.arange(2)), "supervised").tolist() == [0, 1]


# ---------------------------------------------------------------- exact duplicates


@given(texts)
def test_dedup_keeps_the_first_of_each_text_and_loses_none(listed):
    tapes = tapes_of(listed)
    outcome = wb.dedup(tapes)
    first = {tuple(tokens): f"d{i}" for i, tokens in reversed(list(enumerate(listed)))}
    assert [t.doc_id for t in outcome.tapes] == sorted(first.values(), key=lambda name: int(name[1:]))
    for row in outcome.dropped.iter_rows(named=True):
        assert row["of"] == first[tuple(listed[int(row["doc_id"][1:])])] != row["doc_id"] and row["similarity"] == 1
    assert len(outcome.tapes) + len(outcome.dropped) == len(tapes)
    assert not len(wb.dedup(outcome.tapes).dropped), "what is clean stays"


def test_dedup_by_parts_and_of_what_has_none():
    tapes = [Tape("a", np.array([1, 2, 3]), 2), Tape("b", np.array([1, 2, 4]), 2), Tape("c", np.array([9, 4]), 1)]
    assert wb.dedup(tapes, part="prompt").dropped["doc_id"].to_list() == ["b"]
    assert wb.dedup(tapes, part="output").dropped.select("doc_id", "of").rows() == [("c", "b")]
    assert not len(wb.dedup(tapes).dropped)
    plain = [Tape("a", np.array([1])), Tape("b", np.array([2]))]
    assert not len(wb.dedup(plain, part="prompt").dropped), "no prompt is no repeated prompt"


def test_control_counts_that_do_not_add_up_are_refused():
    outcome = wb.dedup(tapes_of(SEVERAL))
    assert len(outcome.dropped) == 1
    same = dict(given=outcome.given, given_tokens=outcome.given_tokens, steps=outcome.steps)
    with pytest.raises(AssertionError, match="4 in, 3 kept, 0 dropped"):
        Cleaned(outcome.tapes, drop_frame([]), **same)
    with pytest.raises(AssertionError, match="both kept and dropped"):
        swapped = outcome.dropped.with_columns(pl.lit("d0").alias("doc_id"))
        Cleaned(outcome.tapes, swapped, **same)
    with pytest.raises(AssertionError, match="tokens in"):
        Cleaned(outcome.tapes, outcome.dropped.with_columns(pl.col("n_tokens") - 1), **same)


# ---------------------------------------------------------------- contamination


def overlap_faults(evaluation: Corpus, training: Corpus, found: wb.corpus.Contamination, n: int) -> list[str]:
    """What a report gets wrong, by sets of tuples."""
    held = {gram for tape in training for gram in windows(tape.tokens, n)}
    by_id, train = {t.doc_id: t for t in evaluation}, {t.doc_id: t for t in training}
    faults = [] if found.documents["doc_id"].to_list() == list(by_id) else ["rows are not the documents"]
    for row in found.documents.iter_rows(named=True):
        tokens = by_id[row["doc_id"]].tokens
        hits = [gram in held for gram in windows(tokens, n)]
        inside = {i + j for i, hit in enumerate(hits) if hit for j in range(n)}
        expected = (len(hits), sum(hits), len(inside) / len(tokens), sum(hits) / len(hits) if hits else None)
        if (row["grams"], row["seen"], row["covered"], row["share"]) != pytest.approx(expected):
            faults.append(f"row {row} is not {expected}")
    spans = dict.fromkeys(by_id, 0)
    for doc_id, start, stop, train_id, at, size in found.spans.iter_rows():
        there = train[train_id].tokens[at : at + size]
        spans[doc_id] += size - n + 1
        if size != stop - start or not np.array_equal(by_id[doc_id].tokens[start:stop], there):
            faults.append(f"{doc_id} {start}:{stop} does not stand at {at} of {train_id}")
    if spans != dict(found.documents.select("doc_id", "seen").iter_rows()):
        faults.append("spans do not hold the n-grams that were seen")
    return faults


@given(texts, texts, st.integers(1, 6))
def test_contamination_finds_all_and_only_what_training_holds_and_where(mine, theirs, n):
    evaluation, training = tapes_of(mine, "e"), tapes_of(theirs, "t")
    found = wb.contamination(evaluation, training, n=n)
    assert not overlap_faults(evaluation, training, found, n)
    assert found.summary["documents"] == len(mine)


def test_control_a_place_off_by_one_and_a_missed_n_gram_are_faults():
    evaluation, training = tapes_of([[7, 1, 2, 3, 4, 9]], "e"), tapes_of([[1, 2, 3, 4, 5], [2, 3]], "t")
    found = wb.contamination(evaluation, training, n=3)
    assert found.spans.rows() == [("e0", 1, 5, "t0", 0, 4)] and not overlap_faults(evaluation, training, found, 3)
    moved = replace(found, spans=found.spans.with_columns(pl.col("train_start") + 1))
    assert overlap_faults(evaluation, training, moved, 3)
    missed = replace(found, documents=found.documents.with_columns(pl.col("seen") - 1))
    assert overlap_faults(evaluation, training, missed, 3)


def test_a_run_ends_with_its_training_document():
    found = wb.contamination(tapes_of([[1, 2, 3, 4]], "e"), tapes_of([[1, 2, 3], [2, 3, 4]], "t"), n=3)
    assert found.spans.rows() == [("e0", 0, 3, "t0", 0, 3), ("e0", 1, 4, "t1", 0, 3)]
    assert found.documents.select("covered", "longest", "train_id").rows() == [(1.0, 3, "t0")]


def test_short_documents_are_not_judged_and_common_n_grams_are_ignored():
    training = tapes_of([[1, 2, 3], [1, 2, 4], [1, 2, 5, 1, 2]], "t")
    evaluation = tapes_of([[1], [1, 2, 3], [1, 2]], "e")
    plain = wb.contamination(evaluation, training, n=2)
    assert plain.documents["share"].to_list() == [None, 1.0, 1.0]
    assert plain.summary == dict(documents=3, judged=2, touched=2, whole=2, grams=3, ignored=0, seen=3)
    rare = wb.contamination(evaluation, training, n=2, common=2)
    assert rare.documents.select("ignored", "seen", "share").rows() == [(0, 0, None), (1, 1, 1.0), (1, 0, None)]
    assert wb.contamination(evaluation, training, n=2, common=3).documents.equals(plain.documents)
    assert repr(plain).startswith("Contamination(2 of 2 documents share an n-gram of 2 tokens")


def test_training_documents_go_for_what_the_evaluation_holds():
    training, evaluation = tapes_of([[1, 2, 3, 9], [4, 5, 6], [9, 1, 2, 8]], "t"), tapes_of([[0, 1, 2, 3, 0]], "e")
    outcome = drop_overlap(training, evaluation, n=2)
    assert outcome.dropped.select("doc_id", "of").rows() == [("t0", "e0"), ("t2", "e0")]
    assert (
        "2 of its 3 2-grams stand in the evaluation; the longest run is 3 tokens of 'e0'"
        in outcome.dropped["reason"][0]
    )
    assert drop_overlap(training, evaluation, n=2, least=2).dropped["doc_id"].to_list() == ["t0"]
    assert not wb.contamination(evaluation, outcome.tapes, n=2).summary["touched"]
    with pytest.raises(UserError, match="step 'overlap' would drop all 1 tapes; the first, 't0': 2 of its"):
        drop_overlap(training[:1], evaluation, n=2)


# ---------------------------------------------------------------- outcomes


def test_steps_follow_one_another_and_are_saved(tmp_path):
    tapes = tapes_of(SEVERAL)
    first = wb.dedup(tapes)
    both = first.then(drop_overlap(first.tapes, tapes_of([[2, 1, 3]], "e"), n=2))
    assert both.summary.select("step", "documents_in", "documents_dropped", "documents_kept").rows() == [
        ("exact", 4, 1, 3),
        ("overlap", 3, 1, 2),
    ]
    assert repr(both) == "Cleaned(4 tapes = 2 kept + 2 dropped by exact, overlap)"
    with pytest.raises(UserError, match="began with 4 tapes and this one kept 3"):
        first.then(drop_overlap(tapes, tapes_of([[9]], "e")))
    with pytest.raises(UserError, match="step 'exact' was taken already"):
        first.then(wb.dedup(first.tapes))
    out = both.save(tmp_path / "clean", unread=[("x", "is empty"), ("y", "ü")])
    assert corpus_fingerprint(corpus(out / "tapes.jsonl")) == corpus_fingerprint(both.tapes)
    assert pl.read_ndjson(out / "dropped.jsonl")["doc_id"].to_list() == ["d2", "d1"]
    report = json.loads((out / "report.json").read_text())
    assert report["documents"] == {"given": 4, "kept": 2, "dropped": 2, "unread": 2}
    assert pl.read_ndjson(out / "unread.jsonl").rows() == [("x", "is empty"), ("y", "ü")]
    assert set(report["files"]) == {f"{name}.jsonl" for name in ("tapes", "dropped", "overlap", "unread")}


# ---------------------------------------------------------------- splits

names = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)


def moved(before: Corpus, after: Corpus) -> set[str]:
    """Documents of both whose label differs."""
    now = {tape.doc_id: tape.split for tape in after}
    return {tape.doc_id for tape in before if tape.doc_id in now and now[tape.doc_id] != tape.split}


def named(ids: Sequence[str]) -> Corpus:
    return Corpus([Tape(one, np.array([1, 2])) for one in ids])


@given(names, st.integers(0, 5), st.randoms(use_true_random=False))
def test_documents_that_come_or_go_move_no_other(ids, seed, random):
    shares = {"train": 0.5, "dev": 0.2, "heldout": 0.3}
    whole = label(named(ids), fractions=shares, seed=seed)
    some = [one for one in ids if random.random() < 0.6] or ids[:1]
    random.shuffle(some)
    assert not moved(whole, label(named(some), fractions=shares, seed=seed))
    wider = label(named(ids), fractions={"train": 0.4, "dev": 0.2, "heldout": 0.4}, seed=seed)
    assert all(tape.split == "heldout" for tape in wider if tape.doc_id in
               {t.doc_id for t in whole if t.split == "heldout"})  # fmt: skip


def test_control_a_split_by_place_moves_documents():
    def by_place(tapes: Corpus) -> Corpus:
        return Corpus([replace(tape, split="train" if i % 2 else "heldout") for i, tape in enumerate(tapes)])

    ids = list("abcdef")
    assert moved(by_place(named(ids)), by_place(named(ids[1:])))


def test_slices_stay_together_and_shares_are_met():
    ids = [f"doc{i}@{at}" for i in range(2000) for at in (0, 64)]
    parts = wb.split(named(ids), fractions={"train": 0.7, "dev": 0.1, "heldout": 0.2}, seed=3)
    assert list(parts) == ["train", "dev", "heldout"] and sum(map(len, parts.values())) == len(ids)
    whose = {tape.doc_id.partition("@")[0]: name for name, part in parts.items() for tape in part}
    assert all(tape.split == name == whose[tape.doc_id.partition("@")[0]] for name, p in parts.items() for tape in p)
    for name, share in (("train", 0.7), ("dev", 0.1), ("heldout", 0.2)):
        spread = (share * (1 - share) / 2000) ** 0.5
        assert abs(len(parts[name]) / len(ids) - share) < 4 * spread
    again = {t.doc_id: t.split for t in label_splits(named(ids), heldout=0.2, seed=3)}
    assert all(again[t.doc_id] == "heldout" for t in parts["heldout"]), "the last name has label_splits' documents"


def test_shares_that_cannot_be_met_are_refused():
    tapes = named(["a", "b"])
    with pytest.raises(UserError, match=r"add up to 0\.9: they must add up to 1"):
        wb.split(tapes, fractions={"train": 0.9})
    with pytest.raises(UserError, match="split 'x' with a share of 1e-09 gets none of the 2 tapes"):
        wb.split(tapes, fractions={"train": 1 - 1e-9, "x": 1e-9})
    with pytest.raises(UserError, match="must map names to shares"):
        wb.split(tapes, fractions=[0.5, 0.5])
    assert list(wb.split(tapes, fractions={"train": 1.0, "none": 0.0})) == ["train"]


def test_what_is_no_tape_is_refused():
    for call in (wb.dedup, wb.near_dedup, lambda t: wb.contamination(t, named(["a"])), wb.split):
        with pytest.raises(UserError, match="tapes=list is not valid: give what corpus"):
            call([1, 2])
    with pytest.raises(UserError, match="training=str is not valid"):
        wb.contamination(named(["a"]), "demo")
    with pytest.raises(UserError, match="part='half' is not valid: choose one of 'all', 'prompt'"):
        wb.dedup(named(["a"]), part="half")
