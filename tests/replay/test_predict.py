"""A prediction is the sum over rounds of what each costs, with intervals that resample documents together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pytest

from workbench.core.bootstrap import bootstrap_by
from workbench.core.errors import UserError
from workbench.replay.cost import CostModel
from workbench.replay.counts import WalkCounts, counts_of
from workbench.replay.curves import Curve, RoundCost
from workbench.replay.predict import document_seconds, predict, round_contexts
from workbench.replay.published import published_costs
from workbench.spec.policies import FixedK
from workbench.sweep.cells import Walked, cell_of

K = 4
COST = RoundCost(
    plain=Curve.constant(10, 0.01),
    first=Curve.of({1: (2, 0.001), 5: (3, 0.003)}),
    step=Curve.constant(1.5, 0.002),
    verify=Curve.of({1: (11, 0.01), 2: (12, 0.01), 5: (16, 0.02)}),
    accept=Curve.of({1: (0.1, 0), 5: (0.4, 0)}),
    partial=Curve.of({1: (0.5, 0.001), 4: (0.9, 0.001)}),
    whole=Curve.constant(0.2),
    other=Curve.constant(0.3),
)
FLAT = RoundCost(**{name: replace(c, slope=(0.0,) * len(c.slope)) for name, c in vars(COST).items()})


def model(cost: RoundCost = COST, **more: Any) -> CostModel:
    return CostModel(name="hand", source="a test", widths={1: cost}, **more)


def rounds(documents: int = 6, seed: int = 0, start: int = 40) -> pl.DataFrame:
    """Rounds of random lengths, steps and acceptances, contiguous in every document."""
    rng, rows = np.random.default_rng(seed), []
    for g in range(documents):
        at = start + 10 * g
        for _ in range(30 + 20 * g):
            steps = int(rng.integers(0, K + 1))
            drafted = int(rng.integers(0, steps + 1))
            accepted = int(rng.integers(0, drafted + 1))
            rows.append((f"d{g}", "ab"[g % 2], at, steps, drafted, accepted, accepted + 1, ""))
            at += accepted + 1
    schema = ["doc_id", "source", "start", "steps", "drafted", "accepted", "emitted", "round_stop"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def counted(frame: pl.DataFrame, contexts: tuple[int, ...] = (0, 128, 512)) -> WalkCounts:
    return counts_of(frame, policy=FixedK(k=K), k_max=K, estimator="own", contexts=contexts)


def brute(frame: pl.DataFrame, cost: CostModel, **at: Any) -> dict[str, float]:
    """Phases and plain seconds, round by round, each at its own context."""
    out: dict[str, float] = {"plain": 0.0}
    for row in frame.iter_rows(named=True):
        work = dict(steps=row["steps"], drafted=row["drafted"], accepted=row["accepted"])
        context = row["start"] + 1
        for phase, seconds in cost.phases(**work, context=context, **at).items():
            out[phase] = out.get(phase, 0.0) + seconds
        out["plain"] += sum(cost.plain_seconds(context=context + i, **at) for i in range(row["emitted"]))
    return out


def test_without_context_a_prediction_is_the_sum_over_rounds():
    frame, cost = rounds(), model(FLAT)
    said, truth = predict(counted(frame), cost, draws=50), brute(frame, model(FLAT))
    assert said.plain_seconds == pytest.approx(truth.pop("plain"), rel=1e-12)
    assert said.phases == pytest.approx(truth, rel=1e-12)
    assert said.seconds == pytest.approx(sum(truth.values())) and said.rounds == len(frame)
    assert said.emitted == frame["emitted"].sum()
    assert said.tokens_per_second.value == pytest.approx(said.emitted / said.seconds)
    assert said.speedup.value == pytest.approx(said.plain_seconds / said.seconds)


def test_a_round_counted_as_drafting_one_more_is_seen():
    """Control: the sum over rounds tells steps from drafts, and one round's acceptance from another's."""
    frame, cost = rounds(), model(FLAT)
    truth = predict(counted(frame), cost, draws=10).seconds
    at = int((frame["steps"] > frame["drafted"]).arg_max())  # type: ignore[arg-type]
    for name in ("drafted", "accepted"):
        shifted = frame.with_columns(
            pl.when(pl.int_range(pl.len()) == at).then(pl.col("drafted") + 1).otherwise(pl.col(name)).alias(name)
        )
        if name == "accepted":
            shifted = shifted.with_columns(drafted=pl.max_horizontal("drafted", "accepted"))
        assert abs(predict(counted(shifted), cost, draws=10).seconds / truth - 1) > 1e-6


def test_contexts_by_bucket_are_close_to_each_rounds_own():
    frame, cost = rounds(), model(contexts=(10, 150))
    said, truth = predict(counted(frame), cost, draws=10), brute(frame, model())
    assert said.plain_seconds == pytest.approx(truth.pop("plain"), rel=0.01)
    assert said.seconds == pytest.approx(sum(truth.values()), rel=0.01)
    fine = predict(counted(frame, tuple(range(0, 2000, 8))), cost, draws=10)
    assert fine.seconds == pytest.approx(sum(truth.values()), rel=0.001)
    beyond = (frame["start"] + 1 > 150).mean()
    assert fine.extrapolated == pytest.approx(beyond, abs=0.02) and 0 < fine.extrapolated < 1
    assert predict(counted(frame), model(), draws=10).extrapolated == 0  # a model without contexts


def test_contexts_of_a_document_that_crosses_buckets():
    rounds_GC = np.array([[8.0, 16, 0], [0, 5, 0], [0, 0, 7], [0, 0, 0], [4, 100, 10]])
    emitted_G = np.array([48, 10, 14, 0, 228])
    got = round_contexts(rounds_GC, emitted_G, (0, 100, 300))
    assert got[0, 0] == 100 - 8 and got[0, 1] == 100 + 16
    assert got[1, 1] == 200 and got[2, 2] == 300
    assert got[4].tolist() == [100 - 4, 200, 300 + 10]


def test_documents_sum_to_the_whole_and_sources_to_their_own():
    counts, cost = counted(rounds()), model()
    parts = document_seconds(counts, cost)
    assert parts.seconds_G.sum() == pytest.approx(predict(counts, cost, draws=10).seconds)
    a = predict(counts.select(source="a"), cost, draws=10)
    keep = np.array(counts.sources) == "a"
    assert a.seconds == pytest.approx(parts.seconds_G[keep].sum())


def test_intervals_are_the_document_bootstrap_and_repeat():
    counts, cost = counted(rounds()), model()
    said = predict(counts, cost, draws=300, seed=7, level=0.9)
    parts = document_seconds(counts, cost)
    expected = bootstrap_by(parts.documents, parts.plain_G, parts.seconds_G, draws=300, seed=7, level=0.9)[0]
    assert said.speedup == expected and said.speedup.low < said.speedup.value < said.speedup.high
    again, other = (predict(counts, cost, draws=300, seed=s, level=0.9) for s in (7, 8))
    assert again.row() == said.row() and other.speedup.low != said.speedup.low
    one = predict(counted(rounds(documents=1)), cost)
    assert one.speedup.low is None and one.speedup.value is not None


def test_two_policies_are_compared_over_the_same_documents():
    cost = model()
    a, b = (predict(counted(rounds(seed=s)), cost, draws=10) for s in (0, 1))
    gap = a.difference(b, draws=200)
    assert gap.value == pytest.approx(a.tokens_per_second.value - b.tokens_per_second.value)
    assert a.difference(a, draws=50).low == 0 == a.difference(a, draws=50).high
    with pytest.raises(UserError, match="not compared"):
        a.difference(predict(counted(rounds()), model(FLAT), draws=10))
    with pytest.raises(UserError, match="same documents"):
        a.difference(predict(counted(rounds(documents=3)), cost, draws=10))


def test_a_batch_emits_for_all_its_sequences():
    twice = RoundCost(**{n: replace(c, base=tuple(1.5 * x for x in c.base)) for n, c in vars(FLAT).items()})
    cost = CostModel(name="two", source="a test", widths={1: FLAT, 2: twice})
    one, two = (predict(counted(rounds()), cost, width=w, draws=10) for w in (1, 2))
    assert two.tokens_per_second.value == pytest.approx(2 / 1.5 * one.tokens_per_second.value)
    assert two.speedup.value == pytest.approx(one.speedup.value) and two.width == 2


def test_what_the_cost_model_does_not_know_is_refused():
    counts = counted(rounds())
    short = CostModel.from_ratios({1: 1.0, 2: 1.1, 3: 1.2})
    with pytest.raises(UserError, match="1 to 3 rows, and 5"):
        predict(counts, short)
    with pytest.raises(UserError, match="width=3 is not valid"):
        predict(counts, model(), width=3)
    few = rounds().filter(pl.col("steps") <= 2)
    assert predict(counted(few), short, draws=10).seconds > 0  # slots that no round drafted ask for nothing


def test_the_payoff_of_fixed_k_is_the_published_formula():
    cost = published_costs()["27B, RTX 5090 Laptop"]
    accepted = [3, 3, 1, 2, 0, 3, 2, 3, 3, 1]
    frame = pl.DataFrame(
        [("d", "s", 10 * i, 3, 3, a, a + 1, "") for i, a in enumerate(accepted)], schema=rounds().columns, orient="row"
    )
    said = predict(counted(frame), cost, draws=10)
    by_hand = (1 + np.mean(accepted)) * cost.plain_seconds() / cost.round_seconds(steps=3, drafted=3)
    assert said.speedup.value == pytest.approx(by_hand)
    assert said.row()["t_verify"] == pytest.approx(10 * 1.30 / 45)


@dataclass(frozen=True, repr=False)
class Written:
    """A policy as a user writes one: no label, and what it prints as is for debugging."""

    k: int = K
    anticipating = False

    @property
    def k_max(self) -> int:
        return self.k

    def spec(self) -> dict[str, Any]:
        return {"family": "mine", "k": self.k}

    def start(self, *, width: int) -> Any:
        raise AssertionError("counts know its rounds already")


@pytest.mark.parametrize("policy", [FixedK(k=K), FixedK(k=K, p_min=0.5), Written()])
def test_a_policy_has_one_name_in_predictions_and_sweeps(policy: Any):
    counts = replace(counted(rounds()), policy=policy)
    walked = Walked("t", {}, "", "own", None, counts.documents, counts.sources)
    said = predict(counts, model(), draws=20).policy
    assert said == cell_of(counts, key="x", walked=walked, cost=None, width=1).label
    assert said == ("Written(k=4)" if isinstance(policy, Written) else policy.label)
