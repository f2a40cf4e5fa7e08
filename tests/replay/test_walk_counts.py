"""The compiled walk counts exactly the rounds of the plain one: every family, estimator and kind of table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.core.errors import UserError
from workbench.replay import (
    DraftTable,
    Profile,
    WalkCounts,
    counts_of,
    kernel,
    own_tapes,
    replay,
    synthetic_table,
    walk,
)
from workbench.replay import fast as fast_module
from workbench.replay.rows import Documents, shard_rows
from workbench.replay.tracks import tracks
from workbench.replay.walk import check_own, rounding
from workbench.spec.policies import (
    AdaptiveFloor,
    Cumulative,
    Ema,
    FixedK,
    Gate,
    Goodput,
    Ladder,
    MinConfidence,
    Oracle,
    Policy,
    Scripted,
    Suspend,
    rules,
)
from workbench.spec.policies.rules import FAMILIES

K = 8


class Cost:
    """Durations that make both modes of a gate worth while in turns: verifies grow with the context, steps do not."""

    def grid(self, k_max: int, *, contexts: Sequence[float]) -> np.ndarray:
        n = np.arange(k_max + 1)
        steps = 0.11 * n[:, None] + (0.02 * n + 1.0)[None]
        return steps[None] + np.asarray(contexts)[:, None, None] * (0.004 * n)[None, None]


@dataclass(frozen=True)
class Alternating:
    """A policy of a notebook cell: 0 drafts, then 3, then 0, until something was accepted in full."""

    k_max: int = 3
    anticipating: bool = False

    def start(self, *, width: int) -> Any:
        return AlternatingRun()


class AlternatingRun:
    rounds = 0

    def next_k(self, committed: int) -> int:
        return 3 * (self.rounds % 2)

    def drops(self, slot: int, top1: float, base: int) -> str | None:
        return "policy" if slot == 2 and top1 < 0.3 else None

    def observe(self, view: Any) -> None:
        self.rounds += 1 + (view.drafted == view.accepted > 0)


def policies_of(seed: int, *, drawn: bool = False) -> list[Policy]:
    """A random policy of every family and of the planned kinds; with ``drawn``, those that the ratio rule takes."""
    r = random.Random(seed)
    reads = "top" if drawn else r.choice(["drawn", "top"])
    cut: dict[str, Any] = {"p_min": r.choice([0.0, 0.3, 0.6, 0.9]), "pmin0": r.random() < 0.5, "statistic": reads}
    k = r.randint(1, K)
    seconds = tuple(1 + 0.12 * i + 0.01 * r.random() for i in range(k + 1))
    made: list[Policy] = [
        FixedK(k=r.randint(0, K), **cut),
        AdaptiveFloor(
            k=k, cap=r.randint(1, K), floor=r.choice([None, 1, 2, 4]), floor_context=r.choice([0, 40]), **cut
        ),
        MinConfidence(k=k, tau=r.random(), statistic=reads),
        Cumulative(k=k, threshold=r.random(), statistic=reads),
        Ema(k=k, alpha=r.choice([0.1, 0.5, 1.0])),
        Ladder(k=k, lanes=r.randint(1, 40), **cut),
        Suspend(k=k, window=r.randint(1, 12), floor=2 * r.random(), reprobe_tokens=r.randint(1, 40)),
        Goodput(k=k, seconds=seconds, reprobe=r.randint(2, 20)),
        Gate(k=k, window=r.randint(1, 6), reprobe_tokens=r.randint(4, 30), refresh_tokens=r.randint(4, 30), **cut),
        Scripted(ks=tuple(r.randint(0, K) for _ in range(r.randint(1, 9)))),
        Scripted(ks={r.randint(0, 120): r.randint(0, K) for _ in range(r.randint(0, 40))}),
        Oracle(k=k),
        Oracle(k=k, seconds=seconds),
    ]
    return [policy for policy in made if not (drawn and policy.anticipating)]


def plain(table: DraftTable, policy: Policy, estimator: str, **more: Any) -> WalkCounts:
    """The counts of the plain walk."""
    documents = Documents.of(table)
    named = dict(zip(documents.ids, documents.sources, strict=True))
    rounds = walk(table, policy=policy, estimator=estimator, cost=Cost(), **more)
    return counts_of(rounds, policy=policy, k_max=policy.k_max, estimator=estimator, documents=named)


def unequal(table: DraftTable, policies: Sequence[Policy], estimator: str, **more: Any) -> list[Policy]:
    """Policies whose compiled walk counts otherwise than the plain one."""
    found = list(wb.walk_counts(table, policies, estimator=estimator, cost=Cost(), threads=2, **more))
    assert [one.policy for one in found] == list(policies)
    return [p for p, one in zip(policies, found, strict=True) if one != plain(table, p, estimator, **more)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DraftTable]:
    """``made(**options)``: a synthetic table, built once."""
    tables: dict[str, DraftTable] = {}

    def build(**options: Any) -> DraftTable:
        key = repr(sorted(options.items()))
        if key not in tables:
            out = tmp_path_factory.mktemp("table") / "x"
            tables[key] = synthetic_table(out, **{"documents": 7, "tokens": (2, 150), "shard_rows": 100, **options})
        return tables[key]

    return build


TABLES: dict[str, dict[str, Any]] = {
    "own": {},
    "own after prompts": dict(prompt_len=30, hidden_size=4096, seed=1),
    "drawn, coupled": dict(temperature=0.8, seed=2),
    "other text": dict(profile=Profile(agree=0.7), seed=3),
    "other text, drawn": dict(profile=Profile(agree=0.8), temperature=0.8, seed=4),
}


def test_every_family_is_tried() -> None:
    assert {policy.family for policy in policies_of(0)} == {*FAMILIES, "oracle", "scripted"}


@pytest.mark.parametrize("name", TABLES)
def test_compiled_and_plain_walks_count_the_same(made, name) -> None:
    table = made(**TABLES[name])
    for estimator in ["forced"] if name.startswith("other") else ["own", "forced"]:
        assert unequal(table, policies_of(len(name)), estimator) == []


def test_drawn_acceptances_are_the_same(made) -> None:
    table = made(**TABLES["drawn, coupled"])
    for seed in (None, 7):
        policies = policies_of(5, drawn=True)
        assert len(policies) > 6 and unequal(table, policies, "ratio", seed=seed) == []
    one, other = (next(wb.walk_counts(table, FixedK(k=4), estimator="ratio", seed=seed)) for seed in (0, 7))
    assert one != other


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_many_random_policies_on_many_random_tables(tmp_path, seed) -> None:
    r = random.Random(1000 + seed)
    profile = Profile(
        easy=r.uniform(0.5, 1), hard=r.uniform(0, 0.6), stay=r.random(), agree=r.choice([1.0, 1.0, r.random()])
    )
    temperature = r.choice([0.0, 0.7])
    table = synthetic_table(
        tmp_path / "x", documents=r.randint(1, 9), tokens=(2, r.choice([3, 40, 700])), prompt_len=r.choice([0, 5, 60]),
        profile=profile, k_max=r.choice([8, 11]), temperature=temperature, seed=seed,
        shard_rows=r.choice([1, 300, 9999]), hidden_size=r.choice([64, 3000, 4096]),
    )  # fmt: skip
    for estimator in ["forced", *(["own"] if profile.agree == 1 else [])]:
        assert unequal(table, policies_of(seed), estimator) == []
    if temperature and profile.agree == 1:
        assert unequal(table, policies_of(seed, drawn=True), "ratio", seed=seed) == []


def test_on_a_recorded_table_of_own_texts_and_of_others(tiny, sampled, tmp_path) -> None:
    from workbench.core.tape import Corpus, Tape

    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    own = own_tapes(model, [Tape(f"p{n}", [1] * n, prompt_len=n) for n in (1, 30)], max_new_tokens=60, ignore_eos=True)
    text = sampled(model, 80, temperature=0.5)
    others = Corpus([Tape("a", text[:40]), Tape("b", text, prompt_len=50)])
    assert unequal(replay(model, own, out=tmp_path / "own", shard_rows=50), policies_of(11), "own") == []
    table = replay(model, others, out=tmp_path / "other")
    assert unequal(table, policies_of(12), "forced") == []
    forced = walk(table, k=K, estimator="forced")["round_stop"].to_list()
    assert "forced" in forced, "no draft was the target's pick off the text, so the rule was not tried"


def test_policies_of_a_cell_are_walked_round_by_round(made) -> None:
    class Mine(FixedK):
        """A class derived from one of the library's is not the library's."""

        def start(self, *, width: int) -> Any:
            return AlternatingRun()

    table, policies = made(), [FixedK(k=2), Alternating(), Mine(k=3), FixedK(k=5)]
    found = list(wb.walk_counts(table, policies))
    assert [one.route for one in found] == ["fast", "plain", "plain", "fast"]
    for policy, one in zip(policies, found, strict=True):
        assert one == plain(table, policy, "own")
    assert np.array_equal(found[1].outcome_GDA, found[2].outcome_GDA)


def test_batches_and_threads_change_nothing(made, monkeypatch) -> None:
    table, policies = made(), [*policies_of(3), *policies_of(4)]
    options: dict[str, Any] = dict(cost=Cost(), contexts=(0, 20, 90))
    whole = list(wb.walk_counts(table, policies, threads=1, **options))
    read: list[int] = []
    rows = fast_module.shard_rows
    monkeypatch.setattr(fast_module, "shard_rows", lambda *given: (read.append(1), rows(*given))[1])
    monkeypatch.setattr(fast_module, "COUNT_BYTES", 40_000)
    assert list(wb.walk_counts(table, policies, threads=3, **options)) == whole and len(read) > 3
    assert all(one.contexts == (0, 20, 90) and one.work_GCSD[:, 1].sum() for one in whole[1:3])


def test_one_shard_is_read_at_a_time(made, monkeypatch) -> None:
    table = made()
    assert len(table.manifest.shards) > 2
    held: list[int] = []
    rows = fast_module.shard_rows

    def watched(*given: Any) -> Iterable[Any]:
        for part in rows(*given):
            held.append(len(part.match_R))
            yield part

    monkeypatch.setattr(fast_module, "shard_rows", watched)
    list(wb.walk_counts(table, [FixedK(k=1), FixedK(k=2)]))
    assert held == [shard["rows"] for shard in table.manifest.shards] and "frame" not in vars(table)


# --- deliberate mistakes ---------------------------------------------------------------------------------------------


def moved_end(rows: Any) -> Any:
    return replace(rows, end_G=np.maximum(rows.end_G - 1, 0))


def moved_start(rows: Any) -> Any:
    return replace(rows, first_G=rows.first_G + 1)


def moved_slots(rows: Any) -> Any:
    return replace(rows, prob_RK={name: np.roll(p_RK, 1, axis=1) for name, p_RK in rows.prob_RK.items()})


def all_on_text(rows: Any) -> Any:
    return replace(rows, match_R=rows.match_R & 0x7F)


@pytest.mark.parametrize("mistake", [moved_end, moved_start, moved_slots, all_on_text])
def test_a_shard_read_wrongly_is_found(made, monkeypatch, mistake) -> None:
    table, policies = made(**TABLES["other text"]), [FixedK(k=5, p_min=0.6)]
    rows = fast_module.shard_rows
    monkeypatch.setattr(fast_module, "shard_rows", lambda *given: map(mistake, rows(*given)))
    assert unequal(table, policies, "forced") == policies


def test_another_policy_is_found(made) -> None:
    """A flag, a threshold, a length, a window: whatever a kernel ignored of these would go unseen otherwise."""
    table = made()
    pairs = [
        (FixedK(k=4, p_min=0.6), FixedK(k=4, p_min=0.6, pmin0=True)),
        (FixedK(k=4, p_min=0.6), FixedK(k=4, p_min=0.7)),
        (FixedK(k=4), FixedK(k=5)),
        (AdaptiveFloor(floor=1), AdaptiveFloor(floor=2)),
        (Suspend(k=4, window=3, floor=2, reprobe_tokens=9), Suspend(k=4, window=4, floor=2, reprobe_tokens=9)),
        (Oracle(k=3), Oracle(k=4)),
        (Scripted(ks={5: 3, 40: 2}), Scripted(ks={5: 3, 40: 1})),
    ]
    for one, other in pairs:
        compiled, reference = next(wb.walk_counts(table, one)), plain(table, other, "own")
        assert replace(reference, policy=one, k_max=one.k_max) != compiled


def test_a_kept_kernel_goes_with_the_rules_it_was_compiled_from(monkeypatch, tmp_path) -> None:
    before = kernel.sources.__wrapped__()
    assert kernel.sources.__wrapped__() == before
    changed = tmp_path / "rules.py"
    changed.write_bytes(Path(rules.__file__).read_bytes() + b"\n")
    monkeypatch.setattr(rules, "__file__", str(changed))
    assert kernel.sources.__wrapped__() != before


# --- what must hold of any walk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_beats_the_oracle(made, seed) -> None:
    table = made(seed=seed)
    for k in (1, 4, K):
        best, *others = wb.walk_counts(table, [Oracle(k=k), *policies_of(seed)], cost=Cost())
        for other in others:
            if other.k_max <= k:
                assert (best.rounds_G <= other.rounds_G).all(), other.policy
    rounds = [one.rounds_G.sum() for one in wb.walk_counts(table, [Oracle(k=k) for k in range(K + 1)])]
    assert all(a >= b for a, b in pairwise(rounds)) and rounds[0] > rounds[-1]


def test_limits_are_fixed_k_and_plain_decode(made) -> None:
    table = made()
    arrays = ("outcome_GDA", "whole_GDA", "work_GCSD")

    def same(a: Policy, b: Policy) -> bool:
        x, y = wb.walk_counts(table, [a, b])
        return all(np.array_equal(getattr(x, name), getattr(y, name)) for name in arrays)

    assert same(FixedK(k=5, p_min=0.0, pmin0=True), FixedK(k=5))
    assert same(AdaptiveFloor(k=4, floor=4), FixedK(k=4)) and not same(AdaptiveFloor(k=4, floor=1), FixedK(k=4))
    assert same(MinConfidence(k=4, tau=0.0), FixedK(k=4)) and same(Cumulative(k=4, threshold=0.0), FixedK(k=4))
    (none,) = wb.walk_counts(table, FixedK(k=0))
    assert none.rounds_G.tolist() == none.emitted_G.tolist() and none.drafted_G.sum() == 0
    (refused,) = wb.walk_counts(table, FixedK(k=5, p_min=1.0, pmin0=True))
    assert refused.rounds_G.tolist() == none.rounds_G.tolist() and refused.drafted_G.sum() == 0
    assert refused.steps_G.sum() > 0, "dropped drafts still cost drafter steps"


def test_bad_requests_are_sentences(made) -> None:
    table, other = made(), made(**TABLES["other text"])
    requests: dict[str, Callable[[], Any]] = {
        "policies is empty": lambda: wb.walk_counts(table, []),
        "the table has 8 slots": lambda: wb.walk_counts(table, FixedK(k=9)),
        "reads the duration": lambda: wb.walk_counts(table, Gate(k=2)),
        "threads=0": lambda: wb.walk_counts(table, FixedK(k=2), threads=0),
        "contexts=": lambda: wb.walk_counts(table, FixedK(k=2), contexts=(0, 0)),
        "estimator='own' needs": lambda: wb.walk_counts(other, FixedK(k=2), estimator="own"),
        "estimator='ratio' needs": lambda: wb.walk_counts(table, FixedK(k=2), estimator="ratio"),
        "seed=3 goes with": lambda: wb.walk_counts(table, FixedK(k=2), seed=3),
    }
    for words, call in requests.items():
        with pytest.raises(UserError, match=words):
            call()


def test_a_text_that_is_not_the_targets_is_refused_in_the_same_words(made) -> None:
    table = made(**TABLES["other text"])

    def by_track() -> None:
        for track in tracks(table):
            check_own(track, rounding(table))

    said = []
    for call in (by_track, lambda: list(shard_rows(table, "own", 0))):
        with pytest.raises(UserError, match="is not this target's greedy text at position") as refusal:
            call()
        said.append(str(refusal.value))
    assert said[0] == said[1]
