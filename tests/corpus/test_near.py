"""Near duplicates against Jaccard similarities of plain sets over all pairs, with mistakes that the law tells."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.core.errors import CapabilityError, UserError
from workbench.core.tape import Corpus, Tape
from workbench.corpus import Cleaned
from workbench.corpus.hygiene.near import RECALL, band_shape, jaccard, recall


def tapes_of(listed: Sequence[Sequence[int]]) -> Corpus:
    return Corpus([Tape(f"d{i}", np.array(tokens)) for i, tokens in enumerate(listed)])


def grams(tape: Tape, n: int) -> set[tuple[int, ...]]:
    tokens = tape.tokens.tolist()
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)} or {tuple(tokens)}


def similarity(a: Tape, b: Tape, n: int) -> float:
    one, other = grams(a, n), grams(b, n)
    return len(one & other) / len(one | other)


def faults(tapes: Corpus, outcome: Cleaned, threshold: float, n: int) -> list[str]:
    """What an outcome gets wrong: a drop without its reason, or two kept documents that are nearly the same."""
    by_id, order = {t.doc_id: t for t in tapes}, [t.doc_id for t in tapes]
    kept = {t.doc_id for t in outcome.tapes}
    found = [f"{a.doc_id} and {b.doc_id} were kept" for a, b in combinations(outcome.tapes, 2)
             if similarity(a, b, n) >= threshold]  # fmt: skip
    for doc_id, of, said in outcome.dropped.select("doc_id", "of", "similarity").rows():
        true = similarity(by_id[doc_id], by_id[of], n)
        if of not in kept or order.index(of) >= order.index(doc_id) or true < threshold or said != pytest.approx(true):
            found.append(f"{doc_id} was dropped for {of} at {said}; they are {true} alike")
    for kept_id, doc_id, exact in outcome.reports["pairs"].select("kept", "doc_id", "jaccard").rows():
        if exact != pytest.approx(similarity(by_id[kept_id], by_id[doc_id], n)):
            found.append(f"the pair {kept_id}, {doc_id} is not {exact} alike")
    return found


def varied(seed: int, families: int = 6, copies: int = 5, length: int = 120) -> Corpus:
    """Families of documents: an original and copies with more and more tokens changed."""
    rng = np.random.default_rng(seed)
    listed = []
    for _ in range(families):
        original = rng.integers(0, 500, length)
        for changes in range(copies):
            copy = original.copy()
            copy[rng.choice(length, 2 * changes, replace=False)] = rng.integers(500, 1000, 2 * changes)
            listed.append(copy.tolist())
    rng.shuffle(listed)
    return tapes_of(listed)


@pytest.mark.parametrize(("seed", "threshold", "n"), [(0, 0.8, 5), (1, 0.6, 3), (2, 0.9, 2), (3, 0.7, 1)])
def test_what_is_dropped_is_near_something_kept_and_what_is_kept_is_not(seed, threshold, n):
    tapes = varied(seed)
    outcome = wb.near_dedup(tapes, threshold=threshold, n=n, seed=seed)
    assert not faults(tapes, outcome, threshold, n)
    assert 0 < len(outcome.dropped) < len(tapes) - 1
    assert len(outcome.tapes) + len(outcome.dropped) == len(tapes)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6), st.integers(1, 4))
def test_short_texts_obey_the_law_too(listed, n):
    tapes = tapes_of(listed)
    outcome = wb.near_dedup(tapes, threshold=1.0, n=n, permutations=16)
    assert not faults(tapes, outcome, 1.0, n), "equal sets have equal signatures, so none is missed"


def test_control_a_looser_run_a_chain_and_a_kept_copy_are_faults():
    tapes = varied(0)
    assert faults(tapes, wb.near_dedup(tapes, threshold=0.5), 0.9, 5), "drops below the threshold"
    all_kept = replace(
        wb.dedup(tapes), reports={"pairs": wb.near_dedup(tapes).reports["pairs"].clear()}, steps={"exact": {}}
    )
    assert faults(tapes, all_kept, 0.8, 5), "near duplicates kept"
    wrong = wb.near_dedup(tapes)
    wrong = replace(wrong, dropped=wrong.dropped.with_columns(pl.col("similarity") - 0.05))
    assert faults(tapes, wrong, 0.8, 5), "a similarity that was estimated"


def test_a_chain_of_small_changes_is_not_one_cluster():
    base = list(range(40))
    chain = [[*range(100, 100 + 3 * i), *base[3 * i :]] for i in range(6)]
    outcome = wb.near_dedup(tapes_of(chain), threshold=0.75, n=2)
    assert len(outcome.tapes) > 1 and not faults(tapes_of(chain), outcome, 0.75, 2)
    clusters = outcome.reports["clusters"]
    assert clusters["size"].sum() - len(clusters) == len(outcome.dropped)
    assert sorted(one for listed in clusters["members"] for one in listed) == sorted(outcome.dropped["doc_id"])
    assert clusters["least_jaccard"].min() == outcome.dropped["similarity"].min() >= 0.75


def test_a_run_repeats_itself_and_other_documents_change_no_estimate():
    tapes = varied(4)
    one, two = wb.near_dedup(tapes, seed=7), wb.near_dedup(tapes, seed=7)
    assert one.dropped.equals(two.dropped) and all(one.reports[name].equals(two.reports[name]) for name in one.reports)
    more = Corpus([*tapes, Tape("x", np.arange(2000, 2100))])
    assert wb.near_dedup(more, seed=7).reports["pairs"].equals(one.reports["pairs"])
    other = wb.near_dedup(tapes, seed=8)
    assert other.dropped.equals(one.dropped), "counted similarities decide, under every seed"
    assert not other.reports["pairs"]["estimate"].equals(one.reports["pairs"]["estimate"])


def test_estimates_lie_about_the_similarities():
    pairs = wb.near_dedup(varied(5, families=20), threshold=0.5, permutations=256).reports["pairs"]
    off = pairs["estimate"].to_numpy() - pairs["jaccard"].to_numpy()
    spread = np.sqrt(pairs["jaccard"].to_numpy() * (1 - pairs["jaccard"].to_numpy()) / 256)
    assert len(pairs) > 30 and (np.abs(off) <= 5 * spread + 1e-9).all()


def test_bands_find_pairs_at_the_threshold():
    for threshold, permutations in ((0.8, 128), (0.5, 128), (0.95, 64), (1.0, 2), (0.3, 256)):
        bands, rows = band_shape(threshold, permutations)
        assert bands * rows <= permutations and bands >= 2 and recall(threshold, bands, rows) >= RECALL
        taller = permutations // (rows + 1)
        assert taller < 2 or recall(threshold, taller, rows + 1) < RECALL, "the tallest such bands"
    with pytest.raises(UserError, match=r"threshold=0\.01 is too low for permutations=128"):
        band_shape(0.01, 128)
    assert jaccard(np.array([1, 2, 3]), np.array([2, 3, 4])) == 0.5


def test_parts_that_hold_nothing_repeat_nothing():
    tapes = Corpus(
        [Tape("a", np.array([1, 2, 3]), 3), Tape("b", np.array([4, 5]), 2), Tape("c", np.array([1, 2, 3]), 3)]
    )
    assert not len(wb.near_dedup(tapes, part="output").dropped)
    assert wb.near_dedup(tapes, part="prompt").dropped["doc_id"].to_list() == ["c"]


def test_without_datasketch_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(CapabilityError, match=r"found by datasketch, which is not installed: pip install 'specdec"):
        wb.near_dedup(varied(0))
    with pytest.raises(UserError, match="threshold=0 is not valid: it must be a number above 0"):
        wb.near_dedup(varied(0), threshold=0)
