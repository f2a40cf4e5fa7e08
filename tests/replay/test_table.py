"""The draft table on disk: what its columns hold, bytes that do not depend on how they were made, resume, sentences."""

from __future__ import annotations

import gc
import inspect
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import workbench as wb
from workbench.cache.hybrid import HybridCache
from workbench.core.errors import CapabilityError, CheckpointError, NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Own, Tape
from workbench.datasets import extract
from workbench.model.chain import ChainBatch
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.replay import ReplayOptions, live_rounds, load_table, own_tapes, replay, slot_rates, walk
from workbench.sampling.options import Shaping
from workbench.spec.policies import FixedK

SMALL: dict[str, Any] = dict(k_max=3, chunk=16)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny(ratio=1, tied=False, vocab_size=11, seed=1)


def documents(count: int = 5, length: int = 30) -> Corpus:
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, 11, length + 5 * i) for i in range(count)]
    return Corpus(
        [Tape(f"d{i}", t, prompt_len=3 * i, source=f"s{i % 2}", split="heldout") for i, t in enumerate(rows)], name="c"
    )


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def shards(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.glob("*.arrow"))]


# ---------------------------------------------------------------- what is written


def test_columns_are_what_model_and_drafter_say(model, tmp_path):
    tapes = documents(3)
    table = replay(model, tapes, out=tmp_path / "a" / "x", **SMALL)
    frame, at = table.frame, 0
    assert (len(frame), table.k_max) == (tapes.n_tokens - 3, 3)
    for tape in tapes:
        n = len(tape)
        rows = frame[at : at + n - 1]
        at += n - 1
        x = torch.from_numpy(tape.tokens.astype(np.int64))[None]
        run = model.forward(x, model.new_cache(capacity=n))
        logits = run.logits_BTV[0, :-1]
        for name, value in (("doc_id", tape.doc_id), ("source", tape.source), ("split", "heldout"), ("own", "")):
            assert rows[name].unique().to_list() == [value]
        assert rows["position"].to_list() == list(range(n - 1)) and rows["length"].unique().to_list() == [n]
        assert rows["prompt_len"].unique().to_list() == [tape.prompt_len] and rows["n_bytes"].null_count() == n - 1
        assert rows["token"].to_list() == tape.tokens[:-1].tolist()
        assert rows["next_token"].to_list() == tape.tokens[1:].tolist()
        assert rows["target_id"].to_list() == logits.argmax(-1).tolist()
        assert rows["on_tape"].to_list() == (logits.argmax(-1) == x[0, 1:]).tolist()
        best = logits.sort(-1, descending=True).values
        assert np.array_equal(rows["target_margin"], (best[:, 0] - best[:, 1]).numpy())
        nll = -logits.double().log_softmax(-1).gather(-1, x[0, 1:, None])[:, 0]
        np.testing.assert_allclose(rows["nll"], nll, atol=2e-6)
        begin = max(tape.prompt_len, 1)
        for row in rows.iter_rows(named=True):
            p = row["position"]
            known = [j for j in range(3) if p >= begin and p + 1 + j < n]
            for name in ("draft_ids", "draft_top1", "draft_margin"):
                assert [j for j, value in enumerate(row[name]) if value is not None] == known, (p, name)
        for p in (begin, n // 2, n - 2):
            row, state = rows.row(p, named=True), model.new_draft_cache(capacity=n + 8)
            hidden = model.draft(x[:, 1 : p + 1], run.normed_BTH[:, :p], state)[:, -1:]
            for j in range(min(3, n - 1 - p)):
                draft = model.unembed(hidden)[0, 0].double()
                best = draft.sort(descending=True).values
                assert row["draft_ids"][j] == int(draft.argmax())
                assert row["draft_top1"][j] == pytest.approx(float(draft.softmax(0).max()), rel=1e-5)
                assert row["draft_margin"][j] == pytest.approx(float(best[0] - best[1]), abs=1e-6)
                hidden = model.draft(torch.tensor([[row["draft_ids"][j]]]), hidden, state)


def test_the_manifest_is_the_tables_key(model, tmp_path):
    tapes = documents()
    table = replay(model, tapes, out=tmp_path / "x", **SMALL)
    manifest = Manifest.read(tmp_path / "x")
    assert manifest.complete and manifest.kind == "draft-table"
    assert manifest.counts == {"documents": 5, "rows": tapes.n_tokens - 5, "tokens": tapes.n_tokens}
    assert manifest.parameters == {**ReplayOptions(**SMALL).key(), "draft_head": None}
    assert table.key == {
        "model": fingerprint(model),
        "exact": True,
        "row_block": model.numerics.row_block,
        "draft_head": None,
        "carrier": "normed",
        "k_max": 3,
        "shaping": Shaping().key(),
        "seed": 0,
    }
    assert str(tmp_path) not in (tmp_path / "x" / "manifest.json").read_text()
    again = load_table(tmp_path / "x")
    assert again.frame.equals(table.frame) and "5 documents" in repr(again) and "draft" in again._repr_html_().lower()
    import datasets

    assert len(datasets.load_from_disk(str(tmp_path / "x"))) == len(table.frame)


def test_only_the_models_own_texts_are_marked(model, tiny, tmp_path):
    own = own_tapes(model, documents(2), prompt_tokens=4, max_new_tokens=12, ignore_eos=True)
    other = tiny(ratio=1, tied=False, vocab_size=11, seed=2)
    assert replay(model, own, out=tmp_path / "own", **SMALL).frame["own"].unique().to_list() == ["greedy"]
    foreign = replay(other, own, out=tmp_path / "other", **SMALL)
    assert foreign.frame["own"].unique().to_list() == [""]
    assert walk(foreign, k=2)["estimator"].unique().to_list() == ["forced"]


# ---------------------------------------------------------------- independence of how it was made


def edged(model: HybridModel) -> Corpus:
    """Texts whose starts lie on and around the ends of key blocks and of chunks."""
    generator = np.random.default_rng(9)
    shapes = [(72, 58), (131, 122), (40, 0), (66, 62), (3, 0), (2, 0)]
    return Corpus([Tape(f"e{i}", generator.integers(0, 11, n), prompt_len=p) for i, (n, p) in enumerate(shapes)])


def test_bytes_do_not_depend_on_the_chunk(model, tmp_path):
    made = {}
    for chunk in (512, 64, 7, 2):
        replay(model, edged(model), out=tmp_path / str(chunk), k_max=5, chunk=chunk, shard_rows=180)
        made[chunk] = shards(tmp_path / str(chunk))
    assert len(made[512]) == 2
    assert all(made[chunk] == made[512] for chunk in made)


@pytest.mark.full
def test_bytes_do_not_depend_on_the_chunk_on_demo_texts(demo, heldout, tmp_path):
    tapes = Corpus([Tape(t.doc_id, t.tokens[:150]) for t in (*heldout("novels"), *heldout("sqlite"))])
    for chunk in (512, 1024, 100, 64, 33, 7, 2):
        replay(demo, tapes, out=tmp_path / str(chunk), chunk=chunk)
        assert shards(tmp_path / str(chunk)) == shards(tmp_path / "512")


@pytest.mark.full
def test_bits_do_not_depend_on_the_slots_of_a_logits_slice(demo, heldout, monkeypatch, tmp_path):
    import sys

    tape = Tape("d", heldout("pycode")[0].tokens[:200])
    replay(demo, tape, out=tmp_path / "a")
    monkeypatch.setattr(sys.modules["workbench.datasets.heads"], "HEAD_VALUES", 1 << 14)
    replay(demo, tape, out=tmp_path / "b")
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_fewer_slots_are_the_first_slots(model, tmp_path):
    wide = replay(model, edged(model), out=tmp_path / "w", k_max=64).frame
    for k in (1, 4):
        slim = replay(model, edged(model), out=tmp_path / str(k), k_max=k).frame
        for name in ("draft_ids", "draft_top1", "draft_margin"):
            parts = [wide[name].arr.get(j) for j in range(k)]
            assert all(part.equals(slim[name].arr.get(j)) for j, part in enumerate(parts))
        assert wide.drop("draft_ids", "draft_top1", "draft_margin").equals(
            slim.drop("draft_ids", "draft_top1", "draft_margin")
        )


@pytest.mark.parametrize("stride", [2, 5, 64, 1000])
def test_a_thinned_table_holds_rows_of_the_whole(model, tmp_path, stride):
    tapes = edged(model)
    whole = replay(model, tapes, out=tmp_path / "w", **SMALL).frame
    thin = replay(model, tapes, out=tmp_path / "t", stride=stride, **SMALL).frame
    begin = pl.max_horizontal(pl.col("prompt_len"), pl.lit(1))
    kept = (pl.col("position") >= begin) & ((pl.col("position") - begin) % stride == 0)
    chains = ("draft_ids", "draft_top1", "draft_margin")
    assert thin.drop(chains).equals(whole.drop(chains))
    assert thin.filter(kept).equals(whole.filter(kept))
    assert all(thin.filter(~kept)[name].explode().null_count() == 3 * len(thin.filter(~kept)) for name in chains)


def test_documents_do_not_touch_each_other(model, tmp_path):
    tapes = edged(model)
    together = replay(model, tapes, out=tmp_path / "all", **SMALL).frame
    for i in (1, 4):
        alone = replay(model, tapes[i], out=tmp_path / str(i), **SMALL).frame
        assert alone.equals(together.filter(pl.col("doc_id") == f"e{i}"))


# ---------------------------------------------------------------- kill and resume


class Killed(BaseException):
    """Stands for whatever ends a process."""


def kill_after(patch: pytest.MonkeyPatch, forwards: int) -> None:
    left, run = [forwards], HybridModel.forward

    def forward(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return run(self, *args, **kwargs)

    patch.setattr(HybridModel, "forward", forward)


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(model, tmp_path):
    options = dict(shard_rows=60, **SMALL)
    replay(model, documents(), out=tmp_path / "whole", **options)
    whole = contents(tmp_path / "whole")
    assert len(shards(tmp_path / "whole")) == 3
    out, done = tmp_path / "killed", set()
    for forwards in (1, 6, 8):
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, forwards)
            with pytest.raises(Killed):
                replay(model, documents(), out=out, **options)
        if out.exists():
            assert not list(out.glob("*.tmp")) and not Manifest.read(out).complete
            done.add(len(Manifest.read(out).shards))
            with pytest.raises(CheckpointError, match="incomplete"):
                load_table(out)
            (out / "data-00002-of-00003.arrow.tmp").write_bytes(b"what kill -9 leaves")
        else:
            done.add(0)
    assert done == {0, 1, 2}, "shards that were done are not done again, and nothing is left of none"
    replay(model, documents(), out=out, **options)
    assert contents(out) == whole
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, 0)
        replay(model, documents(), out=out, **options)
    assert contents(out) == whole, "a finished run is opened, not repeated"


