"""A session that is emptied and used again: its answers, records and planes are a fresh session's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from workbench.cache.hybrid import HybridCache
from workbench.cache.kv import KVPlane
from workbench.cache.quantised import PackedPlane
from workbench.core.errors import NonFiniteError, UserError
from workbench.model.hybrid import HybridModel
from workbench.spec.compare import compare_sessions
from workbench.spec.device.graphs import Graphs
from workbench.spec.device.law import DeviceLaw
from workbench.spec.device.rounds import DeviceRounds
from workbench.spec.generate import generate
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import Ema
from workbench.spec.proposers import MTPProposer
from workbench.spec.session import Session
from workbench.spec.store import PrefixStore
from workbench_kernels.dispatch import use

PROMPTS = [
    [7, 61, 12, 80, 33, 5, 44, 19, 2, 71, 8, 8, 30, 66, 51, 24, 9],
    [3],
    [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37],
    [7, 61, 12],
    [50, 40, 30, 20, 10, 9, 9, 9],
]
CAPACITY = 90
FILTERED = dict(temperature=0.8, top_k=20, top_p=0.9)
PENALISED = dict(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1)
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(temperature=1.0),
    "filtered": FILTERED,
    "penalised": PENALISED,
    "greedy, penalised": dict(repetition_penalty=1.4, penalty_last_n=9, logit_bias={5: -3.0}),
}
MODES: dict[str, dict[str, Any]] = {"host": {}, "streamed": dict(stream_rounds=4), "by parts": dict(graphs=True)}
HOST: dict[str, dict[str, Any]] = {
    "adaptive": dict(adaptive=True, k=6),
    "a threshold": dict(p_min=0.05, k=5),
    "ratio": dict(accept="ratio", temperature=0.9),
    "packed rows": dict(k_format="q8_0", v_format="q8_0"),
    "a window": dict(window=7, chunk=5),
    "no carry, log-probabilities": dict(carry=False, logprobs=True),
    "plain": dict(k=0, temperature=0.9),
    "draft rows kept, timed": dict(refresh=False, anatomy=True),
    "not primed": dict(primed=False),
}


@pytest.fixture
def model(tiny: Callable[..., HybridModel]) -> HybridModel:
    return tiny(exact=False, tied=False, head_dim=32)


def options_of(n: int, **given: Any) -> GenerateOptions:
    """Options of the n-th answer: budgets and streams differ, and two answers end by a stop token."""
    stop = dict(stop_token_ids=tuple(range(20, 60))) if n % 2 else {}
    return GenerateOptions(**{"k": 3, "max_new_tokens": 9 + 7 * n, "sequence": 1000 + n, "seed": 3, **stop, **given})


def facts(made: Any) -> Any:
    rounds = [replace(record, phases=None) for record in made.records]  # all but times
    return made.prompt, made.tokens, made.finish, rounds, made.logprobs, made.cut_text


def differences(session: Session, answer: Callable[[Session, int], Any], fresh: Callable[[int], Session]) -> list[str]:
    """What tells answers of a session that is reset from those of fresh ones."""
    found = []
    for n in range(len(PROMPTS)):
        new = fresh(n)
        session.reset(options=new.options)
        want, got = answer(new, n), answer(session, n)
        if facts(want) != facts(got):
            found.append(f"answer {n}: {facts(got)} for {facts(want)}")
        elif unlike := compare_sessions(session, new):
            found.append(f"answer {n}: {unlike}")
    return found


def told(model: HybridModel, given: dict[str, Any], session: Session | None = None) -> list[str]:
    def fresh(n: int) -> Session:
        return Session(model, options=options_of(n, **given), capacity=CAPACITY)

    def answer(session: Session, n: int) -> Any:
        return session.generate(PROMPTS[n], max_new_tokens=session.options.max_new_tokens)

    return differences(session or fresh(0), answer, fresh)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("law", LAWS)
def test_a_reset_session_answers_as_a_fresh_one(model: HybridModel, law: str, mode: str) -> None:
    with use("ref"):
        assert told(model, {**LAWS[law], **MODES[mode]}) == []


@pytest.mark.parametrize("name", HOST)
def test_with_what_needs_the_host_too(model: HybridModel, name: str) -> None:
    assert told(model, HOST[name]) == []


@pytest.mark.parametrize("mode", MODES)
def test_generate_takes_a_session(model: HybridModel, mode: str) -> None:
    with use("ref") if mode != "host" else nullcontext():
        session = Session(model, options=options_of(0, **PENALISED), capacity=CAPACITY)
        finishes = []
        for n, prompt in enumerate(PROMPTS):
            opts = options_of(n, **PENALISED, **MODES[mode])
            made = generate(model, prompt, options=opts, session=session)
            assert facts(made) == facts(generate(model, prompt, options=opts)), n
            assert session.tokens == [*made.prompt, *made.tokens]
            finishes.append(made.finish)
        assert {"stop", "length"} <= set(finishes)


# ---------------------------------------------------------------- after what went wrong, and after everything else


def spoilt(model: HybridModel, how: str, given: dict[str, Any]) -> Session:
    """A session whose last answer did not come to a good end."""
    session = Session(model, options=options_of(4, **given), capacity=CAPACITY)
    if how == "an error before the first token":
        with pytest.raises(UserError, match="do not fit"):
            session.generate([1] * CAPACITY)
        return session
    session.generate(PROMPTS[2], max_new_tokens=12, ignore_eos=True)
    if how == "left off":
        proposer, rounds = session.state.proposer, session.rounds(45)
        assert isinstance(proposer, MTPProposer)
        on_device = session.options.on_device
        for _ in rounds:
            if on_device or proposer.queue:
                break
        rounds.close()
        assert proposer.queue or on_device
    if how == "a NaN":
        weight = model.blocks[1].ffn.down
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[1] = float("nan")
        with pytest.raises(NonFiniteError):
            session.generate(max_new_tokens=20, ignore_eos=True)
        with torch.no_grad():
            weight.copy_(kept)
    elif how == "cancelled":
        asked = iter([False] * 3 + [True] * 99)
        session.generate([4, 4], max_new_tokens=20, cancel=lambda: next(asked), ignore_eos=True)
    elif how == "the context":
        assert session.generate(max_new_tokens=200, ignore_eos=True).finish == "context"
    elif how == "rewound, grown and demoted":
        session.rewind()
        session.grow(CAPACITY + 40)
        session.demote()
    return session


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "how",
    ["left off", "an error before the first token", "a NaN", "cancelled", "the context", "rewound, grown and demoted"],
)
def test_whatever_came_before(model: HybridModel, how: str, mode: str) -> None:
    given = {**PENALISED, **MODES[mode]}
    with use("ref"):
        session = spoilt(model, how, given)
        if how == "a NaN":  # free rows hold what it left
            for plane in session.state.cache.planes:
                if isinstance(plane, KVPlane):
                    with torch.inference_mode():
                        plane.v_BNSD[:, :, 40:] = float("nan")
        assert told(model, given, session) == []


def test_a_policy_of_the_users_begins_anew(model: HybridModel) -> None:
    def fresh(n: int) -> Session:
        return Session(model, options=options_of(n), policy=Ema(k=5), capacity=CAPACITY)

    def answer(session: Session, n: int) -> Any:
        return session.generate(PROMPTS[n], max_new_tokens=30, ignore_eos=True)

    assert differences(fresh(0), answer, fresh) == []
    kept = Session.reset

    def reset(self: Session, **given: Any) -> None:
        policy = self.state.policy
        kept(self, **given)
        self.state.policy = policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "reset", reset)
        assert differences(fresh(0), answer, fresh) != []


def test_a_subclass_of_the_drafter_is_reset_whole(model: HybridModel) -> None:
    class Counting(MTPProposer):
        def reset(self) -> None:
            self.seen = 0
            super().reset()

        def observe(self, tokens_BT: torch.Tensor, rows: Any) -> None:
            self.seen += tokens_BT.shape[1]
            super().observe(tokens_BT, rows)

    proposer = Counting(model, capacity=CAPACITY)
    session = Session(model, proposer=proposer, capacity=CAPACITY)
    session.generate(PROMPTS[0], max_new_tokens=9)
    assert proposer.seen > 9
    session.reset()
    assert proposer.seen == 0 and session.state.proposer is proposer


@pytest.mark.parametrize("name", ["dense", "packed rows", "a window"])
def test_what_was_taken_from_a_session_outlives_its_reset(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def same(session: Session, store: PrefixStore) -> bool:
        """Whether a fork, and a session restored from an entry, are what they were before a reset."""
        opts = session.options
        session.feed(PROMPTS[2], boundaries=(20,))
        for entry in session.captured:
            store.put(entry)
        twin, fresh = session.fork(), Session(model, options=opts, capacity=CAPACITY)
        session.reset()
        session.generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
        fresh.feed(PROMPTS[2])
        again = Session.from_prefix(model, PROMPTS[2], store, options=opts, capacity=CAPACITY)
        assert again.reuse is not None and again.reuse.reused >= 20
        return not compare_sessions(twin, fresh) and not compare_sessions(again, fresh)

    model.exact = True
    opts = options_of(0, **HOST.get(name, {}))
    assert same(Session(model, options=opts, capacity=CAPACITY), PrefixStore(1 << 24))
    monkeypatch.setattr(KVPlane, "fork", lambda self: copy(self))
    monkeypatch.setattr(PackedPlane, "fork", lambda self: copy(self))
    assert not same(Session(model, options=opts, capacity=CAPACITY), PrefixStore(1 << 24)), "control: rows are shared"


# ---------------------------------------------------------------- mistakes are seen


def queue_kept(patch: pytest.MonkeyPatch) -> None:
    def clear(self: MTPProposer, whole: Any = MTPProposer.clear) -> None:
        queue = list(self.queue)
        whole(self)
        self.queue = queue

    patch.setattr(MTPProposer, "clear", clear)


def rows_kept(patch: pytest.MonkeyPatch) -> None:
    def clear(self: MTPProposer, whole: Any = MTPProposer.clear) -> None:
        held = self.held
        whole(self)
        self.held = held

    patch.setattr(MTPProposer, "clear", clear)


def states_kept(patch: pytest.MonkeyPatch) -> None:
    def clear(self: HybridCache, whole: Any = HybridCache.clear) -> None:
        kept = [(plane.conv_BWC, plane.state_BHKV) for plane in self.recurrent]
        whole(self)
        for plane, (conv, state) in zip(self.recurrent, kept, strict=True):
            plane.conv_BWC, plane.state_BHKV = conv, state

    patch.setattr(HybridCache, "clear", clear)


def text_kept(patch: pytest.MonkeyPatch) -> None:
    def load(self: DeviceRounds, *args: Any, whole: Any = DeviceRounds.load) -> None:
        text = self.books.text_BR.clone()
        whole(self, *args)
        if text.any():
            self.books.text_BR.copy_(text)

    patch.setattr(DeviceRounds, "load", load)


def stream_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceLaw, "take", lambda self, key: None)


def options_kept(patch: pytest.MonkeyPatch) -> None:
    def reset(self: Session, whole: Any = Session.reset, **given: Any) -> None:
        chooser = self.state.chooser
        whole(self, **given)
        self.state.chooser = chooser

    patch.setattr(Session, "reset", reset)


MISTAKES = {
    "the drafter's queue": (queue_kept, "host"),
    "the drafter's final rows": (rows_kept, "host"),
    "the delta layers' states": (states_kept, "host"),
    "the random stream of the host": (options_kept, "host"),
    "the text that penalties see": (text_kept, "streamed"),
    "the random stream": (stream_kept, "streamed"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_negative_control_what_is_forgotten_is_seen(
    model: HybridModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mistake, mode = MISTAKES[name]
    given = {**PENALISED, **MODES[mode]}
    with use("ref"):
        assert told(model, given, spoilt(model, "left off", given)) == []
        mistake(monkeypatch)
        try:
            found = told(model, given, spoilt(model, "left off", given))
        except AssertionError as error:  # an invariant of the session found it
            found = [str(error)]
    assert found != []


# ---------------------------------------------------------------- what is kept


def test_memory_and_launches_are_used_again(model: HybridModel, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    right = Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda self, key, part: (keys.append(key), right(self, key, part))[1])
    with use("ref"):
        session = Session(model, options=options_of(0, **FILTERED, stream_rounds=4), capacity=CAPACITY)
        programs, sets = [], []
        for n, prompt in enumerate(PROMPTS):
            keys.clear()
            opts = options_of(n, **FILTERED, stream_rounds=4, stop_token_ids=(), ignore_eos=True)
            generate(model, prompt, options=opts, session=session)
            assert session.program is not None
            programs.append(session.program[1])
            sets.append(set(keys))
        assert all(made is programs[0] for made in programs) and len(set().union(*sets)) == 1, "one capture for all"
        for other in (dict(top_k=21), dict(stop_token_ids=(5,)), dict(k=2), dict(temperature=0.7), dict(p_min=0.1)):
            keys.clear()
            opts = options_of(0, **{**FILTERED, "stream_rounds": 4, "stop_token_ids": (), "ignore_eos": True, **other})
            generate(model, PROMPTS[0], options=opts, session=session)
            assert session.program is not None and session.program[1] not in programs
            assert not set(keys) & sets[0], f"{other} shapes the launches"
            programs.append(session.program[1])


def test_planes_are_as_new_in_their_own_memory(model: HybridModel) -> None:
    session = Session(model, options=options_of(0), capacity=CAPACITY)
    session.generate(PROMPTS[2], max_new_tokens=50, ignore_eos=True)
    proposer = session.state.proposer
    assert isinstance(proposer, MTPProposer)
    planes = [p for p in (*session.state.cache.planes, *proposer.cache.planes) if isinstance(p, KVPlane)]
    before = [plane.k_BNSD.data_ptr() for plane in planes]
    assert all(plane.k_BNSD.any() and plane.k_BNSD.shape[2] == 128 for plane in planes)
    session.reset()
    after = [p for p in (*session.state.cache.planes, *proposer.cache.planes) if isinstance(p, KVPlane)]
    assert [plane.k_BNSD.data_ptr() for plane in after] == before
    assert not any(plane.k_BNSD.any() or plane.v_BNSD.any() for plane in after)
    assert session.summary["tokens"] == session.telemetry.rounds == 0 and session.times.rounds == 0


# ---------------------------------------------------------------- refusals


def test_checkpoints_of_the_text_before_are_gone(model: HybridModel) -> None:
    session = Session(model, options=options_of(0), capacity=CAPACITY)
    session.feed(PROMPTS[0], stable=1)
    places = [session.turn, session.checkpoint()]
    session.reset()
    with pytest.raises(UserError, match="no turn to return to"):
        session.rewind()
    session.feed(PROMPTS[2])
    for place in places:
        with pytest.raises(UserError, match="is gone"):
            session.rewind(to=place)
    assert session.tokens[:-1] == PROMPTS[2]


def test_what_cannot_change_is_refused_and_nothing_happens(model: HybridModel, tiny: Callable[..., Any]) -> None:
    session = Session(model, options=options_of(0), capacity=CAPACITY)
    session.generate(PROMPTS[0], max_new_tokens=9)
    text = session.tokens
    for given, says in (
        (dict(carrier="pre_norm"), "cannot change within a session"),
        (dict(k_format="q8_0"), "cannot change within a session"),
        (dict(k=0), r"k=0 is not valid for a session that was made with one \(k=3\)"),
        (dict(stop_token_ids=(999,)), "out of range"),
        (dict(accept="ratio", temperature=1.0, p_min=0.0, p_min_reads="top", carrier="pre_norm"), "cannot change"),
    ):
        with pytest.raises(UserError, match=says):
            session.reset(options=options_of(0, **given))
    plain = Session(model, options=options_of(0, k=0), capacity=CAPACITY)
    with pytest.raises(UserError, match=r"made without a drafter \(k=0\)"):
        plain.reset(options=options_of(0))
    rounds = session.rounds(20)
    next(rounds)
    text = session.tokens
    with pytest.raises(UserError, match="has not come to its end"):
        session.reset()
    rounds.close()
    for given, says in (
        (dict(policy=Ema(k=3)), "policy and session exclude each other"),
        (dict(clock=lambda: 0.0), "clock and session exclude each other"),
        (dict(max_new_tokens=CAPACITY), f"this session holds at most {CAPACITY}"),
    ):
        with pytest.raises(UserError, match=says):
            generate(model, PROMPTS[0], session=session, **given)
    with pytest.raises(UserError, match="of another model"):
        generate(tiny(), PROMPTS[0], session=session)
    assert session.tokens == text
    session.reset()
    assert session.tokens == []
