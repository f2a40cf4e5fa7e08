"""Fit a cost model to rows of ``workbench bench phases``: per phase and number of rows, a line over the context."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError, check_choice
from workbench.replay.cost import CostModel
from workbench.replay.curves import Curve, RoundCost
from workbench.replay.nonnegative import nonnegative

if TYPE_CHECKING:
    import polars as pl

STATISTICS = {"mean": "mean", "median": "value"}
LEVEL = ("accept", "commit whole", "other")  # touch no row of the text, so their cost does not grow with it
GROWING = "draft first"  # what it takes for more rows than one is a cost of its own, so it must not fall with them
NEEDED = ("phase", "rows", "context", "width", "strategy", "mode", "value", "mean", "n")

Row = Mapping[str, Any]


def fit(
    rows: pl.DataFrame | Sequence[Row] | str | Path,
    *,
    mode: str | None = None,
    strategy: str | None = None,
    threads: int | None = None,
    run: str | None = None,
    statistic: str = "mean",
    name: str | None = None,
) -> CostModel:
    """Fit a cost model to measured phases.

    A line over the context goes through the entries of every phase and number of rows by least squares, weighted by
    their repeats, none of whose bases and slopes is negative: no time the model gives is below zero, whatever one noisy
    turn says. A line that would fall with the context is flat, one that would begin below zero begins at zero, and a
    drafter's first step of more rows costs no less than one of fewer. Acceptance, whole commits and the rest of a round
    are flat by nature. Numbers of rows keep an entry each. At widths above 1 what the host does per round is taken once
    per sequence.

    Args:
        rows: Rows of ``workbench bench phases``: as returned, as a frame, or their file.
        mode: "exact" or "fast"; None where the rows hold one only, like the next three.
        strategy: "tape", "columns" or "snapshot".
        threads: Threads they were measured with.
        run: Which run of the benchmark, by its ``run`` column.
        statistic: "mean", since times of rounds add up as means do, or "median", which a machine's hiccups do not move.
        name: What the model is called; None for mode, strategy and threads.

    Returns:
        The model.

    Raises:
        UserError: The rows are of several kinds and it was not said which, or a phase is missing.
    """
    check_choice("statistic", statistic, STATISTICS)
    wanted = {"run": run, "mode": mode, "threads": threads, "strategy": strategy}
    found = [row for row in _rows(rows) if row.get("benchmark", "phases") == "phases" and row.get("phase")]
    if not found:
        raise UserError("no rows of `workbench bench phases` were given: measure some, or use CostModel.from_ratios")
    if lacking := [key for key in NEEDED if key not in found[0]]:
        raise UserError(
            f"rows of `workbench bench phases` hold {', '.join(NEEDED)}; {lacking[0]} is missing: measure them again"
        )
    chosen: dict[str, Any] = {}
    for key, value in wanted.items():
        kinds = sorted({row[key] for row in found if row.get(key) is not None}, key=str)
        if value is None and len(kinds) > 1:
            raise UserError(f"the rows hold {key} {', '.join(map(str, kinds))}: say which, such as {key}={kinds[0]!r}")
        if value is not None and value not in kinds:
            raise UserError(f"{key}={value!r} is not among the rows, which hold {', '.join(map(str, kinds)) or 'none'}")
        chosen[key] = value if value is not None else (kinds[0] if kinds else None)
        found = [row for row in found if row.get(key) in (None, chosen[key])]
    lines = _lines(found, STATISTICS[statistic])
    widths = sorted({width for width, phase, _ in lines if phase == "verify"})
    if 1 not in widths:
        raise UserError(
            "the rows hold no batch width of 1, where the host's part of a round is measured: measure it too"
        )
    label = name or ", ".join(str(chosen[key]) for key in ("mode", "strategy") if chosen[key] is not None)
    contexts = [float(row["context"]) for row in found]
    first = found[0]
    where = {key: first[key] for key in ("machine", "commit", "date", "quick") if first.get(key) is not None}
    return CostModel(
        name=label,
        source="workbench bench phases" + (", quick sizes" if where.get("quick") else ""),
        widths={width: _width(lines, width) for width in widths},
        contexts=(min(contexts), max(contexts)),
        facts={**{key: value for key, value in chosen.items() if value is not None}, "statistic": statistic, **where},
    )


def _rows(rows: Any) -> list[Row]:
    if isinstance(rows, str | Path):
        path = Path(rows)
        if not path.is_file():
            raise UserError(f"{rows} is not a file: give the rows that `workbench bench phases --out` wrote")
        try:
            read = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise UserError(f"{rows} holds a line that is not JSON ({error}): give rows of `workbench bench`") from None
    else:
        read = rows.to_dicts() if hasattr(rows, "to_dicts") else list(rows)
    if any(not isinstance(row, Mapping) for row in read):
        raise UserError("the rows are not mappings of column to value: give rows of `workbench bench phases`")
    return read


def _lines(rows: Sequence[Row], column: str) -> dict[tuple[int, str, int | None], tuple[float, float]]:
    """Base and slope in seconds, by (width, phase, number of rows)."""
    points: dict[tuple[int, str], dict[int | None, list[tuple[float, float, float]]]]
    points = defaultdict(lambda: defaultdict(list))
    for row in rows:
        count = None if row["rows"] is None else int(row["rows"])
        points[int(row["width"]), row["phase"]][count].append((row["context"], row[column] / 1e3, row["n"]))
    out: dict[tuple[int, str, int | None], tuple[float, float]] = {}
    for (width, phase), found in points.items():
        parts: dict[int | None, list[np.ndarray]] = {}
        for count, values in found.items():
            context_N, seconds_N, weight_N = np.array(values, dtype=np.float64).T
            parts[count] = [context_N * (phase not in LEVEL), seconds_N, weight_N]
        counted = {count: part for count, part in parts.items() if count is not None}
        fitted: dict[int, tuple[float, float]] = rising_lines(counted) if counted and phase == GROWING else {}
        out.update({(width, phase, n): fitted[n] if n in fitted else line(*part) for n, part in parts.items()})
    return out


def line(context_N: np.ndarray, seconds_N: np.ndarray, weight_N: np.ndarray) -> tuple[float, float]:
    """The least-squares line through points that neither falls nor begins below zero; flat through one context.

    Args:
        context_N: Where.
        seconds_N: How long.
        weight_N: How much each counts.

    Returns:
        Base and slope.
    """
    return rising_lines({1: (context_N, seconds_N, weight_N)})[1]


def rising_lines(points: Mapping[int, Sequence[np.ndarray]]) -> dict[int, tuple[float, float]]:
    """Least-squares lines for several numbers of rows, none below zero, falling, or below that of fewer rows.

    Base and slope are sums of steps from one number of rows to the next, and no step is negative.

    Args:
        points: Number of rows to what ``line`` takes.

    Returns:
        Number of rows to base and slope; all are flat where one of them has points at one context only.
    """
    counts = sorted(points)
    tilted = all(np.ptp(points[count][0]) > 0 for count in counts)
    design, wanted = [], []
    for i, count in enumerate(counts):
        context_N, seconds_N, weight_N = points[count]
        root_N = np.sqrt(weight_N)
        own_N2 = np.stack([root_N, root_N * context_N * tilted], 1)
        design.append(np.concatenate([own_N2] * (i + 1) + [0 * own_N2] * (len(counts) - 1 - i), 1))
        wanted.append(root_N * seconds_N)
    steps_R2 = nonnegative(np.concatenate(design), np.concatenate(wanted)).reshape(-1, 2)
    return {count: (float(base), float(slope)) for count, (base, slope) in zip(counts, steps_R2.cumsum(0), strict=True)}


def _width(lines: Mapping[tuple[int, str, int | None], tuple[float, float]], width: int) -> RoundCost:
    """The costs at one width."""

    def curve(phase: str, *, rows: bool, at: int = width) -> Curve:
        entries = {n: value for (w, what, n), value in lines.items() if (w, what) == (at, phase)}
        if not entries or (rows and (None in entries or 1 not in entries)):
            raise UserError(
                f"the rows hold no phase {phase!r} at width {at}{' of 1 row' if rows else ''}, measure all "
                "phases with `workbench bench phases`"
            )
        return Curve.of(entries) if rows else Curve.constant(*entries[None])  # type: ignore[arg-type]

    def host(phase: str, *, rows: bool) -> Curve:
        one = curve(phase, rows=rows, at=1)
        return Curve(one.knots, tuple(width * x for x in one.base), tuple(width * x for x in one.slope))

    accept, other = host("accept", rows=True), host("other", rows=False)
    plain = curve("plain", rows=False)
    if width > 1:  # a forward alone was measured there
        plain = _sum(plain, _row(accept, 1), other)
    return RoundCost(
        plain=plain,
        first=curve("draft first", rows=True),
        step=curve("draft step", rows=False),
        verify=curve("verify", rows=True),
        accept=accept,
        partial=curve("commit part", rows=True),
        whole=curve("commit whole", rows=False),
        other=other,
    )


def _row(curve: Curve, rows: int) -> Curve:
    base, slope = curve.lines(rows, "the acceptance")
    return Curve.constant(float(base), float(slope))


def _sum(*constants: Curve) -> Curve:
    add: Callable[[str], float] = lambda part: float(sum(getattr(one, part)[0] for one in constants))  # noqa: E731
    return Curve.constant(add("base"), add("slope"))
