"""One progress helper: it counts, it iterates, and it can be silenced as a whole."""

from __future__ import annotations

import sys
from types import ModuleType

from workbench.core.progress import progress, quiet, say


def test_it_iterates_and_counts_on_stderr(capsys):
    assert list(progress([1, 2, 3], desc="walk", unit="doc")) == [1, 2, 3]
    with progress(20_000, desc="count", unit="tok") as bar:
        bar.update(20_000)
    out, err = capsys.readouterr()
    assert out == "" and "walk" in err and "3/3" in err and "20.0k/20.0k" in err


def test_quiet_silences_every_bar_and_ends(capsys):
    with quiet():
        with quiet():
            assert sum(progress(range(4), desc="a")) == 6
        with progress(3, desc="b") as bar:
            bar.update(3)
    assert capsys.readouterr().err == ""
    with quiet():
        list(progress([1], desc="asked for", enabled=True))
    list(progress([1], desc="refused", enabled=False))
    list(progress([1], desc="after"))
    err = capsys.readouterr().err
    assert "asked for" in err and "after" in err and "refused" not in err


def test_quiet_also_works_as_a_switch(capsys):
    quiet()
    try:
        list(progress([1], desc="off"))
        with quiet(False):
            list(progress([1], desc="on"))
        list(progress([1], desc="off again"))
    finally:
        quiet(False)
    err = capsys.readouterr().err
    assert "on:" in err and "off" not in err


def test_a_line_goes_to_stderr_in_a_notebook_to_the_cell_and_nowhere_when_quiet(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    say("a line")
    with quiet():
        say("hidden")
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    say("in a cell")
    said = capsys.readouterr()
    assert said.err == "a line\n" and said.out == "in a cell\n"
