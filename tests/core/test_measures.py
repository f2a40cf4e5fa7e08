"""Measures of rounds with intervals: against hand counts, paired, and in bins."""

from __future__ import annotations

import polars as pl
import pytest

from workbench.core.errors import UserError
from workbench.core.measures import differences, interval, parts, rate_by


def frame(accepted: list[int], drafted: int = 3) -> pl.DataFrame:
    """Rounds of three documents in turn."""
    n = len(accepted)
    ids = [f"d{i % 3}" for i in range(n)]
    return pl.DataFrame({"doc_id": ids, "drafted": [drafted] * n, "accepted": accepted})


A = frame([3, 0, 1, 2, 0, 3])
B = frame([0, 0, 1, 1, 0, 1, 0])


@pytest.mark.parametrize(("measure", "value"), [("tau", 9 / 6), ("slot1", 4 / 6), ("efficiency", 9 / 18)])
def test_a_measure_is_its_ratio(measure, value):
    found = interval(A, measure)
    assert found.value == pytest.approx(value) and found.low <= value <= found.high and found.groups == 3


def test_a_round_that_drafted_nothing_counts_as_rejected():
    rounds = frame([1, 0, 0]).with_columns(drafted=pl.Series([3, 3, 0]))
    assert interval(rounds, "slot1").value == pytest.approx(1 / 3)
    assert interval(rounds, "efficiency").value == pytest.approx(1 / 6)


def test_differences_are_paired_and_signed():
    found = differences(A, {"same": A, "worse": B}, "tau")
    same, worse = found.iter_rows(named=True)
    assert (same["difference"], same["low"], same["high"]) == (0, 0, 0)
    assert worse["difference"] == pytest.approx(3 / 7 - 9 / 6) and worse["low"] <= worse["difference"] <= worse["high"]
    assert worse["value"] == pytest.approx(3 / 7) and worse["baseline"] == pytest.approx(9 / 6)
    assert found["documents"].to_list() == [3, 3]
    with pytest.raises(UserError, match="same documents"):
        differences(A, {"other": B.filter(pl.col("doc_id") != "d0")})


def test_rate_by_bins_hold_every_row_once():
    rows = A.with_columns(x=pl.Series([0.1, 5.0, 0.2, 0.3, 4.0, 9.0]), hit=pl.col("accepted") > 0)
    halves = rate_by(rows, "x", "hit", bins=2)
    assert halves["rows"].to_list() == [3, 3] and halves["value"].to_list() == pytest.approx([1, 1 / 3])
    assert halves["low"].to_list() == [0.1, 4.0] and halves["high"].to_list() == [0.3, 9.0]
    edges = rate_by(rows, "x", "hit", bins=[0.0, 4.5, 100.0])
    assert edges["rows"].to_list() == [4, 2]
    constant = rate_by(rows.with_columns(x=pl.lit(1.0)), "x", "hit", bins=4)
    assert constant["rows"].to_list() == [6] and constant["value"].to_list() == pytest.approx([4 / 6])
    holes = rate_by(rows.with_columns(x=pl.when(pl.col("x") > 1).then(pl.col("x"))), "x", "hit", bins=1)
    assert holes["rows"].to_list() == [3]


def test_bad_requests_are_sentences():
    with pytest.raises(UserError, match="measure='yield'"):
        parts(A, "yield")
    with pytest.raises(UserError, match="accepted is missing"):
        interval(A.drop("accepted"))
    with pytest.raises(UserError, match="ascend"):
        rate_by(A, "accepted", "drafted", bins=[2, 1])
    with pytest.raises(UserError, match="no row"):
        rate_by(A.head(0), "accepted", "drafted")


def test_likelihoods_are_weighted_by_tokens_and_paired_by_document():
    dense = pl.DataFrame({"doc_id": ["a", "b", "c"], "nll": [2.0, 3.0, 1.0], "n_tokens": [30, 10, 60]})
    assert interval(dense, "nll").value == pytest.approx((60 + 30 + 60) / 100)
    worse = dense.with_columns(nll=pl.col("nll") + pl.Series([0.1, 0.2, 0.0])).reverse()
    row = differences(dense, {"worse": worse}, "nll").row(0, named=True)
    assert row["difference"] == pytest.approx((3 + 2) / 100) and -1e-9 <= row["low"] < row["high"] < 0.2 + 1e-9
    assert row["documents"] == 3
    with pytest.raises(UserError, match="nll, n_tokens is missing"):
        interval(A, "nll")
