"""The page of a sweep: one HTML file with its figures, its best rows, and sliders that redraw a chart from its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.page import embedded, facts, figure, page, paragraph, png_of, table
from workbench.cli.sweep_script import CONTROLS, SCRIPT, STYLE
from workbench.core.manifest import write_atomic

if TYPE_CHECKING:
    import polars as pl

    from workbench.sweep import Recommendation

ROWS, LINES, CURVES = 12, 6, 6  # rows of the table, lines of a figure, policies of the survival figure
GRID = ("fixed", "floor")  # families that the sliders speak of
LABELS = {
    "speedup": "speed-up over plain decode (predicted)",
    "tokens_per_second": "tokens per second (predicted)",
    "tau": "accepted per round, without bonus",
    "accepted_length": "accepted length (1 + accepted, rounds not cut)",
    "emitted_per_round": "tokens per round",
    "efficiency": "accepted per drafted",
    "drafted_per_token": "drafted per token",
}
COLUMNS = ("speedup", "tau", "accepted_length", "efficiency", "drafted_per_token", "rounds", "documents")


def write_page(frame: pl.DataFrame, chosen: Sequence[Recommendation], path: Path, *, objective: str) -> Path:
    """Write the page, which refers to nothing outside itself.

    Args:
        frame: The sweep's frame.
        chosen: A recommendation per table.
        path: The file.
        objective: What the recommendations make large; the chart begins with it.

    Returns:
        The file.
    """
    body = ["<h1>Policies over recorded drafts</h1>", paragraph(_about(frame, chosen[0].level), soft=True)]
    body += [facts(_tiles(frame, chosen))]
    body += [paragraph(f"{one.table}: {one.sentence}.") for one in chosen]
    body += ["<h2>Choose K, p_min and floor</h2>", _interactive(frame, objective)]
    body += ["<h2>The best policies</h2>", *_tables(frame, objective)]
    body += ["<h2>Figures</h2>", *_figures(frame, objective)]
    write_atomic(path, page("Policies over recorded drafts", "".join(body)).encode())
    return path


def page_data(frame: pl.DataFrame, objective: str) -> dict[str, Any]:
    """What the page embeds: the frame, column by column, and the words of its measures.

    Args:
        frame: The sweep's frame.
        objective: The measure shown first.

    Returns:
        A JSON-ready mapping.
    """
    known = {name: label for name, label in LABELS.items() if frame[name].null_count() < len(frame)}
    return {"columns": frame.to_dict(as_series=False), "measures": known, "objective": objective}


def _about(frame: pl.DataFrame, level: float) -> str:
    cost = frame["cost"].drop_nulls().unique(maintain_order=True).to_list()
    says = f"{frame['cell'].n_unique():,} walks over recorded draft tables; nothing was generated for this page. "
    says += f"Intervals: {100 * level:g} %, by document bootstrap; ratios are pooled over rounds. "
    return says + (f"Speed is predicted by the cost model {', '.join(cost)}." if cost else "No cost model was given.")


def _tiles(frame: pl.DataFrame, chosen: Sequence[Recommendation]) -> list[tuple[str, str]]:
    tiles = [("policies", f"{frame['policy'].n_unique():,}"), ("tables", f"{frame['table'].n_unique()}")]
    tiles += [("rounds walked", f"{frame.filter(source='all')['rounds'].sum():,}")]
    for one in chosen:
        tiles.append((f"{one.objective.replace('_', ' ')}, {one.table}", f"{one.value:.2f}"))
        if one.probability_best is not None:
            tiles.append((f"of resamples for it, {one.table}", f"{100 * one.probability_best:.0f} %"))
    return tiles


def _interactive(frame: pl.DataFrame, objective: str) -> str:
    data = embedded("sweep-data", page_data(frame, objective))
    if not frame["family"].is_in(GRID).any():
        return data + paragraph("The sweep holds no fixed K and no adaptive floor, which the sliders speak of.")
    return f"<style>{STYLE}</style>{CONTROLS}{data}<script>{SCRIPT}</script>"


def _tables(frame: pl.DataFrame, objective: str) -> Iterator[str]:
    """The best rows of every table, over all sources."""
    names = [name for name in dict.fromkeys(("policy", objective, *COLUMNS)) if frame[name].null_count() < len(frame)]
    for part in frame.filter(source="all").partition_by("table", maintain_order=True):
        rows = part.sort(objective, descending=True, nulls_last=True, maintain_order=True).head(ROWS)
        first = rows.row(0, named=True)
        yield paragraph(
            f"{first['table']}: {first['estimator']} walk at temperature {first['temperature']:g}, all sources, by "
            f"{LABELS[objective]}."
        )
        yield table(
            [name.replace("_", " ") for name in names], [_cells(row, names) for row in rows.iter_rows(named=True)]
        )


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    def text(name: str) -> str:
        value = row[name]
        if value is None:
            return "–"
        if isinstance(value, float):
            low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
            return f"{value:.3f}" + ("" if low is None or high is None else f" ({low:.3f}–{high:.3f})")
        return f"{value:,}" if isinstance(value, int) else str(value)

    return [text(name) for name in names]


def _figures(frame: pl.DataFrame, objective: str) -> Iterator[str]:
    """The figures that the frame has rows for, of its first table."""
    import matplotlib

    matplotlib.use("Agg")
    for title, says, draw in drawings(frame, objective):
        yield figure(png_of(draw()), title, says)


def drawings(frame: pl.DataFrame, objective: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Titles, captions and drawers of the figures.

    Args:
        frame: The sweep's frame.
        objective: The measure drawn.

    Yields:
        A title, a sentence, and what draws the axes.
    """
    import polars as pl

    from workbench import plot

    first = frame["table"][0]
    rows = frame.filter(table=first, source="all")
    told = f"Table {first}, all sources."
    grid = rows.filter(pl.col("k").is_not_null() & pl.col("family").is_in(GRID))
    fixed = grid.filter(family="fixed").unique(["k", "p_min"], keep="first", maintain_order=True)
    values = fixed["p_min"].unique(maintain_order=True)
    if fixed["k"].n_unique() > 1 and not fixed[objective].is_null().all() and objective != "efficiency":
        shown = fixed.filter(pl.col("p_min").is_in(values.head(LINES).to_list()))
        by = "p_min" if len(values) > 1 else None
        yield "By draft length", told, lambda: plot.speedup_by_k(shown, by=by, value=objective)
    if fixed["k"].n_unique() > 1 and len(values) > 1:
        yield "p_min and K", f"{told} Fixed K.", lambda: plot.heatmap(fixed, "k", "p_min", objective)
    least: Any = grid["p_min"].min()
    floors = grid.filter(pl.col("p_min").eq_missing(least)).unique(["k", "floor"], keep="first", maintain_order=True)
    if floors["floor"].n_unique() > 1:
        yield "Floor and K", f"{told} p_min {least:g}.", lambda: plot.heatmap(floors, "k", "floor", objective)
    best = rows.drop_nulls(objective).sort(objective, descending=True, maintain_order=True)
    best = best.unique("policy", keep="first", maintain_order=True).head(CURVES)
    if len(best):
        yield "Survival of drafts", f"{told} The best policies.", lambda: plot.survival(best)
        yield "Yield and drafted tokens", told, lambda: plot.pareto(rows)
