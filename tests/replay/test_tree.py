"""Trees: shapes, the walk of one verify, walks over a table against a live loop and a plain walker, and the verdict."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import workbench as wb
from workbench.core.bootstrap import bootstrap_by, bootstrap_difference
from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.core.tape import Corpus, Tape
from workbench.model.hybrid import HybridModel
from workbench.replay import DraftTable, best_tree, own_tapes, product_yield, replay, tree_rounds, tree_walk, walk
from workbench.replay.options import SHADOW_LIMIT
from workbench.replay.tracks import Track
from workbench.replay.tree import Candidates, Facts, _walk, documents_of, facts_of, walk_shapes
from workbench.sampling.draw import draw
from workbench.sampling.law import Law
from workbench.sampling.options import Shaping
from workbench.sampling.philox import TARGET, Noise
from workbench.sampling.shaping import law
from workbench.spec.tree import MAX_RANK, TreeRow, TreeShape, accept_tree, tree_rows, tree_shapes

tree_module = sys.modules["workbench.replay.tree"]

K, WIDTH, V = 5, 4, 6
SHAPES = ["1", "3", "1,1", "1,2", "2,1", "1,2,1", "2,2,2", "4,3,2,1", "1,1,1,1", "1,3,1,1,2", "4,4,4,4,4"]
DRAWN: dict[str, Any] = dict(temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=1, tied=False, vocab_size=V, seed=10)


def prompts(count: int, seed: int = 3) -> Corpus:
    rng = np.random.default_rng(seed)
    return Corpus([Tape(f"p{i}", rng.integers(0, V, 3 + i), 3 + i, source=f"s{i % 2}") for i in range(count)], name="c")


@pytest.fixture(scope="module")
def own(model) -> Corpus:
    return own_tapes(model, prompts(5), max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def foreign(model, sampled) -> Corpus:
    texts = [sampled(model, 34, temperature=0.5, seed=i) for i in range(5)]
    return Corpus([Tape(f"f{i}", t, prompt_len=2 * i, source=f"s{i % 2}") for i, t in enumerate(texts)], name="c")


@pytest.fixture(scope="module")
def tables(model, own, foreign, tmp_path_factory) -> dict[str, DraftTable]:
    sampled_own = own_tapes(model, prompts(5), max_new_tokens=24, ignore_eos=True, **DRAWN)
    made = {"own": (own, {}), "forced": (foreign, {}), "drawn": (sampled_own, DRAWN), "drawn forced": (foreign, DRAWN)}
    return {
        name: replay(model, tapes, out=tmp_path_factory.mktemp("tree") / "x", k_max=K, shadow=WIDTH, **options)
        for name, (tapes, options) in made.items()
    }


# ---------------------------------------------------------------- shapes


def test_a_shape_counts():
    shape = TreeShape(" 1, 2,2 ")
    assert (shape.counts, shape.depth, shape.nodes, shape.verify_width) == ((1, 2, 2), 3, 5, 6)
    assert str(shape) == "1,2,2" and repr(shape) == "TreeShape('1,2,2')" and not shape.is_chain
    assert shape == TreeShape([1, 2, 2]) == TreeShape(shape) and len({shape, TreeShape("1,2,2")}) == 1
    assert TreeShape("1,1").is_chain and wb.TreeShape is TreeShape


@pytest.mark.parametrize(
    ("given", "limits", "says"),
    [
        ("", {}, "tree shape '' is not valid: write counts per depth, such as '1,2,2'"),
        ("1,,2", {}, "tree shape '1,,2' is not valid"),
        ("1,two", {}, "tree shape '1,two' is not valid"),
        ("1,0", {}, "tree shape '1,0': count 2=0 is not valid: it must be an integer from 1 to 8"),
        ("9", {}, "count 1=9 is not valid"),
        ("1,5", dict(max_rank=4), "count 2=5 is not valid: it must be an integer from 1 to 4"),
        ([1, 1.5], {}, "count 2=1.5 is not valid"),
        ([], {}, "has 0 depths; 1 to 64 are valid"),
        ("1,1,1", dict(max_depth=2), "has 3 depths; 1 to 2 are valid"),
        ("2,3,3", dict(max_nodes=7), "has 8 nodes; at most 7 are valid"),
        (3, {}, "tree shape 3 is not valid"),
    ],
)
def test_a_bad_shape_is_a_sentence(given, limits, says):
    with pytest.raises(UserError, match=says):
        TreeShape(given, **limits)


@pytest.mark.parametrize(("nodes", "rank", "depth"), [(1, 4, None), (5, 2, None), (6, 3, 2), (7, 4, 7), (4, 8, 9)])
def test_all_shapes_under_a_budget(nodes, rank, depth):
    found = tree_shapes(nodes, max_rank=rank, max_depth=depth)
    n = min(depth or nodes, nodes)
    grids = (product(range(1, rank + 1), repeat=d) for d in range(1, n + 1))
    expected = {counts for grid in grids for counts in grid if sum(counts) <= nodes}
    assert {shape.counts for shape in found} == expected and len(found) == len(expected)
    assert found == sorted(found, key=lambda shape: (shape.nodes, shape.depth, shape.counts))
    assert [s.depth for s in found if s.is_chain] == list(range(1, n + 1)), "chains as long as spines"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(max_nodes=0), "max_nodes=0"),
        (dict(max_nodes=4, max_rank=9), "max_rank=9 is not valid: it must be an integer from 1 to 8"),
        (dict(max_nodes=4, max_depth=0), "max_depth=0"),
        (dict(max_nodes=30), "max_nodes=30 with max_rank=4 and max_depth=30 gives [0-9,]+ shapes; at most 200,000"),
    ],
)
def test_too_many_shapes_are_a_sentence(given, says):
    with pytest.raises(UserError, match=says):
        tree_shapes(**given)


# ---------------------------------------------------------------- one verify


def test_rows_of_a_tree():
    rows = tree_rows(TreeShape("1,3,2"), 7, [[10, 11], [20, 21, 22], [30, 31]])
    spine = [TreeRow(7, 0, 0), TreeRow(10, 1, 0), TreeRow(20, 2, 1), TreeRow(30, 3, 2)]
    assert rows == [*spine, TreeRow(21, 2, 1), TreeRow(22, 2, 1), TreeRow(31, 3, 2)]
    with pytest.raises(AssertionError, match="depth 1 needs 2 different candidates"):
        tree_rows(TreeShape("2"), 7, [[10, 10]])


HEDGED = [[10, 11], [20]]
CHAIN = [[10], [20, 21], [30]]


@pytest.mark.parametrize(
    ("shape", "candidates", "picks", "path", "emitted"),
    [
        ("2,1", HEDGED, [11, 55, 66, 20], (3,), (11, 20)),  # and not on to the spine's 20, though the bonus equals it
        ("1,2,1", CHAIN, [10, 21, 66, 77, 88], (1, 4), (10, 21, 88)),
        ("1,2,1", CHAIN, [10, 20, 30, 77, 88], (1, 2, 3), (10, 20, 30, 77)),
        ("1,2,1", CHAIN, [10, 20, 31, 77, 88], (1, 2), (10, 20, 31)),
        ("1,2,1", CHAIN, [42, 10, 20, 30, 21], (), (42,)),
    ],
)
def test_the_walk_of_a_verify(shape, candidates, picks, path, emitted):
    found, verdict = accept_tree(tree_rows(TreeShape(shape), 1, candidates), picks)
    assert found == path and verdict.emitted == emitted
    assert (verdict.accepted, verdict.bonus, verdict.round_stop) == (len(path), emitted[-1], "")


@pytest.mark.parametrize(
    ("picks", "force", "path", "emitted", "stop"),
    [
        ([10, 20, 30, 5, 5], [10, 20, 30, 9], (1, 2, 3), (10, 20, 30, 9), ""),
        ([10, 21, 5, 5, 6], [10, 21, 9, 9], (1, 4), (10, 21, 9), ""),
        ([10, 21, 5, 5, 6], [10, 20, 9, 9], (1, 4), (10, 20), "forced"),
        ([10, 20, 5, 5, 6], [10, 21, 9, 9], (1, 2), (10, 21), "forced"),
        ([10, 5, 5, 5, 6], [10, 21, 9, 9], (1,), (10, 21), ""),
        ([5, 5, 5, 5, 6], [10, 21, 9, 9], (), (10,), ""),
    ],
)
def test_the_walk_of_a_verify_that_commits_a_text(picks, force, path, emitted, stop):
    found, verdict = accept_tree(tree_rows(TreeShape("1,2,1"), 1, CHAIN), picks, force=force)
    assert (found, verdict.emitted, verdict.round_stop) == (path, emitted, stop)
    assert verdict.accepted == len(path) and verdict.bonus == emitted[-1]


def test_a_stop_token_ends_the_walk():
    rows = tree_rows(TreeShape("1,2,1"), 1, CHAIN)
    for picks, stops, emitted in (([10, 20, 30, 5, 5], {20}, (10, 20)), ([10, 21, 5, 5, 6], {21}, (10, 21))):
        path, verdict = accept_tree(rows, picks, stop_ids=frozenset(stops))
        assert verdict.emitted == emitted and (verdict.bonus, verdict.round_stop) == (None, "stop")
        assert len(path) == verdict.accepted == 2


# ---------------------------------------------------------------- a walk is the live run


@torch.inference_mode()
def live(model: HybridModel, tape: Tape, shape: TreeShape, *, forced: bool, shaping: dict[str, Any], sequence: int):
    """Rounds of a live loop that drafts a tree, and verifies every row by a forward of its whole path."""
    noise = Noise(shaping.get("seed", 0), sequence)
    how = Shaping(temperature=shaping.get("temperature", 0.0))

    def picked(logits: torch.Tensor, position: int) -> int:
        made: Law = law(logits, how)
        return int(logits.argmax()) if how.greedy else draw(made, noise, position, TARGET)

    text, at, rounds = tape.tokens.tolist(), max(tape.prompt_len, 1), []
    known = text[: at + 1]
    state = model.new_cache(capacity=512)
    model.forward(torch.tensor([known[:-1]]), state, logits="none")  # all but the pending token
    while at < len(text) - 1:
        depth = min(shape.depth, len(text) - 2 - at)
        x = torch.tensor([known])
        rows = model.forward(x, model.new_cache(capacity=512), logits="none")
        cache, candidates = model.new_draft_cache(capacity=512), []
        hidden = model.draft(x[:, 1:], rows.normed_BTH[:, :-1], cache)[:, -1:]
        for d in range(depth):
            logits = model.unembed(hidden)[0, 0]
            spine = picked(logits, at + 1 + d)
            ranked = sorted(range(V), key=lambda i: (-float(logits[i]), i))
            candidates.append([spine, *(i for i in ranked if i != spine)][:WIDTH])
            hidden = model.draft(torch.tensor([[spine]]), hidden, cache)
        laid = (
            tree_rows(TreeShape(shape.counts[:depth]), known[-1], candidates) if depth else [TreeRow(known[-1], 0, 0)]
        )
        after, spine_ids = [], [row.token for row in laid[: depth + 1]]
        out = model.forward(torch.tensor([spine_ids]), state.fork(), logits="all")
        for i, row in enumerate(laid):
            if i > depth:  # a hedge sees the spine before it, and itself
                path = [*spine_ids[: row.depth], row.token]
                last = model.forward(torch.tensor([path]), state.fork(), logits="last").logits_BTV[0, -1]
            else:
                last = out.logits_BTV[0, i]
            after.append(picked(last, len(known) + row.depth))
        force = text[at + 1 : at + depth + 2] if forced else None
        path, verdict = accept_tree(laid, after, force=force)
        rounds.append((at, depth, len(laid) - 1, len(path), bool(path) and path[-1] > depth, list(verdict.emitted)))
        model.forward(torch.tensor([[known[-1], *verdict.emitted[:-1]]]), state, logits="none")
        known += verdict.emitted
        at += len(verdict.emitted)
    assert known == text, "a verify of a tree commits the text"
    return rounds


FULL = [pytest.param(name, marks=pytest.mark.full) for name in ("own", "drawn forced")]


@pytest.mark.parametrize("name", ["forced", "drawn", *FULL])
def test_a_walk_is_a_live_loop_over_trees(model, own, foreign, tables, name):
    table = tables[name]
    tapes = {"own": own, "drawn": own_tapes(model, prompts(5), max_new_tokens=24, ignore_eos=True, **DRAWN)}
    shaping = {} if table.plain else DRAWN
    hedges = 0
    for one_of, text in ((1, "2,2,2"), (2, "1,3,1,1,2")):
        found = tree_rounds(table, text)
        assert found["estimator"][0] == name.split()[-1].replace("drawn", "own")
        tape = tapes.get(name, foreign)[one_of]
        lived = live(model, tape, TreeShape(text), forced="forced" in name, shaping=shaping, sequence=one_of)
        rows = found.filter(pl.col("doc_id") == tape.doc_id)
        walked = rows.select("start", "depth", "drafted", "accepted", "hedge", "emitted").rows()
        assert walked == [(*one[:-1], len(one[-1])) for one in lived]
        assert rows["bonus"].to_list() == [one[-1][-1] for one in lived]
        hedges += sum(one[4] for one in lived)
    assert hedges > 0


# ---------------------------------------------------------------- the fast walk is the plain one


def counted(rounds: pl.DataFrame) -> dict[str, int]:
    return {
        "rounds": len(rounds),
        "accepted": rounds["accepted"].sum(),
        "hedge_hits": rounds["hedge"].sum(),
        "cut": int((rounds["round_stop"] == "budget").sum()),
        "drafted": rounds["drafted"].sum(),
        "steps": rounds["depth"].sum(),
        "emitted": rounds["emitted"].sum(),
    }


def differences(frame: pl.DataFrame, table: DraftTable, estimator: str) -> list[str]:
    found = []
    for text in SHAPES:
        rounds = tree_rounds(table, text, estimator=estimator)
        for source in ("s0", "s1", "all"):
            part = rounds if source == "all" else rounds.filter(pl.col("source") == source)
            row = frame.filter((pl.col("shape") == text) & (pl.col("source") == source)).row(0, named=True)
            expected = counted(part)
            found += [f"{text} {source} {name}" for name, value in expected.items() if row[name] != value]
    return found


@pytest.mark.parametrize(
    ("name", "estimator"),
    [("own", "own"), ("own", "forced"), ("forced", "forced"), ("drawn", "own"), ("drawn forced", "forced")],
)
def test_the_fast_walk_is_the_plain_one(tables, name, estimator):
    frame = tree_walk(tables[name], SHAPES, estimator=estimator, draws=50)
    assert not differences(frame, tables[name], estimator)
    assert len(frame) == 3 * len(SHAPES) and frame["estimator"].unique().to_list() == [estimator]
    assert frame["hedge_hits"].sum() > 20 and frame["cut"].sum() > 0
    if "forced" in estimator and name != "own":
        stops = [tree_rounds(tables[name], text)["round_stop"] for text in ("2,1", "4,4,4,4,4")]
        assert all((stop == "forced").any() for stop in stops), "nodes off the tape are met"


def test_random_facts_by_the_compiled_and_the_plain_loop():
    rng = np.random.default_rng(0)
    shapes = tree_shapes(7, max_rank=3, max_depth=4)
    facts, first = [], []
    for n in (1, 2, 9, 60):
        reach = np.minimum(rng.integers(0, 5, n), np.arange(n, 0, -1))
        rank = rng.choice([1, 2, 3, 127], n)
        facts.append(Facts(reach.astype(np.int8), rank.astype(np.int8), (rng.random(n) < 0.6) & (rank > 1)))
        first.append(int(rng.integers(0, n)))
    fast = walk_shapes(facts, first, shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_module, "_compiled", lambda: _walk)
        assert np.array_equal(walk_shapes(facts, first, shapes), fast)
    assert (fast[:, :, 0] <= [[n - p for n, p in zip((1, 2, 9, 60), first, strict=True)]]).all()


def hedges_go_on(patch: pytest.MonkeyPatch) -> None:
    """A hedge that stands is followed by the next spine token."""
    right = facts_of

    def wrong(document: Candidates, estimator: str) -> Facts:
        facts = right(document, estimator)
        return Facts(np.where(facts.rank == 2, facts.reach + 1, facts.reach).astype(np.int8), facts.rank, facts.on_tape)

    patch.setattr(tree_module, "facts_of", wrong)


def a_hedge_has_no_bonus(patch: pytest.MonkeyPatch) -> None:
    right = facts_of

    def wrong(document: Candidates, estimator: str) -> Facts:
        facts = right(document, estimator)
        return Facts(facts.reach, facts.rank, np.zeros_like(facts.on_tape))

    patch.setattr(tree_module, "facts_of", wrong)


def hedges_of_the_next_slot(patch: pytest.MonkeyPatch) -> None:
    right = facts_of

    def wrong(document: Candidates, estimator: str) -> Facts:
        ids = document.ids.copy()
        ids[:, :, 1:] = np.roll(ids[:, :, 1:], -1, 1)
        return right(Candidates(document.track, ids), estimator)

    patch.setattr(tree_module, "facts_of", wrong)


def picks_of_the_tape(patch: pytest.MonkeyPatch) -> None:
    right = facts_of
    patch.setattr(tree_module, "facts_of", lambda document, estimator: right(document, "own"))


@pytest.mark.parametrize("mistake", [hedges_go_on, a_hedge_has_no_bonus, hedges_of_the_next_slot, picks_of_the_tape])
def test_a_mistake_is_seen(tables, monkeypatch, mistake):
    mistake(monkeypatch)
    assert differences(tree_walk(tables["forced"], SHAPES, draws=5), tables["forced"], "forced")


# ---------------------------------------------------------------- chains, intervals


@pytest.mark.parametrize("name", ["own", "forced", "drawn", "drawn forced"])
def test_a_tree_of_ones_is_the_chain(tables, name):
    for depth in range(1, K + 1):
        shape = ",".join("1" * depth)
        chain, tree = walk(tables[name], k=depth), tree_rounds(tables[name], shape)
        columns = ["doc_id", "source", "start", "drafted", "accepted", "emitted", "bonus", "round_stop", "estimator"]
        assert tree.select(columns).equals(chain.select(columns)), depth
        row = tree_walk(tables[name], shape, draws=200, seed=4).filter(pl.col("source") == "all").row(0, named=True)
        told = acceptance(chain)
        assert (row["rounds"], row["accepted"], row["cut"]) == (told.rounds, told.accepted, told.cut)
        assert row["tau"] == told.tau and row["yield"] == told.emitted_per_round and row["drafted"] == told.drafted
        for column, numerator in (("yield", "emitted"), ("tau", "accepted")):
            by = bootstrap_by(chain["doc_id"].to_numpy(), chain[numerator].to_numpy(), draws=200, seed=4)[0]
            assert (row[f"{column}_low"], row[f"{column}_high"]) == pytest.approx((by.low, by.high))


def test_a_table_without_candidates_walks_chains_and_no_more(tables, model, foreign, tmp_path):
    bare = replay(model, foreign, out=tmp_path / "x", k_max=K)
    assert bare.k_shadow == 0
    chains = ["1,1", "1,1,1,1,1"]
    assert tree_walk(bare, chains, draws=5).equals(tree_walk(tables["forced"], chains, draws=5))
    for run in (tree_walk, tree_rounds, product_yield):
        for table, shape, says in (
            (bare, "1,2", r"asks for 2 candidates at one depth and the table holds 0: replay with shadow=2"),
            (tables["own"], "5,1", r"asks for 5 candidates at one depth and the table holds 4"),
            (tables["own"], "1,1,1,1,1,1", r"has 6 depths and the table has 5 slots: .*max_depth=5"),
            (tables["own"], "1,x", "tree shape '1,x' is not valid"),
        ):
            with pytest.raises(UserError, match=says):
                run(table, shape)
        with pytest.raises(UserError, match="estimator='ratio' is not valid: choose one of 'own', 'forced'"):
            run(tables["own"], "1,2", estimator="ratio")
        with pytest.raises(UserError, match="estimator='own' needs texts"):
            run(tables["forced"], "1,2", estimator="own")
        thin = replay(model, foreign, out=tmp_path / run.__name__, k_max=K, stride=2)
        with pytest.raises(UserError, match="a chain at one start in 2 only"):
            run(thin, "1,1")
    for shapes in ([], 3):
        with pytest.raises(UserError, match="shapes"):
            tree_walk(tables["own"], shapes)


# ---------------------------------------------------------------- trees against chains


@pytest.fixture(scope="module")
def every(tables) -> pl.DataFrame:
    return wb.tree_walk(tables["own"], wb.tree_shapes(7, max_depth=K), draws=300)


def test_the_best_tree_against_the_best_chain(every):
    verdict = wb.best_tree(every, draws=300, seed=2)
    assert verdict["verify_width"].unique().sort().to_list() == list(range(3, 9)) and len(verdict) == 18
    for row in verdict.iter_rows(named=True):
        part = every.filter(pl.col("source") == row["source"])
        trees = part.filter(~pl.col("is_chain") & (pl.col("verify_width") == row["verify_width"]))
        chains = part.filter(pl.col("is_chain") & (pl.col("verify_width") <= row["verify_width"]))
        assert chains["depth"].max() == min(row["verify_width"] - 1, K), "chains as long as width and slots allow"
        assert row["tree_yield"] == trees["yield"].max() and row["chain_yield"] == chains["yield"].max()
        sides = []
        for name in ("tree", "chain"):
            one = part.filter(pl.col("shape") == row[name]).row(0, named=True)
            assert one["depth"] == row[f"{name}_depth"] and sum(one["document_rounds"]) == one["rounds"]
            sides.append((np.arange(row["documents"]), one["document_emitted"], one["document_rounds"]))
        paired = bootstrap_difference(*sides, draws=300, seed=2)[0]
        assert row["difference"] == pytest.approx(row["tree_yield"] - row["chain_yield"]) == paired.value
        assert (row["difference_low"], row["difference_high"]) == (paired.low, paired.high)


def test_a_verdict_needs_long_chains(every):
    for keep, says in (
        (pl.col("depth") <= 3, "lacks chains that a verify of 5 rows has room for: add the shape '1,1,1,1'"),
        (pl.col("is_chain"), "holds chains only"),
        (~pl.col("is_chain"), "lacks chains that a verify of 3 rows has room for"),
    ):
        with pytest.raises(UserError, match=says):
            best_tree(every.filter(keep))
    with pytest.raises(UserError, match="a frame of trees needs the columns"):
        best_tree(every.drop("document_rounds"))


def hand(drafts: list[list[int]], text: list[int], shadow: list[list[list[int]]]) -> Candidates:
    rows, k = len(drafts), len(drafts[0])
    none, floats = np.zeros(rows), np.zeros((rows, k))
    track = Track("d", "s", "greedy", 0, rows + 1, np.array(text), np.array(text[1:]), none,
                  np.array(drafts), floats, floats, None, None, None)  # fmt: skip
    return Candidates(track, np.concatenate([np.array(drafts)[:, :, None], np.array(shadow)], -1))


def test_facts_by_hand():
    text = [0, 1, 2, 3]
    found = facts_of(hand([[1, 2], [9, 9], [8, 7]], text, [[[5], [5]], [[2], [5]], [[4], [3]]]), "own")
    assert found.reach.tolist() == [2, 0, 0] and found.rank.tolist() == [127, 2, 127] and found.on_tape[:2].all()


def test_independent_products_miss_how_rounds_pick_their_starts():
    """Spine and hedges stand at every other start only; rounds that start there skip the others."""
    good, bad, text = [1, 1], [9, 9], [1] * 41
    drafts = [good if i % 3 == 0 else bad for i in range(40)]
    one = hand(drafts, text, [[[7], [7]]] * 40)
    counts = walk_shapes([facts_of(one, "own")], [0], [TreeShape("1,1")])
    exact = 40 / counts[0, 0, 0]
    reach = facts_of(one, "own").reach
    s1 = (reach >= 1).mean()
    s2 = (reach[:-1] >= 2).sum() / (reach[:-1] >= 1).sum()
    product = 1 + s1 * (1 + s2)
    assert exact > 2.8 and product < 1.8


def test_the_published_estimate_is_another_number(tables, every):
    found = product_yield(tables["own"], tree_shapes(7, max_depth=K))
    both = every.join(found, on=["shape", "source"])
    assert len(both) == len(every) and both["product_yield"].null_count() == 0
    gap = (both["product_yield"] - both["yield"]).abs()
    assert gap.max() > 0.1, "it is no walk"
    documents, _ = documents_of(tables["own"], [TreeShape("3,1")], None)
    assert documents[0].ids.shape[1:] == (K, 3)
    reach, rank, room = [], [], []
    for one in documents:
        facts = facts_of(one, "own")
        for p in range(one.track.first, len(facts.reach)):
            reach.append(int(facts.reach[p]))
            rank.append(int(facts.rank[p]))
            room.append(len(facts.reach) - p)
    estimate = 0.0
    for d, count in ((2, 1), (1, 3)):
        tested = [i for i in range(len(reach)) if reach[i] >= d - 1 and room[i] >= d]
        s = sum(reach[i] >= d for i in tested) / len(tested)
        h = sum(reach[i] >= d or rank[i] <= count for i in tested) / len(tested)
        estimate = s * (1 + estimate) + 0.95 * (h - s)
    row = found.filter((pl.col("shape") == "3,1") & (pl.col("source") == "all")).row(0, named=True)
    assert row["product_yield"] == pytest.approx(1 + estimate) and row["starts"] == len(reach)
    with pytest.raises(UserError, match="hedge_credit=2"):
        product_yield(tables["own"], "1", hedge_credit=2)


def test_a_shape_is_as_wide_as_a_table_can_hold():
    assert MAX_RANK == SHADOW_LIMIT
