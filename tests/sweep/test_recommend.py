"""Recommendations on constructed sums with known winners and ties, and paired comparisons of tables."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import polars as pl
import pytest

import workbench as wb
from workbench.core.bootstrap import bootstrap_by, bootstrap_difference, ratio_draws
from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.replay.walk import walk
from workbench.spec.policies import FixedK, policy_from
from workbench.sweep.cells import COUNTS, SLOTS, Cell, Walked
from workbench.sweep.held import Bootstrap, hold

DOCUMENTS = 20
DRAWS: dict[str, Any] = dict(draws=300, seed=2)


def constructed(name: str, **accepted: Any) -> pl.DataFrame:
    """A frame of policies with 10 rounds a document, and so many accepted tokens in each document."""
    key: Any = {"shaping": {"temperature": 0.0}}
    names = tuple(f"d{i}" for i in range(DOCUMENTS))
    walked = Walked(name, key, "", "own", None, names, ("a", "b") * (DOCUMENTS // 2))
    cells = []
    for i, (label, values) in enumerate(accepted.items()):
        sums = dict.fromkeys(COUNTS, np.full(DOCUMENTS, 10)) | {"accepted": np.broadcast_to(values, DOCUMENTS)}
        slots = dict.fromkeys(SLOTS, np.zeros((DOCUMENTS, 1)))
        cells.append(Cell(f"{name}-{i}", name, label, "fixed", {"family": "fixed", "k": i}, 1, sums, slots))
    hold(cells, [walked], Bootstrap(level=0.9, **DRAWS))
    rows = [(cell.key, name, source, cell.label) for cell in cells for source in ("all", "a", "b")]
    return pl.DataFrame(rows, schema=["cell", "table", "source", "policy"], orient="row")


def test_a_clear_winner_is_sure():
    noise = np.arange(DOCUMENTS) % 5
    found = wb.recommend(constructed("clear", low=10 + noise, high=12 + noise, mid=11 + noise), objective="tau")
    assert (found.label, found.runner_up, found.probability_best, found.sure) == ("high", "mid", 1.0, True)
    assert found.value == pytest.approx(1.4) and found.low < 1.4 < found.high
    assert found.runner_up_value == pytest.approx(1.3) and found.probabilities == {"high": 1.0}
    # The difference is the same in every document: paired, it has no spread, whatever that of the documents.
    assert found.lead is not None and (found.lead.low, found.lead.high) == pytest.approx((0.1, 0.1))
    assert found.high - found.low > 0.05
    assert isinstance(found.policy, FixedK) and found.policy.k == 1 and found.spec == {"family": "fixed", "k": 1}
    assert found.sentence == repr(found)[len("Recommendation(") : -1]
    assert found.sentence.startswith("high: 1.40 accepted per round (1.3")
    assert found.sentence.endswith("best in 100 % of resamples; next mid: 1.30 accepted per round")


def test_policies_that_win_on_other_documents_are_unsure():
    half = np.arange(DOCUMENTS) % 2
    found = wb.recommend(constructed("mirrored", one=10 + 6 * half, two=16 - 6 * half), objective="tau")
    assert 0.4 < found.probability_best < 0.6 and not found.sure and "Not sure" in found._repr_html_()
    assert sum(found.probabilities.values()) == pytest.approx(1) and len(found.probabilities) == 2
    assert found.lead is not None and found.lead.low < 0 < found.lead.high
    on_a = wb.recommend(constructed("mirrored", one=10 + 6 * half, two=16 - 6 * half), objective="tau", source="a")
    assert (on_a.label, on_a.probability_best, on_a.documents) == ("two", 1.0, DOCUMENTS // 2)


def test_the_share_of_wins_is_that_of_paired_draws():
    random = np.random.default_rng(0)
    values = {name: random.uniform(5, 25, DOCUMENTS) for name in "abcd"}
    found = wb.recommend(constructed("random", **values), objective="tau")
    names = [f"d{i}" for i in range(DOCUMENTS)]
    drawn = ratio_draws(names, np.stack(list(values.values()), 1), np.full((DOCUMENTS, 4), 10), **DRAWS)
    shares = dict(zip("abcd", np.bincount(drawn.argmax(1), minlength=4) / len(drawn)))
    assert found.probabilities == pytest.approx({name: share for name, share in shares.items() if share})
    assert found.label == max(values, key=lambda name: values[name].sum())
    lone = bootstrap_by(names, values[found.label], np.full(DOCUMENTS, 10), level=0.9, **DRAWS)[0]
    assert (found.low, found.high) == (lone.low, lone.high)
    # Unpaired, with other resamples for each policy, the shares would be others.
    apart = np.stack([ratio_draws(names, v, np.full(DOCUMENTS, 10), draws=300, seed=i)[:, 0] for i, v in
                      enumerate(values.values())], 1)  # fmt: skip
    assert (np.bincount(apart.argmax(1), minlength=4) / 300 != np.array(list(shares.values()))).any()


def test_equal_rounds_are_one_candidate_and_ties_are_shared():
    x = np.arange(DOCUMENTS) % 3
    found = wb.recommend(constructed("same", one=10 + x, two=10 + x, three=9 + x), objective="tau")
    assert (found.label, found.same, found.candidates, found.probability_best) == ("one", ("two",), 2, 1.0)
    assert found.runner_up == "three" and "the same rounds as two" in found.sentence
    swapped = np.where(np.arange(DOCUMENTS) < 2, [11, 9] * (DOCUMENTS // 2), 10)
    tied = wb.recommend(constructed("tied", one=10, two=swapped), objective="tau")
    assert tied.label == "one" and 0.4 < tied.probability_best < 0.6


def test_a_frame_may_be_narrowed_and_ordered_anew(table, cost):
    frame = wb.sweep(table, k=[1, 2, 4], p_min=[0, 0.5], cost=cost, **DRAWS)
    best = wb.recommend(frame)
    row = frame.filter(source="all").sort("speedup", descending=True).row(0, named=True)
    ends = (row["speedup"], row["speedup_low"], row["speedup_high"])
    assert best.label == row["policy"] and (best.value, best.low, best.high) == pytest.approx(ends, rel=1e-12)
    narrowed = wb.recommend(frame.filter(pl.col("policy") != best.label).sort("tau"))
    assert narrowed.label == best.runner_up and narrowed.candidates < best.candidates
    assert wb.recommend(frame, objective="tau").label == "K=4"
    assert wb.recommend(frame, draws=50, seed=9).draws == 50
    assert "Recommended: " in best._repr_html_() and "<table" in best._repr_html_()


def test_sums_come_from_a_store_in_another_process(table, cost, tmp_path, monkeypatch, user_policies):
    from workbench.sweep import held

    given: dict[str, Any] = dict(k=[1, 2, 4], cost=cost, out=tmp_path / "s", **DRAWS)
    frame = wb.sweep(table, policies=user_policies[1](3), **given)
    there = wb.recommend(frame)
    frame.write_parquet(tmp_path / "frame.parquet")
    monkeypatch.setattr(held, "_HELD", {})
    read = pl.read_parquet(tmp_path / "frame.parquet")
    refuse("give the sweep's directory as store=", read)
    here = wb.recommend(read, store=tmp_path / "s")
    assert here.sentence == there.sentence and here.policy == there.policy and here.probabilities == there.probabilities
    user = wb.recommend(read.filter(family="Described"), store=tmp_path / "s")
    assert user.policy is None and user.spec == {"n": 3} and user.runner_up is None
    assert wb.recommend(wb.load_sweep(tmp_path / "s")).sentence == there.sentence


def refuse(says: str, frame: pl.DataFrame, **given: Any) -> None:
    with pytest.raises(UserError) as error:
        wb.recommend(frame, **given)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_recommendations_are_refused_in_a_sentence(table, warm):
    frame = wb.sweep([table, warm], k=[0, 2], **DRAWS)
    refuse("give the rows of one table", frame, objective="tau")
    assert wb.recommend(frame, objective="tau", table="warm").table == "warm"
    refuse("speedup, which needs a cost model", frame, table="own")
    refuse("objective='joy' is not valid", frame, objective="joy")
    refuse("source='poems' is not valid", frame, source="poems")
    refuse("table='cold' is not valid", frame, table="cold")
    refuse("no policy has efficiency", frame.filter(k=0), objective="efficiency", table="own")
    refuse("holds no rows", frame.filter(k=9), objective="tau")
    refuse("a frame of wb.sweep needs the columns", frame.drop("cell"), objective="tau")


def test_one_document_says_nothing_of_spread(tmp_path):
    from workbench.replay.synthetic import synthetic_table

    frame = wb.sweep(synthetic_table(tmp_path / "t", documents=1, tokens=(60, 60), k_max=3), **DRAWS)
    found = wb.recommend(frame, objective="tau")
    assert found.probability_best is None and not found.sure and found.low is None
    assert "from 1 document" in found.sentence and "–" in repr(found._card())


# ---------------------------------------------------------------- two tables


def test_differences_are_paired_by_document(pair):
    a, b = pair(1), pair(2)
    found = wb.compare_tables(a, b, k=[1, 3], p_min=[0, 0.1], **DRAWS)
    assert found["estimator"].unique().to_list() == ["forced"] and len(found) == 4 * 3 * 3
    for row in found.iter_rows(named=True):
        sides, values = [], []
        for table in (a, b):
            rounds = walk(table, policy=policy_from(json.loads(row["spec"])), estimator="forced")
            if row["source"] != "all":
                rounds = rounds.filter(source=row["source"])
            ended = ~rounds["round_stop"].is_in(["budget", "context"])
            parts = {
                "tau": (rounds["accepted"], None),
                "accepted_length": ((1 + rounds["accepted"]) * ended, ended.cast(pl.Int64)),
                "efficiency": (rounds["accepted"], rounds["drafted"]),
            }
            sides.append((rounds["doc_id"].to_numpy(), *parts[row["quantity"]]))
            values.append(getattr(acceptance(rounds), row["quantity"]))
        one = bootstrap_difference(*sides, **DRAWS)[0]
        expected = (*values, one.value, one.low, one.high)
        seen = tuple(row[name] for name in ("a", "b", "difference", "low", "high"))
        assert all(x is y or x == pytest.approx(y, rel=1e-12, abs=1e-15) for x, y in zip(seen, expected)), row
        assert row["documents"] == len(set(sides[0][0]))
    flipped = wb.compare_tables(b, a, k=[1, 3], p_min=[0, 0.1], **DRAWS)
    np.testing.assert_allclose(found["difference"], -flipped["difference"].to_numpy())


def test_a_table_does_not_differ_from_itself(table, cost):
    found = wb.compare_tables(table, table, [FixedK(k=2), "ema k=3"], cost=cost, **DRAWS)
    assert found["quantity"].unique(maintain_order=True).to_list()[3:] == ["speedup", "tokens_per_second"]
    assert set(found["difference"]) == set(found["low"]) == set(found["high"]) == {0.0}
    assert found["policy"].to_list()[::15] == ["K=2", "ema K=3"] and found["source"].to_list()[:6] == ["all"] * 5 + [
        "code"
    ]


def test_each_side_may_have_its_own_cost(table, cost):
    dear = type(cost).from_ratios({1: 1.0, 2: 1.4, 3: 1.8, 4: 2.2, 5: 2.6}, draft=0.3, plain_seconds=0.01)
    found = wb.compare_tables(table, table, k=2, cost=(cost, dear), quantities="speedup", **DRAWS)
    values = [wb.sweep(table, k=2, cost=one, **DRAWS)["speedup"][0] for one in (cost, dear)]
    assert (found["a"][0], found["b"][0]) == pytest.approx(tuple(values)) and found["low"][0] > 0


def test_tables_that_are_not_paired_are_refused_in_a_sentence(table, warm, pair):
    def refuse(says: str, *args: Any, **given: Any) -> None:
        with pytest.raises(UserError) as error:
            wb.compare_tables(*args, **given)
        assert says in str(error.value) and "\n" not in str(error.value)

    refuse("'d0' has another text or prompt in b", pair(1), pair(2, texts=1), k=2)
    refuse("the two tables hold different documents;", table, warm, k=2)
    refuse("goes by estimator", table, pair(1), k=2)
    refuse("quantity 'speedup' needs a cost model", pair(1), pair(2), k=2, quantities=["speedup"])
    refuse("quantities='joy' is not valid", pair(1), pair(2), k=2, quantities=["joy"])
    refuse("drafts up to 4 tokens and the table has 3 slots", pair(1), pair(2), k=4)
    refuse("str is not a draft table", "a", pair(2), k=2)
