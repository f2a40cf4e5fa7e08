"""What each family does, by hand: numbers that can be followed on paper, limits, and refusals."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.core.errors import CapabilityError, UserError
from workbench.spec.options import GenerateOptions, refuse_anticipating
from workbench.spec.policies import (
    AdaptiveFloor,
    ArrayRun,
    Cumulative,
    Ema,
    FixedK,
    Gate,
    Goodput,
    Ladder,
    MinConfidence,
    Oracle,
    Policy,
    PolicyRun,
    RoundView,
    Scripted,
    Suspend,
    parse_ladder,
    policy_from,
    trimmed,
)
from workbench.spec.policies.rules import FAMILIES


def chain(run: PolicyRun, probs: list[float], base: int = 1) -> tuple[int, str]:
    """Length of a chain with these probabilities, and why it ends."""
    for slot, p in enumerate(probs):
        if (why := run.drops(slot, p, base)) is not None:
            return trimmed(run, slot, base), why
    n = trimmed(run, len(probs), base)
    return n, "k" if n == len(probs) else "policy"


def told(run: PolicyRun, outcomes: list[tuple[int, int]], committed: int = 10) -> list[int]:
    """Draft lengths asked for, before the first and after each outcome (drafted, accepted)."""
    out = [run.next_k(committed)]
    for drafted, accepted in outcomes:
        committed += accepted + 1
        run.observe(RoundView(drafted, accepted, committed))
        out.append(run.next_k(committed))
    return out


# --- confidence of a chain -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 1])
def test_the_weakest_token_drops_the_whole_chain(base):
    run = MinConfidence(k=3, tau=0.5).start(width=8)
    assert chain(run, [0.9, 0.5, 0.6], base) == (3, "k")
    assert chain(run, [0.9, math.nextafter(0.5, 0), 0.6], base) == (0, "policy")
    assert chain(run, [0.2], base) == (0, "policy")
    assert chain(run, [0.9, 0.8], base) == (2, "k"), "each chain is judged by itself"
    assert run.trim(0, base) == 0


@pytest.mark.parametrize("base", [0, 1])
def test_the_product_ends_the_chain_before_the_token_that_breaks_it(base):
    run = Cumulative(k=4, threshold=0.25).start(width=8)
    assert chain(run, [0.5, 0.5, 1.0, 1.0], base) == (4, "k"), "the threshold itself is kept"
    assert chain(run, [0.5, 0.5, 0.9], base) == (2, "policy")
    assert chain(run, [0.2, 1.0], base) == (0, "policy"), "slot 0 is tested too"
    assert chain(run, [0.9] * 4, base) == (4, "k"), "the product starts anew with every chain"


# --- what was accepted -----------------------------------------------------------------------------------------------


def test_the_mean_by_hand():
    run = Ema(k=6, alpha=0.5, margin=1.0).start(width=8)
    assert told(run, [(6, 3), (4, 0), (3, 0), (2, 2)]) == [6, 4, 3, 2, 3]  # means 3, 1.5, .75, 1.375
    assert told(Ema(k=4, alpha=1.0, margin=0.5, low=2).start(width=8), [(4, 4), (4, 0)]) == [4, 4, 2]


def test_rounds_without_a_drafter_step_leave_the_mean():
    run = Ema(k=6, alpha=0.5).start(width=8)
    assert told(run, [(6, 3), (0, 0), (0, 0)]) == [6, 4, 4, 4]
    run.observe(RoundView(0, 0, 30, steps=1))
    assert run.next_k(30) == 3, "a token that was dropped is a step"


def test_suspension_by_hand():
    run = Suspend(k=4, window=3, floor=2.0, reprobe_tokens=3).start(width=8)
    assert told(run, [(4, 0), (4, 3), (4, 3)]) == [4, 4, 4, 4], "a mean of 2 is enough"
    assert told(run, [(4, 0), (4, 2)]) == [4, 4, 0], "3, 0 and 2 are not; the window slides"
    assert told(run, [(0, 0), (0, 0), (0, 0)]) == [0, 0, 0, 4]
    assert told(run, [(4, 0), (4, 0), (4, 0)]) == [4, 4, 4, 0], "the window begins empty"


def test_the_published_suspension_is_the_default():
    run = Suspend().start(width=8)
    assert told(run, [(7, 2)] * 12) == [7] * 13
    assert told(run, [(7, 1)]) == [7, 0]
    assert told(run, [(0, 0)] * 256) == [0] * 256 + [7]


# --- ladder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps, k, lanes, drafts",
    [
        *[("4:3,8:3,16:1,32:1", 3, n, 3) for n in (1, 4, 5, 8)],
        *[("4:3,8:3,16:1,32:1", 3, n, 1) for n in (9, 16, 17, 32, 64)],
        ("4:3,8:3,16:1,32:1", 1, 16, 1),
        ("4:3,8:3,16:1,32:1", 0, 2, 0),
        ("4:3,8:2,16:1", 3, 5, 2),
        ("16:1, 4 : 9 ,8:2", 5, 4, 5),
    ],
)
def test_the_ladder(steps, k, lanes, drafts):
    policy = Ladder(steps=steps, k=k, lanes=lanes, max_lanes=64)
    assert policy.k_max == drafts and policy.start(width=8).next_k(10) == drafts


def test_above_its_cap_the_ladder_drafts_nothing():
    assert [Ladder(lanes=n, max_lanes=8).k_max for n in (1, 8, 9, 99)] == [3, 2, 0, 0]
    assert [Ladder(lanes=n).k_max for n in (32, 33)] == [1, 0]


def test_a_ladder_is_sorted_and_read_whole():
    assert parse_ladder("32:2, 4:3,8:3, 16:2,24:2") == ((4, 3), (8, 3), (16, 2), (24, 2), (32, 2))


@pytest.mark.parametrize(
    "bad", ["", "4:3,broken,8:2", "4:three", "4", "4:3:2", "4:3,", "0:3", "4:0", "-4:3", "4:3,4:2", "4:1.5", 4, None]
)
def test_a_malformed_ladder_is_an_error_and_never_a_default(bad):
    with pytest.raises(UserError, match=r"is not valid at .*pairs sequences:drafts"):
        Ladder(steps=bad)


# --- goodput ---------------------------------------------------------------------------------------------------------

LINE = tuple(1 + 0.25 * k for k in range(5))  # t(0), .. t(4)


def simulate(run: ArrayRun, accept: float, rounds: int, seed: int = 0) -> list[int]:
    """Draft lengths over rounds in which every draft stands with the same probability."""
    rng, asked = np.random.default_rng(seed), []
    for _ in range(rounds):
        k = run.next_k(10)
        hits = rng.random(k) < accept
        accepted = int(hits.cumprod().sum())
        asked.append(k)
        run.observe(RoundView(k, accepted, 10))
    return asked


@pytest.mark.parametrize("accept", [0.05, 0.4, 0.7, 0.95])
def test_goodput_finds_the_best_length(accept):
    """Against the argmax of (1 + a + .. + a^K) / t(K), up to the hysteresis, with costs that grow faster and faster."""
    curve = tuple(1 + 0.1 * k + 0.06 * k * k for k in range(7))
    policy = Goodput(k=6, seconds=curve, alpha=0.01, hysteresis=0.01, reprobe=4)
    asked = simulate(policy.start(width=8), accept, 4000)
    rates = [sum(accept**j for j in range(k + 1)) / curve[k] for k in range(7)]
    settled = np.bincount(asked[2000:], minlength=7)
    settled[6] -= 500  # every fourth round is a probe
    assert rates[int(settled.argmax())] > 0.97 * max(rates)


def test_goodput_by_hand():
    """Means after two rounds of four slots with 4 and 1 accepted: 1, .5, .5, .5; rates 1, 1.6, 1.67, 1.71, 1.75."""
    run = Goodput(k=4, seconds=LINE, warmup=2, reprobe=3, hysteresis=0.0, alpha=0.01).start(width=8)
    assert told(run, [(4, 4), (4, 1)]) == [4, 4, 4]
    assert run.state[16:20].tolist() == [1, 0.5, 0.5, 0.5] and run.state[80:84].tolist() == [2] * 4
    # 0 accepted twice: 1/2, 1/4, 1/4, 1/4 give 1, 1.2, 1.17, 1.14, 1.125
    assert told(run, [(4, 0), (4, 0)]) == [4, 4, 1]
    assert told(run, [(1, 1), (1, 1)]) == [1, 1, 4], "after two rounds at 1 the third asks for 4"
    assert run.state[80:84].tolist() == [6, 4, 4, 4], "slots past the length asked for are not seen"
    assert run.state[16:20].tolist() == pytest.approx([4 / 6, 1 / 4, 1 / 4, 1 / 4])


def test_a_dropped_token_says_that_later_slots_are_not_accepted_and_a_budget_says_nothing():
    run = Goodput(k=4, seconds=LINE, p_min=0.5).start(width=8)
    run.observe(RoundView(2, 2, 10, steps=3))
    assert run.state[80:84].tolist() == [1, 1, 1, 1] and run.state[16:20].tolist() == [1, 1, 0, 0]
    run.observe(RoundView(1, 1, 12, steps=1))
    assert run.state[80:84].tolist() == [2, 1, 1, 1]


def test_hysteresis_keeps_the_present_length():
    asked = {}
    for hysteresis in (0.0, 0.5):
        run = Goodput(k=4, seconds=LINE, warmup=2, hysteresis=hysteresis).start(width=8)
        asked[hysteresis] = told(run, [(4, 2), (4, 1)])[-1]
    assert asked == {0.0: 2, 0.5: 4}  # rates 1, 1.6, 1.67, 1.43, 1.25 after means 1, .5, 0, 0


@pytest.mark.parametrize("reprobe", [1, 5, 32])
def test_goodput_is_never_off_for_good(reprobe):
    """With nothing accepted it asks for no drafts but in every reprobe-th round, and comes back when drafts stand."""
    run = Goodput(k=4, seconds=tuple(1 + k for k in range(5)), alpha=0.2, reprobe=reprobe, warmup=3).start(width=8)
    asked = simulate(run, 0.0, 40 * reprobe)
    probes = [i for i, k in enumerate(asked) if k == 4][3:]
    assert set(asked) <= {0, 4} and probes and set(np.diff(probes)) == {reprobe}
    run = Goodput(k=4, seconds=LINE, alpha=0.2, reprobe=reprobe, warmup=3).start(width=8)
    assert (reprobe == 1) == (simulate(run, 0.0, 10 * reprobe)[-1] == 4)
    assert simulate(run, 1.0, 40 * reprobe)[-1] == 4


# --- gate ------------------------------------------------------------------------------------------------------------


class Clocked:
    """Rounds under a clock of the test's own: a plain round takes 1, a round with drafts what it is told to."""

    def __init__(self, policy: Gate, committed: int = 100) -> None:
        self.run, self.committed, self.modes = policy.start(width=8), committed, []

    def rounds(self, n: int, *, drafting: float, accepted: int) -> list[int]:
        """Draft lengths of the next n rounds."""
        asked = []
        for _ in range(n):
            k = self.run.next_k(self.committed)
            taken = min(accepted, k)
            self.committed += taken + 1
            self.run.observe(RoundView(k, taken, self.committed, k, drafting if k else 1.0))
            asked.append(k)
        return asked


