"""What the tests of the engine share: a plain decoder of their own, states as values, drafters that obey a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import HybridCache, same_bits
from workbench.model.hybrid import HybridModel
from workbench.spec.compare import compare_sessions
from workbench.spec.options import GenerateOptions
from workbench.spec.policies import ArrayRun, PolicyRun, RoundView
from workbench.spec.policies.rules import SCRATCH
from workbench.spec.proposers import DraftContext, MTPProposer, Proposal
from workbench.spec.round import DecodeState
from workbench.spec.session import Session

PROMPT = [5, 6, 7, 8]
WORDS = 80


@torch.inference_mode()
def greedy_text(model: HybridModel, ids: Sequence[int], n: int) -> list[int]:
    """n tokens by one forward each; no part of the engine's."""
    cache, feed, out = model.new_cache(), [list(ids)], []
    for _ in range(n):
        logits = model.forward(torch.tensor(feed), cache, logits="last").logits_BTV
        assert logits is not None
        out.append(int(logits[0, -1].argmax()))
        feed = [[out[-1]]]
    return out


@dataclass
class Setting:
    """A model, a prompt and the greedy text after it."""

    model: HybridModel
    ids: list[int]
    own: list[int]

    @property
    def truth(self) -> list[int]:
        """Prompt and text."""
        return [*self.ids, *self.own]

    def begin(self, **options: Any) -> Session:
        """An empty session; ``policy``, ``proposer``, ``capacity``, ``clock`` are its own, the rest are options."""
        own = {name: options.pop(name) for name in ("policy", "proposer", "capacity", "clock") if name in options}
        return Session(self.model, options=GenerateOptions(**{"ignore_eos": True, "k": 3, **options}), **own)

    def session(self, **options: Any) -> Session:
        """A session on the prompt."""
        session = self.begin(**options)
        session.feed(self.ids)
        return session

    def fresh(self, session: Session) -> Session:
        """A new session given this one's text, pending token included, as one prompt."""
        twin = self.begin(chunk=7)
        twin.feed(session.tokens[:-1], force=session.tokens[-1])
        return twin

    def same(self, session: Session) -> None:
        """Hold a session against a fresh one: text and every plane, in every bit."""
        found = compare_sessions(session, self.fresh(session))
        assert not found, str(found)


@pytest.fixture(scope="session")
def lively(tiny) -> Setting:
    """A tiny random model whose greedy text does not loop. Tests leave it as they found it."""
    model = tiny(ratio=2, tied=False, vocab_size=211, seed=2)
    own = greedy_text(model, PROMPT, WORDS)
    assert len(set(own)) > 40
    return Setting(model, PROMPT, own)


@pytest.fixture(scope="session")
def demo() -> HybridModel:
    return wb.load("demo", exact=True)


def learnt(run: PolicyRun | None) -> Any:
    """What a policy carries from round to round."""
    return run.state[:SCRATCH].tobytes() if isinstance(run, ArrayRun) else getattr(run, "accepted", None)


@dataclass(frozen=True)
class Frozen:
    """Everything a round may change, as values."""

    cache: HybridCache
    tokens: list[int]
    records: list[Any]
    drafter: HybridCache | None
    counters: tuple[Any, ...]
    tensors: list[torch.Tensor]
    learnt: Any

    @classmethod
    def of(cls, state: DecodeState) -> Frozen:
        mtp = state.proposer if isinstance(state.proposer, MTPProposer) else None
        tensors = [x.clone() for pair in mtp.queue for x in pair] if mtp else []
        return cls(
            state.cache.fork(),
            list(state.tokens),
            list(state.records),
            mtp.cache.fork() if mtp else None,
            (mtp.position, mtp.skipped, mtp.held) if mtp else (state.proposer and state.proposer.mark(),),
            [*tensors, mtp.tail.clone()] if mtp and mtp.tail is not None else tensors,
            learnt(state.policy),
        )

    def difference(self, other: Frozen) -> str | None:
        """What differs, or None when all of it agrees in every bit."""
        if found := self.cache.first_difference(other.cache):
            return f"target: {found}"
        if self.drafter is not None and (found := self.drafter.first_difference(other.drafter)):
            return f"drafter: {found}"
        for name in ("tokens", "records", "counters", "learnt"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} and {getattr(other, name)}"
        if len(self.tensors) != len(other.tensors) or not all(map(same_bits, self.tensors, other.tensors)):
            return "queue or tail"
        return None


@dataclass(frozen=True)
class Script:
    """A policy that asks for given draft lengths, then for the last of them."""

    ks: tuple[int, ...]
    drop: Callable[[int, int], bool] = field(default=lambda round_index, slot: False)

    anticipating = False

    @property
    def k_max(self) -> int:
        return max(self.ks)

    def start(self, *, width: int) -> ScriptRun:
        return ScriptRun(self)


class ScriptRun:
    """Run of Script; keeps what it was shown."""

    def __init__(self, policy: Script) -> None:
        self.policy, self.seen, self.accepted = policy, [], 0

    def next_k(self, committed: int) -> int:
        return self.policy.ks[min(len(self.seen), len(self.policy.ks) - 1)]

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        return "policy" if self.policy.drop(len(self.seen), slot) else None

    def observe(self, view: RoundView) -> None:
        self.seen.append(view)
        self.accepted = view.accepted


class Obedient(MTPProposer):
    """The MTP head with its picks replaced by the truth, or by a wrong id where told: any pattern of acceptance."""

    def __init__(
        self, model: HybridModel, truth: Sequence[int], wrong: Callable[[int], bool] = lambda at: False, **options: Any
    ) -> None:
        self.truth, self.wrong = list(truth), wrong
        super().__init__(model, **options)

    def propose(self, ctx: DraftContext) -> Proposal:
        at = iter(range(ctx.position + 1, ctx.position + 1 + ctx.k))
        unembed = self.model.unembed

        def scripted(normed: torch.Tensor) -> torch.Tensor:
            logits, p = unembed(normed).clone(), next(at)
            token = self.truth[p] if p < len(self.truth) else 1
            logits[0, 0, (token + self.wrong(p)) % logits.shape[-1]] = logits.max() + 1
            return logits

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(self.model), "unembed", scripted)
            return super().propose(ctx)


@pytest.fixture(scope="session")
def parts() -> Any:
    """The classes above, for test files, which cannot import this one."""

    class Parts:
        frozen, script, obedient, setting, plain = Frozen, Script, Obedient, Setting, staticmethod(greedy_text)

    return Parts


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock for rounds that moves by one second per reading; the readings."""
    readings: list[float] = []

    def clock() -> float:
        readings.append(float(len(readings)))
        return readings[-1]

    monkeypatch.setattr("workbench.spec.round.perf_counter", clock)
    yield readings
