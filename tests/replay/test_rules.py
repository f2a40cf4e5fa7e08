"""The two rules side by side: empirical laws against the exact one, and chances that agree with what laws say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.core.errors import UserError
from workbench.core.tape import Tape
from workbench.replay.rules import distance, draw_by, empirical_law, honest_distance, rules_by_setting
from workbench.sampling.law import Law
from workbench.sampling.philox import Noise
from workbench.sampling.residual import overlap


def of(*probs: float) -> Law:
    return Law(ids=torch.arange(len(probs)), probs=torch.tensor(probs, dtype=torch.float64))


P, Q = of(0.5, 0.3, 0.2), of(0.2, 0.2, 0.6)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_a_rule_keeps_the_law(rule):
    shares, accepted = empirical_law(rule, P, Q, draws=4000, position=3)
    assert distance(shares, P) < honest_distance(P, 4000)
    assert 0.3 < accepted <= overlap(P, Q) + 0.03


def test_a_wrong_redraw_does_not():
    shares, accepted = empirical_law("ratio", P, Q, draws=4000, redraw=P)
    assert distance(shares, P) > 3 * honest_distance(P, 4000)
    assert accepted == pytest.approx(overlap(P, Q), abs=0.03)


def test_distance_counts_what_the_law_lacks():
    assert distance({0: 0.5, 1: 0.3, 2: 0.2}, P) == pytest.approx(0)
    assert distance({7: 1.0}, P) == pytest.approx(1)


def test_an_unknown_rule_is_a_sentence():
    with pytest.raises(UserError, match="rule='both' is not valid"):
        draw_by("both", P, Q, Noise(0), 0)


def test_chances_by_setting(tiny):
    model, rng = tiny(ratio=2), np.random.default_rng(0)
    tapes = [Tape(f"d{i}", rng.integers(1, model.config.vocab_size, 20)) for i in range(3)]
    settings = {"greedy": dict(temperature=0.0), "warm": dict(temperature=1.0), "cut": dict(temperature=1.0, top_p=0.5)}
    frame = rules_by_setting(model, tapes, settings, first=2, repeats=30)
    assert frame.height == 9 and frame["setting"].to_list() == [name for name in settings for _ in range(3)]
    value = {(row["setting"], row["name"]): row["value"] for row in frame.iter_rows(named=True)}
    assert value["greedy", "gap"] == 0 and value["greedy", "ratio"] == value["greedy", "coupled"]
    for name in ("warm", "cut"):
        assert value[name, "gap"] == pytest.approx(value[name, "ratio"] - value[name, "coupled"])
        assert 0 < value[name, "coupled"] < value[name, "ratio"] < 1
