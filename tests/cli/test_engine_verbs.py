"""``--engine`` of extract and replay: what is refused, and that it reaches the run."""

from __future__ import annotations

import pytest

import workbench.datasets
import workbench.replay
from workbench.datasets.engine import options

GIVEN = ("--engine", "ray", "--workers", "2", "--ray-address", "auto", "--num-gpus", "0.5")


class Stopped(BaseException):
    """Ends a verb once it has called what it is to call."""


@pytest.mark.parametrize("verb", ["extract", "replay"])
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--engine", "spark"), "--engine 'spark' is not valid: choose one of 'local', 'ray'"),
        (("--workers", "2"), "--workers 2 goes with --engine ray: give that as well"),
        (("--ray-address", "auto"), "--ray-address auto goes with --engine ray"),
        (
            ("--engine", "ray", "--num-gpus", "2"),
            "--num-gpus 2.0 is not valid: it must be a number at least 0 and at most",
        ),
        (("--engine", "ray", "--workers", "0"), "--workers 0 is not valid"),
    ],
)
def test_a_bad_engine_is_a_sentence_before_a_model_is_loaded(refused, monkeypatch, tmp_path, verb, argv, says):
    monkeypatch.setattr("workbench.facade.load", None)
    monkeypatch.setattr(options, "version", lambda name: "9")
    assert says in refused(verb, "--out", tmp_path / "x", *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "name", "more"),
    [
        ("extract", "extract", ()),
        ("extract", "extract_sequences", ("--kind", "sequence")),
        ("replay", "replay", ()),
    ],
)
def test_the_engine_reaches_the_run(run, monkeypatch, tmp_path, verb, name, more):
    seen = {}

    def called(model, tapes, **given):
        seen.update(given)
        raise Stopped

    package = {"extract": workbench.datasets, "replay": workbench.replay}[verb]
    called.__wrapped__ = getattr(package, name)  # whose options the verb reads
    called.__module__, called.__doc__ = called.__wrapped__.__module__, called.__wrapped__.__doc__
    monkeypatch.setattr(package, name, called)
    monkeypatch.setattr(options, "version", lambda name: "9")
    with pytest.raises(Stopped):
        run(verb, "--out", tmp_path / "x", "--limit", "1", "--quiet", *GIVEN, *more)
    wanted = {"engine": "ray", "workers": 2, "ray_address": "auto", "num_gpus": 0.5}
    assert {name: seen.get(name) for name in wanted} == wanted


def test_likelihoods_alone_are_made_here(refused, monkeypatch, tmp_path):
    monkeypatch.setattr(options, "version", lambda name: "9")
    said = refused("replay", "--score-only", "--engine", "ray", "--out", tmp_path / "x")
    assert "--engine ray and --score-only exclude each other" in said
