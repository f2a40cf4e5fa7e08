"""Frozen records of what happened, without tensors: rounds, phases and generation summaries.

Telemetry, replay, plots and frames read these and nothing else. A round emits ``accepted + 1`` tokens unless a
stop, the budget or the context ends it; ``cut`` marks those rounds, and accepted length is taken over the others.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

CHAIN_STOPS = ("k", "p_min", "policy", "proposer", "constraint", "none")
ROUND_STOPS = ("", "stop", "stop_string", "cancel", "budget", "context", "forced")
CUTS = ("stop", "stop_string", "cancel", "budget", "context")  # the round stops for which ``RoundRecord.cut`` holds


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds one round spent in each phase; they sum to the round's wall time.

    Args:
        draft: Chaining the proposer, seconds.
        verify_issue: Launching the target's forward, seconds.
        verify_wait: Waiting for its result to reach the host, seconds; 0 on a CPU.
        accept: Comparing drafts with the target's picks, seconds.
        commit: Committing caches and rewriting drafter rows, seconds.
        other: What none of the above covers, seconds.
    """

    draft: float = 0.0
    verify_issue: float = 0.0
    verify_wait: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """Wall time of the round, seconds."""
        return self.draft + self.verify_issue + self.verify_wait + self.accept + self.commit + self.other


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of propose, verify, accept, commit.

    Args:
        index: Number of the round in its generation, from 0.
        start: Absolute position of the pending token (row 0 of the verify), i.e. the last known token.
        base: 1 when the pending token rides as row 0 of the verify, 0 when it was fed alone first.
        k: Draft length that policy, budget and context allowed.
        draft_ids: Drafted token ids, in order; discarded chain tokens are not among them.
        draft_top1: Drafter's probability of each drafted token (softmax at T = 1, unfiltered).
        accepted: Length of the accepted prefix.
        emitted: Tokens committed to the output by this round.
        bonus: The target's own token after the accepted prefix; None when a cut left it out.
        chain_stop: Why the chain ended: "k", "p_min", "policy", "proposer" (it had no more to offer), "constraint"
            (the next token is not allowed) or "none" (nothing was asked of it).
        round_stop: "" for a whole round, else what cut it: "stop", "stop_string", "cancel", "forced", or "budget" or
            "context", which allow fewer drafts than the policy wished for; such a round may still hold its bonus.
        phases: Seconds per phase.
        logprobs: The target's log-probability of each emitted token, softmax at T = 1, unfiltered, nats; empty unless
            asked for.
        steps: Drafter steps run for the chain, those of dropped tokens included.
    """

    index: int
    start: int
    base: int
    k: int
    draft_ids: tuple[int, ...]
    draft_top1: tuple[float, ...]
    accepted: int
    emitted: int
    bonus: int | None
    chain_stop: str
    round_stop: str
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    logprobs: tuple[float, ...] = ()
    steps: int = 0

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return len(self.draft_ids)

    @property
    def cut(self) -> bool:
        """True when a stop, the budget or the context cut the round: ended it, or shortened its chain beforehand."""
        return self.round_stop in CUTS

    def key(self) -> tuple[int, int, int, str]:
        """What a walk must reproduce: (start, drafted, accepted, chain_stop)."""
        return (self.start, self.drafted, self.accepted, self.chain_stop)

    def row(self) -> dict[str, Any]:
        """The record as one flat mapping, phases as ``t_<phase>`` columns in seconds."""
        out = asdict(self)
        phases = out.pop("phases")
        out["draft_ids"] = list(self.draft_ids)
        out["draft_top1"] = list(self.draft_top1)
        out["logprobs"] = list(self.logprobs)
        out["drafted"] = self.drafted
        out.update({f"t_{name}": value for name, value in phases.items()})
        return out


@dataclass(frozen=True, slots=True)
class SetupTimes:
    """Seconds of a whole generation by stage.

    Args:
        init: Building caches and policy state.
        capture: Capturing CUDA graphs, seconds.
        prime: Prefill of the prompt through the target.
        drafter_fill: Filling the drafter's cache over the prompt.
        rounds: All rounds.
        tail: Decoding text, summaries.
    """

    init: float = 0.0
    capture: float = 0.0
    prime: float = 0.0
    drafter_fill: float = 0.0
    rounds: float = 0.0
    tail: float = 0.0

    def since(self, earlier: SetupTimes) -> SetupTimes:
        """Seconds spent after an earlier reading of the same clock."""
        return SetupTimes(**{name: now - getattr(earlier, name) for name, now in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class DraftStepTimes:
    """Anatomy of draft steps: mean seconds per step in each part, and how many steps were measured.

    Args:
        glue: Embedding, norms, concat, projection, pick.
        attention: The drafter's attention block.
        ffn: The drafter's feed-forward block.
        head: Final norm and the vocabulary head.
        steps: Draft steps measured.
        synchronised: True when the device was synchronised between parts; such a run is no throughput number.
    """

    glue: float
    attention: float
    ffn: float
    head: float
    steps: int
    synchronised: bool