GATE = Gate(k=2, window=2, refresh_tokens=8, reprobe_tokens=6, context_floor=100_000)


def test_the_gate_by_hand():
    clock = Clocked(GATE)
    # windows of two rounds with drafts, a token each in 2 seconds; after 8 tokens a probe of plain decode, which is
    # faster there and in the window after: the second in a row
    assert clock.rounds(12, drafting=2.0, accepted=0) == [2] * 8 + [0] * 2 + [2] * 2
    # plain from now on; after 6 tokens one window with drafts
    assert clock.rounds(16, drafting=2.0, accepted=0) == [0] * 6 + [2] * 2 + [0] * 6 + [2] * 2
    # drafts become three tokens in 2 seconds: seen by the next probe, confirmed by the window after it
    assert clock.rounds(12, drafting=2.0, accepted=2) == [0] * 6 + [2] * 2 + [0] * 2 + [2] * 2


def test_the_gate_stays_where_it_is_faster_and_within_the_margin():
    clock = Clocked(GATE)
    asked = clock.rounds(200, drafting=1.0, accepted=2)
    assert asked.count(0) == 2 * len([i for i in range(1, 200) if asked[i] == 0 and asked[i - 1] == 2])
    assert 0 < asked.count(0) < 0.5 * len(asked)
    slower = Clocked(Gate(**{**vars(GATE), "margin": 0.5}))
    assert slower.rounds(200, drafting=1.4, accepted=0).count(0) < 100, "plain decode is faster by 40 % only"
    faster = Clocked(Gate(**{**vars(GATE), "margin": 0.3}))
    assert faster.rounds(200, drafting=1.4, accepted=0).count(0) > 100