def test_another_run_is_not_mixed_in(model, tiny, tmp_path):
    out = tmp_path / "x"
    replay(model, documents(), out=out, **SMALL)
    before = contents(out)
    for change, says in [
        (dict(k_max=4), "parameters.k_max is 3 there and 4 now"),
        (dict(stride=2), "parameters.stride is 1 there and 2 now"),
        (dict(chunk=17), "parameters.chunk is 16 there and 17 now"),
        (dict(carrier="pre_norm"), "parameters.carrier is 'normed' there and 'pre_norm' now"),
        (dict(exact=False), "model.exact is True there and False now"),
        (dict(resume=False), "resume=False was given"),
    ]:
        with pytest.raises(UserError, match=says):
            replay(model, documents(), out=out, **{**SMALL, **change})
    with pytest.raises(UserError, match=r"model\.fingerprint"):
        replay(tiny(ratio=1, tied=False, vocab_size=11, seed=2), documents(), out=out, **SMALL)
    with pytest.raises(UserError, match=r"corpus\.fingerprint"):
        replay(model, documents(4), out=out, **SMALL)
    for other in (extract, wb.score):
        more = dict(gamma=3, top_k=4) if other is extract else {}
        with pytest.raises(UserError, match="kind is 'draft-table' there"):
            other(model, documents(), out=out, **more)
    assert contents(out) == before


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "state.json", "dataset_info.json"])
def test_a_flipped_byte_is_refused_and_made_good(model, tmp_path, name):
    out = tmp_path / "x"
    replay(model, documents(2), out=out, **SMALL)
    before, file = contents(out), out / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{name} does not match the hash"):
        load_table(out)
    replay(model, documents(2), out=out, **SMALL)
    assert contents(out) == before


