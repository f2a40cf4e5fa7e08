"""What a replay must get right, broken one thing at a time: each makes the comparison with live rounds fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import polars as pl
import pytest

from workbench.core.tape import Corpus, Tape
from workbench.model import chain
from workbench.model.chain import ChainBatch
from workbench.model.hybrid import HybridModel
from workbench.replay import live_rounds, replay, walk
from workbench.replay import walk as walk_module_function
from workbench.spec.policies import AdaptiveFloor, ArrayRun

OPTIONS: dict[str, Any] = dict(k=6, estimator="forced")


@pytest.fixture(scope="module")
def setting(tiny, sampled) -> tuple[HybridModel, Corpus, pl.DataFrame]:
    """A model whose drafts are often accepted, texts over the end of a key block, and their live rounds."""
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1)
    text = sampled(model, 80, temperature=0.5)
    tapes = Corpus([Tape("a", text[:40]), Tape("b", text, prompt_len=50)])
    return model, tapes, live_rounds(model, tapes, **OPTIONS)


def test_nothing_broken_nothing_found(setting, differences, tmp_path):
    model, tapes, lived = setting
    assert not differences(walk(replay(model, tapes, out=tmp_path / "x"), **OPTIONS), lived)


def carriers_moved(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def control(patch: pytest.MonkeyPatch) -> None:
        draft = HybridModel.draft

        def wrong(self, tokens_BT, carrier_BTH, cache, **more):
            return draft(self, tokens_BT, carrier_BTH.roll(by, dims=1), cache, **more)

        patch.setattr(HybridModel, "draft", wrong)

    return control


def mask_moved(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def control(patch: pytest.MonkeyPatch) -> None:
        merge = chain._Group._merge

        def wrong(self, q, pick, local, blocks, num):
            return merge(self, q, pick, local + by, blocks, num)

        patch.setattr(chain._Group, "_merge", wrong)

    return control


def rows_moved(patch: pytest.MonkeyPatch) -> None:
    """Private rows begin one slot later, so that the true row of the first drafted place stays in sight."""
    attend = chain._Group.attend

    def wrong(self, q, k, v, slots, num):
        return attend(self, q, k, v, slots + 1, num)

    patch.setattr(chain._Group, "attend", wrong)


def one_cache_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every chain writes its row where every other chain of its group sees it."""
    attend = chain._Group.attend

    def wrong(self, q, k, v, slots, num):
        local = slots - self.m * chain.BLOCK
        self.k_tail[:, :, local], self.v_tail[:, :, local] = k.transpose(0, 1), v.transpose(0, 1)
        return attend(self, q, k, v, slots, num)

    patch.setattr(chain._Group, "attend", wrong)


def rotated_by_one_more(patch: pytest.MonkeyPatch) -> None:
    step = ChainBatch.step

    def wrong(self, tokens, carrier):
        table = self.model.rotary.table
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.model.rotary, "table", lambda n, device: tuple(x[1:] for x in table(n + 1, device)))
            return step(self, tokens, carrier)

    patch.setattr(ChainBatch, "step", wrong)


def first_step_only(patch: pytest.MonkeyPatch) -> None:
    """The chain forgets its own earlier rows: each step attends from slot p as if it were the first."""
    step = ChainBatch.step

    def wrong(self, tokens, carrier):
        self.steps = 0
        return step(self, tokens, carrier)

    patch.setattr(ChainBatch, "step", wrong)


def true_carriers(patch: pytest.MonkeyPatch) -> None:
    """Chains that are fed the last carrier again instead of the head's own output."""
    step = ChainBatch.step
    patch.setattr(ChainBatch, "step", lambda self, tokens, carrier: 0 * step(self, tokens, carrier) + carrier)


REPLAY: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "carriers one too early": carriers_moved(1),
    "carriers one too late": carriers_moved(-1),
    "own row unseen": mask_moved(-1),
    "a row past the own seen": mask_moved(1),
    "private rows one slot late": rows_moved,
    "chains see each other": one_cache_for_all,
    "rotary positions one too far": rotated_by_one_more,
    "own earlier rows forgotten": first_step_only,
    "carrier not passed on": true_carriers,
}


