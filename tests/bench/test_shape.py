"""The benchmark of a geometry, on a tiny one: every piece alone, its figures by hand, and what it leaves out."""

from __future__ import annotations

import json
from contextlib import nullcontext
from statistics import median

import pytest
import torch

from workbench.bench.shape import PIECES, Setting, run_shape
from workbench.bench.shape.anatomy import STAGES
from workbench.bench.shape.peer import published_tensors, transformers_twin
from workbench.bench.shape.pieces import speedup_by_bytes, speedup_by_phases, step_bytes
from workbench.bench.shape.setting import Run
from workbench.bench.shape.timing import figure, seconds_of
from workbench.core.errors import CapabilityError, UserError
from workbench.core.metrics import acceptance
from workbench.model.hybrid import HybridModel
from workbench.model.shapes import random_model
from workbench.model.traffic import expected_emitted
from workbench.spec.generate import generate
from workbench.spec.proposers import SyntheticProposer
from workbench_kernels.dispatch import use

CHANCES = (0.8, 0.6)  # joint


def setting(**options) -> Setting:
    notes: list[str] = []
    given = dict(context=24, acceptance=CHANCES, quick=True, note=notes.append)
    made = Setting(random_model("tiny"), "tiny", **{**given, **options})
    made.notes = notes
    return made


def test_a_run_adds_each_row_as_it_comes(tmp_path):
    out, notes = tmp_path / "made" / "rows.jsonl", []
    only = ["plain", "copy", "verify"]
    rows = run_shape(
        "tiny", synthetic_acceptance=CHANCES, context=24, only=only, quick=True, out=out, note=notes.append
    )
    assert [json.loads(line) for line in out.read_text("utf-8").splitlines()] == rows
    assert list(dict.fromkeys(row["piece"] for row in rows)) == ["copy", "plain", "verify"] and notes == []
    for row in rows:
        assert row["benchmark"] == "decode" and row["shape"] == "tiny" and row["quick"] and row["mode"]
        assert "commit" in row and row["date"] and row["versions"]["torch"] and row["machine"]["device"] == "cpu"
        assert row["low"] <= row["p20"] <= row["value"] <= row["p80"] <= row["high"]
    assert {row["unit"] for row in rows} == {"TB/s", "tok/s", "ms", "ratio"}


@pytest.mark.parametrize("name", [name for name in PIECES if name != "transformers"])
def test_every_piece_stands_alone(name):
    one = setting(trim=50)
    rows = list(PIECES[name](one))
    assert rows and all(row["value"] > 0 or row.get("group") == "setup" for row in rows)
    assert all(row["n"] == one.repeats for row in rows if row.get("group", "draft step") == "draft step")


def test_pieces_share_what_they_measure():
    one = setting()
    list(PIECES["plain"](one))
    before = one.plain("eager")
    list(PIECES["speculative"](one))
    assert one.plain("eager") is before and one.phase("decode", graph=False) is one.phase("decode", graph=False)


def test_speculative_rows_tell_given_and_measured_acceptance():
    one = setting()
    speed, over = PIECES["speculative"](one)
    assert speed["same_text"] and speed["given"] == list(CHANCES) and len(speed["cond"]) == len(speed["joint"]) == 2
    assert speed["given_cond"] == pytest.approx([0.8, 0.75]) and speed["tau"] == pytest.approx(sum(speed["joint"]))
    assert over["emitted"] == pytest.approx(1 + 0.8 + 0.6)
    decode, verify, draft = (step_bytes(one, name) for name in ("decode", "verify", "draft"))
    assert over["by_bytes"] == pytest.approx(over["emitted"] * decode / (verify + 2 * draft))
    seconds = {name: median(one.phase(name, graph=False)) for name in ("decode", "verify", "draft")}
    whole = seconds["verify"] + 2 * seconds["draft"]
    assert over["by_phases"] == {"eager": pytest.approx(over["emitted"] * seconds["decode"] / whole)}


def test_given_acceptance_is_joint():
    one = setting(acceptance=(0.87, 0.69, 0.53), context=64)
    one.model.exact = True
    plain = generate(one.model, one.prompt, k=0, max_new_tokens=1500, ignore_eos=True)

    def emitted(chances) -> float:
        drafter = SyntheticProposer(one.model, [*one.prompt, *plain.tokens], chances)
        made = generate(one.model, one.prompt, k=3, max_new_tokens=1500, ignore_eos=True, proposer=drafter)
        assert made.tokens == plain.tokens
        return 1 + acceptance([record for record in made.records if not record.cut]).tau

    sigma = 1.21 / (1500 / 3.09) ** 0.5  # of accepted drafts a round, over the rounds of the text
    assert expected_emitted(one.acceptance) == pytest.approx(3.09)
    assert abs(emitted(one.cond) - 3.09) < 4 * sigma
    assert abs(emitted(one.acceptance) - 3.09) > 4 * sigma, "control: shares taken for chances"


