"""Extraction end to end on a tiny model: shards, manifest, resume, hashes, memory, and sentences that leave nothing."""

from __future__ import annotations

import inspect
import json
import shutil
import socket
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.core.errors import CheckpointError, NonFiniteError, UserError
from workbench.core.manifest import Manifest
from workbench.core.sealed import seal, unseal
from workbench.core.tape import Corpus, Tape
from workbench.datasets import ExtractOptions, extract, load_anchors, post_norm, to_arrays
from workbench.datasets import shards as shards_module
from workbench.model.fingerprint import fingerprint

SMALL = dict(gamma=3, top_k=8, chunk=16)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny()


def documents(count: int = 6, length: int = 40, vocab: int = 83) -> Corpus:
    generator = np.random.default_rng(3)
    sizes = [length + 3 * i for i in range(count)]
    rows = [generator.integers(0, vocab, n) for n in sizes]
    return Corpus([Tape(f"d{i}", t, prompt_len=i, source="s", split="heldout") for i, t in enumerate(rows)], name="c")


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


class Killed(BaseException):
    """Stands for whatever ends a process."""


def kill_after(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, forwards: int) -> None:
    left, run = [forwards], type(model).forward

    def forward(self, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return run(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)


# ---------------------------------------------------------------- what is written


def test_records_open_as_they_are_and_say_what_made_them(model, tmp_path):
    import datasets

    tapes = documents()
    records = extract(model, tapes, out=tmp_path / "a" / "b", shard_rows=10, **SMALL)
    out = tmp_path / "a" / "b"
    plain = datasets.load_from_disk(str(out))
    assert isinstance(records, datasets.Dataset) and len(plain) == len(records) == 24
    assert plain[5] == records[5] and plain[-1] == records[-1]
    assert records.filter(lambda row: row["doc_id"] == "d2", load_from_cache_file=False).num_rows == 4
    assert [len(records[0][c]) for c in ("hidden", "tokens", "slot_mask", "top_ids", "tail_probs")] == [30, 4, 3, 24, 3]
    assert len(list(out.glob("data-*.arrow"))) == 2 and not list(out.glob("*.tmp"))
    manifest = Manifest.read(out)
    assert manifest.complete and manifest.kind == "anchors" and manifest.model["fingerprint"] == fingerprint(model)
    assert manifest.counts["records"] == 24 and manifest.counts["documents"] == 6
    assert manifest.counts["tokens"] == tapes.n_tokens > manifest.counts["rows_run"]
    assert manifest.parameters == ExtractOptions(**SMALL, shard_rows=10).to_dict()
    assert set(manifest.machine) == {"cpu", "system", "device", "device_name", "threads"}
    assert [s["documents"] for s in manifest.shards] == [[0, 3], [3, 6]] and manifest.versions["torch"]
    text = (out / "manifest.json").read_text()
    assert str(tmp_path) not in text and socket.gethostname() not in text


def test_columns_are_what_the_model_says(model, tmp_path):
    tapes = documents(3)
    records = extract(model, tapes, out=tmp_path / "x", anchors="all", hidden_dtype="float32", **SMALL)
    a = to_arrays(records)
    assert a["top_probs"].shape[1:] == (3, 8) and a["hidden"].dtype == np.float32
    for tape in tapes:
        x = torch.from_numpy(tape.tokens.astype(np.int64))[None]
        rows = model.forward(x, model.new_cache(capacity=len(tape)))
        mine = a["doc_id"] == tape.doc_id
        p = a["position"][mine]
        assert p.tolist() == list(range(max(tape.prompt_len - 1, 1), len(tape) - 3))
        assert np.array_equal(a["hidden"][mine], rows.trunk_BTH[0, p - 1].numpy())
        assert np.array_equal(a["tokens"][mine], tape.tokens[p[:, None] + np.arange(4)])
        logits = rows.logits_BTV[0].numpy()[p[:, None] + np.arange(3)]
        order = np.argsort(-logits, axis=-1, kind="stable")[..., :8]
        assert np.array_equal(a["top_ids"][mine], order)
        assert np.array_equal(a["top_logits"][mine], np.take_along_axis(logits, order, -1))
    normed = post_norm(a["hidden"][:5], tmp_path / "x")
    expected = model.forward(x, model.new_cache(), logits="none").normed_BTH[0]
    last = post_norm(a["hidden"][mine], tmp_path / "x")
    np.testing.assert_allclose(last, expected[p - 1].numpy(), atol=2e-6)
    assert normed.shape == (5, 30)


def test_exact_records_do_not_depend_on_the_chunk_nor_on_neighbours(model, tmp_path):
    tapes = documents(4)
    arrays = [
        to_arrays(extract(model, some, out=tmp_path / str(i), **{**SMALL, "chunk": chunk}))
        for i, (some, chunk) in enumerate([(tapes, 512), (tapes, 7), (tapes, 1), (tapes[2:3], 16)])
    ]
    for other in arrays[1:3]:
        assert all(np.array_equal(arrays[0][name], other[name]) for name in other)
    alone = arrays[0]["doc_id"] == "d2"
    assert all(np.array_equal(arrays[0][name][alone], arrays[3][name]) for name in arrays[3])


def test_fast_records_agree_within_rounding_and_leave_the_model_as_it_was(model, tmp_path):
    tapes = documents(2)
    exact = to_arrays(extract(model, tapes, out=tmp_path / "e", **SMALL))
    fast = to_arrays(extract(model, tapes, out=tmp_path / "f", exact=False, **SMALL))
    assert model.exact is True and Manifest.read(tmp_path / "f").model["exact"] is False
    np.testing.assert_allclose(fast["top_logits"], exact["top_logits"], atol=1e-4)
    assert np.array_equal(fast["position"], exact["position"])


def test_stored_bfloat16_is_the_rounded_row(model, tmp_path):
    tapes = documents(2)
    full = extract(model, tapes, out=tmp_path / "f", hidden_dtype="float32", **SMALL)
    half = extract(model, tapes, out=tmp_path / "h", **SMALL)
    assert half.features["hidden"].feature.dtype == "uint16"
    rounded = torch.from_numpy(to_arrays(full, ["hidden"])["hidden"].copy()).to(torch.bfloat16).float().numpy()
    assert np.array_equal(to_arrays(half, ["hidden"])["hidden"], rounded)
    with pytest.raises(UserError, match="choose among doc_id"):
        to_arrays(half, ["carrier"])


def test_a_mask_reaches_the_slots(model, tmp_path):
    mask = np.arange(40) % 5 < 2
    tape = Tape("d", np.arange(40), prompt_len=0, supervised=mask)
    a = to_arrays(extract(model, tape, out=tmp_path / "x", anchors=[1, 4, 9], **SMALL))
    assert a["slot_mask"].tolist() == [[bool(mask[p + j + 1]) for j in range(3)] for p in (1, 4, 9)]


# ---------------------------------------------------------------- kill and resume


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(model, tmp_path, monkeypatch):
    tapes, options = documents(), dict(shard_rows=8, **SMALL)
    extract(model, tapes, out=tmp_path / "whole", **options)
    whole = contents(tmp_path / "whole")
    assert len(whole) == 3 + 5
    out, sizes = tmp_path / "killed", set()
    for forwards in (1, 8, 11):
        with monkeypatch.context() as patch:
            kill_after(patch, model, forwards)
            with pytest.raises(Killed):
                extract(model, tapes, out=out, **options)
        if out.exists():
            sizes.add(len(Manifest.read(out).shards))
            assert not list(out.glob("*.tmp")) and not Manifest.read(out).complete
            with pytest.raises(CheckpointError, match="incomplete"):
                load_anchors(out)
            (out / "data-00002-of-00003.arrow.tmp").write_bytes(b"what kill -9 leaves")
    assert sizes == {1, 2}, "shards that were done are not done again"
    extract(model, tapes, out=out, **options)
    assert contents(out) == whole
    with monkeypatch.context() as patch:
        kill_after(patch, model, 0)
        extract(model, tapes, out=out, **options)
    assert contents(out) == whole, "a finished run is opened, not repeated"


def test_a_lost_file_is_made_again(model, tmp_path):
    options = dict(shard_rows=8, **SMALL)
    extract(model, documents(), out=tmp_path / "x", **options)
    before = contents(tmp_path / "x")
    for name in ("data-00001-of-00003.arrow", "norm.safetensors", "state.json"):
        (tmp_path / "x" / name).unlink()
        with pytest.raises(CheckpointError, match=f"lacks {name}"):
            load_anchors(tmp_path / "x")
        extract(model, documents(), out=tmp_path / "x", **options)
        assert contents(tmp_path / "x") == before


@pytest.mark.parametrize("name", ["data-00001-of-00003.arrow", "norm.safetensors", "state.json", "documents.jsonl"])
def test_a_flipped_byte_is_refused_and_made_good(model, tmp_path, name):
    options = dict(shard_rows=8, **SMALL)
    extract(model, documents(), out=tmp_path / "x", **options)
    before = contents(tmp_path / "x")
    file = tmp_path / "x" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{name} does not match the hash"):
        load_anchors(tmp_path / "x")
    extract(model, documents(), out=tmp_path / "x", **options)
    assert contents(tmp_path / "x") == before


def test_another_run_is_not_mixed_in(model, tiny, tmp_path):
    out = tmp_path / "x"
    extract(model, documents(), out=out, **SMALL)
    before = contents(out)
    for change, says in [
        (dict(gamma=2), "parameters.gamma is 3 there and 2 now"),
        (dict(exact=False), "model.exact is True there and False now"),
        (dict(anchors=[1, 2]), r"parameters.anchors is 4 there and \[1, 2\] now"),
    ]:
        with pytest.raises(UserError, match=says):
            extract(model, documents(), out=out, **{**SMALL, **change})
    with pytest.raises(UserError, match=r"model\.fingerprint"):
        extract(tiny(seed=1), documents(), out=out, **SMALL)
    with pytest.raises(UserError, match=r"corpus\.fingerprint"):
        extract(model, documents(5), out=out, **SMALL)
    with pytest.raises(UserError, match="resume=False"):
        extract(model, documents(), out=out, resume=False, **SMALL)
    assert contents(out) == before


def test_two_writers_do_not_meet(model, tmp_path, monkeypatch):
    caught = []
    finish = shards_module.ShardDirectory.finish

    def second(self, counts):
        with pytest.raises(UserError) as error:
            extract(model, documents(), out=tmp_path / "x", **SMALL)
        caught.append(str(error.value))
        finish(self, counts)

    monkeypatch.setattr(shards_module.ShardDirectory, "finish", second)
    extract(model, documents(), out=tmp_path / "x", **SMALL)
    assert "being written by another process" in caught[0]


# ---------------------------------------------------------------- memory


def test_memory_does_not_grow_with_the_corpus(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "BATCH_ROWS", 16)
    peaks = []
    for times in (1, 8):
        tapes = documents(4 * times, length=60)
        tracemalloc.start()
        extract(model, tapes, out=tmp_path / str(times), anchors=8, shard_rows=64, **SMALL)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0] + 100_000, peaks


