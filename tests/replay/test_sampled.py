"""On texts the target sampled, a walk over a table of draws with their shaping and seed is the live coupled run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import workbench as wb
from workbench.core.errors import UserError
from workbench.core.tape import Corpus, Own, Tape
from workbench.corpus import corpus, save_tapes
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.replay import ReplayOptions, live_rounds, own_tapes, replay, walk
from workbench.replay.draws import TapeDraws

PENALTIES = dict(repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.2)
SHAPINGS: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=0.8, seed=3),
    "bias": dict(temperature=1.1, logit_bias={3: 1.5, 4: -inf}, seed=1 << 40),
    "chain": dict(temperature=0.9, top_k=7, top_p=0.9, min_p=0.02, seed=1),
    "joint": dict(temperature=1.2, top_p=0.8, filter_order="joint"),
    "last": dict(temperature=0.7, top_p=0.95, min_p=0.05, filter_order="temperature_last", seed=5),
    "penalties": dict(temperature=0.6, penalty_last_n=6, **PENALTIES),
    "penalties and top-p": dict(temperature=0.7, top_p=0.95, repetition_penalty=1.2, seed=8),
    "greedy with penalties": dict(frequency_penalty=0.1, penalty_last_n=4),
}
CELLS: dict[str, tuple[tuple[int, str], ...]] = {
    "temperature": ((8, "floor"), (3, "pmin0"), (5, "top")),
    "bias": ((1, "fixed"), (6, "adaptive")),
    "chain": ((4, "p_min"), (7, "adaptive")),
    "joint": ((2, "fixed"), (5, "pmin0")),
    "last": ((6, "top"), (3, "fixed")),
    "penalties": ((7, "fixed"), (8, "p_min"), (4, "top")),
    "penalties and top-p": ((5, "floor"), (2, "pmin0")),
    "greedy with penalties": ((3, "adaptive"), (8, "fixed")),
}


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=2, tied=False, vocab_size=12, seed=1)


@pytest.fixture(scope="module")
def every_policy(policies) -> dict[str, dict[str, Any]]:
    return {**policies, "top": dict(p_min=0.3, p_min_reads="top")}


def prompts(*lengths: int) -> Corpus:
    return Corpus([Tape(f"p{n}", [i % 12 for i in range(n)], prompt_len=n, source="s") for n in lengths], name="c")


# ---------------------------------------------------------------- a walk is the live run


@pytest.mark.parametrize("name", SHAPINGS)
def test_a_walk_is_the_live_run(model, every_policy, against_live, differences, tmp_path, name):
    shaping = SHAPINGS[name]
    own = own_tapes(model, prompts(1, 55, 120), max_new_tokens=14, ignore_eos=True, sequence=2, **shaping)
    table = replay(model, own, out=tmp_path / "table", chunk=50, **shaping)
    assert not table.plain and table.frame["sequence"].unique().to_list() == [2, 3, 4]
    drafted, accepted = 0, 0
    for k, policy in CELLS[name]:
        live = dict(ignore_eos=True, **shaping)
        walked, lived = against_live(model, own, table=table, k=k, live=live, **every_policy[policy])
        assert not (found := differences(walked, lived)), (k, policy, found)
        assert walked["emitted"].sum() == 3 * 13 and walked["estimator"].unique().to_list() == ["own"]
        drafted, accepted = drafted + walked["drafted"].sum(), accepted + walked["accepted"].sum()
    assert walk(table, k=3)["estimator"][0] == "own", "which is what such a table walks as by itself"
    assert 0.05 < accepted / drafted < 0.95


def test_the_cells_take_every_k_and_every_policy(every_policy):
    cells = [cell for cells in CELLS.values() for cell in cells]
    assert {k for k, _ in cells} == set(range(1, 9)) and {policy for _, policy in cells} == set(every_policy)


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPINGS)
def test_every_k_under_every_policy(demo, heldout, every_policy, against_live, differences, tmp_path, name):
    shaping = SHAPINGS[name]
    own = own_tapes(demo, [*heldout("pycode"), *heldout("novels")], prompt_tokens=58, max_new_tokens=24, **shaping)
    table = replay(demo, own, out=tmp_path / "table", **shaping)
    for k in range(1, 9):
        for policy in every_policy:
            walked, lived = against_live(demo, own, table=table, k=k, live=shaping, **every_policy[policy])
            assert not (found := differences(walked, lived)), (k, policy, found)


def test_demo_texts(demo, heldout, every_policy, against_live, differences, tmp_path):
    shaping = dict(temperature=0.8, top_p=0.95, seed=4)
    own = own_tapes(demo, heldout("pycode"), prompt_tokens=58, max_new_tokens=24, **shaping)
    table = replay(demo, own, out=tmp_path / "table", **shaping)
    for k, policy in ((4, "fixed"), (7, "top")):
        walked, lived = against_live(demo, own, table=table, k=k, live=shaping, **every_policy[policy])
        assert not (found := differences(walked, lived)), (k, policy, found)


@pytest.mark.parametrize("name", ["temperature", "penalties and top-p"])
def test_any_text_is_walked_as_forced(model, sampled, against_live, differences, tmp_path, name):
    shaping = SHAPINGS[name]
    tapes = Corpus([Tape(f"d{i}", sampled(model, 40, temperature=0.5, seed=i), prompt_len=9 * i) for i in range(2)])
    table = replay(model, tapes, out=tmp_path / "table", chunk=16, **shaping)
    walked, lived = against_live(model, tapes, table=table, estimator="forced", k=5, live=shaping)
    assert not (found := differences(walked, lived)), found
    assert walked["accepted"].sum() > 5 and walk(table, k=2)["estimator"][0] == "forced"
    other = live_rounds(model, tapes, estimator="forced", k=5, exact=True, **{**shaping, "seed": 77})
    assert differences(walked, other), "another seed draws otherwise"


# ---------------------------------------------------------------- how rows become tokens does not show


def test_rows_together_are_rows_alone(model, monkeypatch, tmp_path):
    """Noise made at once or row by row, and every row by the engine's own route, give the same table."""
    module = sys.modules[TapeDraws.__module__]
    own = own_tapes(model, prompts(4, 30), max_new_tokens=20, ignore_eos=True, temperature=0.8)
    for name in ("temperature", "chain", "penalties"):
        shaping = dict(SHAPINGS[name], forced=True, k_max=4)
        frames = [replay(model, own, out=tmp_path / f"{name} once", **shaping).frame]
        for patch, value in (("NOISE_VALUES", 0), ("CLOSE", 1e9), ("WIDE_VALUES", 12)):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(module, patch, value)
                frames.append(replay(model, own, out=tmp_path / f"{name} {patch}", **shaping).frame)
        frames.append(replay(model, own, out=tmp_path / f"{name} chunk", chunk=7, **shaping).frame)
        exact = frames[0].drop("forced_q", "target_p")
        for frame in frames[1:]:
            assert frame.drop("forced_q", "target_p").equals(exact)
            for column in ("forced_q", "target_p"):
                a, b = (x[column].to_numpy() for x in (frame, frames[0]))
                np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_greedy_table_is_what_it_was(model, tmp_path):
    own = own_tapes(model, prompts(4), max_new_tokens=20, ignore_eos=True)
    table = replay(model, own, out=tmp_path / "x", k_max=3)
    again = replay(model, own, out=tmp_path / "y", k_max=3, seed=5, top_p=0.5)
    assert table.plain and again.plain and again.frame.equals(table.frame)
    assert {"draft_top", "sequence", "law_differs", "forced_q"}.isdisjoint(table.frame.columns)
    walked = walk(table, k=3, p_min=0.3, p_min_reads="top")
    assert walked.equals(walk(table, k=3, p_min=0.3)), "the pick is the top of its row"