def test_what_is_no_table_is_refused(model, tmp_path):
    for path, says in [(tmp_path / "none", "is not a directory"), (tmp_path, r"has no manifest\.json")]:
        with pytest.raises(CheckpointError, match=says):
            load_table(path)
    extract(model, documents(2), out=tmp_path / "x", gamma=3, top_k=4)
    with pytest.raises(CheckpointError, match="holds 'anchors'; 'draft-table' is needed"):
        load_table(tmp_path / "x")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt and no manifest"):
        replay(model, documents(2), out=tmp_path / "y", **SMALL)
    assert [file.name for file in (tmp_path / "y").iterdir()] == ["notes.txt"]


# ---------------------------------------------------------------- memory


def test_one_tape_is_in_flight(model, monkeypatch, tmp_path):
    alive: list[weakref.ref[HybridCache]] = []
    counts = []
    new_cache = HybridModel.new_cache

    def counted(self, **more):
        counts.append(sum(ref() is not None for ref in alive))
        cache = new_cache(self, **more)
        alive.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(HybridModel, "new_cache", counted)
    replay(model, documents(6), out=tmp_path / "x", **SMALL)
    wb.score(model, documents(6), out=tmp_path / "s", hidden=True)
    wb.score(model, documents(6))
    assert len(counts) == 18 and max(counts) <= 1, counts