def test_a_shard_is_written_as_it_comes(model, tmp_path, monkeypatch):
    import pyarrow as pa

    monkeypatch.setattr(shards_module, "BATCH_ROWS", 16)
    extract(model, documents(8), out=tmp_path / "x", anchors=6, **SMALL)
    with pa.ipc.open_stream(tmp_path / "x" / "data-00000-of-00001.arrow") as stream:
        sizes = [batch.num_rows for batch in stream]
    assert sizes == [16, 16, 16]


# ---------------------------------------------------------------- sentences


def test_defaults_are_the_options():
    signature = inspect.signature(extract)
    for name, value in vars(ExtractOptions()).items():
        assert signature.parameters[name].default == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(gamma=0), "gamma=0"),
        (dict(gamma=2.5), "gamma=2.5"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_k=84), "top_k=84 .* from 1 to 83"),
        (dict(temperature=0), "temperature=0 .*greedy"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature="hot"), "temperature='hot'"),
        (dict(anchors=0), "anchors=0"),
        (dict(anchors="few"), "anchors='few'"),
        (dict(anchors={"d0": [1], "zz": [2]}), "document 'zz'"),
        (dict(chunk=0), "chunk=0"),
        (dict(seed=-1), "seed=-1"),
        (dict(hidden_dtype="float16"), "hidden_dtype='float16'"),
        (dict(shard_rows=0), "shard_rows=0"),
        (dict(exact="yes"), "exact='yes'"),
    ],
)
def test_a_bad_option_is_a_sentence_and_nothing_is_made(model, tmp_path, change, says):
    with pytest.raises(UserError, match=says):
        extract(model, documents(1), out=tmp_path / "deep" / "x", **{**SMALL, **change})
    assert not list(tmp_path.iterdir()) and model.exact is True


