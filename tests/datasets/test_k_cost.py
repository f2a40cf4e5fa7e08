"""The report of what k costs: from records, from full laws beside them, and bytes beside other formats'."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
import torch

from workbench.core.errors import NonFiniteError, UserError
from workbench.core.tape import Corpus, Tape
from workbench.datasets import (
    extract,
    extract_sequences,
    law_rows,
    record_bytes,
    sequences,
    to_arrays,
    topk_cost,
    topk_rows,
)
from workbench.datasets.layouts import LAYOUTS
from workbench.model.hybrid import HybridModel


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny()


def documents(count: int = 5) -> Corpus:
    rng = np.random.default_rng(4)
    tapes = [Tape(f"d{i}", rng.integers(0, 83, 30 + 7 * i), prompt_len=4, source="s") for i in range(count)]
    return Corpus(tapes, name="c")


# ---------------------------------------------------------------- full laws


def test_rows_are_the_laws_of_target_and_drafter(model):
    tapes = documents(2)
    rows = topk_rows(model, tapes, ks=[2, 5], anchors="all", temperature=0.7, chunk=11)
    for tape in tapes:
        ids = torch.from_numpy(tape.tokens.astype(np.int64))[None]
        target = model.forward(ids, model.new_cache())
        out = model.draft(ids[:, 1:], target.normed_BTH[:, :-1], model.new_draft_cache())
        drafter = model.unembed_draft(out)[0]
        part = rows.filter((pl.col("doc_id") == tape.doc_id) & (pl.col("k") == 5))
        assert part["position"].to_list() == list(range(3, len(tape) - 1))
        for row in part.iter_rows(named=True):
            position = row["position"]
            p = (target.logits_BTV[0, position].double() / 0.7).softmax(-1)
            q = (drafter[position - 1].double() / 0.7).softmax(-1)
            assert row["accept"] == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-6)
            assert row["kl"] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
            assert row["mass"] == pytest.approx(float(p.sort(descending=True).values[:5].sum()), rel=1e-6)
        shifted = (drafter[position - 2].double() / 0.7).softmax(-1)
        assert row["accept"] != pytest.approx(float(torch.minimum(p, shifted).sum()), rel=1e-3), "control: off by one"


def test_rows_do_not_depend_on_chunks_nor_blocks(model, monkeypatch):
    options = dict(ks=[1, 8], anchors=6)
    first = topk_rows(model, documents(), chunk=512, **options)
    assert first.equals(topk_rows(model, documents(), chunk=1, **options))
    monkeypatch.setattr(law_rows, "BLOCK_VALUES", 200)
    assert first.equals(topk_rows(model, documents(), chunk=7, **options))
    assert not first.equals(topk_rows(model, documents(), temperature=0.9, **options)), "control"


def test_a_target_without_a_head_has_no_drafter_columns(tiny):
    rows = topk_rows(tiny(mtp=False), documents(2), ks=[4])
    assert rows["accept"].null_count() == len(rows) and rows["tail"].null_count() == 0
    cost = topk_cost(rows)
    assert cost["error_bucket"].to_list() == [None] and cost["tail"][0] > 0


def test_the_report_keeps_its_bounds(model):
    cost = topk_cost(topk_rows(model, documents(), ks=[1, 2, 8, 32, 83], anchors=10))
    assert cost["k"].to_list() == [1, 2, 8, 32, 83] and cost["documents"].to_list() == [5] * 5
    assert (cost["error_bucket"] >= -1e-12).all() and (cost["error_kept"] <= 1e-12).all()
    assert (cost["error_bucket"] <= cost["bound"] + 1e-12).all()
    assert (cost["error_kept"].abs() <= cost["bound"] + 1e-12).all()
    assert (cost["error_renorm"].abs() <= cost["tail"] + 1e-12).all() and (
        cost["kl_bucket"] <= cost["kl"] + 1e-12
    ).all()
    assert cost["tail"].is_sorted(descending=True) and cost["kl_bucket"].is_sorted()
    assert (cost["tail_low"] <= cost["tail"]).all() and (cost["tail"] <= cost["tail_high"]).all()
    assert cost["tail"][-1] == 0 and cost["accept"].n_unique() == 1
    assert (cost["error_bucket_most"] >= cost["error_bucket"]).all()


# ---------------------------------------------------------------- records


def test_records_say_what_full_laws_say(model, tmp_path):
    tapes = documents()
    anchors = extract(model, tapes, out=tmp_path / "a", gamma=1, top_k=16, anchors="all")
    rows = topk_rows(model, tapes, ks=[1, 4, 16], anchors="all")
    truth, found = topk_cost(rows), topk_cost(anchors, ks=[1, 4, 16])
    assert found["positions"].to_list() == truth["positions"].to_list()
    for name in ("mass", "tail", "tv", "tail_p95", "tail_max", "tail_low", "tail_high"):
        np.testing.assert_allclose(found[name], truth[name], rtol=1e-5, atol=1e-7)
    assert found["accept"].null_count() == 3 and found.columns == truth.columns
    cooler = topk_cost(topk_rows(model, tapes, ks=[1, 4, 16], anchors="all", temperature=1.0))
    assert not np.allclose(cooler["tail"], found["tail"], rtol=1e-3), "control: another temperature"


def test_a_store_and_a_directory_are_read_alike(model, tmp_path):
    tapes = documents()
    store = extract_sequences(model, tapes, out=tmp_path / "s", top_k=16)
    found = topk_cost(store)
    assert found.equals(topk_cost(tmp_path / "s")) and found["k"].to_list() == [1, 2, 4, 8, 16]
    kept = [row.kept.tail[:-1][row.loss_mask_S[1:]] for row in sequences(store)]
    assert found["tail"][-1] == pytest.approx(float(np.concatenate(kept).astype(np.float64).mean()), rel=1e-9)
    assert found["positions"][0] == sum(len(tape) - tape.prompt_len for tape in tapes)


def test_unsupervised_slots_do_not_count(model, tmp_path):
    mask = np.arange(40) % 3 == 0
    tape = Tape("d", np.arange(40), supervised=mask)
    records = extract(model, tape, out=tmp_path / "a", gamma=2, top_k=4, anchors="all")
    a = to_arrays(records)
    assert topk_cost(records)["positions"][0] == a["slot_mask"].sum() < a["slot_mask"].size


def test_what_cannot_be_reported_is_refused(model, tmp_path):
    store = extract_sequences(model, documents(1), out=tmp_path / "s")
    with pytest.raises(UserError, match="holds no kept ids"):
        topk_cost(store)
    rows = topk_rows(model, documents(1), ks=[2, 4])
    with pytest.raises(UserError, match=r"ks=\[3\] is not in the frame: choose among 2, 4"):
        topk_cost(rows, ks=[2, 3])
    assert topk_cost(rows, ks=[4])["k"].to_list() == [4]
    with pytest.raises(UserError, match="ks=84 is not valid"):
        topk_rows(model, documents(1), ks=[84])
    with pytest.raises(UserError, match="needs at least 3"):
        topk_rows(model, Tape("d", np.arange(2)))
    with pytest.raises(UserError, match=r"needs the columns .* is missing"):
        topk_cost(rows.drop("tail"))


def test_a_bad_row_is_named(tiny):
    model = tiny(tied=False)
    model.head.data[7] = float("nan")
    with pytest.raises(NonFiniteError, match="document 'd0': the logits of position"):
        topk_rows(model, documents(1))


# ---------------------------------------------------------------- bytes


def test_layouts_give_the_published_bytes():
    each = {layout.name: layout for layout in LAYOUTS}
    assert each["deepspec"].token_bytes(2560, 5) == 30_726  # Qwen3-4B
    assert each["specforge dspark"].token_bytes(4096, 5) == 49_168  # Qwen3-8B
    assert each["speculators"].token_bytes(4096, 3) - each["speculators"].ids == 32_768  # Llama-3.1-8B, rows alone
    assert each["specforge eagle3"].token_bytes(4096, 5) == 16 + 4 * 8192


def test_bytes_of_datasets_are_those_on_disk(model, tmp_path):
    tapes = documents()
    extract(model, tapes, out=tmp_path / "anchors", gamma=2, top_k=4)
    extract_sequences(model, tapes, out=tmp_path / "store", hidden_dtype="fp8")
    frame = record_bytes(tmp_path / "anchors", tmp_path / "store", layers=2, seq_length=64)
    size = {name: sum(f.stat().st_size for f in (tmp_path / name).glob("*.arrow")) for name in ("anchors", "store")}
    rows = {row["name"]: row for row in frame.iter_rows(named=True)}
    assert rows["anchors"]["total_bytes"] == size["anchors"] and rows["anchors"]["unit"] == "anchor"
    assert rows["anchors"]["units"] == 20 and rows["anchors"]["unit_bytes"] == size["anchors"] / 20
    assert rows["store"]["token_bytes"] == size["store"] / tapes.n_tokens and rows["anchors"]["ratio"] == 1
    assert rows["deepspec"]["total_bytes"] == tapes.n_tokens * (6 + 3 * 2 * 30) and not rows["deepspec"]["measured"]
    padded = rows["nemo-automodel dspark"]
    assert padded["units"] == 5 * 64 and padded["token_bytes"] == pytest.approx(320 * 196 / tapes.n_tokens)
    with pytest.raises(UserError, match="seq_length=10 is not valid"):
        record_bytes(tmp_path / "anchors", seq_length=10)
    extract(model, documents(2), out=tmp_path / "other", gamma=2, top_k=4)
    with pytest.raises(UserError, match="of another corpus"):
        record_bytes(tmp_path / "anchors", tmp_path / "other")
