"""Sessions over bursts, turns, rewinds and growth equal a fresh session given the same tokens, in text and planes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import HybridCache
from workbench.core.errors import UserError
from workbench.core.metrics import Telemetry
from workbench.spec import round as rounds
from workbench.spec.policies import FixedK

SAMPLED = dict(temperature=0.9, top_k=40, repetition_penalty=1.1, presence_penalty=0.2, seed=5)


# --- bursts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(1,) * 9, (1, 2, 3, 4), (5, 1, 9), (20,)])
def test_bursts_of_any_sizes_join_to_one_text(lively, sizes, sampled):
    shaping = SAMPLED if sampled else {}
    whole = wb.generate(lively.model, lively.ids, max_new_tokens=sum(sizes), k=3, ignore_eos=True, **shaping)
    session = lively.begin(**shaping)
    bursts = [session.generate(lively.ids if i == 0 else None, max_new_tokens=n) for i, n in enumerate(sizes)]
    assert [len(burst.tokens) for burst in bursts] == list(sizes)
    assert tuple(t for burst in bursts for t in burst.tokens) == whole.tokens
    assert [burst.fed for burst in bursts] == [True] + [False] * (len(sizes) - 1)
    assert all(burst.finish == "length" for burst in bursts)
    lively.same(session)


def test_a_burst_holds_its_own_rounds_and_the_session_their_sum(lively):
    session = lively.begin(logprobs=True)
    bursts = [session.generate(lively.ids, max_new_tokens=7)]
    bursts += [session.generate(max_new_tokens=n) for n in (1, 8, 3)]
    total = Telemetry()
    for burst in bursts:
        assert burst.telemetry.emitted == len(burst.tokens) - burst.fed == len(burst.logprobs) - burst.fed
        assert burst.token_frame.height == len(burst.tokens) and burst.rounds.height == len(burst.records)
        assert len(burst.prompt) == burst.token_frame["position"][0]
        assert burst.setup.rounds > 0 and burst.setup.init == 0 and (burst.setup.prime > 0) == burst.fed
        total = total.merge(burst.telemetry)
    assert session.telemetry == total and session.summary["rounds"] == total.rounds
    assert [r.index for burst in bursts for r in burst.records] == list(range(total.rounds))
    assert sum(burst.setup.rounds for burst in bursts) == pytest.approx(session.times.rounds)
    whole = wb.generate(lively.model, lively.ids, max_new_tokens=19, k=3, ignore_eos=True, logprobs=True)
    assert tuple(x for burst in bursts for x in burst.logprobs) == whole.logprobs


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 13, 14, 15])
def test_a_suffix_around_the_chunk_size(lively, parts, n):
    session = lively.begin(chunk=7)
    session.generate(lively.ids, max_new_tokens=6)
    suffix = [(31 * i + 9) % 200 for i in range(n)]
    burst = session.generate(torch.tensor(suffix), max_new_tokens=6)
    text = [*lively.truth[: len(lively.ids) + 6], *suffix]
    assert list(burst.prompt) == text and list(burst.tokens) == parts.plain(lively.model, text, 6)
    lively.same(session)


@pytest.mark.parametrize("suffix", [None, [], ""])
def test_an_empty_suffix_goes_on_from_the_pending_token(lively, suffix):
    session = lively.begin()
    with pytest.raises(UserError, match="holds no text yet: give a prompt"):
        session.generate(suffix)
    session.generate(lively.ids, max_new_tokens=4)
    assert list(session.generate(suffix, max_new_tokens=5).tokens) == lively.own[4:9]


def test_greedy_then_sampled_then_greedy(lively):
    session, plain = lively.begin(), lively.begin(k=0)
    for one in (session, plain):
        assert list(one.generate(lively.ids, max_new_tokens=6).tokens) == lively.own[:6]
        one.generate(max_new_tokens=9, **SAMPLED)
        one.generate([9, 8, 7], max_new_tokens=5, **SAMPLED)
        one.generate(max_new_tokens=6)
        one.generate([1], max_new_tokens=3)
    assert session.tokens == plain.tokens and session.tokens[10:19] != lively.own[6:15]
    assert session.options.temperature == 0 and session.state.chooser.plain
    lively.same(session)


def test_a_chosen_pending_token_stays_and_later_draws_have_the_noise_of_their_positions(lively):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=6)
    drawn = session.generate(max_new_tokens=8, **SAMPLED).tokens
    text = [*lively.ids, *lively.own[:6]]
    assert wb.generate(lively.model, text, max_new_tokens=8, k=0, ignore_eos=True, **SAMPLED).tokens == drawn
    other = wb.generate(lively.model, text, max_new_tokens=8, k=0, ignore_eos=True, **{**SAMPLED, "seed": 6}).tokens
    assert other != drawn


def test_a_boundary_token_is_drawn_not_arg_maxed(lively):
    firsts = set()
    for seed in range(12):
        session = lively.begin(temperature=1.5, seed=seed)
        session.generate(lively.ids, max_new_tokens=3)
        twin = lively.begin(k=0, temperature=1.5, seed=seed)
        twin.feed([*session.tokens, 9])
        firsts.add(session.generate([9], max_new_tokens=1).tokens)
        assert session.tokens == twin.tokens
    assert len(firsts) > 6


def test_draft_lengths_may_change_between_bursts_and_the_own_policy_waits(lively):
    session = lively.begin(adaptive=True, k=6)
    session.generate(lively.ids, max_new_tokens=9)
    learnt = session.state.policy.state.copy()
    lengths = {k: {r.k for r in session.generate(max_new_tokens=9, k=k, adaptive=False).records} for k in (0, 1, 5)}
    assert lengths[0] == {0} and lengths[1] <= {0, 1} and 5 in lengths[5]
    assert session.generate(max_new_tokens=6, policy=FixedK(k=2)).records[0].k == 2
    assert learnt.any() and (session.state.policy.state == learnt).all()
    assert session.tokens == lively.truth[: len(session.tokens)]
    lively.same(session)


def test_options_of_a_burst_that_cannot_be(lively):
    session = lively.begin()
    session.feed(lively.ids)
    before = session.tokens
    for bad, said in [
        (dict(refresh=False), "refresh=False cannot change within a session"),
        (dict(strategy="snapshot"), "cannot change within"),
        (dict(colour=1), "unknown option 'colour'"),
        (dict(k=-1), "k"),
        (dict(stop="x"), "no"),
        (dict(stop_token_ids=[999]), "999"),
        (dict(accept="ratio", temperature=1.0, p_min=0.5), "would bend"),
        (dict(max_new_tokens=0), "max_new_tokens"),
    ]:
        with pytest.raises(UserError, match=said):
            session.generate(**bad)
        assert session.tokens == before
    plain = lively.begin(k=0)
    plain.feed(lively.ids)
    with pytest.raises(UserError, match="made without a drafter"):
        plain.generate(k=2)


def test_a_burst_ends_with_the_capacity(lively):
    session = lively.begin(capacity=12)
    assert session.generate(lively.ids, max_new_tokens=50).finish == "context"
    assert session.tokens == lively.truth[:12]
    session.grow(16)
    assert list(session.generate(max_new_tokens=4).tokens) == lively.own[8:12] and session.capacity == 16
    lively.same(session)


def test_a_stop_and_what_may_follow_it(lively):
    stop = lively.own[7]
    session = lively.begin(stop_token_ids=(stop,))
    burst = session.generate(lively.ids, max_new_tokens=30)
    assert burst.finish == "stop" and list(burst.tokens) == lively.own[:8]
    again = session.generate(max_new_tokens=5)
    assert again.finish == "stop" and again.tokens == ()
    lively.same(session)
    session.generate([9, 9], max_new_tokens=4)
    lively.same(session)
    assert lively.begin().generate([stop], max_new_tokens=2).finish == "length"


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a_cancel_mid_burst_loses_nothing(lively, after):
    session = lively.begin()
    asked = iter([False] * after + [True] * 99)
    burst = session.generate(lively.ids, max_new_tokens=20, cancel=lambda: next(asked))
    assert burst.finish == "cancel"
    if not session.tokens:  # it came while the prompt was read
        assert burst.tokens == () and session.state.cache.lengths == [0] and session.turn is None
        session.feed(lively.ids)
    else:
        lively.same(session)
    session.generate(max_new_tokens=8)
    assert session.tokens == lively.truth[: len(session.tokens)]
    lively.same(session)


@pytest.mark.parametrize("point", ["check_finite", "judge", "commit"])
def test_an_error_between_verify_and_commit(lively, monkeypatch, point):
    session = lively.begin()
    session.generate(lively.ids, max_new_tokens=5)
    owner = HybridCache if point == "commit" else rounds
    original, uses = getattr(owner, point), []

    def failing(*args: Any, **more: Any) -> Any:
        uses.append(1)
        if len(uses) == 2:
            raise KeyboardInterrupt
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, point, failing)
        with pytest.raises(KeyboardInterrupt):
            session.generate(max_new_tokens=15)
    assert len(session.tokens) > len(lively.ids) + 5 and session.state.sink is None and session.lent is None
    lively.same(session)
    session.generate(max_new_tokens=7)
    assert session.tokens == lively.truth[: len(session.tokens)]
    lively.same(session)


def test_the_check_can_fail(lively):
    session = lively.begin()
    session.feed(lively.ids)
    session.check()
    session.state.tokens.append(3)
    with pytest.raises(AssertionError, match="holds 4 rows of a text of 6 tokens"):
        session.check()
    with pytest.raises(AssertionError):
        session.grow(600 - 100)
