"""A corpus the target writes: its answers are plain decoding's, and a run cut short ends with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench as wb
from workbench.core.errors import CheckpointError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Own, Tape
from workbench.datasets import answers
from workbench.datasets.answers import answer_options, answers_summary, generate_corpus, load_answers, on_device
from workbench.model.hybrid import HybridModel
from workbench.spec.options import GenerateOptions
from workbench.spec.session import Session
from workbench_kernels.dispatch import use

TEXTS = ["the end", "then", "a bell", "th", "half past ten", "so"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> HybridModel:
    return wb.load(tiny_dir)


@pytest.fixture(scope="module")
def asked(model: HybridModel) -> Corpus:
    return wb.prompts(TEXTS, tokenizer=model.tokenizer)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("shaping", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_answers_are_those_of_plain_decoding(model: HybridModel, asked: Corpus, tmp_path: Path, shaping: Any) -> None:
    made = generate_corpus(model, asked, out=tmp_path / "a", max_new_tokens=7, k=2, **shaping)
    records = load_answers(tmp_path / "a")
    assert [tape.doc_id for tape in made] == [tape.doc_id for tape in asked] == records["doc_id"]
    for prompt, tape, record in zip(asked, made, records, strict=True):
        plain = wb.generate(
            model,
            prompt.tokens.tolist(),
            k=0,
            max_new_tokens=7,
            sequence=record["sequence"],
            stop_token_ids=(2,),
            **shaping,
        )
        assert tape.tokens.tolist() == record["tokens"] == [*plain.prompt, *plain.tokens]
        assert tape.prompt_len == record["prompt_len"] == len(prompt)
        assert tape.supervised.tolist() == [i >= len(prompt) for i in range(len(tape))]
        assert record["drafted"] > 0 and record["finish"] in answers.FINISH
        kind = Own("greedy", tape.own.model) if not shaping else None
        assert tape.own == (kind or tape.own) and tape.own.model == Manifest.read(tmp_path / "a").model["fingerprint"]
        if shaping:
            assert (tape.own.seed, tape.own.sequence, tape.own.accept) == (3, record["sequence"], "coupled")
            assert '"top_p": 0.95' in tape.own.shaping
    summary = answers_summary(records)
    assert summary["answers"] == 6 and sum(summary["finish"].values()) == 6
    assert summary["answer_tokens"] == sum(len(tape) - tape.prompt_len for tape in made)
    assert 0 <= summary["tau"] == summary["accepted"] / summary["rounds"]


def test_own_answers_walk_as_live_runs(model: HybridModel, asked: Corpus, tmp_path: Path) -> None:
    made = generate_corpus(model, asked, out=tmp_path / "a", max_new_tokens=9, turn_ends=False, **SAMPLED)
    shaping = {name: value for name, value in SAMPLED.items() if name != "seed"}
    table = wb.replay(model, made, out=tmp_path / "t", k_max=2, seed=3, **shaping)
    walked = wb.walk(table, k=2)
    live = wb.live_rounds(model, made, k=2, seed=3, **shaping)
    assert wb.compare_rounds(walked, live).is_empty(), "not one round differs"
    other = wb.live_rounds(model, made, k=1, seed=3, **shaping)
    assert not wb.compare_rounds(walked, other).is_empty(), "other rounds are told apart"


@pytest.mark.parametrize("rounds", [{}, {"stream_rounds": 4}], ids=["host", "device"])
@pytest.mark.parametrize("shaping", [{}, {**SAMPLED, "repetition_penalty": 1.2}], ids=["greedy", "sampled"])
def test_one_session_answers_as_many_do(
    tiny: Callable[..., HybridModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shaping: Any, rounds: Any
) -> None:
    model = tiny(exact=False, tied=False)
    drawn = np.random.default_rng(4)
    prompts = Corpus([Tape(f"p{n}", drawn.integers(1, 83, 2 + 5 * n % 13), 2 + 5 * n % 13) for n in range(5)])
    made: list[Session] = []
    begun = Session.__init__

    def begin(self: Session, *args: Any, **given: Any) -> None:
        made.append(self)
        begun(self, *args, **given)

    def answered(name: str) -> dict[str, bytes]:
        made.clear()
        with use("ref") if rounds else nullcontext():
            generate_corpus(model, prompts, out=tmp_path / name, max_new_tokens=12, k=2, **rounds, **shaping)
        return contents(tmp_path / name)

    monkeypatch.setattr(Session, "__init__", begin)
    one = answered("one")
    assert len(made) == 1 and made[0].capacity == max(map(len, prompts)) + 12
    with monkeypatch.context() as patch:
        patch.setattr(answers, "generate", lambda *args, session, **given: wb.generate(*args, **given))
        assert answered("many") == one and len(made) == 1 + len(prompts)
    reset = Session.reset

    def forgetful(self: Session, **given: Any) -> None:  # the mistake: states of the text before go on
        kept = [(plane.conv_BWC, plane.state_BHKV) for plane in self.state.cache.recurrent]
        reset(self, **given)
        for plane, pair in zip(self.state.cache.recurrent, kept, strict=True):
            plane.conv_BWC, plane.state_BHKV = pair

    monkeypatch.setattr(Session, "reset", forgetful)
    assert answered("forgetful") != one


# ---------------------------------------------------------------- cut short and gone on with


def interrupted(at: int) -> Callable[..., Any]:
    """``generate`` that is interrupted before its call number ``at``."""
    calls = iter(range(1, 1000))

    def run(*args: Any, **given: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return wb.generate(*args, **given)

    return run


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_a_run_cut_short_ends_with_the_same_bytes(
    model: HybridModel, asked: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    options = {"max_new_tokens": 6, "shard_rows": 2, **SAMPLED}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    generate_corpus(model, asked, out=whole, **options)
    with monkeypatch.context() as patch:
        patch.setattr(answers, "generate", interrupted(at))
        with pytest.raises(KeyboardInterrupt):
            generate_corpus(model, asked, out=cut, **options)
    done = {path.name: path.stat() for path in cut.glob("*.arrow")} if cut.exists() else {}
    assert len(done) == (at - 1) // 2 and not (cut.exists() and list(cut.glob("*.tmp")))
    if done:
        with pytest.raises(CheckpointError, match="incomplete"):
            wb.corpus(cut)
    generate_corpus(model, asked, out=cut, **options)
    assert contents(cut) == contents(whole)
    for name, before in done.items():
        after = (cut / name).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "whole shards are kept"


def test_another_seed_gives_other_bytes(model: HybridModel, asked: Corpus, tmp_path: Path) -> None:
    made = [
        generate_corpus(model, asked, out=tmp_path / str(seed), max_new_tokens=6, temperature=0.9, seed=seed)
        for seed in (3, 4)
    ]
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(*made, strict=True))


def test_an_answer_does_not_depend_on_the_prompts_beside_it(
    model: HybridModel, asked: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(name: str, prompts: Corpus) -> dict[str, list[int]]:
        made = generate_corpus(model, prompts, out=tmp_path / name, max_new_tokens=8, **SAMPLED)
        return {tape.doc_id: tape.tokens.tolist() for tape in made}

    some = Corpus([asked[i] for i in (4, 1, 5)], tokenizer=asked.tokenizer)
    every, part = texts("all", asked), texts("some", some)
    assert all(every[doc_id] == tokens for doc_id, tokens in part.items())
    streams = [answers.sequence_of_prompt(tape.doc_id) for tape in asked]
    assert len(set(streams)) == len(asked) and all(0 <= stream < 2**63 for stream in streams)
    counter = iter(range(100))
    monkeypatch.setattr(answers, "sequence_of_prompt", lambda doc_id: next(counter))
    by_place = texts("all by place", asked), texts("some by place", some)
    assert any(by_place[0][doc_id] != tokens for doc_id, tokens in by_place[1].items()), "streams by place would differ"


def test_another_run_and_damage_are_refused(model: HybridModel, asked: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "a"
    generate_corpus(model, asked, out=out, max_new_tokens=3)
    with pytest.raises(UserError, match=r"another run.*parameters\.max_new_tokens"):
        generate_corpus(model, asked, out=out, max_new_tokens=4)
    with pytest.raises(UserError, match="resume=False"):
        generate_corpus(model, asked, out=out, max_new_tokens=3, resume=False)
    shard = next(out.glob("*.arrow"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match the hash"):
        wb.corpus(out)


# ---------------------------------------------------------------- why an answer ends


def ended(model: HybridModel, asked: Corpus, out: Path, **options: Any) -> set[str]:
    generate_corpus(model, asked, out=out, **{"max_new_tokens": 4, **options})
    return set(load_answers(out)["finish"])


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        ({"logit_bias": {2: 1e6}}, "end_of_turn"),
        ({"logit_bias": {0: 1e6}}, "end_of_text"),
        ({"logit_bias": {7: 1e6}, "stop_token_ids": (7,)}, "stop_token"),
        ({"logit_bias": {60: 1e6}, "stop": "\x00"}, "length"),
        ({"logit_bias": {2: 1e6}, "turn_ends": False}, "length"),
        ({"logit_bias": {2: 1e6}, "ignore_eos": True}, "length"),
        ({"logit_bias": {0: 1e6}, "ignore_eos": True}, "length"),
    ],
)
def test_what_ended_an_answer_is_told(
    model: HybridModel, asked: Corpus, tmp_path: Path, options: dict[str, Any], finish: str
) -> None:
    assert ended(model, asked, tmp_path / "a", **options) == {finish}


def test_a_stop_string_and_the_context_end_answers(model: HybridModel, tmp_path: Path) -> None:
    assert model.tokenizer is not None
    (x,) = model.tokenizer.encode("x")
    few = wb.prompts(["ab"], tokenizer=model.tokenizer)
    assert ended(model, few, tmp_path / "s", logit_bias={x: 1e6}, stop="xx") == {"stop_string"}
    limit = model.config.max_position_embeddings
    long = Corpus([Tape("long", [x] * (limit - 2), limit - 2)])
    assert ended(model, long, tmp_path / "c", logit_bias={x: 1e6}) == {"context"}
    assert len(wb.corpus(tmp_path / "c")[0]) == limit
    with pytest.raises(UserError, match="leaves no room for an answer"):
        generate_corpus(model, Corpus([Tape("full", [x] * limit, limit)]), out=tmp_path / "f")
    with pytest.raises(UserError, match="has no prompt"):
        generate_corpus(model, Corpus([Tape("none", [x] * 4)]), out=tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_conversations_are_answered_and_trained_on(model: HybridModel, tmp_path: Path) -> None:
    talk = [{"messages": [{"role": "user", "content": "Hi"}], "id": "c"}]
    asked = wb.prompts(talk, tokenizer=model.tokenizer)
    (tape,) = generate_corpus(model, asked, out=tmp_path / "a", max_new_tokens=12, logit_bias={2: -1e6, 0: -1e6})
    assert model.tokenizer is not None
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.decode(tape.tokens[: tape.prompt_len].tolist()) == opening
    records = wb.extract(model, wb.corpus(tmp_path / "a"), out=tmp_path / "x", gamma=2, top_k=4, anchors="all")
    assert records["position"][0] == tape.prompt_len - 1 and records["slot_mask"][0] == [True, True]


def test_prompts_that_cannot_be_answered_go_into_quarantine(model: HybridModel, asked: Corpus, tmp_path: Path) -> None:
    limit = model.config.max_position_embeddings
    bad = [Tape("full", [5] * limit, limit), Tape("longer", [5] * (limit + 9), limit + 9), Tape("none", [5] * 4)]
    bad.append(Tape("strange", [model.config.vocab_size], 1))
    mixed = Corpus([bad[0], asked[0], *bad[1:], asked[1]], tokenizer=asked.tokenizer)
    for tape in bad:
        with pytest.raises(UserError, match=f"document '{tape.doc_id}'"):
            generate_corpus(model, Corpus([asked[0], tape]), out=tmp_path / "a")
    aside: list[tuple[str, str]] = []
    made = generate_corpus(model, mixed, out=tmp_path / "a", max_new_tokens=4, quarantine=aside)
    assert [tape.doc_id for tape in made] == [asked[0].doc_id, asked[1].doc_id]
    assert [doc_id for doc_id, _ in aside] == ["full", "longer", "none", "strange"]
    assert "leaves no room" in aside[1][1] and "has no prompt" in aside[2][1] and "holds token id" in aside[3][1]
    generate_corpus(model, Corpus(asked[:2].tapes, tokenizer=asked.tokenizer), out=tmp_path / "b", max_new_tokens=4)
    for file in (tmp_path / "a").glob("*.arrow"):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), "answers are those without the bad ones"
    with pytest.raises(UserError, match="no prompt can be answered; 4 in quarantine, such as: document 'strange'"):
        generate_corpus(model, Corpus(bad), out=tmp_path / "c", quarantine=[])
    assert not (tmp_path / "c").exists()


# ---------------------------------------------------------------- options


def test_rounds_run_on_a_gpu_unless_an_option_needs_the_host(model: HybridModel) -> None:
    assert on_device(GenerateOptions()).graphs and on_device(GenerateOptions()).stream_rounds == answers.STREAM
    for host in (
        GenerateOptions(adaptive=True),
        GenerateOptions(stop="x"),
        GenerateOptions(accept="ratio", temperature=1.0),
    ):
        assert on_device(host) == host

    class OnGpu:
        through_kernels, can_draft = True, True

    gpu: Any = OnGpu()
    assert answer_options(gpu, None, {}).graphs and answer_options(gpu, None, {}).k == 3
    assert not answer_options(gpu, None, {"graphs": False}).on_device
    assert not answer_options(gpu, GenerateOptions(), {}).on_device
    assert not answer_options(model, None, {}).on_device


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sequence": 3}, "sequence is set per prompt"),
        ({"options": GenerateOptions(sequence=3)}, "sequence is set per prompt"),
        ({"shard_rows": 0}, "shard_rows=0"),
        ({"turn_ends": 1}, "turn_ends=1"),
        ({"grammar": "x"}, "unknown option 'grammar'"),
        ({"stop_token_ids": (999,)}, "999 is out of range"),
    ],
)
def test_options_are_refused_in_a_sentence(
    model: HybridModel, asked: Corpus, tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        generate_corpus(model, asked, out=tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


def test_the_template_of_the_prompts_says_what_ends_a_turn(model: HybridModel, asked: Corpus, tmp_path: Path) -> None:
    bare = "{% for m in messages %}{{ m.content }} {% endfor %}"
    options = {"logit_bias": {2: 1e6}, "chat_template": bare}
    assert ended(model, asked, tmp_path / "a", **options) == {"length"}
    assert model.tokenizer is not None and model.tokenizer.config["chat_template"] != bare, "the model is left alone"
