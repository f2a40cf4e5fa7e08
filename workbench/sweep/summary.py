"""A card that opens a sweep's frame: what was walked, how, and where it is largest; made from the frame alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError
from workbench.core.frames import require

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("table", "source", "temperature", "estimator", "policy", "aggregation", "rounds", "documents", "cost")


def summary(frame: pl.DataFrame) -> Any:
    """What a sweep's frame holds, as a card.

    Args:
        frame: Rows of ``sweep`` or ``load_sweep``.

    Returns:
        A card for notebooks and terminals.

    Raises:
        UserError: The frame is none of a sweep, or is empty.
    """
    from workbench.display import card

    require(frame, (*COLUMNS, "tau", "speedup"), "a summary of a sweep")
    if not len(frame):
        raise UserError("the frame holds no rows: give rows of wb.sweep")

    def distinct(name: str) -> list[Any]:
        return frame[name].unique(maintain_order=True).to_list()

    whole = frame.filter(source="all")
    rows: list[tuple[str, Any]] = [
        ("cells", frame["cell"].n_unique()),
        ("policies", frame["policy"].n_unique()),
        ("tables", distinct("table")),
        ("temperatures", distinct("temperature")),
        ("sources", distinct("source")),
        ("estimators", distinct("estimator")),
        ("aggregation", distinct("aggregation")),
        ("cost", distinct("cost")),
    ]
    if len(whole):
        documents = whole.group_by("table", maintain_order=True).first()["documents"].sum()
        rows += [("documents", int(documents)), ("rounds walked", int(whole["rounds"].sum()))]
    for name in ("tau", "speedup"):
        known = (whole if len(whole) else frame).drop_nulls(name)
        if len(known):
            best = known.sort(name, descending=True, maintain_order=True).row(0, named=True)
            rows.append((f"largest {name}", f"{best[name]:.3f}: {best['policy']} on {best['table']}, {best['source']}"))
    return card("Sweep", rows, "Intervals resample documents; wb.recommend says how sure a choice is.")