@pytest.mark.parametrize("name", REPLAY)
def test_a_broken_replay_is_found(setting, differences, monkeypatch, tmp_path, name):
    model, tapes, lived = setting
    REPLAY[name](monkeypatch)
    table = replay(model, tapes, out=tmp_path / "x")
    monkeypatch.undo()
    found = differences(walk(table, **OPTIONS), lived)
    assert found and not found[0].startswith("column")
    if "row" in name or "each other" in name or "carrier not" in name:
        first = table.frame["draft_ids"].arr.first()
        right = replay(model, tapes, out=tmp_path / "right").frame["draft_ids"].arr.first()
        assert first.equals(right), "the first draft of a chain needs none of it"


LIVE: dict[str, dict[str, Any]] = {
    "drafter's rows not refreshed": dict(refresh=False),
    "drafter not primed": dict(primed=False),
    "drafter's carriers one too early": dict(shift=1),
    "the other carrier": dict(carrier="pre_norm"),
    "the other numerical class": dict(exact=False),
}


@pytest.mark.parametrize("name", LIVE)
def test_another_engine_is_found(setting, differences, tmp_path, name):
    model, tapes, lived = setting
    walked = walk(replay(model, tapes, out=tmp_path / "x"), **OPTIONS)
    tapes = tapes[1:] if name == "drafter not primed" else tapes
    walked = walked.filter(pl.col("doc_id").is_in([tape.doc_id for tape in tapes]))
    assert differences(walked, live_rounds(model, tapes, **OPTIONS, **LIVE[name]))


class Wide(AdaptiveFloor):
    """The adaptive floor as on a wide model, whose floor of 4 relaxes with depth."""

    def start(self, *, width: int) -> ArrayRun:
        return super().start(width=4096)


def late(policy: AdaptiveFloor) -> AdaptiveFloor:
    return Wide(k=policy.k, floor_context=policy.floor_context + 1)


def test_the_committed_length_that_a_policy_sees(setting, differences, tmp_path):
    model, tapes, _ = setting
    table = replay(model, tapes, out=tmp_path / "x")
    policy = Wide(k=7, floor_context=62)
    walked = walk(table, policy=policy, estimator="forced")
    lived = live_rounds(model, tapes, estimator="forced", k=7, policy=policy)
    assert not differences(walked, lived)
    deep = pl.col("start") + 1 > 62
    whole = pl.col("round_stop") != "budget"
    assert walked.filter(whole & ~deep)["k"].min() == 4 and walked.filter(whole & deep)["k"].min() == 1
    starts = set(walked["start"])
    at = next(x for x in range(52, 70) if x in starts and (walked.filter(pl.col("start") == x)["k"] == 4).all())
    edge = Wide(k=7, floor_context=at)
    lived = live_rounds(model, tapes, estimator="forced", k=7, policy=edge)
    assert not differences(walk(table, policy=edge, estimator="forced"), lived)
    assert differences(walk(table, policy=late(edge), estimator="forced"), lived), "one token more is seen"


def own_instead_of_forced(patch: pytest.MonkeyPatch) -> None:
    module = walking()
    judge = module.accept_greedy
    patch.setattr(module, "accept_greedy", lambda drafts, picks, force=None: judge(drafts, force or picks))


def fed_alone(patch: pytest.MonkeyPatch) -> None:
    drops = ArrayRun.drops
    patch.setattr(ArrayRun, "drops", lambda self, slot, top1, base: drops(self, slot, top1, 0))


def slots_moved(patch: pytest.MonkeyPatch) -> None:
    module = walking()
    tracks = module.tracks

    def wrong(table):
        for track in tracks(table):
            track.draft_ids[:] = track.draft_ids[:, [1, 0, *range(2, track.draft_ids.shape[1])]]
            yield track

    patch.setattr(module, "tracks", wrong)


def walking() -> Any:
    """The module of walks; the package has a function of its name."""
    import sys

    return sys.modules[walk_module_function.__module__]


WALKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the target's pick ignored": own_instead_of_forced,
    "slot 0 exempt though the pending token rides along": fed_alone,
    "slots exchanged": slots_moved,
}


@pytest.mark.parametrize("name", WALKS)
def test_a_broken_walk_is_found(setting, differences, monkeypatch, tmp_path, name):
    model, tapes, lived = setting
    table = replay(model, tapes, out=tmp_path / "x")
    options = dict(p_min=0.5, pmin0=True) if "exempt" in name else {}
    if options:
        lived = live_rounds(model, tapes, **OPTIONS, **options)
    assert not differences(walk(table, **OPTIONS, **options), lived)
    with contextmanager(lambda: iter([WALKS[name](monkeypatch)]))():
        assert differences(walk(table, **OPTIONS, **options), lived)