def test_a_doubled_context_makes_the_gate_measure_again():
    policy = Gate(**{**vars(GATE), "refresh_tokens": 10_000, "context_floor": 16})
    clock = Clocked(policy, committed=20)
    assert clock.rounds(22, drafting=1.0, accepted=0) == [2] * 22, "21 tokens were known after the first, now 42"
    assert clock.rounds(6, drafting=1.0, accepted=0) == [0] * 2 + [2] * 4


def test_deviations_widen_the_margin():
    """Windows with drafts of 4/3 and 1/3 tokens per second in turn: a noisy baseline is not left as readily."""

    def run(deviations: float) -> list[int]:
        clock = Clocked(Gate(**{**vars(GATE), "deviations": deviations, "confirm": 1}))
        asked = []
        for i in range(12):
            asked += clock.rounds(2, drafting=0.75 if i % 2 else 3.0, accepted=0)
        return asked

    assert run(0.0)[10] == 0 == run(0.0)[11], "after the probe plain decode goes on"
    assert run(5.0)[10:12] == [2, 2]


def test_time_is_the_default_of_none():
    assert Gate.timed and not any(getattr(cls, "timed", False) for cls in (FixedK, Goodput, Suspend, Oracle, Scripted))


# --- schedules -------------------------------------------------------------------------------------------------------


