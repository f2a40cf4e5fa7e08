"""One progress bar for everything: rate and estimate on stderr, a widget in notebooks, nothing when switched off."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_shown = True


class quiet:
    """Switch every bar off, except those that ask for ``enabled=True``: ``wb.quiet()`` from here on, or in a block.

    Args:
        on: True for quiet; False for bars again.
    """

    def __init__(self, on: bool = True) -> None:
        global _shown
        self.before, _shown = _shown, not on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        global _shown
        _shown = self.before


def progress(
    iterable_or_total: Iterable[Any] | int | None, *, desc: str, unit: str = "it", enabled: bool | None = None
) -> Any:
    """Open a bar over an iterable, or over a total that the caller counts up with ``update``.

    Args:
        iterable_or_total: What to iterate over, or how many units there will be; None when unknown.
        desc: What is being done.
        unit: What is counted, such as "tok" or "doc"; default "it".
        enabled: Show it; None follows ``quiet``.

    Returns:
        A tqdm bar: iterate over it, or use it as a context manager and call ``update(n)``.
    """
    from tqdm.auto import tqdm

    counted = iterable_or_total is None or isinstance(iterable_or_total, int)
    many = isinstance(iterable_or_total, int) and iterable_or_total >= 10_000
    return tqdm(
        None if counted else iterable_or_total,
        total=iterable_or_total if counted else None,
        desc=desc,
        unit=unit,
        unit_scale=many,  # 1.2M rather than 1200000
        dynamic_ncols=True,
        mininterval=0.2,
        file=sys.stderr,
        disable=not (_shown if enabled is None else enabled),
    )


def say(text: str) -> None:
    """Show a line beside the bars: on stderr, in a notebook in the cell's output; nothing when they are switched off.

    Args:
        text: The line.
    """
    if _shown:
        print(text, file=sys.stdout if "ipykernel" in sys.modules else sys.stderr)
