"""One worker thread that takes items in order through a bounded queue, off the critical path of whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

DEPTH = 2  # items that wait while one is worked on
POLL = 0.1  # seconds after which a waiting thread looks whether the other one has stopped


class Abandoned(BaseException):
    """The maker of items stopped before the last one."""


class _End:
    """Comes after the last item, or after the last one that was made before an exception."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole


class Background(Generic[T]):
    """A thread that works through items while its owner makes the next ones; use it as a context manager.

    What is queued when the owner fails is still worked on; then the worker is stopped by ``Abandoned``.

    Args:
        work: Called once, on the thread, with the items in the order in which they were put.
        depth: Items that may wait; default 2. ``put`` waits while there are as many.

    Raises:
        BaseException: At the next ``put`` or at the end of the block, what the worker raised.
    """

    def __init__(self, work: Callable[[Iterator[T]], None], *, depth: int = DEPTH) -> None:
        self._queue: Queue[Any] = Queue(depth)
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(work,), name="workbench-writer", daemon=True)

    def _run(self, work: Callable[[Iterator[T]], None]) -> None:
        try:
            work(self._items())
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error

    def _items(self) -> Iterator[T]:
        while not self._stop.is_set():
            try:
                item = self._queue.get(timeout=POLL)
            except Empty:
                continue
            if not isinstance(item, _End):
                yield item
            elif item.whole:
                return
            else:
                break
        raise Abandoned

    def _offer(self, item: Any) -> bool:
        """Queue an item when there is room; False when the worker has stopped."""
        while self._thread.is_alive():
            try:
                self._queue.put(item, timeout=POLL)
            except Full:
                continue
            return True
        return False

    def put(self, item: T) -> None:
        """Hand over an item; waits while the queue is full.

        Args:
            item: The next item.

        Raises:
            BaseException: What stopped the worker.
        """
        if not self._offer(item):
            self._raise()
            raise AssertionError("the worker ended before the last item")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._offer(_End(whole=kind is None))
            self._thread.join()
        except BaseException:  # interrupted while waiting: the worker stops before its next item
            self._stop.set()
            self._thread.join()
            raise
        if kind is None:
            self._raise()
