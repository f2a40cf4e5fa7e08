"""Likelihoods against an independent float64 evaluation, each token scored once; and the dump of hidden rows."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from workbench.core.errors import NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.datasets.shards import load_shards
from workbench.model.config import FULL, LINEAR
from workbench.replay import replay, score


def documents(vocab: int = 83) -> Corpus:
    generator = np.random.default_rng(5)
    shapes = [(90, 0, 200), (7, 3, None), (2, 1, 2), (66, 66, 11)]
    made = [(f"d{i}", generator.integers(0, vocab, n), p, b) for i, (n, p, b) in enumerate(shapes)]
    return Corpus([Tape(name, ids, prompt_len=p, source=f"s{p % 2}", n_bytes=b) for name, ids, p, b in made])


def expected(reference64, path, tape: Tape) -> tuple[np.ndarray, np.ndarray]:
    """Float64 -ln p of tokens 1.. and the trunk rows, from the tensors of a saved checkpoint."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text("utf-8"))
    trunk, _, logits = reference64.evaluate(tensors, config, tape.tokens.tolist())
    logp = logits.log_softmax(-1)
    return -logp[:-1].gather(-1, torch.tensor(tape.tokens[1:]).long()[:, None])[:, 0].numpy(), trunk.numpy()


@pytest.mark.parametrize(
    "fields", [dict(ratio=2, tied=True), dict(ratio=3, tied=False, mtp=False)], ids=["mtp", "none"]
)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_every_token_is_scored_once_as_in_float64(tiny, reference64, tmp_path, fields, exact):
    model = tiny(**fields)
    model.save(tmp_path / "model")
    tapes = documents()
    totals = score(model, tapes, exact=exact, chunk=32)
    written = score(model, tapes, out=tmp_path / "s", exact=exact, chunk=32)
    rows = load_shards(tmp_path / "s", kind="scores").to_polars()
    assert rows.select("doc_id", "position").rows() == [(t.doc_id, p) for t in tapes for p in range(len(t) - 1)]
    for tape, total in zip(tapes, totals.iter_rows(named=True), strict=True):
        nll, _ = expected(reference64, tmp_path / "model", tape)
        mine = rows.filter(pl.col("doc_id") == tape.doc_id)
        np.testing.assert_allclose(mine["nll"], nll, atol=1e-5)
        assert mine["token"].to_list() == tape.tokens[:-1].tolist(), "row p holds x_p and scores x_{p+1}"
        assert (total["doc_id"], total["source"], total["n_tokens"]) == (tape.doc_id, tape.source, len(nll))
        assert total["nll"] == pytest.approx(nll.mean(), abs=1e-6) and total["n_bytes"] == tape.n_bytes
        assert total["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
        bits = nll.sum() / np.log(2) / tape.n_bytes if tape.n_bytes else None
        assert total["bits_per_byte"] == (pytest.approx(bits, rel=1e-5) if bits else None)
    columns = ["nll", "perplexity", "bits_per_byte"]
    assert written.drop(columns).equals(totals.drop(columns))
    for name in columns:
        np.testing.assert_allclose(written[name].cast(float), totals[name].cast(float), rtol=1e-12)


def test_demo_text_as_in_float64(demo, heldout, reference64, tmp_path):
    tape = heldout("pydocs")[0]
    tape = Tape("d", tape.tokens[:60], n_bytes=len(demo.tokenizer.decode(tape.tokens[:60].tolist()).encode()))
    nll, _ = expected(reference64, demo.path, tape)
    got = score(demo, tape).row(0, named=True)
    assert got["nll"] == pytest.approx(nll.mean(), abs=2e-5) and 0.2 < got["bits_per_byte"] < 3
    assert nll.mean() < 0.6 * np.log(demo.config.vocab_size), "a trained model: the comparison means something"


def test_a_draft_table_scores_the_same(tiny, tmp_path):
    model, tapes = tiny(), documents()
    table = replay(model, tapes, out=tmp_path / "t", chunk=20)
    assert table.nll.equals(score(model, tapes, out=tmp_path / "s", chunk=50))
    totals = score(model, tapes)
    assert table.nll.drop("nll", "perplexity", "bits_per_byte").equals(
        totals.drop("nll", "perplexity", "bits_per_byte")
    )
    np.testing.assert_allclose(table.nll["nll"], totals["nll"], rtol=1e-12)
    rows = load_shards(tmp_path / "s", kind="scores").to_polars()
    for name in ("nll", "target_id", "target_margin"):
        assert table.frame[name].to_numpy().tobytes() == rows[name].to_numpy().tobytes()
    assert table.tokens_nll.columns == ["doc_id", "source", "position", "nll"]
    assert (table.tokens_nll.group_by("doc_id").len().sort("doc_id")["len"] == [89, 6, 1, 65]).all()


@pytest.mark.parametrize("chunk", [2, 7, 64, 512])
def test_hidden_rows_are_trunk_rows_rounded_to_nearest_even(tiny, tmp_path, chunk):
    model, tapes = tiny(), documents()
    score(model, tapes, out=tmp_path / "s", hidden=True, chunk=chunk)
    rows = load_shards(tmp_path / "s", kind="scores").with_format("numpy")[:]
    for tape in tapes:
        x = torch.from_numpy(tape.tokens.astype(np.int64))[None, :-1]
        run = model.forward(x, model.new_cache(capacity=len(tape)))
        mine = rows["doc_id"] == tape.doc_id
        bits = run.trunk_BTH[0].to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(rows["hidden"][mine], bits)
        assert np.array_equal(rows["target_id"][mine], run.logits_BTV[0].argmax(-1).numpy()), "the greedy track"
        best = run.logits_BTV[0].sort(-1, descending=True).values
        assert np.array_equal(rows["target_margin"][mine], (best[:, 0] - best[:, 1]).numpy())
    dense = {"k_format": "dense", "v_format": "dense", "window": None}
    assert Manifest.read(tmp_path / "s").parameters == {"chunk": chunk, "hidden": True, "shard_rows": 16_384, **dense}


def test_halves_are_rounded_to_even_and_truncation_would_show(tiny, tmp_path, monkeypatch):
    from workbench.replay import score as function

    model, tape = tiny(), Tape("d", [1, 2, 3, 4])
    values = np.array([[0x3F808000, 0x3F818000, 0x3F808001, 0xBF80FFFF]], np.uint32).view(np.float32)
    forward = type(model).forward

    def fixed(self, *args, **more):
        rows = forward(self, *args, **more)
        rows.trunk_BTH[0, :, :4] = torch.from_numpy(values)
        return rows

    monkeypatch.setattr(type(model), "forward", fixed)
    function(model, tape, out=tmp_path / "s", hidden=True)
    rows = load_shards(tmp_path / "s", kind="scores")
    assert rows[0]["hidden"][:4] == [0x3F80, 0x3F82, 0x3F81, 0xBF81]
    assert rows.features["hidden"].feature.dtype == "uint16"


def test_bytes_on_disk_do_not_depend_on_the_chunk(tiny, tmp_path):
    model, tapes = tiny(), documents()
    shards = []
    for chunk in (2, 7, 64, 512):
        score(model, tapes, out=tmp_path / str(chunk), hidden=True, chunk=chunk, shard_rows=50)
        shards.append([file.read_bytes() for file in sorted((tmp_path / str(chunk)).glob("*.arrow"))])
    assert len(shards[0]) > 1 and all(other == shards[0] for other in shards[1:])


def test_no_head_is_needed_and_nothing_is_drafted(tiny, monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "draft", lambda *_, **__: pytest.fail("scores need no drafts"))
    assert score(model, documents())["n_tokens"].to_list() == [89, 6, 1, 65]
    assert wb.score is score


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(hidden=True), "hidden=True needs out"),
        (dict(chunk=1), "chunk=1 is not valid: it must be an integer of at least 2"),
        (dict(shard_rows=0), "shard_rows=0"),
        (dict(exact="no"), "exact='no'"),
        (dict(tapes=[]), "is empty"),
        (dict(tapes=[Tape("one", [4])]), "tape 'one' has 1 token; at least 2"),
        (dict(tapes=[Tape("x", [4, 83])]), "token id 83 at position 1"),
        (dict(tapes="demo"), "give what corpus"),
    ],
)
def test_a_bad_request_is_a_sentence_and_nothing_is_made(tiny, tmp_path, change, says):
    given = {"tapes": documents(), "out": tmp_path / "deep" / "s", **change}
    if "hidden" in change:
        given["out"] = None
    with pytest.raises(UserError, match=says):
        score(tiny(), **given)
    assert not list(tmp_path.iterdir())