def test_schedules_by_start_and_by_round():
    by_start = Scripted(ks={4: 2, 9: 0, 12: 5}).start(width=8)
    assert [by_start.next_k(n) for n in (5, 10, 13, 7)] == [2, 0, 5, 0]
    assert told(Scripted(ks=(3, 0, 2)).start(width=8), [(3, 0)] * 4) == [3, 0, 2, 2, 2]
    assert Scripted(ks={}).k_max == 0 and Scripted(ks={4: 2, 12: 5}).k_max == 5 == Scripted(ks=(0, 5)).k_max


def test_an_oracle_does_not_run_live():
    with pytest.raises(CapabilityError, match=r"knows what recorded texts accept.*oracle_schedules"):
        Oracle(k=3).start(width=8)


# --- limits ----------------------------------------------------------------------------------------------------------

FIXED: dict[str, Policy] = {
    "p_min 0": FixedK(k=4, p_min=0.0, pmin0=True),
    "floor at the cap": AdaptiveFloor(k=4, floor=4, cap=4),
    "tau 0": MinConfidence(k=4, tau=0.0),
    "threshold 0": Cumulative(k=4, threshold=0.0),
    "low at k": Ema(k=4, low=4),
    "one step": Ladder(steps="1:4", k=4),
    "floor 0": Suspend(k=4, floor=0.0),
    "warm-up": Goodput(k=4, seconds=LINE, warmup=10_000),
    "every round a probe": Goodput(k=4, seconds=LINE, reprobe=1),
    "no refresh": Gate(k=4, refresh_tokens=10**9, context_floor=10**9),
    "one length": Scripted(ks=(4,)),
}
PLAIN: dict[str, Policy] = {
    "k 0": FixedK(k=0),
    "p_min 1": FixedK(k=4, p_min=1.0, pmin0=True),
    "p_min 1, adaptive": AdaptiveFloor(k=4, p_min=1.0, pmin0=True),
    "tau 1": MinConfidence(k=4, tau=1.0),
    "threshold 1": Cumulative(k=4, threshold=1.0),
    "no lane": Ladder(max_lanes=0),
    "length 0": Scripted(ks=(0,)),
}


def outcomes(policy: Policy) -> list[tuple[int, int]]:
    """Asked and kept over rounds with random probabilities and acceptances, the same for every policy."""
    rng, run, out, committed = np.random.default_rng(3), policy.start(width=4096), [], 900
    for _ in range(150):
        probs, take = rng.uniform(0, 0.999, 4).tolist(), int(rng.integers(0, 5))
        k = run.next_k(committed)
        n, _ = chain(run, probs[:k])
        committed += min(take, n) + 1
        run.observe(RoundView(n, min(take, n), committed, min(n + 1, k), 1.0))
        out.append((k, n))
    return out


