"""Quarantine agrees with what an extraction refuses, and all steps together lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets import CleanOptions
from workbench.datasets.anchors import anchor_positions
from workbench.datasets.provenance import check_tapes
from workbench.model.weights.text import TextSide, load_text_side


def mask(*ones: int, size: int) -> np.ndarray:
    return np.isin(np.arange(size), ones)


def bad_tapes(vocab: int, context: int) -> dict[str, Tape]:
    """A tape per reason, by a word of the sentence."""
    sound = np.arange(12) % vocab
    return {
        "token id": Tape("id", np.array([0, vocab, 1, 2, 3, 4, 5, 6])),
        "context": Tape("long", np.zeros(context + 1)),
        "needs at least 7": Tape("short", sound[:6]),
        "after its prompt": Tape("answer", sound, prompt_len=10),
        "no position with a supervised slot": Tape("slots", sound, supervised=mask(0, 1, size=12)),
        "supervises all": Tape("marks", sound, supervised=mask(*range(12), size=12)),
    }


def test_every_refusal_is_a_reason_and_extract_takes_the_rest(tiny, tmp_path):
    model = tiny()
    bad = bad_tapes(model.config.vocab_size, model.config.max_position_embeddings)
    sound = [Tape(f"good{i}", np.arange(i, i + 12), prompt_len=i) for i in range(3)]
    outcome = wb.quarantine(Corpus([sound[0], *bad.values(), *sound[1:]]), model, gamma=5)
    assert [t.doc_id for t in outcome.tapes] == ["good0", "good1", "good2"]
    for word, (doc_id, reason) in zip(bad, outcome.dropped.select("doc_id", "reason").rows()):
        assert doc_id == bad[word].doc_id and word in reason, reason
    records = wb.extract(model, outcome.tapes, out=tmp_path / "a", gamma=5, top_k=4)
    assert set(records["doc_id"]) == {"good0", "good1", "good2"}
    refused = [tape for tape in bad.values() if tape.doc_id != "marks"]
    for i, tape in enumerate(refused):
        with pytest.raises(UserError, match=tape.doc_id):
            wb.extract(model, [tape], out=tmp_path / f"b{i}", gamma=5, top_k=4)
        assert not (tmp_path / f"b{i}").exists()
    kept = wb.quarantine(Corpus([*sound, bad["supervises all"]]), model, gamma=5, whole_masks=True)
    assert len(kept.tapes) == 4


def test_rows_that_are_not_finite_are_found_by_running(tiny, tmp_path):
    model = tiny(seed=3, tied=False)
    model.embed[7] = float("nan")
    tapes = Corpus([Tape(f"d{i}", np.array([*range(10, 22), 7, 8, 9][i:])) for i in range(2)] +
                   [Tape("sound", np.arange(10, 24))])  # fmt: skip
    blind = wb.quarantine(tapes, model)
    assert not len(blind.dropped)
    with pytest.raises(UserError, match="document 'd0': the logits of position"):
        wb.extract(model, blind.tapes, out=tmp_path / "blind", gamma=5, top_k=4, anchors="all")
    outcome = wb.quarantine(tapes, model, run=True)
    assert outcome.dropped["doc_id"].to_list() == ["d0", "d1"]
    said = outcome.dropped["reason"].to_list()
    assert all(
        f"document {i!r}: the logits of position" in one and "hold NaN" in one for i, one in zip(("d0", "d1"), said)
    )
    assert set(wb.extract(model, outcome.tapes, out=tmp_path / "a", gamma=5, top_k=4)["doc_id"]) == {"sound"}
    with pytest.raises(UserError, match="run=True needs the model itself"):
        wb.quarantine(tapes, TextSide(model.config, None, "tiny"), run=True)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.integers(0, 60)), min_size=1, max_size=6),
       st.integers(1, 6))  # fmt: skip
@settings(deadline=None)
def test_quarantine_drops_exactly_what_is_refused(side, shapes, gamma):
    tapes = Corpus([Tape(str(i), np.arange(n) + low, min(prompt, n)) for i, (n, prompt, low) in enumerate(shapes)])

    def sound(tape: Tape) -> bool:
        try:
            check_tapes(side, Corpus([tape]))
            anchor_positions(tape, anchors=4, gamma=gamma, seed=1)
        except UserError:
            return False
        return True

    expected = [tape.doc_id for tape in tapes if sound(tape)]
    if not expected:
        with pytest.raises(UserError, match="would drop all"):
            wb.quarantine(tapes, side, gamma=gamma)
        return
    outcome = wb.quarantine(tapes, side, gamma=gamma)
    assert [tape.doc_id for tape in outcome.tapes] == expected
    assert len(outcome.tapes) + len(outcome.dropped) == len(tapes)


@pytest.fixture(scope="module")
def side(tiny) -> TextSide:
    return TextSide(tiny(vocab_size=64).config, None, "tiny")


def test_all_steps_together_add_up_and_label(side):
    rng = np.random.default_rng(0)
    base = [rng.integers(0, 64, 60) for _ in range(12)]
    near = base[3].copy()
    near[30] = (near[30] + 1) % 64
    held = np.concatenate([rng.integers(0, 64, 20), base[5][10:30]])
    tapes = [*base, base[2], near, base[0][:5]]
    corpus = Corpus([Tape(f"d{i:02d}", tokens) for i, tokens in enumerate(tapes)], name="made")
    outcome = wb.clean(corpus, model=side, evaluation=[Tape("e", held)], near=0.7, heldout=0.3, seed=1)
    found = {step: doc for doc, step in outcome.dropped.select("doc_id", "step").iter_rows()}
    assert found == {"quarantine": "d14", "exact": "d12", "near": "d13", "overlap": "d05"}
    assert outcome.given == 15 == len(outcome.tapes) + 4 and len(outcome.dropped) == 4
    assert outcome.summary["documents_kept"].to_list() == [14, 13, 12, 11]
    assert {tape.split for tape in outcome.tapes} == {"train", "heldout"} and outcome.tapes.name == "made"
    plain = wb.clean(corpus, near=None)
    assert list(plain.steps) == ["exact"] and {tape.split for tape in plain.tapes} == {""}


def test_options_are_checked_as_a_whole():
    with pytest.raises(UserError, match="near=2 is not valid"):
        CleanOptions(near=2)
    with pytest.raises(UserError, match="ngram=0 is not valid"):
        wb.clean([Tape("a", np.arange(3))], ngram=0)


def test_the_text_side_is_that_of_the_model(tiny_dir):
    side, model = load_text_side(tiny_dir), wb.load(tiny_dir)
    assert side.config.vocab_size == model.config.vocab_size
    assert side.config.max_position_embeddings == model.config.max_position_embeddings
    assert side.tokenizer.fingerprint == model.tokenizer.fingerprint
    with pytest.raises(UserError, match="is not a directory here"):
        load_text_side("nowhere")


@given(st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=9), min_size=32, max_size=32), st.data())
@settings(max_examples=25, deadline=None)
def test_thirty_two_documents_in_are_thirty_two_kept_or_listed(side, texts, data):
    copies = data.draw(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=8))
    for here, there in copies:
        texts[here] = list(texts[there])
    texts[0] = list(range(9))
    given = Corpus([Tape(f"d{i}", np.array(tokens)) for i, tokens in enumerate(texts)])
    held = [Tape("e", np.array([63, *texts[data.draw(st.integers(1, 31))]]))]
    outcome = wb.clean(given, model=side, evaluation=held, gamma=1, near=0.7, ngram=2, permutations=32, overlap_ngram=3)
    listed = {tape.doc_id for tape in outcome.tapes} | set(outcome.dropped["doc_id"])
    assert listed == {f"d{i}" for i in range(32)} and len(outcome.tapes) + len(outcome.dropped) == 32
    assert (
        outcome.dropped["reason"].str.len_chars().min() is None or outcome.dropped["reason"].str.len_chars().min() > 9
    )