def test_a_row_that_is_not_finite_is_named(tiny, monkeypatch, tmp_path):
    model = tiny()
    unembed, calls = type(model).unembed, [0]

    def poisoned(self, normed):
        logits = unembed(self, normed)
        calls[0] += 1
        if calls[0] % 2 == 0:
            logits[0, 1, 7] = float("inf")
        return logits

    monkeypatch.setattr(type(model), "unembed", poisoned)
    for out in (None, tmp_path / "s"):
        with pytest.raises(NonFiniteError, match="position 3 hold infinity"):
            score(model, Tape("d", [1, 2, 3, 82, 4, 5]), out=out, chunk=2)
    assert not list(tmp_path.iterdir())


KEPT = [dict(k_format="q8_0", v_format="q5_1"), dict(k_format="fp8"), dict(window=8), dict(window=9, v_format="q8_0")]


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_scores_under_a_cache_format_are_those_of_decoding_with_it(tiny, tmp_path, kept):
    model, tapes = tiny(layer_types=(LINEAR, FULL, LINEAR, FULL), head_dim=32), documents()
    totals = score(model, tapes, chunk=13, **kept)
    score(model, tapes, out=tmp_path / "s", chunk=64, **kept)
    rows = load_shards(tmp_path / "s", kind="scores").to_polars()
    for tape, total in zip(tapes, totals.iter_rows(named=True), strict=True):
        mine = rows.filter(pl.col("doc_id") == tape.doc_id)
        ids = tape.tokens.tolist()
        made = wb.generate(
            model, ids[:1], force=ids[1:], k=0, logprobs=True, ignore_eos=True, max_new_tokens=len(ids) - 1, **kept
        )
        np.testing.assert_allclose(mine["nll"], [-x for x in made.logprobs], atol=2e-6)
        assert total["nll"] == pytest.approx(mine["nll"].mean(), abs=1e-6)
    assert totals["nll"][0] != score(model, tapes)["nll"][0]  # and the format shows
    assert Manifest.read(tmp_path / "s").parameters["window"] == kept.get("window")
    with pytest.raises(UserError):
        score(model, tapes, out=tmp_path / "s", chunk=64)  # a directory of other rows


def test_formats_that_do_not_fit_are_refused_before_anything_is_written(tiny, tmp_path):
    for kept, sentence in ((dict(k_format="q8_0"), "heads 24 wide"), (dict(v_format="int4"), "v_format='int4'")):
        with pytest.raises(UserError, match=sentence):
            score(tiny(ratio=2), documents(), out=tmp_path / "s", **kept)
    with pytest.raises(UserError, match="window=0"):
        score(tiny(), documents(), window=0)
    assert not (tmp_path / "s").exists()
