"""Times of a burst on the device: what capturing took is told apart, and is in no round and no other stage."""

from __future__ import annotations

from time import sleep

import pytest

from workbench.model.shapes import random_model
from workbench.spec.device.graphs import Graphs
from workbench.spec.session import Session
from workbench_kernels.dispatch import use

SLOW = 0.3  # seconds that a capture is made to take, well above a round of the tiny shape


@pytest.mark.parametrize(("parts", "streamed"), [(3, 1), (1, 4)])
def test_capturing_has_a_stage_of_its_own(monkeypatch, parts, streamed):
    run = Graphs.run

    def slow(self, key, part):
        if key not in self.kept:
            sleep(SLOW)
            self.seconds += SLOW
            self.kept[key] = None
        run(self, key, part)

    monkeypatch.setattr(Graphs, "run", slow)
    model = random_model("tiny")
    with use("ref"):
        session = Session(model, capacity=200)
        session.feed([5, 6, 7, 8])
        before = session.times
        made = session.generate(max_new_tokens=40, ignore_eos=True, graphs=True, stream_rounds=streamed)
    assert before.capture == 0 and made.setup.capture == pytest.approx(parts * SLOW)
    assert made.setup.init < SLOW and max(r.phases.total for r in made.records) < SLOW
    assert sum(r.phases.total for r in made.records) <= made.setup.rounds
    first, *others = made.records
    assert first.phases.draft == 0 and first.phases.other > 0
    assert all((r.phases.draft > 0) == (streamed == 1) for r in others)