@pytest.mark.parametrize("name", FIXED)
def test_limits_that_are_fixed_k(name):
    assert outcomes(FIXED[name]) == [(4, 4)] * 150


@pytest.mark.parametrize("name", PLAIN)
def test_limits_that_are_plain_decode(name):
    assert {n for _, n in outcomes(PLAIN[name])} == {0}


def test_the_limits_are_not_everywhere():
    near = [FixedK(k=4, p_min=0.5), Cumulative(k=4, threshold=0.1), Ema(k=4), Suspend(k=4, window=2, reprobe_tokens=3)]
    for policy in near:
        assert {n for _, n in outcomes(policy)} not in ({4}, {0}), policy


# --- anticipation ----------------------------------------------------------------------------------------------------

THRESHOLDS = [
    FixedK(k=4, p_min=0.4, pmin0=True),
    Ema(k=4, p_min=0.4),
    Cumulative(k=4, threshold=0.2),
    MinConfidence(k=4, tau=0.3),
    MinConfidence(k=1, tau=0.3),
    FixedK(k=4),
    MinConfidence(k=4),
    Cumulative(k=4),
]


@pytest.mark.parametrize("statistic", ["drawn", "top"])
@pytest.mark.parametrize("policy", THRESHOLDS, ids=lambda p: p.label)
def test_anticipating_says_whether_a_slot_hangs_on_its_own_draw_or_a_later_one(policy, statistic):
    """The row of slot i is known before its draw; the drawn token's probability, and every later row, are not."""
    policy = type(policy)(**{**vars(policy), "statistic": statistic})
    rng, depends = np.random.default_rng(0), False
    for _ in range(300):
        one, two = rng.random((2, policy.k))
        for slot in range(policy.k):
            known = slot + 1 if statistic == "top" else slot  # readings that precede the draw of this slot
            mixed = np.concatenate([one[:known], two[known:]])
            kept = [chain(policy.start(width=8), probs.tolist())[0] > slot for probs in (one, mixed)]
            depends |= kept[0] != kept[1]
    assert depends == policy.anticipating


@pytest.mark.parametrize("policy", [MinConfidence(k=2, tau=0.3, statistic="top"), Cumulative(threshold=0.1), Oracle()])
def test_the_ratio_rule_refuses_what_anticipates(policy):
    with pytest.raises(UserError, match=f"accept='ratio' with this {type(policy).__name__} policy"):
        refuse_anticipating(policy)
    refuse_anticipating(Cumulative(threshold=0.1, statistic="top"))
    refuse_anticipating(MinConfidence(k=1, tau=0.3, statistic="top"))


# --- as data ---------------------------------------------------------------------------------------------------------


def test_specs_labels_and_short_texts(policies_module):
    every = [p for kind, p in policies_module.random_policies(60, seed=1) if kind != "user"]
    every += [Scripted(ks={5: 2, 7: 0}), Scripted(ks={}), Oracle(k=2)]
    for policy in every:
        spec = json.loads(json.dumps(policy.spec()))
        assert policy_from(spec) == policy == policy_from(json.dumps(spec)) and type(policy_from(spec)) is type(policy)
        assert spec["family"] == policy.family and policy.label and "\n" not in policy.label
    different = {json.dumps(policy.spec()): policy.label for policy in every if isinstance(policy, Ema | FixedK)}
    assert len(set(different.values())) == len(different)
    assert FixedK(k=3, p_min=0.5).label == "K=3, p_min=0.5" and FixedK(k=0).label == "K=0"
    assert AdaptiveFloor(k=5, floor=2).label == "adaptive K=5, floor=2"
    assert Goodput(k=4, seconds=LINE).label == "goodput K=4, seconds=(1, .., 2)"
    assert policy_from("fixed k=3 p_min=0.5 pmin0=true") == FixedK(k=3, p_min=0.5, pmin0=True)
    assert policy_from("ladder steps=4:3,8:2 lanes=8") == Ladder(steps="4:3,8:2", lanes=8)
    assert policy_from("goodput k=1 seconds=[1,1.5]") == Goodput(k=1, seconds=(1.0, 1.5))
    assert policy_from("floor floor=None") == AdaptiveFloor()


