"""Where the per-document sums behind a frame are: in this process, by cell, or in a store.

A Polars frame carries no attributes through a filter; the column ``cell`` leads back to its sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.sweep.cells import Cell, Walked
from workbench.sweep.store import read_store

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """How a frame's intervals were drawn.

    Args:
        draws: Resamples of documents.
        seed: Of the resampling.
        level: Coverage.
    """

    draws: int
    seed: int
    level: float


_HELD: dict[str, tuple[Cell, Walked, Bootstrap]] = {}


def hold(cells: Iterable[Cell], walked: Sequence[Walked], bootstrap: Bootstrap) -> None:
    """Keep the sums of a frame's cells for as long as the process runs; equal cells replace each other."""
    tables = {one.name: one for one in walked}
    _HELD.update({cell.key: (cell, tables[cell.table], bootstrap) for cell in cells})


def held_in(path: str | Path) -> dict[str, tuple[Cell, Walked, Bootstrap]]:
    """The cells of a store by key, each with its table and how its intervals are drawn."""
    manifest, walked, cells = read_store(Path(path))
    tables, bootstrap = {one.name: one for one in walked}, Bootstrap(**manifest.extra["bootstrap"])
    return {cell.key: (cell, tables[cell.table], bootstrap) for cell in cells}


def sums_behind(frame: pl.DataFrame, store: str | Path | None) -> tuple[list[Cell], Walked, Bootstrap]:
    """The cells of a frame that speaks of one table.

    Args:
        frame: Rows of a sweep's frame.
        store: The sweep's directory; None for what this process walked or loaded.

    Returns:
        Its cells in the order of the frame, their table, and how their intervals were drawn.

    Raises:
        UserError: Sums are not at hand, or the rows are of several tables.
    """
    require(frame, ("cell", "table"), "a frame of wb.sweep")
    names = frame["table"].unique(maintain_order=True).to_list()
    if len(names) != 1:
        given = ", ".join(map(repr, names)) if names else "no table"
        raise UserError(f"the rows given are of {given}: give the rows of one table, with table=NAME or a filter")
    held: dict[str, Any] = _HELD
    if store is not None:
        held = held_in(store)
    keys = frame["cell"].unique(maintain_order=True).to_list()
    if missing := [key for key in keys if key not in held]:
        where = "this process has not walked it" if store is None else f"{store} does not hold it"
        raise UserError(
            f"the sums per document of cell {missing[0]} are not at hand, since {where}: give the sweep's directory as "
            "store=, or run wb.sweep or wb.load_sweep first"
        )
    found = [held[key] for key in keys]
    return [cell for cell, _, _ in found], found[0][1], found[0][2]
