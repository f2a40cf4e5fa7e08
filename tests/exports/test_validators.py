"""Our own check of an export: every fault that the readers take in silence is named, whatever the hashes say.

Each fault is put into a copy of a sound export and every hash is written anew, so that only meaning can give it away.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from workbench.datasets.export import export, validate
from workbench.model.ops import rms_norm

FORMATS = ("modelopt", "specforge-dflash", "specforge-dspark", "specforge-eagle3", "speculators")
LAST = {
    "modelopt": "hidden_states",
    "specforge-dspark": "target_last_hidden_states",
    "specforge-eagle3": "hidden_state",
}
TAPS = {
    "modelopt": "aux_hidden_states",
    "specforge-dflash": "hidden_states",
    "specforge-dspark": "hidden_states",
    "specforge-eagle3": "aux_hidden_state",
}
WITH_LAST = tuple(to for to in FORMATS if to != "specforge-dflash")


def change_last(held, to, change):
    """Change the last rows of a sample, [S, H]."""
    if to == "speculators":
        rows = held["hidden_states"].clone()
        rows[:, -1] = change(rows[:, -1])
        held["hidden_states"] = rows
    else:
        rows = held[LAST[to]]
        held[LAST[to]] = change(rows[0])[None] if rows.ndim == 3 else change(rows)


def change_taps(held, to, change):
    """Change the tapped rows of a sample, [S, L, H]."""
    if to == "speculators":
        rows = held["hidden_states"].clone()
        rows[:, :-1] = change(rows[:, :-1].clone())
        held["hidden_states"] = rows
    else:
        rows = held[TAPS[to]]
        changed = change(rows.reshape(rows.shape[-2], 3, 30).clone())
        held[TAPS[to]] = changed.reshape(rows.shape)


def change_ids(held, to, change):
    name = "token_ids" if to == "speculators" else "input_ids"
    held[name] = change(held[name].clone())


def problems(out, to):
    """What the check says, which must be something, and never that a hash does not match."""
    found = validate(out, to=to)
    assert found and not [text for text in found if "hash" in text or "bytes are not" in text], found
    return found


def one_of(found, says):
    assert any(says in text for text in found), found


@pytest.fixture
def spoil(copied, stores):
    """``spoil(to, change, index=0)``: problems of a copy in which one sample was changed."""

    def inner(to, change, index=0, **options):
        out = copied(to, **options)
        stores.change_sample(out, index, change)
        return problems(out, to)

    return inner


@pytest.mark.parametrize("to", FORMATS)
def test_another_token_id(spoil, to):
    def change(ids):
        ids[3] = (ids[3] + 1) % 83
        return ids

    says = "token_ids of its hidden rows are not" if to == "speculators" else "token ids are not those of the dataset"
    one_of(spoil(to, lambda held: change_ids(held, to, change)), says)


@pytest.mark.parametrize("to", [to for to in FORMATS if to != "speculators"])
def test_ids_and_masks_of_another_kind(copied, stores, to):
    def outside(ids):
        ids[0] = 83
        return ids

    def narrow(held):
        held["input_ids"], held["loss_mask"] = held["input_ids"].int(), held["loss_mask"].bool()

    def all_ones(held):
        held["loss_mask"] = torch.ones_like(held["loss_mask"])

    def short(held):
        held["loss_mask"] = held["loss_mask"][:-1]

    for change, says, index in (
        (lambda held: change_ids(held, to, outside), "outside the vocabulary of 83", 0),
        (narrow, "the type of its ids is torch.int32 where torch.int64 is due", 0),
        (all_ones, "its mask is not that of the dataset", 1),
        (short, "the shape of its mask is", 0),
    ):
        out = copied(to)
        stores.change_sample(out, index, change)
        one_of(problems(out, to), says)
        shutil.rmtree(out)


@pytest.mark.parametrize("to", FORMATS)
def test_rows_that_are_not_finite(spoil, to):
    def change(rows_SLH):
        rows_SLH[2, 1, 7] = float("nan")
        return rows_SLH

    one_of(
        spoil(to, lambda held: change_taps(held, to, change)), "tap 1 rows hold NaN or infinity, first at position 2"
    )


@pytest.mark.parametrize("to", WITH_LAST)
def test_last_rows_that_are_not_finite(spoil, to):
    def change(rows_SH):
        rows_SH[4, 0] = float("inf")
        return rows_SH

    one_of(spoil(to, lambda held: change_last(held, to, change)), "last rows hold NaN or infinity, first at position 4")


@pytest.mark.parametrize("to", FORMATS)
def test_rows_that_are_too_few(spoil, to):
    def change(held):
        name = "hidden_states" if to == "speculators" else TAPS[to]
        held[name] = held[name][..., :-1, :] if to != "speculators" else held[name][:-1]

    one_of(spoil(to, change), "rows have shape")


@pytest.mark.parametrize("to", FORMATS)
def test_layers_in_another_order(spoil, to):
    found = spoil(to, lambda held: change_taps(held, to, lambda rows_SLH: rows_SLH[:, [1, 0, 2]]))
    one_of(found, "of tap 0 is not the dataset's row of that layer")


@pytest.mark.parametrize("to", FORMATS)
def test_rows_that_are_shifted_by_one_position(spoil, to):
    found = spoil(to, lambda held: change_taps(held, to, lambda rows_SLH: rows_SLH.roll(1, 0)))
    one_of(found, "is not the dataset's row of that layer")


@pytest.mark.parametrize("to", WITH_LAST)
def test_last_rows_on_the_other_side_of_the_norm(spoil, trimmed, to):
    pre = to == "speculators"
    scale, eps = trimmed.final_scale, trimmed.config.rms_norm_eps

    def normed(rows_SH):
        return rms_norm(rows_SH.float(), scale, eps).to(rows_SH.dtype)  # for post-norm rows: a second time

    found = spoil(to, lambda held: change_last(held, to, normed))
    one_of(found, f"is not the dataset's row {'before' if pre else 'after'} the final norm")
    one_of(found, "logits rebuilt from last row 0 by " + ("the final norm and the head" if pre else "the head alone"))


@pytest.mark.parametrize("to", ["modelopt", "specforge-dspark", "specforge-eagle3"])
def test_a_norm_without_its_one(made, trimmed, spoil, to):
    truth = made(to).truth["doc/0"].trunk_SH.to(torch.bfloat16).float()
    plain = rms_norm(truth, trimmed.norm.detach().float(), trimmed.config.rms_norm_eps).to(torch.bfloat16)
    found = spoil(to, lambda held: change_last(held, to, lambda rows_SH: plain))
    one_of(found, "is not the dataset's row after the final norm")
    one_of(found, "by the head alone miss the model's")


def test_modelopts_flag(copied, stores):
    def turned(held):
        held["hidden_states_prenorm"] = not held["hidden_states_prenorm"]

    def word(held):
        held["hidden_states_prenorm"] = "post"

    def absent(held):
        del held["hidden_states_prenorm"]

    for change, says in (
        (turned, "its flag says that the last rows lie before the final norm, and they do not"),
        (word, "is 'post', which any reader takes for True"),
        (absent, "cannot be read (KeyError"),
    ):
        out = copied("modelopt")
        stores.change_sample(out, 1, change)
        one_of(problems(out, "modelopt"), says)
        shutil.rmtree(out)
    out = copied("modelopt")  # every flag and the manifest, consistently: only the rows themselves can tell
    for index in range(3):
        stores.change_sample(out, index, turned)
    stores.change_sample(out, 3, turned)
    stores.change_facts(out, lambda facts: facts["norm"].update(rows="pre"))
    found = problems(out, "modelopt")
    one_of(found, "logits rebuilt from last row 0 by the final norm and the head miss the model's")


@pytest.mark.parametrize("to", FORMATS)
def test_layers_numbered_by_another_convention(copied, stores, to):
    out = copied(to)
    off = -1 if to == "speculators" else 1

    def shift(facts):
        for each in facts["layers"]:
            each["id"] += off

    stores.change_facts(out, shift)
    one_of(problems(out, to), f"numbers layer 1 as {1 if to == 'speculators' else 2}")


@pytest.mark.parametrize("to", FORMATS)
def test_a_wrong_rule_of_numbering_fails(made, trimmed, tmp_path, monkeypatch, to):
    """The control of the law above: an exporter that counts wrongly, and checks by the right rule."""
    from workbench.datasets.export import REGISTRY

    kind, right = type(REGISTRY[to]), type(REGISTRY[to]).layer_id
    monkeypatch.setattr(kind, "layer_id", lambda self, layer: right(self, layer) + 1)
    export(made(to).data, to=to, model=trimmed, out=tmp_path / "out")
    assert validate(tmp_path / "out", to=to) == []
    monkeypatch.undo()
    one_of(validate(tmp_path / "out", to=to), "numbers layer 0 as")


@pytest.mark.parametrize("to", FORMATS)
def test_rows_of_another_type(spoil, to):
    def change(held):
        name = "hidden_states" if to == "speculators" else TAPS[to]
        held[name] = held[name].float()

    one_of(spoil(to, change), "rows are torch.float32 where torch.bfloat16 is due")


@pytest.mark.parametrize("to", FORMATS)
def test_files_that_lack_or_are_too_many(copied, stores, to):
    out = copied(to)
    line = [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()][1]
    file = out / line["file"]
    shutil.copy(file, file.with_name(file.name.replace("1.", "9.", 1)))
    file.unlink()
    found = problems(out, to)
    one_of(found, "it is missing")
    one_of(found, "lies among the samples and is none")


@pytest.mark.parametrize("to", FORMATS)
def test_files_that_were_cut_or_changed_after_they_were_written(copied, to):
    out = copied(to)
    line = json.loads((out / "samples.jsonl").read_text("utf-8").splitlines()[0])
    data = (out / line["file"]).read_bytes()
    (out / line["file"]).write_bytes(data[: len(data) // 2])
    one_of(validate(out, to=to), "cannot be read")
    (out / line["file"]).write_bytes(data + b"\0")
    assert validate(out, to=to)
    (out / line["file"]).write_bytes(data)
    assert validate(out, to=to) == []
    with open(out / "samples.jsonl", "a", encoding="utf-8") as handle:
        handle.write("\n")
    one_of(validate(out, to=to), "samples.jsonl does not match its hash")


def test_maps_between_vocabularies_of_another_head(copied, stores):
    out = copied("specforge-dspark")
    file = out / "vocab_mapping/vocab_mapping.pt"
    maps = torch.load(file, weights_only=True)
    absolute = maps["d2t"] + torch.arange(20)
    torch.save({**maps, "d2t": absolute}, file)  # absolute ids where offsets are due
    stores.bless(out)
    one_of(problems(out, "specforge-dspark"), "d2t of vocab_mapping/vocab_mapping.pt is not the trimmed head's")
    out = copied("modelopt")
    torch.save(absolute, out / "d2t.pt")
    stores.bless(out)
    one_of(problems(out, "modelopt"), "d2t.pt is not the trimmed head's map")
    out = copied("speculators")
    np.save(out / "t2d-20.npy", ~np.load(out / "t2d-20.npy"))
    stores.bless(out)
    one_of(problems(out, "speculators"), "t2d-20.npy is not the trimmed head's map")


def test_token_rows_of_speculators(copied, stores):
    out = copied("speculators")
    state = json.loads((out / "state.json").read_text("utf-8"))
    (out / "state.json").write_text(json.dumps(state | {"_format_type": None}), "utf-8")
    stores.bless(out)
    one_of(problems(out, "speculators"), "does not ask for torch's format")
    shutil.rmtree(out)

    import datasets

    out = copied("speculators")
    rows = datasets.load_from_disk(str(out)).with_format(None)[:]
    rows["loss_mask"][1] = [1] * len(rows["loss_mask"][1])
    spoilt = datasets.Dataset.from_dict(rows).with_format("torch")
    spoilt.save_to_disk(str(out.with_name("spoilt")))
    shutil.copy(next(out.with_name("spoilt").glob("*.arrow")), out / "data-00000-of-00001.arrow")
    stores.bless(out)
    one_of(problems(out, "speculators"), "its mask is not that of the dataset")


def test_what_is_no_export(copied, tmp_path):
    assert "has no export.json" in validate(tmp_path, to="modelopt")[0]
    out = copied("modelopt")
    one_of(validate(out, to="speculators"), "holds an export to 'modelopt'")
    (out / "export.json").write_text("{}")
    one_of(validate(out, to="modelopt"), "does not describe an export")


def test_a_manifest_that_contradicts_itself_or_the_parts(copied, stores):
    for change, says in (
        (lambda facts: facts.update(complete=False), "is not complete"),
        (lambda facts: facts["norm"].update(eps=1e-5), "another kind or eps of the final norm"),
        (lambda facts: facts["norm"].update(kind="w"), "another kind or eps of the final norm"),
        (lambda facts: facts.update(vocab_size=84), "another vocabulary, width or draft head"),
        (lambda facts: facts.update(draft_ids=None), "another vocabulary, width or draft head"),
        (lambda facts: facts.update(documents=9), "lists 4 documents where export.json says 9"),
        (lambda facts: facts["layers"][0].pop("id"), "cannot be read (KeyError"),
        (lambda facts: facts.update(files={}), "lists no samples.jsonl"),
    ):
        out = copied("modelopt")
        stores.change_facts(out, change)
        one_of(validate(out, to="modelopt"), says)
        shutil.rmtree(out)
    out = copied("modelopt")
    (out / "samples.jsonl").unlink()
    one_of(validate(out, to="modelopt"), "samples.jsonl is missing")