@pytest.mark.parametrize(
    "spec, says",
    [
        ("", "family='' is not valid: choose one of 'fixed', 'floor'"),
        ({}, "family=None is not valid"),
        ("fast k=3", "family='fast'"),
        ("fixed k3", "not valid at 'k3': write a family and name=value parts"),
        ("fixed k=3 k=4", "not valid at 'k=4'"),
        ("fixed depth=3", "policy 'fixed' has no field 'depth': its fields are"),
        ("fixed k=many", "k='many' is not valid"),
        ("goodput k=3", "policy 'goodput' needs seconds: add seconds=.. to"),
        ('{"family": "fixed"', "is not JSON"),
        ({"family": "scripted", "ks": {"x": 2}}, "start='x' is not valid"),
    ],
)
def test_bad_descriptions_are_refused_in_a_sentence(spec, says):
    with pytest.raises(UserError, match=says):
        policy_from(spec)


@pytest.mark.parametrize(
    "make, bad, says",
    [
        (MinConfidence, dict(tau=1.5), "tau=1.5 is not valid"),
        (MinConfidence, dict(k=65), "k=65"),
        (Cumulative, dict(threshold=float("nan")), "threshold=nan"),
        (Cumulative, dict(statistic="best"), "statistic='best' is not valid: choose one of 'drawn', 'top'"),
        (Ema, dict(alpha=0.0), "alpha=0.0 is not valid.*above 0.0 and at most 1.0"),
        (Ema, dict(low=0, margin=0.0), "low=0 with margin=0 would never draft again"),
        (Ema, dict(k=2, low=3), "low=3 is not valid.*k=2 is the longest draft"),
        (Suspend, dict(window=129), "window=129"),
        (Suspend, dict(reprobe_tokens=0), "reprobe_tokens=0"),
        (Goodput, dict(k=2, seconds=(1, 2)), r"seconds=\(1, 2\) is not valid with k=2: give 3 durations"),
        (Goodput, dict(k=1, seconds=(1, 0)), r"seconds\[1\]=0.0 is not valid"),
        (Goodput, dict(k=1, seconds=5), "seconds=5 is not valid"),
        (Goodput, dict(k=1, seconds=(1, 2), reprobe=0), "reprobe=0"),
        (Gate, dict(window=0), "window=0"),
        (Gate, dict(margin=-1), "margin=-1"),
        (Ladder, dict(lanes=0), "lanes=0"),
        (FixedK, dict(pmin0=1), "pmin0=1 is not valid: it must be True or False"),
        (Oracle, dict(k=2, seconds=(1.0,)), "give 3 durations"),
        (Scripted, dict(ks=()), r"ks=\(\) is not valid"),
        (Scripted, dict(ks=(1, -1)), r"ks\[1\]=-1"),
        (Scripted, dict(ks={4: 99}), r"ks\[4\]=99"),
    ],
)
def test_bad_numbers_are_refused_in_a_sentence(make, bad, says):
    with pytest.raises(UserError, match=says):
        make(**bad)


def test_the_facade_has_them_all():
    names = ("FixedK AdaptiveFloor MinConfidence Cumulative Ema Ladder Suspend Goodput Gate Oracle Scripted").split()
    assert [getattr(wb, name).__name__ for name in names] == names and set(names) <= set(wb.__all__)
    assert wb.policy_from("fixed") == wb.FixedK() == GenerateOptions().policy()


def test_a_run_is_copied_with_its_state(policies_module):
    for _, policy in policies_module.random_policies(24, seed=2):
        if isinstance(policy, Oracle):
            continue
        run = policy.start(width=8)
        told(run, [(1, 1), (1, 0), (0, 0), (2, 2)])
        twin = copy.deepcopy(run)
        assert told(run, [(1, 1)] * 9, 50) == told(twin, [(1, 1)] * 9, 50)
        if isinstance(run, ArrayRun):
            assert twin.state is not run.state and twin.params is run.params
            assert (twin.state == run.state).all() and run.rules is FAMILIES[policy.family]


@pytest.mark.parametrize("stays", [-1, 4, 1.0, None])
def test_a_trim_that_is_no_count_is_refused(stays: Any):
    class Wrong:
        def trim(self, drafted: int, base: int) -> Any:
            return stays

    with pytest.raises(UserError, match=f"Wrong.trim returned {stays} for a chain of 3 tokens"):
        trimmed(Wrong(), 3, 1)  # type: ignore[arg-type]
