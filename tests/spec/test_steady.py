"""States that a verify may read while what was launched before it still runs: nothing there writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from workbench.model import kernel_path
from workbench.model.hybrid import HybridModel
from workbench.spec.device import planes, rounds
from workbench.spec.device.planes import Planes
from workbench.spec.session import Session
from workbench_kernels.dispatch import use

PROMPT = [7, 61, 12, 80, 33, 5, 44, 19, 2]


def too_soon(events: list[str]) -> list[int]:
    """Places of steady reads that no launch parts from the last write."""
    found, parted = [], False
    for i, event in enumerate(events):
        parted = event != "write" and (parted or event == "assemble")
        if event == "steady read" and not parted:
            found.append(i)
    return found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def note(place: Any, name: str, event: Callable[[dict[str, Any]], str]) -> None:
        right = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **kw: (seen.append(event(kw)), right(*a, **kw))[1])

    note(rounds, "assemble_verify", lambda given: "assemble")
    for place, name in ((planes, "conv_commit"), (planes, "gated_delta_commit"), (Planes, "load")):
        note(place, name, lambda given: "write")
    note(kernel_path, "gated_delta_step", lambda given: "steady read" if given["steady"] else "read")
    return seen


@pytest.mark.parametrize("mode", [dict(stream_rounds=4), dict(graphs=True)])
def test_a_launch_parts_steady_reads_from_the_last_write(
    tiny: Callable[..., HybridModel], events: list[str], mode: dict[str, Any]
) -> None:
    model = tiny(exact=False, tied=False)
    with use("ref"):
        session = Session(model, capacity=150)
        for k in (3, 0, 3):
            session.generate(PROMPT, max_new_tokens=14, k=k, ignore_eos=True, **mode)
            session.generate(max_new_tokens=5, k=k, ignore_eos=True)  # the host's own rounds between
            session.rewind()
        model.trim_draft_vocab(range(1, 40))
        session.reset()
        session.generate(PROMPT, max_new_tokens=14, ignore_eos=True, **mode)
    assert {"assemble", "write", "steady read", "read"} == set(events)
    assert too_soon(events) == []
    for i in (i for i, event in enumerate(events) if event == "assemble"):
        assert too_soon(events[:i] + events[i + 1 :]), "control: a verify without it"
