"""Unconditional hits per slot, against a loop, and why they are no yield."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.core.frames import records_from
from workbench.core.metrics import acceptance
from workbench.core.tape import Corpus, Tape
from workbench.replay import own_tapes, replay, slot_rates, walk


def counted(table) -> dict[tuple[str, int], tuple[int, int]]:
    """Starts and hits by (source, slot), read row by row."""
    rows = {(row["doc_id"], row["position"]): row for row in table.frame.iter_rows(named=True)}
    out: dict[tuple[str, int], tuple[int, int]] = {}
    for (doc, p), row in rows.items():
        for slot in range(table.k_max):
            starts, hits = out.get((row["source"], slot + 1), (0, 0))
            if row["draft_ids"][slot] is not None:
                starts += 1
                hits += row["draft_ids"][slot] == rows[doc, p + slot]["target_id"]
            out[row["source"], slot + 1] = starts, hits
    return out


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_a_loop_counts_the_same(tiny, sampled, tmp_path, stride):
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    text = sampled(model, 60, temperature=0.5)
    tapes = [Tape("a", text, source="x"), Tape("b", text[:40], prompt_len=20, source="y")]
    tapes += [Tape(f"n{n}", text[:n], source="x") for n in range(2, 11)]
    table = replay(model, tapes, out=tmp_path / "t", stride=stride, k_max=8)
    rates = slot_rates(table)
    assert rates.columns == ["source", "slot", "starts", "hits", "rate"]
    assert {(s, j): (n, hits) for s, j, n, hits, _ in rates.iter_rows()} == counted(table)
    assert np.allclose(rates["rate"], rates["hits"] / rates["starts"]) and rates["starts"].min() > 0


def test_a_slot_without_a_start_has_no_rate(tiny, tmp_path):
    rates = slot_rates(replay(tiny(), Tape("n", [1, 2, 3, 4]), out=tmp_path / "t", k_max=5))
    assert rates["starts"].to_list() == [2, 1, 0, 0, 0] and rates["rate"].to_list()[2:] == [None] * 3


def test_slot_rates_are_no_yield(demo, heldout, tmp_path):
    """Beyond slot 1 a draft may hit the pick on the text's own prefix although its chain was rejected before."""
    tape = heldout("pycode")[0]
    table = replay(demo, Tape("d", tape.tokens[:160], source="s"), out=tmp_path / "t", k_max=4)
    hits = slot_rates(table)["rate"].to_list()
    rounds = walk(table, k=4, estimator="forced")
    told = acceptance(records_from(rounds.drop("estimator")))
    joint = told.joint
    assert all(rate > share + 0.02 for rate, share in zip(hits[1:], joint[1:], strict=True)), (hits, joint)
    assert sum(hits) > told.tau * 1.1, "summed as if they were a yield, they promise too much"


def test_on_own_text_a_first_slot_hit_is_an_acceptance(tiny, tmp_path):
    """Where every position starts a round, slot 1 is the same event in both; deeper slots are not."""
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    own = own_tapes(model, Tape("p", [1, 2], prompt_len=2), max_new_tokens=80, k=1, ignore_eos=True)
    table = replay(model, Corpus(own.tapes), out=tmp_path / "t", k_max=3)
    rows = table.frame.filter(table.frame["draft_ids"].arr.first().is_not_null())
    accepted = sum(row["draft_ids"][0] == row["next_token"] for row in rows.iter_rows(named=True))
    assert slot_rates(table)["hits"][0] == accepted > 5
