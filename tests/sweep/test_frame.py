"""Every column of a sweep's frame against metrics computed directly from the rounds of the plain walk."""

from __future__ import annotations

import json
from typing import Any

import polars as pl
import pytest

import workbench as wb
from workbench.core.bootstrap import bootstrap_by
from workbench.core.errors import UserError
from workbench.core.metrics import acceptance
from workbench.core.records import CUTS
from workbench.replay.counts import counts_of
from workbench.replay.predict import predict
from workbench.replay.walk import walk
from workbench.spec.policies import FixedK, policy_from
from workbench.sweep import grid
from workbench.sweep.frame import schema

GRID: dict[str, Any] = dict(k=range(0, 5), p_min=[0, 0.5], floor=[None, 2, "default"])
DRAWS: dict[str, Any] = dict(draws=200, seed=7)


def rounds_of(table, row: dict[str, Any], **given: Any) -> pl.DataFrame:
    rounds = walk(table, policy=policy_from(json.loads(row["spec"])), estimator=row["estimator"], **given)
    return rounds if row["source"] == "all" else rounds.filter(source=row["source"])


def near(found: Any, expected: Any) -> bool:
    """Numbers equal up to the last bits, None equal to None alone; lists likewise, place by place."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(near, found, expected))
    if found is None or expected is None:
        return found is expected
    return bool(found == pytest.approx(expected, rel=1e-12, abs=1e-15))


def check_row(row: dict[str, Any], rounds: pl.DataFrame) -> None:
    """Every column that counts give, against the rounds."""
    pooled, means = acceptance(rounds), acceptance(rounds, aggregation="request_mean")
    for name in ("rounds", "cut", "emitted", "drafted", "accepted", "tau", "accepted_length", "efficiency"):
        assert near(row[name], getattr(pooled, name)), name
    assert row["documents"] == pooled.requests and row["aggregation"] == pooled.aggregation
    assert near(row["emitted_per_round"], pooled.emitted_per_round)
    assert near(row["drafted_per_token"], pooled.drafted / pooled.emitted)
    assert near(row["tau_request_mean"], means.tau)
    assert near(row["accepted_length_request_mean"], means.accepted_length)
    for name in ("joint", "reach", "cond"):
        seen = list(getattr(pooled, name))
        assert near(row[name][: len(seen)], seen), name
        assert len(row[name]) == row["k_max"] and not any(row[name][len(seen) :])
    whole = (~rounds["round_stop"].is_in(list(CUTS))).cast(pl.Int64)
    parts = {
        "tau": (rounds["accepted"], None),
        "accepted_length": ((1 + rounds["accepted"]) * whole, whole),
        "efficiency": (rounds["accepted"], rounds["drafted"]),
    }
    for name, (top, bottom) in parts.items():
        (interval,) = bootstrap_by(rounds["doc_id"].to_numpy(), top, bottom, **DRAWS)
        found = (row[name], row[f"{name}_low"], row[f"{name}_high"])
        assert near(found, (interval.value, interval.low, interval.high)), name


def test_columns_are_the_metrics_of_the_walks(table):
    frame = wb.sweep(table, **GRID, **DRAWS)
    assert set(frame["source"]) == {"all", "code", "prose"} and set(frame["estimator"]) == {"own"}
    for row in frame.gather_every(4).iter_rows(named=True):
        check_row(row, rounds_of(table, row))
    assert frame["speedup"].null_count() == len(frame) == frame["cost"].null_count()


def test_a_wrong_count_is_seen(table):
    row = wb.sweep(table, k=3, **DRAWS).row(0, named=True)
    rounds = rounds_of(table, row)
    check_row(row, rounds)
    fewer = pl.col("accepted") - (pl.int_range(pl.len()) == rounds["accepted"].arg_max()).cast(pl.Int32)
    with pytest.raises(AssertionError):
        check_row(row, rounds.with_columns(fewer))
    with pytest.raises(AssertionError):
        check_row(row | {"tau_high": row["tau_high"] + 1e-6}, rounds)


def test_speeds_are_predictions_of_the_walks(table, cost):
    frame = wb.sweep(table, k=[0, 2, 4], p_min=[0, 0.5], cost=cost, **DRAWS)
    assert frame["cost"].unique().to_list() == ["a machine"]
    for row in frame.iter_rows(named=True):
        policy = policy_from(json.loads(row["spec"]))
        counts = counts_of(rounds_of(table, row), policy=policy, k_max=4, estimator="own")
        for name in ("speedup", "tokens_per_second"):
            one = getattr(predict(counts, cost, **DRAWS), name)
            found = (row[name], row[f"{name}_low"], row[f"{name}_high"])
            assert found == pytest.approx((one.value, one.low, one.high), rel=1e-9)
    assert frame.filter(k=2, source="all")["speedup"].min() > 1


def test_tables_of_several_temperatures_stand_side_by_side(table, warm, foreign):
    given: dict[str, Any] = dict(k=[1, 3], p_min=[0, 0.5], statistic="top", **DRAWS)
    frame = wb.sweep([table, warm, foreign], **given)
    about = frame.select("table", "temperature", "estimator").unique(maintain_order=True).rows()
    assert about == [("own", 0.0, "own"), ("warm", 0.7, "own"), ("foreign", 0.0, "forced")]
    for name, one in (("own", table), ("warm", warm), ("foreign", foreign)):
        part = frame.filter(table=name)
        assert part.equals(wb.sweep({name: one}, **given))
        check_row(part.row(-1, named=True), rounds_of(one, part.row(-1, named=True)))


def test_ratio_draws_by_the_sweeps_seed(warm):
    given: dict[str, Any] = dict(k=3, estimator="ratio", draws=200)
    one, two = wb.sweep(warm, seed=7, **given), wb.sweep(warm, seed=8, **given)
    check_row(one.row(0, named=True), rounds_of(warm, one.row(0, named=True), seed=7))
    assert one["cell"][0] != two["cell"][0] and one["accepted"].to_list() != two["accepted"].to_list()


def test_parameters_stand_in_columns_of_their_own(table, user_policies):
    bare, described = user_policies
    policies = ["min_confidence k=3 tau=0.4", "ema k=4 alpha=0.3", bare(2), described(3)]
    frame = wb.sweep(table, k=2, floor=[None, 1], p_min=0.5, policies=policies, **DRAWS).filter(source="all")
    names = list(schema())
    assert [name for name in frame.columns if name in names] == names
    weakest = frame.row(2, named=True)
    assert weakest["policy_tau"] == 0.4 and weakest["tau"] != 0.4 and weakest["family"] == "min_confidence"
    assert frame["alpha"].to_list()[3] == 0.3 and frame["alpha"].null_count() == 5
    assert frame["family"].to_list() == ["fixed", "floor", "min_confidence", "ema", "EveryOther", "Described"]
    assert frame["floor"].to_list() == [None, 1, None, None, None, None] and frame["pmin0"].to_list()[:2] == [False] * 2
    assert frame["spec"].to_list()[4:] == [None, '{"n":3}'] and frame["k_max"].to_list()[4:] == [2, 3]
    assert frame["cell"].n_unique() == 6


def test_one_document_has_values_and_no_intervals(tmp_path):
    from workbench.replay.synthetic import synthetic_table

    frame = wb.sweep(synthetic_table(tmp_path / "t", documents=1, tokens=(40, 40), k_max=2), k=[0, 2])
    assert frame["tau"].null_count() == 0 and frame["tau_low"].null_count() == len(frame) == 4
    assert frame.filter(k=0)["efficiency"].null_count() == 2


def test_a_grid_names_each_policy_once():
    def specs(**given: Any) -> list[str]:
        return [one.label for one in grid(**given)]

    assert specs(k=[2, 2, 1]) == ["K=2", "K=1"]
    assert specs(k=2, pmin0=[False, True], statistic=["drawn", "top"]) == ["K=2"]
    assert len(specs(k=2, p_min=[0, 0.5], pmin0=[False, True])) == 3
    assert specs(k=[0, 1], p_min=[0, 0.5], floor=[None, 1])[:1] == ["K=0"]
    assert len(specs(k=[0, 1], p_min=[0, 0.5], floor=[None, 1])) == 5
    assert len(specs(k=3, floor=[None, 1], cap=[2, 3])) == 3
    assert len(specs(k=3, floor=[1, "default"], floor_context=[10, 20])) == 3
    assert specs(policies=[FixedK(k=2), "fixed k=2", {"family": "fixed", "k": 3}]) == ["K=2", "K=3"]
    assert specs(k=2, policies=FixedK(k=2)) == ["K=2"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(), "a sweep needs policies"),
        (dict(p_min=0.5), "p_min=0.5 spans a grid with k"),
        (dict(k=[]), "k=[] is empty"),
        (dict(k=-1), "k=-1 is not valid"),
        (dict(k=0, p_min=2.0), "p_min=2.0 is not valid"),
        (dict(k=2, floor="auto"), "floor='auto' is not valid"),
        (dict(k=2, floor=0), "floor=0 is not valid"),
        (dict(k=2, cap=0), "cap=0 is not valid"),
        (dict(k=2, statistic="best"), "statistic='best' is not valid"),
        (dict(policies=[3]), "3 is not a policy"),
        (dict(policies=FixedK), "is not a policy"),
        (dict(policies="fixed q=3"), "has no field 'q'"),
    ],
)
def test_grids_are_refused_in_a_sentence(given, says):
    with pytest.raises(UserError) as error:
        grid(**given)
    assert says in str(error.value) and "\n" not in str(error.value)


def refuse(says: str, *args: Any, **given: Any) -> None:
    with pytest.raises(UserError) as error:
        wb.sweep(*args, **given)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_sweeps_are_refused_in_a_sentence(table, foreign, warm, cost):
    refuse("the policy drafts up to 5 tokens and the table has 4 slots", table, k=5)
    refuse("needs texts that this target generated", foreign, k=2, estimator="own")
    refuse("estimator='best' is not valid", table, k=2, estimator="best")
    refuse("reads a token already drawn", warm, k=2, p_min=[0, 0.5], estimator="ratio")
    refuse("two tables are called 'own'", [table, table], k=2)
    refuse("str is not a draft table", "runs/table", k=2)
    refuse("no table was given", [], k=2)
    refuse("width=0 is not valid", table, k=2, width=0)
    refuse("draws=0 is not valid", table, k=2, draws=0)
    refuse("level=1 is not valid", table, k=2, level=1)
    refuse("Gate", table, policies="gate k=3")
    small = type(cost).from_ratios({1: 1.0, 2: 1.1, 3: 1.2})
    refuse("knows rounds of up to 2", table, k=3, cost=small)
    assert wb.sweep(table, cost=small, draws=50)["k"].max() == 2


def test_sweep_is_a_package_and_a_function(table):
    import workbench.sweep.runner

    assert wb.sweep(table, k=1, draws=50).shape[0] == 3
    assert workbench.sweep.runner.sweep(table, k=1, draws=50).shape[0] == 3
    assert wb.sweep.grid(k=1) == [FixedK(k=1)]
    shown = repr(wb.sweep.summary(wb.sweep(table, k=1, draws=50)))
    assert "policies" in shown and "own" in shown and "pooled" in shown