@pytest.mark.parametrize(
    ("tapes", "says"),
    [
        ([], "is empty"),
        ("demo", "give what corpus"),
        ([[1, 2, 3]], "give what corpus"),
        ([Tape("a", [1, 2, 3, 4])], "document 'a' has 4 tokens; gamma=3 needs at least 5"),
        ([Tape("a", np.arange(9)), Tape("a", np.arange(9))], "holds doc_id 'a' twice"),
        ([Tape("a", [1, 2, 3, 4, 5, 83])], "token id 83 at position 5.* 0 to 82"),
        ([Tape("a", [1, -2, 3, 4, 5, 6])], "token id -2 at position 1"),
        ([Tape("a", np.zeros(513), prompt_len=512)], r"513 tokens \(prompt 512\); this model's context is 512"),
    ],
)
def test_a_bad_tape_is_a_sentence_and_nothing_is_made(model, tmp_path, tapes, says):
    with pytest.raises(UserError, match=says):
        extract(model, tapes, out=tmp_path / "x", **SMALL)
    assert not list(tmp_path.iterdir())


def test_tapes_of_another_tokenizer_are_refused(tiny_dir, tmp_path):
    from workbench.model.weights.load import load_model

    model = load_model(tiny_dir)
    with pytest.raises(UserError, match="made with tokenizer 1234"):
        extract(model, Corpus([Tape("a", np.arange(9))], tokenizer="1234"), out=tmp_path / "x", **SMALL)