@pytest.mark.parametrize("arms", [("eager",), ("eager", "graphed", "streamed")], ids=len)
def test_anatomy_parts_rounds_steps_and_setup(monkeypatch, arms):
    monkeypatch.setattr(Setting, "arms", arms)
    monkeypatch.setattr(Setting, "burst", 40)
    with use("ref") if len(arms) > 1 else nullcontext():
        one = setting()
        rows = list(PIECES["anatomy"](one))
        again = list(PIECES["anatomy"](one))
    assert one.notes == [] and all(row["mode"] == "exact" and row["unit"] == "ms" for row in rows)
    by = {(row["group"], row["arm"], row["part"]): row for row in rows}
    assert len(by) == len(rows)
    parts = {arm: {part for group, a, part in by if (group, a) == ("round", arm)} for arm in arms}
    assert parts["eager"] >= {"draft", "verify_issue", "accept", "commit", "total"}
    for arm in arms:
        rounds = [r for r in one.speculative(arm).records[one.speculative(arm).warm :] if not r.cut]
        assert 3 < by["round", arm, "total"]["n"] == len(rounds) < len(one.speculative(arm).records)
        assert by["round", arm, "total"]["value"] == pytest.approx(1e3 * median(r.phases.total for r in rounds))
        assert {part for group, a, part in by if (group, a) == ("setup", arm)} == set(STAGES)
        assert by["setup", arm, "prime"]["value"] > 0
    if len(arms) > 1:
        assert parts["graphed"] >= {"draft", "verify_issue", "commit", "total"} and "accept" not in parts["graphed"]
        assert parts["streamed"] == {"other", "total"}
    steps = {part: row for (group, _, part), row in by.items() if group == "draft step"}
    assert set(steps) == {"glue", "attention", "ffn", "head"} and not any(r["synchronised"] for r in steps.values())
    drafting = by["round", "eager", "draft"]["value"]
    assert 0.3 * drafting < one.k * sum(row["value"] for row in steps.values()) < 3 * drafting
    assert [r["value"] for r in again if r["group"] == "round"] == [r["value"] for r in rows if r["group"] == "round"]


def test_anatomy_of_bursts_that_are_all_cut_is_left_out(monkeypatch):
    one = setting()
    monkeypatch.setattr(Run, "timed", [])
    rows = list(PIECES["anatomy"](one))
    assert {row["group"] for row in rows} == {"draft step", "setup"}
    assert "rounds, eager was left out: every round was cut" in one.notes[0]


def test_phases_leave_the_prompt_as_it_was():
    one = setting(trim=50)
    cache, drafter = one.primed.cache, one.primed.drafter
    kept = cache.fork()
    for name in ("decode", "verify", "verify cut", "draft", "draft trimmed"):
        one.phase(name, graph=False)
    one.primed.restore()
    assert cache.first_difference(kept) is None and drafter.lengths[0] == 24  # the prompt's pairs and the last draft's
    with torch.inference_mode():
        one.model.forward(torch.tensor([[1]]), cache)
    assert cache.first_difference(kept) is not None


def test_what_a_graph_holds_is_the_engines_forward():
    one, plain = setting(trim=50), setting()
    with pytest.raises(CapabilityError, match="forwards through the kernels"):
        one.phase("decode", graph=True)
    with use("ref"), torch.inference_mode():
        for name in ("decode", "verify", "verify cut", "draft", "draft trimmed"):
            after = []
            for graph in (False, True):
                call, before = one.primed.phase(one, name, graph=graph)
                before()
                picked = call()
                kept = [one.primed.cache.fork(), one.primed.drafter.fork()]
                before()
                assert torch.equal(call(), picked), "a second run starts from the same state"
                after.append((picked, kept))
            assert torch.equal(after[0][0], after[1][0]), name
            assert all(a.first_difference(b) is None for a, b in zip(after[0][1], after[1][1], strict=True)), name
            assert not all(
                a.first_difference(b) is None
                for a, b in zip(after[0][1], (plain.primed.cache, plain.primed.drafter), strict=True)
            ), "the phase changes a state"


