"""The sequence store end to end on a tiny model: rows, bytes, resume, and logits rebuilt from what is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.errors import CheckpointError, NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.corpus import corpus
from workbench.datasets import (
    SequenceOptions,
    extract,
    extract_sequences,
    load_anchors,
    load_sequences,
    post_norm,
    read_sequence,
    rebuilt_logits,
    sequence_passes,
    sequence_store,
    sequences,
    to_arrays,
)
from workbench.datasets.norm import LAYERS
from workbench.datasets.rows import read_rows, stored_columns
from workbench.datasets.topk import sparse_rows
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model
from workbench_kernels.dispatch import use

ROOT = Path(__file__).resolve().parents[2]
SMALL = dict(chunk=16, shard_tokens=120)


@pytest.fixture(scope="module")
def model(tiny) -> HybridModel:
    return tiny()


def ragged(count: int = 9) -> Corpus:
    rng = np.random.default_rng(5)
    lengths = rng.permutation(np.linspace(1, 70, count).astype(int))
    tapes = [Tape(f"d{i}", rng.integers(0, 83, n), int(n) // 3, "s", "train") for i, n in enumerate(lengths)]
    return Corpus(tapes, name="ragged")


def shards(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.glob("*.arrow"))]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def truth(model: HybridModel, tape: Tape, taps: tuple[int, ...] = ()):
    ids = torch.from_numpy(tape.tokens.astype(np.int64))[None]
    return model.forward(ids, model.new_cache(capacity=len(tape)), taps=taps)


# ---------------------------------------------------------------- what is stored


def test_a_store_holds_what_the_model_says(model, tmp_path):
    tapes = ragged()
    extract_sequences(model, tapes, out=tmp_path / "x", taps=[0, 3], hidden_dtype="float32", top_k=7, **SMALL)
    store = load_sequences(tmp_path / "x")
    assert len(store) == len(tapes) == 9
    for tape, row in zip(tapes, sequences(store), strict=True):
        rows = truth(model, tape, taps=(0, 3))
        assert (row.doc_id, row.split, row.source, row.prompt_len) == (tape.doc_id, "train", "s", tape.prompt_len)
        assert np.array_equal(row.tokens_S, tape.tokens) and len(row) == len(tape)
        assert np.array_equal(row.loss_mask_S, np.arange(len(tape)) >= tape.prompt_len)
        assert np.array_equal(row.hidden_SH, rows.trunk_BTH[0].numpy())
        assert all(np.array_equal(row.taps[i], rows.taps[i][0].numpy()) for i in (0, 3)) and len(row.taps) == 2
        expected = sparse_rows(rows.logits_BTV[0], top_k=7, temperature=0.7)
        assert np.array_equal(row.kept.ids, expected.ids) and np.array_equal(row.kept.logits, expected.logits)
        np.testing.assert_allclose(row.kept.probs.sum(-1) + row.kept.tail, 1, atol=2e-5)
        tensors = row.tensors(torch.bfloat16)
        assert tensors["tap_3"].dtype == torch.bfloat16 and tensors["top_ids"].shape == (len(tape), 7)
        assert tensors["tokens"].dtype == torch.int64 and tensors["loss_mask"].dtype == torch.bool


def test_the_last_layers_tap_is_the_trunk_row_and_the_first_is_not_the_embedding(model, tmp_path):
    tapes = ragged(2)
    last = model.config.num_layers - 1
    options = dict(taps=[0, last], hidden_dtype="float32")
    row = read_sequence(extract_sequences(model, tapes, out=tmp_path / "x", **options), -1)
    assert np.array_equal(row.taps[last], row.hidden_SH)
    embedded = model.embed[torch.from_numpy(row.tokens_S.astype(np.int64))].numpy()
    assert not np.allclose(row.taps[0], embedded, atol=1e-3), "tap 0 is the output of layer 0, not its input"


def test_taps_through_the_kernels_are_those_of_plain_torch(model, tmp_path):
    tapes, options = ragged(3), dict(taps=[1, 4], hidden_dtype="float32", exact=False)
    plain = extract_sequences(model, tapes, out=tmp_path / "plain", **options)
    with use("ref"):
        kernels = extract_sequences(model, tapes, out=tmp_path / "kernels", batch=3, **options)
    for a, b in zip(sequences(plain), sequences(kernels), strict=True):
        np.testing.assert_allclose(a.hidden_SH, b.hidden_SH, atol=1e-4)
        for layer in (1, 4):
            np.testing.assert_allclose(a.taps[layer], b.taps[layer], atol=1e-4)


def test_a_mask_of_the_tape_is_kept(model, tmp_path):
    mask = np.arange(20) % 5 < 2
    tape = Tape("d", np.arange(20), prompt_len=4, supervised=mask)
    row = read_sequence(extract_sequences(model, tape, out=tmp_path / "x"), 0)
    assert np.array_equal(row.loss_mask_S, mask) and row.kept is None and row.taps == {}


def test_the_manifest_says_how_to_read_it(model, tmp_path):
    extract_sequences(model, ragged(3), out=tmp_path / "x", taps=[1], hidden_dtype="fp8", **SMALL)
    manifest = Manifest.read(tmp_path / "x")
    assert manifest.kind == "sequence" and manifest.complete and manifest.extra["pre_norm"] is True
    assert manifest.parameters == SequenceOptions((1,), "fp8", **SMALL).to_dict()
    assert manifest.extra["layers"] == {
        "convention": LAYERS,
        "count": model.config.num_layers,
        "taps": [1],
    }
    norm = manifest.extra["norm"]
    assert norm["eps"] == model.config.rms_norm_eps and len(norm["fingerprint"]) == 16
    assert manifest.counts == {"documents": 3, "records": 3, "tokens": ragged(3).n_tokens}
    each = manifest.counts["tokens"] * SequenceOptions((1,), "fp8").token_bytes(model.config.hidden_size)
    assert 0 < sum(s["bytes"] for s in manifest.shards) - each < 20_000, "headers are all that comes on top"


def test_datasets_opens_a_store_as_it_is(model, tmp_path):
    import datasets

    extract_sequences(model, ragged(), out=tmp_path / "x", taps=[2], hidden_dtype="fp8", top_k=3, **SMALL)
    plain = datasets.load_from_disk(str(tmp_path / "x"))
    assert len(plain) == 9 and len(plain[4]["tokens"]) == len(ragged()[4])
    assert len(plain[4]["hidden_scale"]) == len(ragged()[4]) and set(plain.column_names) >= {"tap_2", "tap_2_scale"}


# ---------------------------------------------------------------- formats of rows


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_stored_rows_are_the_rounded_rows(model, tmp_path, dtype):
    full = extract_sequences(model, ragged(), out=tmp_path / "f", taps=[0], hidden_dtype="float32", **SMALL)
    small = extract_sequences(model, ragged(), out=tmp_path / "s", taps=[0], hidden_dtype=dtype, **SMALL)
    for a, b in zip(sequences(full), sequences(small), strict=True):
        for x, y in ((a.hidden_SH, b.hidden_SH), (a.taps[0], b.taps[0])):
            if dtype == "bfloat16":
                assert np.array_equal(torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy(), y)
                assert np.array_equal(b.tensors(torch.bfloat16)["hidden"].float().numpy(), b.hidden_SH)
                continue
            top = np.abs(x).max(-1, keepdims=True)
            assert (np.abs(x - y) <= np.maximum(np.abs(x) / 16, top / 448 / 512) * 1.0001).all()
            assert not np.array_equal(x, y)


def test_a_row_of_fp8_depends_on_itself_alone():
    x = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 50)[:, None]
    x[3] = 0.0
    together = stored_columns("h", x, "fp8")
    alone = [stored_columns("h", row[None], "fp8") for row in x]
    assert torch.equal(together["h"], torch.cat([one["h"] for one in alone]))
    assert torch.equal(together["h_scale"], torch.cat([one["h_scale"] for one in alone]))
    found = read_rows("h", {name: column.numpy().reshape(-1) for name, column in together.items()}, 50)
    assert np.array_equal(found[3], np.zeros(30)) and np.abs(found - x.numpy()).max() > 0
    scaled = together | {"h_scale": together["h_scale"].roll(1)}
    wrong = read_rows("h", {name: column.numpy().reshape(-1) for name, column in scaled.items()}, 50)
    assert not np.allclose(wrong, x.numpy(), rtol=0.1), "control: scales of other rows"


# ---------------------------------------------------------------- logits from what is stored


def agreement(found: np.ndarray, logits: np.ndarray) -> tuple[float, float]:
    """Share of equal picks among rows whose two largest logits are not within 0.01, and mean total variation."""
    laws = [np.exp(x - x.max(-1, keepdims=True)) for x in (found.astype(np.float64), logits.astype(np.float64))]
    p, q = (x / x.sum(-1, keepdims=True) for x in laws)
    best = np.sort(logits, -1)
    clear = best[:, -1] - best[:, -2] > 0.01
    assert clear.mean() > 0.95, "ties are few"
    return float((found.argmax(-1) == logits.argmax(-1))[clear].mean()), float(np.abs(p - q).sum(-1).mean() / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_come_back_from_rows_norm_and_head(tiny, tmp_path, dtype):
    model = tiny(tied=False)
    tapes = ragged()
    head = model.head.detach().numpy()
    store = extract_sequences(model, tapes, out=tmp_path / "x", hidden_dtype=dtype, **SMALL)
    rows = [read_sequence(store, i).hidden_SH for i in range(len(store))]
    logits = np.concatenate([truth(model, tape).logits_BTV[0].numpy() for tape in tapes])
    hidden = np.concatenate(rows)
    picks, tv = agreement(rebuilt_logits(hidden, tmp_path / "x", head), logits)
    assert picks >= 0.999 and tv < 1e-3, (picks, tv)
    for wrong in (hidden @ head.T, post_norm(post_norm(hidden, tmp_path / "x"), tmp_path / "x") @ head.T):
        assert agreement(wrong, logits)[1] > 1e-2, "control: no norm, or the norm twice"
    plain = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    assert agreement(plain * model.norm.detach().numpy() @ head.T, logits)[1] > 1e-2, "control: w rather than 1 + w"


# ---------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_bytes_depend_neither_on_batch_nor_on_chunk(model, tmp_path, dtype):
    options = dict(taps=[1], hidden_dtype=dtype, top_k=5, shard_tokens=120)
    for name, batch, chunk in (("a", 1, 512), ("b", 4, 16), ("c", 9, 7), ("d", None, 1)):
        extract_sequences(model, ragged(), out=tmp_path / name, batch=batch, chunk=chunk, **options)
    first = shards(tmp_path / "a")
    assert len(first) > 1 and all(shards(tmp_path / name) == first for name in "bcd")


def test_control_documents_taken_for_each_other_change_bytes(model, tmp_path, monkeypatch):
    extract_sequences(model, ragged(), out=tmp_path / "right", batch=4, **SMALL)
    monkeypatch.setattr(sequence_passes, "flat_places", lambda places, width: np.concatenate(places))
    extract_sequences(model, ragged(), out=tmp_path / "wrong", batch=4, **SMALL)
    assert shards(tmp_path / "wrong") != shards(tmp_path / "right")


def test_32_documents_in_and_32_out_in_their_order(model, tmp_path):
    tapes = ragged(32)
    store = extract_sequences(model, tapes, out=tmp_path / "x", batch=6, **SMALL)
    assert [row.doc_id for row in sequences(store)] == [tape.doc_id for tape in tapes]
    assert all(np.array_equal(row.tokens_S, tape.tokens) for row, tape in zip(sequences(store), tapes, strict=True))


def test_a_record_batch_is_a_document(model, tmp_path):
    import pyarrow as pa

    extract_sequences(model, ragged(), out=tmp_path / "x", **SMALL)
    for file in (tmp_path / "x").glob("*.arrow"):
        with pa.ipc.open_stream(file) as stream:
            assert {batch.num_rows for batch in stream} == {1}


@pytest.mark.parametrize("batch", [1, 2])
def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(model, tmp_path, monkeypatch, batch):
    options = dict(taps=[1], hidden_dtype="fp8", batch=batch, chunk=16, shard_tokens=100)
    forward, calls = HybridModel.forward, [0, 1 << 30]

    def counted(self, *given, **more):
        calls[0] += 1
        if calls[0] > calls[1]:
            raise KeyboardInterrupt
        return forward(self, *given, **more)

    monkeypatch.setattr(HybridModel, "forward", counted)
    extract_sequences(model, ragged(24), out=tmp_path / "whole", **options)
    calls[:] = 0, 2 * calls[0] // 3
    with pytest.raises(KeyboardInterrupt):
        extract_sequences(model, ragged(24), out=tmp_path / "x", **options)
    done = {shard["file"] for shard in Manifest.read(tmp_path / "x").shards}
    assert 0 < len(done) < len(shards(tmp_path / "whole")) and not list((tmp_path / "x").glob("*.tmp"))
    before = {name: (tmp_path / "x" / name).stat().st_mtime_ns for name in done}
    calls[:] = 0, 1 << 30
    extract_sequences(model, ragged(24), out=tmp_path / "x", **options)
    assert contents(tmp_path / "x") == contents(tmp_path / "whole")
    assert before == {name: (tmp_path / "x" / name).stat().st_mtime_ns for name in done}, "finished shards stay"


def test_documents_that_wait_are_bounded(model, monkeypatch):
    tapes = list(ragged())
    monkeypatch.setattr(sequence_store, "batch_limit", lambda model, batch, chunk: lambda rows: 32)
    each = max(map(len, tapes)) * SequenceOptions().token_bytes(model.config.hidden_size)
    monkeypatch.setattr(sequence_store, "HELD_BYTES", 3.5 * sequence_store.WINDOW * each)
    assert sequence_store._limit(model, tapes, SequenceOptions())(5) == 3
    monkeypatch.setattr(sequence_store, "HELD_BYTES", 1)
    assert sequence_store._limit(model, tapes, SequenceOptions())(5) == 1
    assert sequence_store._limit(model, tapes, SequenceOptions(batch=8))(5) == 32


# ---------------------------------------------------------------- refusals

WRONG = [
    (dict(taps=[3, 1]), "name every layer once, in ascending order"),
    (dict(taps=[1, 1]), "name every layer once"),
    (dict(taps=[5]), "this model has 5 layers, counted from 0"),
    (dict(taps="1"), "give a list of layers"),
    (dict(hidden_dtype="float16"), "choose one of 'bfloat16', 'float32', 'fp8'"),
    (dict(top_k=84), "from 1 to 83"),
    (dict(temperature=0.0), "temperature=0.0 is not valid"),
    (dict(shard_tokens=0), "shard_tokens=0 is not valid"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_what_is_refused_leaves_nothing(model, tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        extract_sequences(model, ragged(2), out=tmp_path / "x", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("taps", [(), (2,)])
def test_a_row_that_is_not_finite_names_document_position_and_layer(tiny, tmp_path, taps):
    model = tiny()
    model.embed.data[7] = float("nan")
    tape = Tape("bad", np.array([1, 2, 3, 7, 4]))
    with pytest.raises(UserError, match="document 'bad': the trunk row of position 3 is not finite"):
        extract_sequences(model, tape, out=tmp_path / "x", taps=taps, chunk=3)
    assert not list(tmp_path.iterdir())


def test_a_bad_row_of_logits_is_named(tiny, tmp_path):
    model = tiny(tied=False)
    model.head.data[7] = float("inf")
    with pytest.raises(NonFiniteError, match=r"document 'd\d': the logits of position \d+ hold"):
        extract_sequences(model, ragged(), out=tmp_path / "x", top_k=2, batch=4, **SMALL)


def test_kinds_are_not_taken_for_each_other(model, tmp_path):
    tapes = Corpus([Tape("d", np.arange(30))])
    store = extract_sequences(model, tapes, out=tmp_path / "s", **SMALL)
    anchors = extract(model, tapes, out=tmp_path / "a", gamma=2, top_k=4)
    with pytest.raises(CheckpointError, match="holds 'sequence'; 'anchors' is needed"):
        load_anchors(tmp_path / "s")
    with pytest.raises(CheckpointError, match="holds 'anchors'; 'sequence' is needed"):
        load_sequences(tmp_path / "a")
    with pytest.raises(UserError, match="they are no sequence store"):
        read_sequence(anchors, 0)
    with pytest.raises(UserError, match="they are no anchor records"):
        to_arrays(store)
    with pytest.raises(UserError, match="index=1 is not valid"):
        read_sequence(store, 1)


def test_a_flipped_byte_is_refused(model, tmp_path):
    extract_sequences(model, ragged(), out=tmp_path / "x", **SMALL)
    file = sorted((tmp_path / "x").glob("*.arrow"))[1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{file.name} does not match the hash"):
        load_sequences(tmp_path / "x")


def test_the_demos_logits_come_back_from_bfloat16_and_not_from_fp8(tmp_path):
    model = load_model(ROOT / "data" / "demo")
    tapes = corpus("demo", tokenizer=model.tokenizer, max_tokens=128, overflow="truncate", limit=6)
    logits = np.concatenate([truth(model, tape).logits_BTV[0].numpy() for tape in tapes])
    found = {}
    for dtype in ("bfloat16", "fp8"):
        store = extract_sequences(model, tapes, out=tmp_path / dtype, hidden_dtype=dtype, batch=3, chunk=128)
        hidden = np.concatenate([row.hidden_SH for row in sequences(store)])
        found[dtype] = agreement(rebuilt_logits(hidden, tmp_path / dtype, model.embed.detach().float().numpy()), logits)
    assert found["bfloat16"][0] >= 0.999 and found["bfloat16"][1] < 1e-3, found
    assert found["fp8"][1] > 3e-3, "control: rows with three bits of mantissa are not the target's"
