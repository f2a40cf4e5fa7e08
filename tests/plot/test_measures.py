"""Figures of differences and binned rates, tested by what they draw."""

from __future__ import annotations

import matplotlib.pyplot as plt
import polars as pl
import pytest

from workbench import plot
from workbench.core.errors import UserError
from workbench.core.measures import differences, rate_by

ROUNDS = pl.DataFrame(
    {
        "doc_id": ["a", "b", "c"] * 8,
        "drafted": [3] * 24,
        "accepted": [0, 1, 2, 3] * 6,
        "margin": [float(i) for i in range(24)],
    }
).with_columns(hit=pl.col("accepted") > 0)
WORSE = ROUNDS.with_columns(accepted=pl.col("accepted") // 2)


def texts(ax) -> str:
    return "\n".join(text.get_text() for text in ax.texts)


def test_differences_show_sign_unit_and_where_zero_is():
    ax = plot.differences(differences(ROUNDS, {"worse": WORSE, "same": ROUNDS}))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["worse", "same"]
    assert "-25.0 points → 50.0 %" in texts(ax) and "+0.0 points → 75.0 %" in texts(ax)
    assert "75.0 %" in ax.get_title(loc="left") and "paired by document" in texts(ax)
    assert tuple(ax.lines[0].get_xdata()) == (0, 0)
    taus = plot.differences(differences(ROUNDS, {"worse": WORSE}, "tau"))
    assert "-1.000 tokens → 0.50 tokens" in texts(taus)
    nats = pl.DataFrame({"doc_id": ["a", "b"], "nll": [2.0, 3.0], "n_tokens": [30, 10]})
    likelihoods = differences(nats, {"packed": nats.with_columns(pl.col("nll") + 0.1)}, "nll")
    ax = plot.differences(likelihoods)
    assert (
        "+0.1000 nats → 2.350 nats" in texts(ax)
        and ax.get_title(loc="left") == "NLL per token: difference from 2.250 nats"
    )
    assert ax.get_xlabel() == "difference (nats)"
    mixed = pl.concat([differences(ROUNDS, {"worse": WORSE}, measure) for measure in ("tau", "slot1")])
    with pytest.raises(UserError, match="mixes measures"):
        plot.differences(mixed)
    assert "no runs" in texts(plot.differences(mixed.head(0)))


def test_rate_by_draws_a_point_per_bin():
    _, ax = plt.subplots()
    found = rate_by(ROUNDS, "margin", "hit", bins=4)
    assert plot.rate_by(found, ax=ax, label="first") is ax
    assert list(ax.lines[0].get_xdata()) == found["centre"].to_list()
    assert list(ax.lines[0].get_ydata()) == found["value"].to_list()
    assert ax.get_xlabel() == "margin" and "n = 24" in texts(ax)
    plot.rate_by(found, ax=ax, index=1, log=True)
    assert ax.get_xscale() == "log" and len(ax.lines) == 2
