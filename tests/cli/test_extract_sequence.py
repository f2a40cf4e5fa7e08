"""``workbench extract --kind sequence``: what it writes, and options that belong to the other kind."""

from __future__ import annotations

from dataclasses import fields

SMALL = ("--corpus", "demo/sqlite", "--limit", "1", "--max-tokens", "40", "--overflow", "truncate", "--threads", "1")
STORE = ("extract", *SMALL, "--kind", "sequence")


def test_a_store_is_written_and_gone_on_with(run, tmp_path):
    from workbench.datasets import load_sequences, read_sequence

    argv = (*STORE, "--out", tmp_path / "x", "--taps", "0,11", "--hidden-dtype", "fp8", "--top-k", "4", "--seed", "3")
    data = run(*argv, "--json").data
    assert data["kind"] == "sequence" and data["records"] == 1 and data["tokens"] == 40
    assert data["parameters"]["taps"] == [0, 11] and data["parameters"]["top_k"] == 4
    row = read_sequence(load_sequences(tmp_path / "x"), 0)
    assert row.hidden_SH.shape == (40, 320) and set(row.taps) == {0, 11} and row.kept.ids.shape == (40, 4)
    assert "load_sequences" in run(*argv).out


def test_every_option_of_a_store_is_an_option(run):
    from workbench.cli.options import arg_docs
    from workbench.datasets import SequenceOptions

    text = run("extract", "--help").out.replace(",", " ")
    names = {field.name for field in fields(SequenceOptions)}
    assert not [name for name in names if f"--{name.replace('_', '-')} " not in text]
    assert names <= set(arg_docs(SequenceOptions))


def test_options_of_the_other_kind_are_refused(refused, tmp_path):
    out = ("--out", tmp_path / "x")
    assert "--gamma shapes --kind anchors" in refused(*STORE, *out, "--gamma", "3")
    assert "--taps shapes --kind sequence" in refused("extract", *SMALL, *out, "--taps", "3")
    assert "--taps 3,1 is not valid: name every layer once" in refused(*STORE, *out, "--taps", "3,1")
    assert "this model has 12 layers" in refused(*STORE, *out, "--taps", "12")
    assert "give layers separated by commas" in refused(*STORE, *out, "--taps", "a")
    assert "choose one of 'bfloat16', 'float32'" in refused("extract", *SMALL, *out, "--hidden-dtype", "fp8")
    assert not (tmp_path / "x").exists()
