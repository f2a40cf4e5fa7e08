"""Options mirror the Python API: names, types, defaults and texts come from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from workbench.cli.options import add_options, arg_docs, given, kind_of
from workbench.cli.parser import Parser
from workbench.core.errors import UserError


@dataclass(frozen=True)
class Sample:
    """Options of a sample.

    Args:
        count: How many, at 100 % of what
            there is; default 3.
        share: Of ``count`` kept.
        loud: Say so; False whispers.
        limit: Most; None for no bound.
        mode: How.
    """

    count: int = 3
    share: float = 0.5
    loud: bool = False
    limit: int | None = None
    mode: Literal["a", "b"] = "a"


def parser() -> tuple[Parser, list[str]]:
    made = Parser("sample", "A sample.")
    return made, add_options(made, Sample, title="options")


def test_help_texts_are_the_docstrings_in_the_words_of_the_command_line():
    text = " ".join(parser()[0].format_help().split())
    assert "--count N How many, at 100 % of what there is. (default: 3)" in text
    assert "--share X Of --count kept. (default: 0.5)" in text
    assert "--loud, --no-loud Say so; --no-loud whispers. (default: no)" in text
    assert "--limit N|none Most; none for no bound. (default: none)" in text
    assert "--mode {a,b}" in text


def test_only_what_was_given_is_passed_on():
    made, names = parser()
    assert names == ["count", "share", "loud", "limit", "mode"]
    assert given(made.read([]), names) == {}
    args = made.read(["--no-loud", "--limit", "none", "--count", "1_000", "--mode", "b", "--share", "nan"])
    found = given(args, names)
    assert found.pop("share") != found.get("share")  # NaN gets through, to be refused where bounds are known
    assert found == {"loud": False, "limit": None, "count": 1000, "mode": "b"}


def test_words_outside_the_choices_are_refused():
    with pytest.raises(UserError, match="--mode 'c' is not valid: choose one of 'a', 'b'"):
        parser()[0].read(["--mode", "c"])


def test_docs_join_lines_and_end_with_the_section():
    assert arg_docs(Sample)["count"] == "How many, at 100 % of what there is; default 3."
    assert set(arg_docs(Sample)) == {f.name for f in fields(Sample)}
    assert arg_docs(lambda: None) == {}


def test_kinds():
    assert kind_of(int).convert("7") == 7
    assert kind_of(float | None).convert("None") is None
    assert kind_of(str | None).metavar == "TEXT|none"
    assert kind_of(str, ("x", "y")).metavar == "{x,y}"


def test_every_option_of_the_api_is_an_option(run):
    from workbench.datasets import ExtractOptions
    from workbench.replay import ReplayOptions
    from workbench.spec.options import GenerateOptions
    from workbench.train.demo import DemoRecipe

    for verb, options in {
        "generate": GenerateOptions,
        "extract": ExtractOptions,
        "replay": ReplayOptions,
        "train demo": DemoRecipe,
    }.items():
        text = run(*verb.split(), "--help").out
        missing = [
            f.name for f in fields(options) if "--" + f.name.replace("_", "-") + " " not in text.replace(",", " ")
        ]
        assert not missing, (verb, missing)
        undocumented = {f.name for f in fields(options)} - set(arg_docs(options))
        assert not undocumented, (verb, undocumented)
