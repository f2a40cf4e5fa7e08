"""``workbench export``: what it prints, writes and refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def stores():
    path = Path(__file__).resolve().parents[1] / "exports" / "stores.py"
    spec = importlib.util.spec_from_file_location("workbench_tests_cli_export_stores", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def data(stores, tiny_checkpoint, tmp_path):
    """A checkpoint and a store that it made."""
    from workbench import facade

    checkpoint = tiny_checkpoint("model", tied=False)
    stores.make_store(facade.load(checkpoint), stores.documents(), tmp_path / "data")
    return checkpoint, tmp_path / "data"


def test_export_writes_checks_and_reports(run, data, tmp_path):
    checkpoint, store = data
    out = tmp_path / "out"
    ran = run("export", "--to", "specforge-dspark", "--data", store, "--model", checkpoint, "--out", out, "--json")
    assert ran.code == 0, ran
    assert ran.data["format"] == "specforge-dspark" and ran.data["layers"] == ran.data["layer_ids"] == [0, 1, 3]
    assert ran.data["documents"] == 3 and set(ran.data["left_out"]) == {"doc/2", "doc/3"}
    assert ran.data["bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert "left out 'doc/2': no two tokens of it in a row are supervised" in ran.err
    ran = run("export", "--to", "specforge-dspark", "--check", out)
    assert ran.code == 0 and ran.out.strip() == f"{out} is sound"
    facts = json.loads((out / "export.json").read_text())
    facts["layers"][0]["id"] = 7
    (out / "export.json").write_text(json.dumps(facts))
    ran = run("export", "--to=specforge-dspark", "--check", out)
    assert ran.code == 2 and "is not sound: export.json numbers layer 0 as 7" in ran.err


def test_options_are_those_of_the_format(run, data, tmp_path):
    checkpoint, store = data
    common = ("--data", store, "--model", checkpoint, "--quiet", "--json")
    ran = run("export", "--to", "modelopt", *common, "--norm", "pre", "--layers", "1,3", "--out", tmp_path / "a")
    assert ran.code == 0 and ran.data["norm"] == "pre" and ran.data["layer_ids"] == [1, 3]
    ran = run("export", "--to", "speculators", *common, "--hidden-dtype", "float32", "--out", tmp_path / "b")
    assert ran.code == 0 and ran.data["layer_ids"] == [1, 2, 4]
    text = run("export", "--to", "modelopt", "--help").out
    assert "--norm" in text and "--layers" in text and "specforge-eagle3" in text
    assert "--norm" not in run("export", "--help").out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--to is needed"),
        (("--to", "specforge"), "--to specforge is not valid: did you mean 'specforge-"),
        (("--to", "modelopt"), "--data and --out are needed"),
        (("--to", "modelopt", "--data", "d", "--check", "e"), "--check excludes --data and --out"),
        (("--to", "modelopt", "--norm", "both"), "--norm"),
        (("--to", "speculators", "--norm", "pre"), "unknown option --norm"),
        (("--to", "speculators", "--layers", "a"), "write layers as 1,5,8"),
        (("--to", "speculators", "--check", "absent"), "has no export.json"),
    ],
)
def test_what_is_refused(refused, argv, says):
    assert says in refused("export", *argv)


def test_a_store_of_another_model_is_refused(refused, data, tiny_checkpoint, tmp_path):
    other = tiny_checkpoint("other", tied=False, seed=4)
    said = refused("export", "--to", "modelopt", "--data", data[1], "--model", other, "--out", tmp_path / "out")
    assert "was made with model" in said and not (tmp_path / "out").exists()
