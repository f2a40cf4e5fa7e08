"""Benchmark rows as frames for figures: the latest measurement of every op, and phases of a round by arm.

It reads what ``data/bench/README.md`` describes and knows nothing of how rows were measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.core.errors import UserError
from workbench.core.frames import PHASES, phase_schema, require

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

ARMS = ("eager", "graphed", "streamed")
UNPARTED = "not parted"  # the one phase of a round that is measured as a whole


def read_rows(path: str | Path) -> pl.DataFrame:
    """A file of benchmark rows as a frame; what a row does not say is null.

    Args:
        path: JSON lines.

    Returns:
        The frame.

    Raises:
        UserError: There is no such file, or it holds no row.
    """
    from pathlib import Path

    import polars as pl

    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        raise UserError(f"{path.name} holds no benchmark rows here: measure them first, by `workbench bench`")
    return pl.read_ndjson(path, infer_schema_length=None)


def latest_ops(frame: pl.DataFrame) -> pl.DataFrame:
    """The last row of every op and case whose check passed, without rows of a kernel that has changed since.

    Args:
        frame: Rows of ``kernels.jsonl``, oldest first: name, case, check, value.

    Returns:
        The rows, in the file's order.

    Raises:
        UserError: A column is missing.
    """
    import polars as pl

    require(frame, ("name", "case", "check", "value"), "a frame of kernel rows")
    rows = frame.filter(pl.col("check") == "passed")
    if "superseded" in rows.columns:
        rows = rows.filter(pl.col("superseded").is_null())
    return rows.unique(["name", "case"], keep="last", maintain_order=True)


def op_ratios(frame: pl.DataFrame) -> pl.DataFrame:
    """How many times faster ops are than what stands beside them in the same run.

    Args:
        frame: Rows of ``kernels.jsonl``, oldest first, with speedup (over the library) or speedup_over_peer and peer.

    Returns:
        Rows of name, case, against ("library" or the peer's name), ratio, and its ends low and high where the op's
        time has percentiles; the last row of each.

    Raises:
        UserError: A column is missing.
    """
    import polars as pl

    require(frame, ("name", "case", "value", "low", "high", "stock_us", "speedup"), "a frame of kernel rows")
    stock = latest_ops(frame).drop_nulls("speedup")
    found = [
        stock.select(
            "name", "case", against=pl.lit("library"), ratio="speedup",
            low=pl.col("stock_us") / pl.col("high"), high=pl.col("stock_us") / pl.col("low"),
        )
    ]  # fmt: skip
    if "speedup_over_peer" in frame.columns:
        peers = frame.drop_nulls("speedup_over_peer")
        peers = peers.unique(["name", "case", "peer"], keep="last", maintain_order=True)
        none = pl.lit(None, pl.Float64)
        found.append(peers.select("name", "case", against="peer", ratio="speedup_over_peer", low=none, high=none))
    return pl.concat(found)


def phases_by_arm(frame: pl.DataFrame, *, shape: str, mode: str = "fast") -> pl.DataFrame:
    """Phases of a round, one group per arm, as a phases frame of medians.

    Args:
        frame: Rows of ``workbench bench decode --shape``: piece, shape, mode, arm, group, part, value (ms), unit, n;
            synchronised is read where it is there.
        shape: Which geometry, such as "4B".
        mode: "fast" (default) or "exact".

    Returns:
        A frame of ``phase_schema``, groups in the order eager, graphed, streamed; a round measured as a whole has the
        one part "not parted".

    Raises:
        UserError: A column is missing, or an arm has no row of this shape and mode.
    """
    import polars as pl

    rows = _round_rows(frame, shape, mode)
    out: list[tuple[str, str, float, int, bool]] = []
    for arm in ARMS:
        part = {row["part"]: row for row in rows.filter(pl.col("arm") == arm).iter_rows(named=True)}
        found = [part[name] for name in PHASES if name in part]
        names = [row["part"].replace("_", " ") for row in found]
        if names == ["other"]:
            names = [UNPARTED]
        out += [(arm, name, row["value"], row["n"], bool(row.get("synchronised"))) for name, row in zip(names, found)]
    return pl.DataFrame(out, schema=phase_schema(), orient="row")


def round_times(frame: pl.DataFrame, *, shape: str, mode: str = "fast") -> pl.DataFrame:
    """Milliseconds of a whole round by arm.

    Args:
        frame: Rows as of ``phases_by_arm``, with p20 and p80.
        shape: Which geometry.
        mode: "fast" (default) or "exact".

    Returns:
        Rows of arm, ms (median), p20, p80 and rounds, in the order of arms.

    Raises:
        UserError: A column is missing, or an arm has no row of this shape and mode.
    """
    import polars as pl

    require(frame, ("p20", "p80"), "a frame of shape rows")
    rows = _round_rows(frame, shape, mode).filter(pl.col("part") == "total")
    order = {arm: i for i, arm in enumerate(ARMS)}
    rows = rows.sort(pl.col("arm").replace_strict(order))
    return rows.select("arm", "value", "p20", "p80", "n").rename({"value": "ms", "n": "rounds"})


def _round_rows(frame: pl.DataFrame, shape: str, mode: str) -> pl.DataFrame:
    """The last row of every arm and part of a round; each arm has its total and a phase."""
    import polars as pl

    require(
        frame, ("piece", "shape", "mode", "arm", "group", "part", "value", "unit", "n"), "a frame of shape rows"
    )  # fmt: skip
    chosen = (pl.col("piece") == "anatomy") & (pl.col("group") == "round") & (pl.col("unit") == "ms")
    rows = frame.filter(chosen & (pl.col("shape") == shape) & (pl.col("mode") == mode) & pl.col("arm").is_in(ARMS))
    rows = rows.unique(["arm", "part"], keep="last", maintain_order=True)
    for arm in ARMS:
        parts = {*rows.filter(pl.col("arm") == arm)["part"]}
        if "total" not in parts or not parts & {*PHASES}:
            raise UserError(
                f"there is no row of the phases of the arm {arm!r} for {shape}, {mode}: measure them by `workbench "
                f"bench decode --shape {shape} --only anatomy` on a GPU"
            )
    return rows


def arm_ratios(frame: pl.DataFrame, *, shape: str, mode: str = "fast") -> pl.DataFrame:
    """Speculative over plain decode by arm, at the acceptance the rows were measured with.

    Args:
        frame: Rows as of ``phases_by_arm``.
        shape: Which geometry.
        mode: "fast" (default) or "exact".

    Returns:
        Rows of arm, head ("whole" or "trimmed"), ratio, p20, p80 and by_bytes (the ratio if every step took the time
        of its bytes), in the order of arms.

    Raises:
        UserError: A column is missing, or there is no such row.
    """
    import polars as pl

    columns = ("piece", "shape", "mode", "arm", "value", "unit", "p20", "p80", "by_bytes")
    require(frame, columns, "a frame of shape rows")
    chosen = (pl.col("piece") == "speculative") & (pl.col("shape") == shape) & (pl.col("mode") == mode)
    rows = frame.filter(chosen & (pl.col("unit") == "ratio"))
    if not len(rows):
        raise UserError(
            f"there is no row of speculative over plain decode for {shape}, {mode}: measure them by `workbench bench "
            f"decode --shape {shape} --only speculative` on a GPU"
        )
    trimmed = pl.col("trim").is_not_null() if "trim" in rows.columns else pl.lit(False)
    rows = rows.with_columns(head=pl.when(trimmed).then(pl.lit("trimmed")).otherwise(pl.lit("whole")))
    rows = rows.unique(["arm", "head"], keep="last", maintain_order=True)
    order = pl.col("arm").replace_strict({arm: i for i, arm in enumerate(ARMS)}, default=len(ARMS))
    return rows.sort(order, "head", descending=[False, True]).select(
        "arm", "head", "p20", "p80", "by_bytes", ratio="value"
    )


def phase_floors(frame: pl.DataFrame, *, shape: str, mode: str = "fast", kind: str = "graph") -> pl.DataFrame:
    """Phases of a round alone on the device, beside the time a copy of their least bytes takes.

    Args:
        frame: Rows as of ``phases_by_arm``, of the pieces "verify" and "draft".
        shape: Which geometry.
        mode: "fast" (default) or "exact".
        kind: How the phase ran: "graph" (default), without the host's time, or "eager".

    Returns:
        Rows of phase, rows, ms, floor_ms and of_floor (the floor's share of the time), the last row of each phase.

    Raises:
        UserError: A column is missing, or there is no such row.
    """
    import polars as pl

    columns = ("shape", "mode", "kind", "phase", "rows", "value", "unit", "floor_ms", "of_floor")
    require(frame, columns, "a frame of shape rows")
    chosen = (pl.col("shape") == shape) & (pl.col("mode") == mode) & (pl.col("kind") == kind)
    rows = frame.filter(chosen & (pl.col("unit") == "ms")).unique("phase", keep="last", maintain_order=True)
    if not len(rows):
        raise UserError(
            f"there is no row of the phases of {shape} alone, {mode}, {kind}: measure them by `workbench bench decode "
            f"--shape {shape} --only verify,draft` on a GPU"
        )
    return rows.select("phase", "rows", "floor_ms", "of_floor", ms="value").select(
        "phase", "rows", "ms", "floor_ms", "of_floor"
    )