def test_memory_does_not_grow_with_the_corpus(model, tmp_path):
    peaks = []
    for times in (1, 5):
        tapes = Corpus([Tape(f"d{i}", np.arange(20) % 11) for i in range(3 * times)])
        gc.collect()
        tracemalloc.start()
        replay(model, tapes, out=tmp_path / str(times), shard_rows=40, **SMALL)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0] + 200_000, peaks


# ---------------------------------------------------------------- sentences


def test_defaults_are_the_options():
    signature = inspect.signature(replay)
    for name, value in vars(ReplayOptions()).items():
        assert signature.parameters[name].default == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(k_max=0), "k_max=0 is not valid: it must be an integer from 1 to 64"),
        (dict(k_max=65), "k_max=65"),
        (dict(k_max=2.5), "k_max=2.5"),
        (dict(stride=0), "stride=0"),
        (dict(chunk=1), "chunk=1 is not valid: it must be an integer of at least 2"),
        (dict(shard_rows=0), "shard_rows=0"),
        (dict(carrier="raw"), "carrier='raw' is not valid: choose one of 'normed', 'pre_norm'"),
        (dict(exact="yes"), "exact='yes'"),
        (dict(tapes=[]), "is empty"),
        (dict(tapes="demo"), "give what corpus"),
        (dict(tapes=[Tape("one", [4])]), "tape 'one' has 1 token; at least 2 are needed"),
        (dict(tapes=[Tape("a", [1, 2]), Tape("a", [1, 2])]), "holds doc_id 'a' twice"),
        (dict(tapes=[Tape("x", [4, 11])]), "token id 11 at position 1.* 0 to 10"),
        (dict(tapes=[Tape("x", np.zeros(513))]), "513 tokens"),
    ],
)
def test_a_bad_request_is_a_sentence_and_nothing_is_made(model, tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        replay(model, **{"tapes": documents(1), "out": tmp_path / "deep" / "x", **SMALL, **change})
    assert not list(tmp_path.iterdir()) and model.exact is True


def test_a_checkpoint_without_a_head_is_told_what_it_can_do(tiny, tmp_path):
    with pytest.raises(CapabilityError, match=r"no mtp\.\* weights.*use wb\.score"):
        replay(tiny(mtp=False), Tape("d", [1, 2, 3]), out=tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_draft_that_is_not_finite_is_named(model, monkeypatch, tmp_path):
    step = ChainBatch.step

    def poisoned(self, tokens, carrier):
        out = step(self, tokens, carrier)
        out[1] = float("nan")
        return out

    monkeypatch.setattr(ChainBatch, "step", poisoned)
    for stride in (1, 6):
        with pytest.raises(NonFiniteError, match=f"position {4 + stride + 1} hold NaN"):
            replay(model, Tape("d", [1] * 30, prompt_len=4), out=tmp_path / "x", stride=stride)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def own_table(model, tmp_path_factory) -> Any:
    own = own_tapes(model, documents(2), prompt_tokens=4, max_new_tokens=20, ignore_eos=True)
    return replay(model, own, out=tmp_path_factory.mktemp("own") / "x", **SMALL)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(k=4), "drafts up to 4 tokens and the table has 3 slots: replay with k_max=4"),
        (dict(policy=FixedK(k=9)), "drafts up to 9"),
        (dict(k=8, adaptive=True), "drafts up to 7 tokens"),
        (dict(k=-1), "k=-1"),
        (dict(k=2, p_min=1.5), "p_min=1.5"),
        (dict(k=2, p_min=float("nan")), "p_min=nan"),
        (dict(k=2, floor=1), "floor=1 needs adaptive=True"),
        (dict(k=2, estimator="slot"), r"estimator='slot' is not valid.*slot_rates\(table\)"),
        (dict(k=2, carry=False), "option 'carry' is not valid in a walk"),
        (dict(k=2, carrier="pre_norm"), "option 'carrier' is not valid in a walk.*set when the table is made"),
        (dict(k=2, pmin=0.5), "option 'pmin' is not valid in a walk: valid options are k, policy, estimator, p_min"),
        (dict(policy=FixedK(k=2), p_min=0.5), "policy and 'p_min' were both given"),
    ],
)
def test_a_bad_walk_is_a_sentence(own_table, given, says):
    for run in (walk, lambda table, **more: table.rounds(**more)):
        with pytest.raises(UserError, match=says):
            run(own_table, **given)