def test_a_trimmed_head_costs_less_and_is_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(HybridModel, "trim_draft_vocab", lambda self, ids: seen.append(len(ids)), raising=False)
    monkeypatch.setattr(HybridModel, "untrim_draft_vocab", lambda self: seen.append("whole"), raising=False)
    one = setting(trim=50)
    rows = list(PIECES["speculative"](one))
    assert seen == [50, "whole"] and [row["trim"] for row in rows] == [None, None, 50, 50]
    assert speedup_by_bytes(one, trimmed=True) > speedup_by_bytes(one, trimmed=False)
    assert one.notes == []


def test_what_cannot_run_is_left_out_in_a_sentence(monkeypatch):
    one = setting()
    monkeypatch.setattr(Setting, "arms", ("eager", "twice"))
    monkeypatch.setitem(setting.__globals__["Setting"].bursts.__globals__["ARMS"], "twice", {"twofold": True})
    rows = list(PIECES["plain"](one))
    assert [row["arm"] for row in rows] == ["eager"]
    assert len(one.notes) == 1 and one.notes[0].startswith("plain decode, twice was left out: unknown option 'twofold'")
    with one.optional("a thing"):
        raise torch.OutOfMemoryError("out\nof it")
    assert one.notes[1] == "a thing was left out: the device has too little memory (out)"
    with pytest.raises(RuntimeError), one.optional("a fault"):
        raise RuntimeError("is no reason to leave anything out")


def test_a_text_that_parts_from_plain_decode_is_told(monkeypatch):
    one = setting()
    bursts = Setting.bursts

    def strayed(self, arm, *, proposer=None):
        run = bursts(self, arm, proposer=proposer)
        if proposer is not None:
            run.text[-1] ^= 1
        return run

    monkeypatch.setattr(Setting, "bursts", strayed)
    rows = list(PIECES["speculative"](one))
    assert not any(row["same_text"] for row in rows) and "do not quote it" in one.notes[0]


def test_transformers_twin_has_our_logits_and_our_memory():
    pytest.importorskip("transformers")
    model = random_model("tiny", exact=False)
    twin = transformers_twin(model)
    ids = torch.randint(model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        ours = model.forward(ids, model.new_cache()).logits_BTV
        assert (twin(ids).logits - ours).abs().max() < 5e-4
        model.layers[3].mixer.qkv[0] += 1.0  # the twin shares the tensor, and follows
        changed = model.forward(ids, model.new_cache()).logits_BTV
        assert (changed - ours).abs().max() > 1e-2 and (twin(ids).logits - changed).abs().max() < 5e-4
    assert twin.lm_head.weight.data_ptr() == model.embed.data_ptr()
    names = dict(twin.named_parameters())
    assert set(names) | {"lm_head.weight"} == set(published_tensors(model))


def test_transformers_rows_compare_with_ours():
    pytest.importorskip("transformers")
    one = setting()
    rows = list(PIECES["transformers"](one))
    assert sum(row["unit"] == "ratio" for row in rows) == 3 and one.notes == []


def test_without_transformers_a_sentence_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    one = setting()
    assert list(PIECES["transformers"](one)) == []
    assert one.notes[0].startswith("transformers was left out: transformers is missing or too old here")


@pytest.mark.parametrize(
    "wrong",
    [
        dict(context=3),
        dict(context=5000),
        dict(trim=0),
        dict(trim=1 << 20),
        dict(synthetic_acceptance=()),
        dict(synthetic_acceptance=(0.5, 0.6)),
        dict(synthetic_acceptance=(1.2,)),
        dict(only=["x"]),
    ],
)
def test_bad_requests_are_sentences(wrong):
    with pytest.raises(UserError, match=r"is not valid|is empty"):
        run_shape("tiny", quick=True, **wrong)


def test_readings_leave_out_warm_calls_and_what_comes_before():
    calls: list[str] = []
    cpu = torch.device("cpu")
    seconds = seconds_of(
        lambda: calls.append("call"), device=cpu, repeats=2, warm=1, inner=2, before=lambda: calls.append("before")
    )
    assert len(seconds) == 2 and calls == ["before", "call", "call"] * 3
    row = figure("x", [1.0, 2.0, 3.0, 4.0, 10.0], "ms")
    assert (row["value"], row["low"], row["high"]) == (3.0, 1.0, 10.0)
    assert row["p20"] == pytest.approx(1.8) and row["p80"] == pytest.approx(5.2)


def test_trimming_without_a_size_is_refused():
    with pytest.raises(UserError, match="no size of a trimmed head"), setting().trimmed():
        pass
    assert set(speedup_by_phases(setting(), trimmed=False)) == {"eager"}
