"""What figures do with their frames before they draw: columns, series, sources, names and counts for captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.bootstrap import DRAWS, LEVEL
from workbench.core.errors import UserError, check_choice
from workbench.core.frames import require

if TYPE_CHECKING:
    import polars as pl

MEASURE_NAMES = {
    "speedup": "predicted speed-up (× plain decode)",
    "tau": "tau (accepted per round, without bonus)",
    "accepted_length": "accepted length (tokens per whole round, with bonus)",
    "emitted_per_round": "tokens per round (accepted and bonus)",
    "efficiency": "draft efficiency (accepted / drafted)",
    "tokens_per_second": "predicted speed (tokens/s)",
    "drafted_per_token": "drafted tokens per token of text",
}
# Columns that tell the policies of a sweep apart, beside the one a figure is drawn along.
SETTINGS = ("table source temperature estimator k p_min pmin0 floor cap floor_context statistic shape").split()
DEPTHS = (0, 512, 1024, 2048, 4096, 8192)  # lower edges of buckets of context depth, tokens


def as_rounds(frame: Any, columns: Sequence[str]) -> pl.DataFrame:
    """A rounds frame from a frame, or from anything that has one as ``rounds`` or gives one by ``rounds()``.

    Args:
        frame: The frame, a draft table or a generation.
        columns: Columns the figure needs.

    Returns:
        The frame.

    Raises:
        UserError: Neither, or a column is missing.
    """
    if not hasattr(frame, "columns"):
        inner = getattr(frame, "rounds", None)
        frame = inner() if callable(inner) else inner
    if not hasattr(frame, "columns"):
        raise UserError("this figure is drawn from a rounds frame: give a polars DataFrame or a table with .rounds()")
    require(frame, columns, "a rounds frame")
    return frame


def series(frame: pl.DataFrame, by: str | None) -> list[tuple[str, pl.DataFrame]]:
    """Split a frame into the series to draw, ordered by name, or by depth.

    Args:
        frame: The frame.
        by: "source" for one series per source, "depth" for one per bucket of the start's position, None for one of
            everything.

    Returns:
        (name, part) pairs; the name is "all" for everything, "no source" for an empty source.

    Raises:
        UserError: Another ``by``.
    """
    import polars as pl

    if by is None:
        return [("all", frame)] if len(frame) else []
    column = check_choice("by", by, ("source", "depth"), hint="or None for one series")
    if column == "depth":
        require(frame, ("start",), "by='depth'")
        ends = zip(DEPTHS, [*DEPTHS[1:], None])
        upper = {low: pl.lit(True) if high is None else pl.col("start") < high for low, high in ends}
        found = [(low, frame.filter((pl.col("start") >= low) & below)) for low, below in upper.items()]
        named = dict(zip(DEPTHS, buckets(DEPTHS)))
        return [(named[low], part) for low, part in found if len(part)]
    require(frame, (column,), "by='source'")
    names = frame[column].unique().sort().to_list()
    return [(name or "no source", frame.filter(pl.col(column).eq_missing(name))) for name in names]


def buckets(edges: Sequence[int]) -> list[str]:
    """Names of buckets by their ascending lower edges, such as "512–1k"; the last holds everything above."""

    def short(n: int) -> str:
        return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)

    ends = zip(edges, [*edges[1:], None])
    return [f"{short(low)}+" if high is None else f"{short(low)}–{short(high)}" for low, high in ends]


def of_source(frame: pl.DataFrame, source: str | None) -> pl.DataFrame:
    """The rows of one source, of a frame that has a source column; all rows otherwise, or for None.

    Raises:
        UserError: No row has that source.
    """
    if source is None or "source" not in frame.columns or not len(frame):
        return frame
    rows = frame.filter(frame["source"] == source)
    if not len(rows):
        known = ", ".join(map(repr, frame["source"].unique().sort().drop_nulls().to_list()))
        raise UserError(f"source={source!r} is not in the frame: choose one of {known}, or None for all rows")
    return rows


def differing(rows: pl.DataFrame, keys: Sequence[str], values: Sequence[str]) -> str:
    """What the first rows with equal keys differ in, for the end of a refusal.

    Args:
        rows: The frame, in which some keys occur twice.
        keys: Columns that should tell rows apart.
        values: Columns that do not count.
    """
    twice = rows.filter(rows.select(keys).is_duplicated())
    same = twice.join(twice.select(keys).head(1), on=list(keys), how="semi", nulls_equal=True).head(2)
    left = [one for one in rows.columns if one not in (*keys, *values) and same[one].n_unique() > 1]
    found = [one for one in left if one in SETTINGS] or [one for one in left if one == "policy"]
    if not found:
        return ": aggregate or filter the frame first"
    return f"; they differ in {', '.join(found)}: filter the frame to one setting of it first"


def setting(value: Any) -> str:
    """A setting of a policy as text: "none" for None, numbers without idle digits."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def counted(number: int, noun: str) -> str:
    """A count with its noun, such as "1,204 rounds"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def intervals(frame: pl.DataFrame, drawn: bool, mark: str) -> str:
    """What the intervals are, for the end of a caption.

    Args:
        frame: The frame, with doc_id.
        drawn: Whether the figure draws intervals.
        mark: What shows them, such as "bars".
    """
    return interval_note(frame["doc_id"].n_unique(), drawn, mark)


def interval_note(documents: int, drawn: bool, mark: str) -> str:
    """What the intervals are, given the number of documents; one document has none."""
    if not drawn:
        return ""
    if documents < 2:
        return "; no interval: it takes two documents"
    return f"; {mark}: {100 * LEVEL:.0f} % bootstrap by document ({DRAWS:,} draws)"
