"""Calibration, ranking and drafts one by one, against hand calculation and brute force."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from workbench.core.bootstrap import bootstrap_by, bootstrap_of
from workbench.core.calibration import auroc, calibration
from workbench.core.drafts import CLASSES, drafts_frame, token_class
from workbench.core.errors import UserError
from workbench.core.frames import predicted_phases, rounds_frame
from workbench.core.measures import non_dominated
from workbench.core.metrics import acceptance
from workbench.core.records import RoundRecord

P = [0.1, 0.3, 0.35, 0.8, 0.9, 1.0]
HIT = [False, True, False, True, True, False]


def test_calibration_equals_a_hand_calculation():
    found = calibration(P, HIT, bins=2, binning="width")
    # Below one half: mean 0.25, one hit of three. From one half on: mean 0.9, two hits of three.
    assert [(b.low, b.high, b.count) for b in found.bins] == [(0.0, 0.5, 3), (0.5, 1.0, 3)]
    assert [b.confidence for b in found.bins] == pytest.approx([0.25, 0.9])
    assert [b.hits.value for b in found.bins] == pytest.approx([1 / 3, 2 / 3])
    assert found.ece.value == pytest.approx(0.5 * (1 / 3 - 0.25) + 0.5 * (0.9 - 2 / 3))
    assert found.brier == pytest.approx((0.1**2 + 0.7**2 + 0.35**2 + 0.2**2 + 0.1**2 + 1.0**2) / 6)
    # Of nine pairs of a hit and a miss, 0.3 beats one miss, 0.8 and 0.9 beat two each.
    assert found.auroc == pytest.approx(5 / 9)
    assert found.count == 6 and found.ece.low is None, "one document has no interval"
    assert found.frame()["count"].to_list() == [3, 3]


def test_equal_mass_bins_hold_equally_many_and_never_part_equal_values():
    p = np.linspace(0.01, 0.99, 100)
    assert [b.count for b in calibration(p, p > 0.5, bins=4).bins] == [25, 25, 25, 25]
    tied = calibration([0.2] * 90 + [0.9] * 10, [True] * 100, bins=10)
    assert [b.count for b in tied.bins] == [90, 10]
    assert [b.count for b in calibration([0.0, 1.0], [False, True], bins=1).bins] == [2]


def test_auroc_counts_pairs():
    rng = np.random.default_rng(0)
    p, hit = rng.integers(0, 8, 200) / 8, rng.random(200) < 0.4
    pairs = p[hit][:, None] - p[~hit][None]
    assert auroc(p, hit) == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    assert auroc([0.1, 0.9], [False, True]) == 1.0 and auroc([0.1, 0.9], [True, False]) == 0.0
    assert auroc([0.5, 0.5], [True, False]) == 0.5
    assert auroc([0.5, 0.6], [True, True]) is None


def test_a_calibrated_drafter_has_a_small_error_and_an_overconfident_one_has_not():
    rng = np.random.default_rng(1)
    p, documents = rng.random(20_000), rng.integers(0, 40, 20_000)
    hit = rng.random(20_000) < p
    good = calibration(p, hit, groups=documents)
    assert good.ece.value < 0.02 and good.ece.low <= good.ece.value
    bad = calibration(np.sqrt(p), hit, groups=documents)
    assert bad.ece.value == pytest.approx(2 / 3 - 1 / 2, abs=0.02) and bad.ece.low > good.ece.high
    assert bad.auroc == good.auroc, "a monotone change ranks the same"
    assert calibration(p, hit, groups=documents, seed=3).ece == calibration(p, hit, groups=documents, seed=3).ece


def test_calibration_refuses_what_it_cannot_use():
    for bad, why in (
        (lambda: calibration([0.5], [True, False]), "one of each per draft"),
        (lambda: calibration([], []), "no draft"),
        (lambda: calibration([0.5, 1.2], [True, True]), "1.2 of draft 1"),
        (lambda: calibration([float("nan")], [True]), "nan of draft 0"),
        (lambda: calibration(P, HIT, binning="count"), "'mass', 'width'"),
        (lambda: calibration(P, HIT, bins=0), "bins=0"),
    ):
        with pytest.raises(UserError, match=why):
            bad()


def test_bootstrap_of_a_ratio_is_bootstrap_by():
    rng = np.random.default_rng(2)
    ids, top, bottom = rng.integers(0, 9, 60), rng.random(60), 1 + rng.random(60)
    one = bootstrap_of(ids, np.stack([top, bottom], 1), lambda s: s[:, 0] / s[:, 1], draws=300, seed=5)
    other = bootstrap_by(ids, top, bottom, draws=300, seed=5)[0]
    assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word start"), ("\n    def", "word start"), (" Ünder", "word start"), ("ing", "continuation"),
        ("中", "continuation"), ("7", "digit"), (" 42", "digit"), ("½", "digit"), (".", "punctuation"),
        (".append", "punctuation"), (" +=", "punctuation"), ("_x", "punctuation"), ("<|end|>", "punctuation"),
        ("   ", "whitespace"), ("\t", "whitespace"), ("\n", "newline"), ("  \r\n ", "newline"), ("", "other"),
        ("\ufffd", "other"), ("\x00", "other"),
    ],
)  # fmt: skip
def test_classes_come_from_the_text_of_a_token(text, kind):
    assert token_class(text) == kind and kind in CLASSES


def record(start, ids, accepted, stop="", emitted=None):
    top1 = tuple(0.1 * (i + 1) for i in range(len(ids)))
    return RoundRecord(
        0, start, 1, len(ids), tuple(ids), top1, accepted, emitted or accepted + 1, 9, "k" if ids else "none", stop
    )


def test_drafts_are_those_the_target_compared():
    rounds = rounds_frame(
        [
            record(4, [10, 11, 12], 1),  # 12 was drafted behind a rejected draft
            record(6, [], 0),
            record(7, [10, 13], 2),
            record(10, [10, 11, 12], 1, "forced", 1),  # the text left an accepted draft: 11 was never compared
            record(11, [14, 15], 1, "stop", 1),
        ],
        doc_id="a",
        source="s",
    )
    texts = {10: " a", 11: "b", 12: "1", 13: ".", 14: "\n", 15: "x"}
    got = drafts_frame(rounds, pieces=lambda ids: [texts[i] for i in ids])
    assert got.select("start", "slot", "draft_id", "hit").rows() == [
        (4, 1, 10, True), (4, 2, 11, False), (7, 1, 10, True), (7, 2, 13, True), (10, 1, 10, True), (11, 1, 14, True),
    ]  # fmt: skip
    assert got["confidence"].to_list() == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.1, 0.1])
    assert got["token_class"].to_list() == [
        "word start", "continuation", "word start", "punctuation", "word start", "newline"
    ]  # fmt: skip
    whole = rounds.filter(pl.col("round_stop") == "")
    cond = drafts_frame(whole).group_by("slot").agg(pl.col("hit").mean()).sort("slot")["hit"].to_list()
    assert cond == pytest.approx(acceptance(whole).cond[:2])
    assert len(drafts_frame(rounds.clear())) == 0
    with pytest.raises(UserError, match="draft_ids is missing"):
        drafts_frame(rounds.drop("draft_ids"))


def test_the_front_is_what_no_point_beats():
    rng = np.random.default_rng(4)
    for _ in range(20):
        cost, gain = rng.integers(0, 6, 30).astype(float), rng.integers(0, 6, 30).astype(float)
        beaten = [
            any(c <= cost[i] and g >= gain[i] and (c < cost[i] or g > gain[i]) for c, g in zip(cost, gain))
            for i in range(30)
        ]
        assert non_dominated(cost, gain).tolist() == [not one for one in beaten]
    assert non_dominated([1.0, np.nan, 2.0], [1.0, 5.0, np.nan]).tolist() == [True, False, False]
    assert non_dominated([], []).tolist() == []


def test_predicted_phases_are_per_round():
    frame = predicted_phases({"draft": 0.5, "verify": 2.0}, rounds=100)
    assert frame.select("group", "part", "ms", "count").rows() == [
        ("predicted round", "draft", 5.0, 100), ("predicted round", "verify", 20.0, 100)
    ]  # fmt: skip
    with pytest.raises(UserError, match="rounds=0"):
        predicted_phases({"draft": 0.5}, rounds=0)
