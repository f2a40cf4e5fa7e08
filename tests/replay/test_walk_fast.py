"""In the fast class a walk may leave the live run only where the deciding margin is at the level of rounding.

The level is measured: the largest difference of logits between the two routes, four times. Where the sides have parted,
rounds of one side only are allowed until the next common start; from there on the rule holds again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
import torch

from workbench.cache.hybrid import HybridCache
from workbench.core.tape import Corpus, Tape
from workbench.model.chain import ChainBatch, FastChains
from workbench.model.hybrid import HybridModel
from workbench.replay import compare_rounds, live_rounds, own_tapes, replay, walk

FIXED = [(4, {}), (7, dict(p_min=0.4, pmin0=True))]


@torch.inference_mode()
def rounding(model: HybridModel, ids: list[int], k: int = 6) -> float:
    """Largest difference of logits between one forward and steps of 1 or k + 1 rows; drafts likewise."""
    x, n = torch.tensor([ids]), len(ids)
    whole = model.forward(x, model.new_cache(capacity=n))
    worst = 0.0
    for size in (1, k + 1):
        state, fill = model.new_cache(capacity=n), model.new_draft_cache(capacity=2 * n)
        rows = [model.forward(part, state) for part in x.split(size, 1)]
        logits = torch.cat([part.logits_BTV for part in rows], 1)
        worst = max(worst, float((logits - whole.logits_BTV).abs().max()))
        normed = torch.cat([part.normed_BTH for part in rows], 1)
        steps = [model.draft(t, c, fill) for t, c in zip(x[:, 1:].split(size, 1), normed[:, :-1].split(size, 1))]
        live = torch.cat(steps, 1)[0]
        state = model.new_draft_cache(capacity=2 * n)
        bulk = model.draft(x[:, 1:], whole.normed_BTH[:, :-1], state)[0]
        starts = list(range(1, n - 1, 13))
        for first, second in chains(model, fill, state, starts, live, bulk, k):
            worst = max(worst, float((model.unembed(first[None]) - model.unembed(second[None])).abs().max()))
    return worst


def chains(model: HybridModel, fill: HybridCache, state: HybridCache, starts: list[int], live: Any, bulk: Any, k: int):
    """Carriers of every step of both routes; both are fed the tokens that the batched route drafts."""
    batch = ChainBatch(model, state.planes[0], starts)
    at, twins = bulk[torch.tensor(starts) - 1], [fill.fork() for _ in starts]
    beside = live[torch.tensor(starts) - 1]
    yield beside, at
    for start, twin in zip(starts, twins, strict=True):
        twin.truncate(start)
    for _ in range(k - 1):
        tokens = model.unembed(at[None])[0].argmax(-1)
        at = batch.step(tokens, at)
        steps = [model.draft(tokens[i : i + 1][None], beside[i][None, None], twin) for i, twin in enumerate(twins)]
        beside = torch.cat(steps)[:, 0]
        yield beside, at


def unexplained(walked: pl.DataFrame, lived: pl.DataFrame, table: Any, level: float, p_min: float = 0.0) -> list[str]:
    """Differences that rounding does not explain, probabilities of equal drafts included."""
    rows = {(row["doc_id"], row["start"]): row for row in compare_rounds(walked, lived, table).iter_rows(named=True)}
    found = []
    for row in walked.join(lived, on=["doc_id", "start", "draft_ids"], suffix="_live").iter_rows(named=True):
        apart = [abs(p - q) for p, q in zip(row["draft_top1"], row["draft_top1_live"], strict=True)]
        if max(apart, default=0.0) > 4 * level:
            found.append(f"draft_top1 at {row['doc_id']} {row['start']} by {max(apart)}")
    for doc in walked["doc_id"].unique(maintain_order=True):
        sides = [set(frame.filter(pl.col("doc_id") == doc)["start"]) for frame in (walked, lived)]
        together = True
        for start in sorted(sides[0] | sides[1]):
            row = rows.get((doc, start))
            if start not in sides[0] & sides[1]:
                if together:
                    found.append(f"one side only: {row}")
                continue
            together = row is None
            if row is None:
                continue
            margin = abs(row["draft_top1"] - p_min) if row["decision"] == "stop" else row["margin"]
            if margin is None or margin > 4 * level:
                found.append(f"by {margin}, rounding is {level}: {row}")
    return found


def near_ties(model: HybridModel, seed: int = 0) -> HybridModel:
    """Every vocabulary row of the head twice, but for a relative difference of a few units in the last place."""
    head = model.head
    half = model.config.vocab_size // 2
    noise = torch.randn(head[:half].shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head[half : 2 * half] = head[:half] * (1 + 2e-7 * noise)
    return model


@pytest.fixture(scope="module")
def tied_up(tiny) -> HybridModel:
    return near_ties(tiny(ratio=2, tied=False, vocab_size=12, seed=1, exact=False))


def test_demo_texts(demo, heldout, tmp_path):
    tapes = Corpus([Tape(t.doc_id, t.tokens[:72], prompt_len=34) for t in (*heldout("pycode"), *heldout("novels"))])
    demo.exact = False
    try:
        level = rounding(demo, tapes[0].tokens[:30].tolist())
        assert 0 < level < 1e-3
        table = replay(demo, tapes, out=tmp_path / "x")
        assert table.key["exact"] is False
        for k, policy in FIXED:
            walked = walk(table, k=k, **policy)
            lived = live_rounds(demo, tapes, estimator="forced", k=k, **policy)
            assert not unexplained(walked, lived, table, level, policy.get("p_min", 0.0))
    finally:
        demo.exact = True


def test_near_ties_part_the_two_and_nothing_else_does(tied_up, sampled, tmp_path):
    tapes = [Tape(f"d{i}", sampled(tied_up, 50, temperature=0.4, seed=i), prompt_len=9 * i) for i in range(2)]
    level = max(rounding(tied_up, tape.tokens.tolist()) for tape in tapes)
    table = replay(tied_up, tapes, out=tmp_path / "x")
    walked, lived = walk(table, k=5), live_rounds(tied_up, tapes, estimator="forced", k=5)
    rows = compare_rounds(walked, lived, table)
    assert len(rows) > 3 and {"draft", "accept"} & set(rows["decision"]), "ties are near enough to be undone"
    assert not (found := unexplained(walked, lived, table, level)), found
    assert len(walked) - len(rows.drop_nulls("drafted")) > 10, "and they are together again afterwards"
    assert unexplained(walked, lived, table, level / 1e4), "the check can fail"


def test_near_ties_change_nothing_in_exact_mode(tied_up, sampled, against_live, differences):
    tapes = [Tape(f"d{i}", sampled(tied_up, 70, temperature=0.4, seed=i), prompt_len=30 * i) for i in range(2)]
    walked, lived = against_live(tied_up, tapes, estimator="forced", exact=True, k=5)
    assert not (found := differences(walked, lived)), found
    assert tied_up.exact is False


def test_own_texts_of_near_ties(tied_up, tmp_path):
    """The text is what the target picked; another route's pick at a margin of rounding does not make it another's."""
    prompts = [Tape(f"p{i}", [i, 2, 3, 4], prompt_len=4) for i in range(2)]
    own = own_tapes(tied_up, prompts, max_new_tokens=60, k=3, ignore_eos=True)
    table = replay(tied_up, own, out=tmp_path / "x")
    level = max(rounding(tied_up, tape.tokens.tolist()) for tape in own)
    generated = table.frame.filter(pl.col("position") >= pl.col("prompt_len"))
    off = generated.filter(~pl.col("on_tape"))
    assert len(off) > 0 and off["target_margin"].max() <= 4 * level
    walked, lived = walk(table, k=3, estimator="own"), live_rounds(tied_up, own, k=3, ignore_eos=True)
    assert lived["emitted"].sum() == walked["emitted"].sum() == 2 * 59
    assert not (found := unexplained(walked, lived, table, level)), found
    exact = replay(tied_up, own, out=tmp_path / "exact", exact=True)
    with pytest.raises(ValueError, match="another numerical class; use estimator='forced'"):
        walk(exact, k=3, estimator="own")


SEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the last true row hidden": lambda starts: starts - 1,
    "a true row past the start seen": lambda starts: starts + 1,
}


@pytest.mark.parametrize("name", SEEN)
def test_a_wrong_mask_is_no_rounding(tiny, sampled, monkeypatch, tmp_path, name):
    model = tiny(ratio=1, tied=False, vocab_size=5, seed=1, exact=False)
    tape = Tape("d", sampled(model, 80, temperature=0.5))
    level = rounding(model, tape.tokens.tolist())
    build = FastChains.__init__

    def wrong(self, plane, b, starts, top):
        build(self, plane, b, starts, top)
        self.seen = torch.arange(top) < SEEN[name](starts)[:, None]

    lived = live_rounds(model, tape, estimator="forced", k=4)
    right = replay(model, tape, out=tmp_path / "right")
    assert not unexplained(walk(right, k=4), lived, right, level)
    monkeypatch.setattr(FastChains, "__init__", wrong)
    table = replay(model, tape, out=tmp_path / "wrong")
    assert unexplained(walk(table, k=4), lived, table, level)
