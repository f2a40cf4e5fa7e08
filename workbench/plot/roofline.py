"""The roofline of ops in time: microseconds of a call over the bytes it must move, under what a copy takes.

Drawn from benchmark rows of kernels (``core.bench_rows.latest_ops``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.core.errors import UserError
from workbench.core.frames import require
from workbench.plot import frames, style

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes

BAND = 0.34  # share of the width for ops whose bytes are not counted
LINE = 1.25 * style.SMALL  # height of a line of labels, points


def roofline(frame: pl.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Time of every call against the bytes it must move, with the time of a copy and the least time seen as bounds.

    Below the bend no call is bound by bytes: moving them takes less than the shortest launch. Calls whose bytes are
    not counted stand in a band on the left, by their time alone; those with counted operations carry their rate.

    Args:
        frame: One row per call: name, case, value (µs), bytes (null where not counted), copy_tb_s; tflop_s is read
            where it is there.
        ax: Axes to draw on; None for a new figure.

    Returns:
        The axes, both scales logarithmic; a point below the line moved its bytes faster than a copy, which writes too.

    Raises:
        UserError: A column is missing, a time is not above 0, or a call with bytes has no copy rate.
    """
    import polars as pl

    require(frame, ("name", "case", "value", "bytes", "copy_tb_s"), "a frame of kernel rows")
    rows = frame.drop_nulls("value")
    ax = style.axes(ax, width=9.6, height=5.6)
    if not len(rows):
        return style.empty(ax, "ops")
    if (rows["value"] <= 0).any():
        raise UserError(f"value={rows['value'].min()!r} is not valid: a call takes more than 0 µs")
    counted = rows.filter(pl.col("bytes") > 0)
    rate = counted["copy_tb_s"].median() if len(counted) else 1.0
    if not isinstance(rate, float):
        raise UserError("copy_tb_s is null in every row with bytes: a roofline needs the copy rate of its run")
    least = float(rows["value"].min())  # type: ignore[arg-type]
    low, high = _ends([float(n) for n in counted["bytes"].to_list()] or [1.0])
    start = low * (low / high) ** (BAND / (1 - BAND))
    ax.set(xscale="log", yscale="log", xlim=(start, high))
    ax.set_ylim(least / 1.6, 2.0 * float(rows["value"].max()))  # type: ignore[arg-type]
    if len(counted):
        _roof(ax, least, rate * 1e6, low, high)
    _points(ax, counted)
    _band(ax, rows.filter(pl.col("bytes").is_null() | (pl.col("bytes") <= 0)), start, low)
    style.titles(ax, "Time of a call by the bytes it must move", x="bytes of a call", y="time of a call (µs)")
    ax.xaxis.set_label_coords(BAND + (1 - BAND) / 2, -0.075)
    copied = f"; line: a copy at {rate:.2f} TB/s, read and written bytes both counted" if len(counted) else ""
    ops = frames.counted(rows["name"].n_unique(), "op")
    style.caption(ax, f"n = {frames.counted(len(rows), 'call')} of {ops}{copied}; dotted: the shortest call here")
    return ax


def _ends(moved: list[float]) -> tuple[float, float]:
    """Room for the bytes, with some air."""
    return min(moved) / 2.5, max(moved) * 2.5


def _roof(ax: Axes, least: float, per_us: float, low: float, high: float) -> None:
    """The bound: the shortest call up to the bend, and the time of a copy from there on."""
    ink = style.tone(ax)
    bend = min(max(least * per_us, low), high)
    ax.plot([bend, high], [bend / per_us, high / per_us], color=ink, linewidth=1.5, label="_copy")
    ax.plot([low, high], [least, least], color=ink, linewidth=1.0, linestyle=":", label="_least")
    if low < least * per_us < high:
        ax.annotate(
            f"bend at {_bytes(least * per_us)}", xy=(bend, least), xytext=(0, -5), textcoords="offset points",
            ha="center", va="top", fontsize=style.SMALL, color=ink,
        )  # fmt: skip


def _points(ax: Axes, rows: pl.DataFrame) -> None:
    """Calls with bytes, one colour and marker per op, named in a legend outside, slowest first."""
    names = rows.sort("value", descending=True)["name"].unique(maintain_order=True).to_list()
    for i, name in enumerate(names):
        part = rows.filter(rows["name"] == name)
        ax.plot(part["bytes"], part["value"], label=f"{name} ({len(part)})", **_look(i))
    if names:
        style.legend(ax, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.3, handletextpad=0.3)


def _look(i: int) -> dict[str, Any]:
    """Colour and marker of the i-th op: no two of the first 49 share both."""
    return {
        "color": style.colour(i), "marker": style.marker(i + i // len(style.PALETTE)), "markersize": 5.5,
        "linestyle": "none", "alpha": 0.85,
    }  # fmt: skip


def _band(ax: Axes, rows: pl.DataFrame, start: float, end: float) -> None:
    """Calls without counted bytes at the band's left, each op's slowest call named on the right of it."""
    import numpy as np
    from matplotlib.ticker import NullLocator

    grey = style.tone(ax, style.MUTED)
    ax.axvline(end, color=grey, linewidth=0.8)
    ax.text(
        BAND / 2, 0.985, "bytes not counted", transform=ax.transAxes, ha="center", va="top", fontsize=style.SMALL,
        color=grey,
    )  # fmt: skip
    at = start * (end / start) ** 0.06
    ax.plot([at] * len(rows), rows["value"], "o", color=grey, markersize=4, alpha=0.7, label="_not counted")
    ops = [(name, part) for (name,), part in rows.group_by("name", maintain_order=True)]
    low, high = (float(np.log10(one)) for one in ax.get_ylim())
    tops = [float(part["value"].max()) for _, part in ops]  # type: ignore[arg-type]
    wanted = [(np.log10(top) - low) / (high - low) for top in tops]
    tall = [LINE / style.size(ax)[1]] * len(ops)
    for (name, part), top, place in zip(ops, tops, style.spread(wanted, tall, low=0.0, high=0.94)):
        ax.annotate(
            name + _rate(part), xy=(at, top), xytext=(0.24 * BAND, place), textcoords="axes fraction", va="center",
            fontsize=style.SMALL, color=style.tone(ax),
            arrowprops={
                "arrowstyle": "-", "color": grey, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2, "relpos": (0, 0.5),
            },
        )  # fmt: skip
    ticks = [10.0**n for n in range(int(np.ceil(np.log10(end))), 16) if 10.0**n < ax.get_xlim()[1]]
    ax.set_xticks(ticks, [_bytes(one) for one in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _rate(part: pl.DataFrame) -> str:
    """The best counted rate of an op's calls, for its label."""
    best = part["tflop_s"].max() if "tflop_s" in part.columns else None
    return f", {best:,.0f} TFLOP/s" if isinstance(best, float) else ""


def _bytes(count: float) -> str:
    """Bytes in a unit that keeps the number short."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g} B"