def test_a_directory_of_something_else_is_refused(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds notes\.txt and no manifest"):
        extract(model, documents(1), out=tmp_path, **SMALL)
    with pytest.raises(UserError, match="is a file"):
        extract(model, documents(1), out=tmp_path / "notes.txt", **SMALL)
    with pytest.raises(UserError, match="cannot be written to"):
        extract(model, documents(1), out=tmp_path / "notes.txt" / "x", **SMALL)
    (tmp_path / "notes.txt").rename(tmp_path / "notes.tmp")
    with pytest.raises(UserError, match=r"holds notes\.tmp and no manifest"):
        extract(model, documents(1), out=tmp_path, **SMALL)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.tmp"]
    with pytest.raises(CheckpointError, match="no manifest"):
        load_anchors(tmp_path)


def test_non_finite_logits_are_named_and_leave_nothing(tiny, tmp_path):
    model = tiny(tied=False)
    model.head.data[7] = float("inf")
    with pytest.raises(NonFiniteError, match=r"document 'd0': the logits of position 4 hold"):
        extract(model, documents(2), out=tmp_path / "x", anchors=[4, 9], **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_mass_that_is_off_stops_the_run(model, tmp_path, monkeypatch):
    from workbench.datasets import passes

    kept = passes.kept_columns

    def leaky(*args, **kwargs):
        rows = kept(*args, **kwargs)
        rows.tail_R[:] = 0.0
        return rows

    monkeypatch.setattr(passes, "kept_columns", leaky)
    with pytest.raises(UserError, match="and their tail miss 1"):
        extract(model, documents(2), out=tmp_path / "x", **SMALL)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_is_none_is_a_sentence(model, tmp_path):
    extract(model, documents(1), out=tmp_path / "x", **SMALL)
    file = tmp_path / "x" / "manifest.json"
    good = unseal(file.read_bytes())
    for bad, says in [
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        (json.dumps(good), "do not match the hash at its end"),
        (seal({**good, "format": 9}).decode(), "format 9"),
        (seal({**good, "surprise": 1}).decode(), "surprise"),
        (seal({**good, "kind": "table"}).decode(), "holds 'table'; 'anchors' is needed"),
    ]:
        file.write_text(bad)
        with pytest.raises(CheckpointError, match=says):
            load_anchors(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(CheckpointError, match="no manifest"):
        load_anchors(tmp_path / "x")


def test_the_fingerprint_names_weights_and_follows_them(tiny):
    a, b = tiny(), tiny()
    before = fingerprint(a)
    assert before == fingerprint(b) != fingerprint(tiny(seed=1)) and len(before) == 16
    with torch.no_grad():
        a.norm.add_(1.0)
    assert fingerprint(a) != before == fingerprint(b)
    assert fingerprint(b.to(torch.bfloat16)) != before