# ---------------------------------------------------------------- one thing broken at a time


def drafts_moved(patch: pytest.MonkeyPatch) -> None:
    """The drafter draws with the noise of the next place."""
    gumbel, rows, draft = TapeDraws._gumbel, TapeDraws._gumbel_rows, TapeDraws.draft

    def wrong(self, logits, positions, drafted):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TapeDraws, "_gumbel", lambda self, law, at: gumbel(self, law, at - 1))
            inner.setattr(TapeDraws, "_gumbel_rows", lambda self, at, x: rows(self, [p - 1 for p in at], x))
            return draft(self, logits, positions, drafted)

    patch.setattr(TapeDraws, "draft", wrong)


def own_drafts_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The drafter's penalties do not see the chain's own drafts, but the tape."""
    draft = TapeDraws.draft
    patch.setattr(TapeDraws, "draft", lambda self, logits, at, drafted: draft(self, logits, at, drafted[:, :0]))


def penalties_forgotten(patch: pytest.MonkeyPatch) -> None:
    penalised = TapeDraws._penalised

    def wrong(self, logits, positions, drafted):
        return penalised(self, logits, positions, drafted) if drafted is None else logits

    patch.setattr(TapeDraws, "_penalised", wrong)


CONTROLS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "drafts with the noise one place early": ("temperature", drafts_moved),
    "filtered drafts with the noise one place early": ("chain", drafts_moved),
    "penalties on the tape instead of the chain": ("penalties", own_drafts_forgotten),
    "drafts without penalties": ("penalties", penalties_forgotten),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_broken_table_is_found(model, differences, tmp_path, name):
    shaping, control = SHAPINGS[CONTROLS[name][0]], CONTROLS[name][1]
    own = own_tapes(model, prompts(5, 20, 40), max_new_tokens=24, ignore_eos=True, **shaping)
    lived = live_rounds(model, own, k=5, exact=True, ignore_eos=True, **shaping)
    assert not differences(walk(replay(model, own, out=tmp_path / "right", **shaping), k=5), lived)
    with pytest.MonkeyPatch.context() as patch:
        control(patch)
        table = replay(model, own, out=tmp_path / "wrong", **shaping)
    assert differences(walk(table, k=5), lived)


def test_a_target_that_draws_elsewhere_is_found(model, monkeypatch, tmp_path):
    shaping = SHAPINGS["temperature"]
    own = own_tapes(model, prompts(5), max_new_tokens=24, ignore_eos=True, **shaping)
    rows = TapeDraws._gumbel_rows
    monkeypatch.setattr(TapeDraws, "_gumbel_rows", lambda self, at, x: rows(self, [p - 1 for p in at], x))
    table = replay(model, own, out=tmp_path / "x", **shaping)
    with pytest.raises(UserError, match=r"is not this target's sampled text at position .* its draw leads by"):
        walk(table, k=3)


# ---------------------------------------------------------------- marks


def test_what_a_sampled_tape_remembers(model, tmp_path):
    shaping = dict(temperature=0.8, top_p=0.9, logit_bias={3: -inf, 1: 0.5}, seed=6)
    tapes = own_tapes(model, prompts(3, 4), max_new_tokens=9, ignore_eos=True, sequence=5, **shaping)
    for i, tape in enumerate(tapes):
        own = tape.own
        assert (own.kind, own.model, own.seed, own.temperature) == ("sampled", fingerprint(model), 6, 0.8)
        assert own.sequence == 5 + i and own.accept == "coupled" and '"top_p": 0.9' in own.shaping
        alone = wb.generate(model, tape, max_new_tokens=9, ignore_eos=True, k=0, sequence=5 + i, **shaping)
        assert tape.tokens.tolist() == [*alone.prompt, *alone.tokens]
        assert hash(own) == hash(Own(**own.facts())) and own == Own(**own.facts())
    again = corpus(save_tapes(tapes, tmp_path / "own.jsonl"))
    assert [tape.own for tape in again] == [tape.own for tape in tapes]
    out = Path(tmp_path / "table")
    table = replay(model, again, out=out, k_max=3, **shaping)
    walked = walk(table, k=3)
    assert walked["estimator"][0] == "own" and wb.load_table(out).rounds(k=3).equals(walked)
    assert "temperature=0.8" in table._repr_html_() and table.key["seed"] == 6


def test_kinds_of_marks(model):
    few = dict(max_new_tokens=4, ignore_eos=True)
    marks = [
        own_tapes(model, prompts(3), **few, **more)[0].own
        for more in ({}, dict(seed=4, top_p=0.5), PENALTIES, dict(temperature=1, accept="ratio"),
                     dict(temperature=1, accept="ratio", k=0))
    ]  # fmt: skip
    assert marks[0] == marks[1] == Own("greedy", fingerprint(model)), "nothing else makes a greedy text"
    assert marks[0].facts() == {"kind": "greedy", "model": fingerprint(model), "seed": None, "temperature": 0.0}
    assert [mark.kind for mark in marks[2:]] == ["sampled"] * 3
    assert [mark.accept for mark in marks[2:]] == ["coupled", "ratio", "coupled"], "without drafts both draw alike"


# ---------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(seed=4), "'p5' is none: seed is 3 there and 4 here; replay with the shaping and seed of the text"),
        (dict(temperature=0.7), "temperature is 0.8 there and 0.7 here"),
        (dict(top_k=5, seed=9), "top_k is 0 there and 5 here, seed is 3 there and 9 here"),
        (dict(temperature=0.0), r"generated greedily \(wb\.own_tapes\)"),
    ],
)
def test_another_shaping_or_seed_is_refused(model, tmp_path, change, says):
    shaping = SHAPINGS["temperature"]
    own = own_tapes(model, prompts(5), max_new_tokens=12, ignore_eos=True, **shaping)
    table = replay(model, own, out=tmp_path / "x", k_max=3, **{**shaping, **change})
    with pytest.raises(UserError, match=says):
        walk(table, k=3, estimator="own")
    assert walk(table, k=3)["estimator"][0] == "forced"
    with pytest.raises(UserError, match="is not"):
        live_rounds(model, own, k=3, **{**shaping, **change})


def test_texts_that_are_no_draws(model, tiny, tmp_path):
    shaping = SHAPINGS["temperature"]
    few = dict(max_new_tokens=8, ignore_eos=True)
    strange = tiny(ratio=2, tied=False, vocab_size=12, seed=2)
    for i, (own, says) in enumerate(
        [
            (own_tapes(model, prompts(5), **few), "it is greedy"),
            (own_tapes(strange, prompts(5), **few, **shaping), "this target did not generate it"),
            (own_tapes(model, prompts(5), **few, **shaping, accept="ratio"), "it was drawn with accept='ratio'"),
            (prompts(5), "this target did not generate it"),
            (Tape("t", [1, 2, 3], 1, own=Own("sampled", fingerprint(model), seed=3, temperature=0.8)), "not recorded"),
        ]
    ):
        table = replay(model, own, out=tmp_path / str(i), k_max=3, **shaping)
        with pytest.raises(UserError, match=says):
            walk(table, k=2, estimator="own")
        with pytest.raises(UserError, match=says):
            live_rounds(model, own, k=2, **shaping)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(temperature=-1), "temperature=-1"),
        (dict(temperature=1, top_p=0), "top_p=0"),
        (dict(temperature=1, filter_order="any"), "filter_order='any' is not valid: choose one of 'chain'"),
        (dict(temperature=1, seed=-1), "seed=-1"),
        (dict(temperature=1, logit_bias={12: 1.0}), "logit_bias names id 12, but the vocabulary has 12 ids"),
        (dict(forced="yes", temperature=1), "forced='yes'"),
    ],
)
def test_a_bad_shaping_is_a_sentence_and_nothing_is_made(model, tmp_path, given, says):
    with pytest.raises(UserError, match=says):
        replay(model, prompts(5), out=tmp_path / "x", **given)
    assert not list(tmp_path.iterdir())


def test_what_makes_no_own_text(model):
    with pytest.raises(UserError, match=r"force goes with wb\.generate"):
        own_tapes(model, prompts(5), max_new_tokens=4, force=[1, 2, 3, 4])
    with pytest.raises(UserError, match=r"sequence goes with wb\.generate: here every tape has a random stream"):
        live_rounds(model, prompts(5), estimator="forced", sequence=2)
    with pytest.raises(UserError, match="sequence=-1"):
        own_tapes(model, prompts(5), sequence=-1)


def test_options_are_the_manifest(model, tmp_path):
    options = dict(k_max=2, temperature=0.5, logit_bias={3: -inf}, seed=2, forced=True)
    tapes = Corpus([Tape("a", [1, 2, 3, 4, 5]), Tape("b", [5, 6, 7, 8])])
    table = replay(model, tapes, out=tmp_path / "x", **options)
    assert table.manifest.parameters == {**ReplayOptions(**options).key(), "draft_head": None}
    assert table.manifest.parameters["shaping"]["logit_bias"] == [[3, "-inf"]]
    with pytest.raises(UserError, match=r"parameters\.shaping\.temperature is 0\.5 there and 0\.6 now"):
        replay(model, tapes, out=tmp_path / "x", **{**options, "temperature": 0.6})
    frame = table.frame.filter(pl.col("draft_ids").arr.get(1).is_not_null())
    assert frame["forced_q"].arr.get(1).null_count() == 0 and frame["sequence"].unique().to_list() == [0, 1]
