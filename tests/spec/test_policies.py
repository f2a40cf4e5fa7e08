"""The policies' numbers, without a model."""

from __future__ import annotations

import math

import pytest

from workbench.core.errors import UserError
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import AdaptiveFloor, FixedK, RoundView

LOW = math.nextafter(0.5, 0)


def lengths(policy: AdaptiveFloor, accepted: list[int], *, width: int = 100, committed: int = 10) -> list[int]:
    """Draft lengths asked for, the first before any round, then one after each accepted count."""
    run = policy.start(width=width)
    out = [run.next_k(committed)]
    for n in accepted:
        run.observe(RoundView(out[-1], n, committed))
        out.append(run.next_k(committed))
    return out


def test_fixed_k_is_fixed():
    run = FixedK(k=5).start(width=10)
    assert [run.next_k(n) for n in (1, 100, 5000)] == [5, 5, 5]
    run.observe(RoundView(5, 0, 10))
    assert run.next_k(10) == 5 and FixedK(k=5).k_max == 5


def test_adaptive_drafts_one_more_than_was_accepted_from_the_cap_on():
    assert lengths(AdaptiveFloor(k=5), [0, 1, 3, 5, 5, 0]) == [5, 1, 2, 4, 5, 5, 1]
    assert lengths(AdaptiveFloor(k=5, floor=3), [0, 1, 2, 3, 5]) == [5, 3, 3, 3, 4, 5]


def test_the_cap_is_seven_and_bounds_floor_and_first_length():
    assert lengths(AdaptiveFloor(k=20), [7, 3]) == [7, 7, 4]
    assert AdaptiveFloor(k=20).k_max == 7 and AdaptiveFloor(k=20, cap=12).k_max == 12
    assert lengths(AdaptiveFloor(k=20, cap=12), [11, 12]) == [12, 12, 12]
    assert lengths(AdaptiveFloor(k=3, floor=9), [0, 0]) == [3, 3, 3]


@pytest.mark.parametrize("width, floor", [(1, 1), (2499, 1), (2500, 2), (3499, 2), (3500, 4), (8192, 4)])
def test_the_default_floor_goes_by_width(width, floor):
    assert lengths(AdaptiveFloor(k=7), [0], width=width) == [7, floor]
    assert lengths(AdaptiveFloor(k=1), [0], width=width) == [1, 1]


@pytest.mark.parametrize("committed, floor", [(1023, 4), (1024, 4), (1025, 1), (9000, 1)])
def test_only_a_default_floor_of_four_relaxes_past_the_context(committed, floor):
    assert lengths(AdaptiveFloor(k=7), [0], width=4096, committed=committed)[1] == floor
    assert lengths(AdaptiveFloor(k=7), [0], width=3000, committed=committed)[1] == 2
    for given in (2, 4, 6):
        assert lengths(AdaptiveFloor(k=7, floor=given), [0], width=4096, committed=committed)[1] == given


def test_the_context_at_which_it_relaxes_is_an_option():
    policy = AdaptiveFloor(k=7, floor_context=50)
    assert [lengths(policy, [0], width=4096, committed=n)[1] for n in (50, 51)] == [4, 1]
    run = policy.start(width=4096)
    run.observe(RoundView(7, 2, 51))
    assert run.next_k(51) == 3, "what was accepted still counts"


def test_a_run_keeps_its_own_state():
    policy = AdaptiveFloor(k=4)
    a, b = policy.start(width=10), policy.start(width=10)
    a.observe(RoundView(4, 0, 10))
    assert (a.next_k(10), b.next_k(10)) == (1, 4)


@pytest.mark.parametrize("make", [FixedK, AdaptiveFloor])
def test_the_threshold_is_strict_and_spares_the_first_slot(make):
    plain = make(k=3, p_min=0.5).start(width=10)
    for base in (0, 1):
        assert plain.drops(0, 0.0, base) is None
        assert plain.drops(1, 0.5, base) is None
        assert plain.drops(1, LOW, base) == "p_min" == plain.drops(2, 0.0, base)


@pytest.mark.parametrize("make", [FixedK, AdaptiveFloor])
def test_pmin0_tests_the_first_slot_unless_the_pending_token_was_fed_alone(make):
    strict = make(k=3, p_min=0.5, pmin0=True).start(width=10)
    assert strict.drops(0, LOW, 1) == "p_min" and strict.drops(0, 0.5, 1) is None
    assert strict.drops(0, LOW, 0) is None
    assert strict.drops(1, LOW, 0) == "p_min"


def test_no_threshold_never_drops():
    run = FixedK(k=3, pmin0=True).start(width=10)
    assert all(run.drops(slot, 0.0, 1) is None for slot in range(3))


def test_a_policy_says_when_it_reads_the_token_it_decides_about():
    assert not FixedK(k=3).anticipating and not AdaptiveFloor(k=3).anticipating
    assert FixedK(k=3, p_min=0.01).anticipating and AdaptiveFloor(k=3, p_min=1.0).anticipating


@pytest.mark.parametrize(
    "make, bad, sentence",
    [
        (FixedK, dict(k=-1), "k=-1 is not valid: it must be an integer from 0 to 64; k=0 is plain decode"),
        (FixedK, dict(k=65), "k=65 is not valid"),
        (FixedK, dict(k=2.0), "k=2.0 is not valid"),
        (FixedK, dict(k=True), "k=True is not valid"),
        (FixedK, dict(p_min=float("nan")), "p_min=nan is not valid: it must be a number at least 0.0 and at most 1.0"),
        (FixedK, dict(p_min=-0.1), r"p_min=-0\.1 is not valid.*0 switches the threshold off"),
        (FixedK, dict(p_min=1.01), r"p_min=1\.01 is not valid"),
        (FixedK, dict(p_min="high"), "p_min='high' is not valid"),
        (AdaptiveFloor, dict(k=0), "k=0 is not valid: it must be an integer from 1 to 64"),
        (AdaptiveFloor, dict(floor=0), "floor=0 is not valid.*floor=None goes by the model's width"),
        (AdaptiveFloor, dict(cap=0), "cap=0 is not valid"),
        (AdaptiveFloor, dict(floor_context=-1), "floor_context=-1 is not valid"),
    ],
)
def test_bad_numbers_are_refused_in_a_sentence(make, bad, sentence):
    with pytest.raises(UserError, match=sentence):
        make(**bad)


def test_options_describe_the_policies():
    assert GenerateOptions(k=4, p_min=0.2, pmin0=True).policy() == FixedK(k=4, p_min=0.2, pmin0=True)
    given = dict(k=5, floor=2, cap=6, floor_context=99, p_min=0.1)
    assert GenerateOptions(adaptive=True, **given).policy() == AdaptiveFloor(**given)
    assert GenerateOptions(k=0).policy() == FixedK(k=0)
