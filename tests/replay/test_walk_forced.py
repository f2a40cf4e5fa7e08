"""On any text, the forced walk is the live engine made to commit that text, round for round and bit for bit."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

import workbench as wb
from workbench.core.tape import Corpus, Tape
from workbench.model.weights.load import load_model
from workbench.replay import compare_rounds, live_rounds, replay, walk

REGISTERS = ("novels", "pycode", "sqlite")


def excerpts(tapes: list[Tape], length: int = 90) -> Corpus:
    """Pieces of documents: plain text, a prompt before it, a prompt that ends past a key block, supervised slots."""
    prompts, out = (0, 5, 62, 0), []
    for i, tape in enumerate(tapes):
        at, n = 50 * i, length if prompts[i] < 60 else 62 + length // 2
        mask = np.arange(n) % 7 > 2 if i == 1 else None
        out.append(Tape(tape.doc_id, tape.tokens[at : at + n], prompt_len=prompts[i], supervised=mask))
    return Corpus(out)


@pytest.mark.parametrize("cell", [(8, "fixed", "pycode"), (4, "floor", "novels"), (5, "pmin0", "pydocs")], ids=str)
def test_a_forced_walk_is_the_forced_run(demo, heldout, policies, against_live, differences, cell):
    k, name, register = cell
    tapes = excerpts(heldout(register, 3), length=24)
    walked, lived = against_live(demo, tapes, estimator="forced", k=k, **policies[name])
    assert not (found := differences(walked, lived)), found
    assert walked["emitted"].sum() == sum(len(t) - 1 - max(t.prompt_len, 1) for t in tapes)
    assert len(set(walked["accepted"])) > 1


@pytest.mark.full
@pytest.mark.parametrize("register", REGISTERS)
def test_every_k_under_every_policy(demo, heldout, policies, against_live, differences, tmp_path, register):
    tapes = excerpts(heldout(register, 3), length=32)
    table = replay(demo, tapes, out=tmp_path / "table")
    for k, name in product(range(1, 9), policies):
        walked, lived = against_live(demo, tapes, table=table, estimator="forced", k=k, **policies[name])
        assert not (found := differences(walked, lived)), (k, name, found)


@pytest.mark.parametrize("ratio", [1, 3])
def test_texts_drawn_from_random_models(tiny, sampled, policies, against_live, differences, tmp_path, ratio):
    """Drafts that are the target's pick and not the text occur here: they count, and end their round."""
    model = tiny(ratio=ratio, tied=False, vocab_size=5, seed=1)
    text = sampled(model, 75, temperature=0.5)
    tapes = [Tape("whole", text[:35]), Tape("late", text, prompt_len=55)]
    table = replay(model, tapes, out=tmp_path / "table", chunk=16)
    stops: Counter[str] = Counter()
    for k, name in ((2, "fixed"), (6, "adaptive")):
        walked, lived = against_live(model, tapes, table=table, estimator="forced", k=k, **policies[name])
        assert not (found := differences(walked, lived)), (k, name, found)
        stops += Counter(walked["round_stop"])
        ended = walked.filter(walked["round_stop"] == "forced")
        assert (ended["accepted"] == ended["emitted"]).all() and ended["bonus"].null_count() == 0
    assert min(stops["forced"], stops[""], stops["budget"]) > 1, stops


def test_every_start_over_three_key_blocks(tiny, against_live, differences):
    """Almost nothing is accepted on random ids, so that nearly every position starts a round of eight drafts."""
    model = tiny(ratio=2, tied=False)
    ids = np.random.default_rng(0).integers(0, 83, 142)
    tapes = [Tape("a", ids[:76]), Tape("b", ids, prompt_len=118)]
    walked, lived = against_live(model, tapes, estimator="forced", k=8)
    assert not (found := differences(walked, lived)), found
    assert {62, 63, 64, 65, 126, 127, 128, 129} <= set(walked["start"]) and len(walked) > 85


