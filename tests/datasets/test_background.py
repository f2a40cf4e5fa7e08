"""The writing thread: order, a bounded queue, failures on either side, and an interrupt while waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import sleep

import pytest

from workbench.datasets import background
from workbench.datasets.background import Background
from workbench.datasets.shards import Part, in_order, without_rows


class Full(Exception):
    """Stands for what a writer may raise."""


def test_items_come_in_order_on_another_thread():
    seen: list[int] = []
    names: set[str] = set()

    def work(items: Iterator[int]) -> None:
        for item in items:
            seen.append(item)
            names.add(threading.current_thread().name)

    with Background(work) as worker:
        for i in range(50):
            worker.put(i)
    assert seen == list(range(50)) and names == {"workbench-writer"}


def test_a_slow_worker_holds_the_maker_back():
    made, lead = 0, 0
    done: list[int] = []

    def work(items: Iterator[int]) -> None:
        for item in items:
            sleep(0.01)
            done.append(item)

    with Background(work, depth=2) as worker:
        for i in range(12):
            worker.put(i)
            made += 1
            lead = max(lead, made - len(done))
    assert done == list(range(12)) and lead <= 4, "two wait, one is worked on, one has just been put"
    unbounded = 0
    with Background(work, depth=100) as worker:
        for i in range(12):
            worker.put(i)
            unbounded = max(unbounded, 12 + i + 1 - len(done))
    assert unbounded > 4, "control: a deep queue lets the maker run ahead"


@pytest.mark.parametrize("at", [0, 3])
def test_what_stops_the_worker_reaches_the_maker(at):
    def work(items: Iterator[int]) -> None:
        for item in items:
            if item == at:
                raise Full("no room")

    made = 0
    with pytest.raises(Full, match="no room"), Background(work) as worker:
        for i in range(1000):
            worker.put(i)
            made += 1
    assert made < 1000, "the maker learns of it while it makes"


def test_a_worker_that_fails_on_the_last_item_is_heard():
    def work(items: Iterator[int]) -> None:
        for _ in items:
            pass
        raise Full("at the end")

    with pytest.raises(Full, match="at the end"), Background(work) as worker:
        worker.put(1)


@pytest.mark.parametrize("error", [Full, KeyboardInterrupt])
def test_a_maker_that_fails_leaves_what_it_made_and_stops_the_worker(error):
    seen: list[int] = []
    ended: list[str] = []

    def work(items: Iterator[int]) -> None:
        try:
            for item in items:
                sleep(0.005)
                seen.append(item)
            ended.append("whole")
        except BaseException as stopped:
            ended.append(type(stopped).__name__)
            raise

    before = threading.active_count()
    with pytest.raises(error), Background(work) as worker:
        for i in range(5):
            worker.put(i)
        raise error
    assert seen == list(range(5)) and ended == ["Abandoned"] and threading.active_count() == before


def test_an_interrupt_while_waiting_for_the_end_stops_the_worker(monkeypatch):
    seen: list[int] = []

    def work(items: Iterator[int]) -> None:
        for item in items:
            sleep(0.02)
            seen.append(item)

    worker = Background(work, depth=10)
    offer = worker._offer

    def interrupted(item):
        if isinstance(item, background._End):
            raise KeyboardInterrupt
        return offer(item)

    monkeypatch.setattr(worker, "_offer", interrupted)
    with pytest.raises(KeyboardInterrupt), worker:
        for i in range(8):
            worker.put(i)
    assert len(seen) < 8 and not worker._thread.is_alive()


def part(document: int, name: str, last: bool) -> Part:
    return Part(document, name, last)  # type: ignore[arg-type]


def test_parts_of_mixed_documents_come_document_by_document():
    given = [part(5, "e1", True), part(2, "b1", False), part(9, "x", True), part(3, "c1", True), part(2, "b2", True)]
    assert [p.batch for p in in_order(given, [2, 3, 5])] == ["b1", "b2", "c1", "e1"]
    stream = in_order(iter(given[:2]), [2, 3, 5])
    assert next(stream).batch == "b1", "the first document's parts are not held"
    with pytest.raises(AssertionError, match="document 3 did not come to its end"):
        list(in_order(given[:3] + given[4:], [2, 3, 5]))


def test_a_document_that_is_left_out_has_no_other_part():
    given = [part(2, "b1", False), part(3, "c1", False), without_rows(3, "why"), part(2, "b2", True)]
    held = in_order(given, [2, 3], whole=True)
    assert [(p.document, p.batch, p.reason) for p in held] == [(2, "b1", ""), (2, "b2", ""), (3, None, "why")]
    late = [*given[:2], without_rows(2, "why")]
    assert [p.batch for p in in_order([*late, part(3, "c2", True)], [2, 3], whole=True)] == [None, "c1", "c2"]
    with pytest.raises(AssertionError, match="rows of it may be written already"):
        list(in_order(late, [2, 3]))
    with pytest.raises(AssertionError, match="left out without a reason"):
        without_rows(2, "")