def test_a_walk_drafts_nothing_at_k_0(own_table):
    rounds = own_table.rounds(k=0)
    assert rounds["drafted"].sum() == 0 and set(rounds["chain_stop"]) == {"none"} and set(rounds["round_stop"]) == {""}
    assert len(rounds) == 2 * 19


def test_texts_that_are_not_the_targets_own(model, tiny, tmp_path):
    table = replay(model, documents(2), out=tmp_path / "x", **SMALL)
    with pytest.raises(UserError, match=r"needs texts that this target generated greedily \(wb\.own_tapes\)"):
        walk(table, k=2, estimator="own")
    with pytest.raises(UserError, match="'d0' is not this target's own greedy text"):
        live_rounds(model, documents(2), k=2)
    with pytest.raises(UserError, match="estimator='slot' is not valid"):
        live_rounds(model, documents(2), estimator="slot", k=2)
    theirs = own_tapes(tiny(ratio=1, tied=False, vocab_size=11, seed=2), Tape("d", [1, 2], 2), max_new_tokens=3)
    with pytest.raises(UserError, match="is not this target's own greedy text"):
        live_rounds(model, theirs, k=2)
    sampled = Tape("s", [1, 2, 3, 4], prompt_len=1, own=Own("sampled", fingerprint(model), seed=1, temperature=1.0))
    table = replay(model, sampled, out=tmp_path / "s", **SMALL)
    assert table.frame["own"].unique().to_list() == ["sampled"]
    with pytest.raises(UserError, match="estimator='own' needs texts"):
        walk(table, k=2, estimator="own")


def test_a_text_that_only_claims_to_be_own(model, tmp_path):
    """One token that is not the target's pick is found, wherever rounds begin."""
    own = own_tapes(model, documents(1), prompt_tokens=4, max_new_tokens=20, ignore_eos=True)[0]
    for at in (4, 5, 11, 23):
        tokens = own.tokens.copy()
        tokens[at] = (tokens[at] + 1) % 11
        table = replay(model, Tape("d", tokens, prompt_len=4, own=own.own), out=tmp_path / str(at), **SMALL)
        for k in (0, 1, 3):
            with pytest.raises(UserError, match=f"not this target's greedy text at position {at}, where its pick"):
                walk(table, k=k)


def test_own_tapes_refuse_what_they_cannot_continue(model):
    with pytest.raises(UserError, match=r"document 'd0' has 30 tokens, fewer than prompt_tokens=31.*min_tokens=31"):
        own_tapes(model, documents(1), prompt_tokens=31)
    for given, says in [
        (dict(prompt_tokens=0), "prompt_tokens=0"),
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(k=-1), "k=-1"),
        (dict(speed=2), "unknown option 'speed'"),
        (dict(max_new_tokens=600), "over this model's context of 512"),
    ]:
        with pytest.raises(UserError, match=says):
            own_tapes(model, documents(1), **{"prompt_tokens": 4, **given})


def test_a_thinned_table_is_no_walk_but_has_slot_rates(model, tmp_path):
    table = replay(model, documents(2), out=tmp_path / "x", stride=2, **SMALL)
    with pytest.raises(UserError, match=r"a chain at one start in 2 only; a walk needs replay\(\.\.\., stride=1\)"):
        walk(table, k=2)
    assert slot_rates(table)["starts"].min() > 0