def test_the_shortest_texts(tiny, policies, against_live, differences):
    model = tiny(ratio=1, vocab_size=5, seed=1)
    tapes = [Tape("2", [1, 2]), Tape("2p", [1, 2], prompt_len=1), Tape("3", [1, 2, 3]), Tape("3p", [3, 2, 1], 2)]
    tapes += [Tape(f"n{n}", [i % 5 for i in range(n)], prompt_len=n // 3) for n in range(4, 11)]
    for name in ("fixed", "pmin0", "adaptive"):
        walked, lived = against_live(model, tapes, estimator="forced", k=8, **policies[name])
        assert not (found := differences(walked, lived)), (name, found)
        assert set(walked["doc_id"]) == {tape.doc_id for tape in tapes[2:] if tape.doc_id != "3p"}


def test_a_text_that_is_all_prompt_has_scores_and_no_rounds(tiny, tmp_path):
    model = tiny(ratio=1, vocab_size=5, seed=1)
    table = replay(model, [Tape("p", [1, 2, 3], prompt_len=3), Tape("q", [1, 2], prompt_len=2)], out=tmp_path / "x")
    assert walk(table, k=4).is_empty() and table.nll["n_tokens"].to_list() == [2, 1]
    assert table.frame["draft_ids"].explode().null_count() == 3 * table.k_max


def test_conversations(tiny_dir, against_live, differences):
    model = load_model(tiny_dir)
    turns = [{"role": "user", "content": "the path of the thing"}, {"role": "assistant", "content": "there, then"}]
    chats = [{"messages": turns}, {"messages": [{"role": "system", "content": "the"}, *turns, *turns]}]
    tapes = wb.corpus(chats, tokenizer=model.tokenizer)
    assert all(tape.prompt_len > 1 and tape.supervised is not None for tape in tapes)
    walked, lived = against_live(model, tapes, estimator="forced", k=5, p_min=0.02)
    assert not (found := differences(walked, lived)), found
    assert set(walked["chain_stop"]) == {"k", "p_min", "none"}


def test_one_text_by_hand(tiny, tmp_path):
    """Rounds of a table whose every entry is read off one by one, without the library's acceptance."""
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    text = [1, 3, 3, 0, 2, 4, 4, 1, 0, 2, 2, 3, 1, 1, 4, 0, 3, 2]
    table = replay(model, Tape("d", text, prompt_len=2), out=tmp_path / "x")
    rows = {row["position"]: row for row in table.frame.iter_rows(named=True)}
    at, expected = 2, []
    while at < len(text) - 1:
        k = min(3, len(text) - 2 - at)
        chain = rows[at]["draft_ids"][:k]
        accepted = emitted = 0
        for slot, token in enumerate(chain):
            if token != rows[at + slot]["target_id"]:
                break
            accepted += 1
            if token != text[at + 1 + slot]:
                emitted = accepted
                break
        emitted = emitted or accepted + 1
        expected.append((at, k, accepted, emitted, chain))
        at += emitted
    columns = ("start", "drafted", "accepted", "emitted", "draft_ids")
    assert walk(table, k=3, estimator="forced").select(columns).rows() == expected


def test_where_two_runs_part_is_named(tiny, sampled, tmp_path):
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    tape = Tape("d", sampled(model, 60, temperature=0.5), source="s")
    table = replay(model, tape, out=tmp_path / "x")
    walked, lived = walk(table, k=4, estimator="forced"), live_rounds(model, tape, estimator="forced", k=4)
    assert compare_rounds(walked, lived, table).is_empty() and compare_rounds(walked, lived).width == 12
    import polars as pl

    start, chain = walked.filter(pl.col("drafted") == 4).select("start", "draft_ids").row(1)
    row = table.frame.filter(pl.col("position") == start).row(0, named=True)
    here = pl.col("start") == start

    def changed(**columns: pl.Expr) -> dict[str, object]:
        other = lived.with_columns(pl.when(here).then(x).otherwise(pl.col(c)).alias(c) for c, x in columns.items())
        return compare_rounds(walked, other, table).row(0, named=True)

    other = [*chain[:2], (chain[2] + 1) % 5, chain[3]]
    found = changed(draft_ids=pl.lit(pl.Series([other], dtype=pl.List(pl.Int32))).first())
    assert (found["start"], found["decision"], found["slot"]) == (start, "draft", 2)
    assert found["margin"] == row["draft_margin"][2] and found["draft_top1"] == row["draft_top1"][2]
    found = changed(draft_ids=pl.col("draft_ids").list.head(3), drafted=pl.lit(3), chain_stop=pl.lit("p_min"))
    assert (found["decision"], found["slot"], found["margin"]) == ("stop", 3, None)
    accepted = walked.filter(here)["accepted"][0]
    found = changed(accepted=pl.col("accepted") + 1)
    assert (found["decision"], found["slot"]) == ("accept", accepted)
    assert found["margin"] == table.frame.filter(pl.col("position") == start + accepted)["target_margin"][0]
    found = compare_rounds(walked.filter(~here), lived, table).row(0, named=True)
    assert found["start"] == start and found["draft_ids"] is None and found["decision"] is None
