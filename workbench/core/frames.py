"""Polars frames of records, each with one fixed schema, so that frames of many runs concatenate.

Polars is imported inside the functions: a machine without it can still make records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.core.errors import UserError, check_int
from workbench.core.records import DraftStepTimes, PhaseTimes, RoundRecord, SetupTimes

if TYPE_CHECKING:
    import polars as pl

PHASES = tuple(item.name for item in fields(PhaseTimes))
STAGES = tuple(item.name for item in fields(SetupTimes))
STEP_PARTS = ("glue", "attention", "ffn", "head")
GROUPS = ("round", "predicted round", "draft step", "setup")

T = TypeVar("T")


def round_schema() -> dict[str, Any]:
    """Columns and types of a rounds frame: identity, counts, content, reasons, seconds per phase."""
    import polars as pl

    whole = dict.fromkeys("index start base k drafted accepted emitted steps".split(), pl.Int32())
    content = {"draft_ids": pl.List(pl.Int32()), "draft_top1": pl.List(pl.Float64()), "bonus": pl.Int32()}
    content["logprobs"] = pl.List(pl.Float64())
    reasons = {"chain_stop": pl.String(), "round_stop": pl.String()}
    phases = {f"t_{name}": pl.Float64() for name in PHASES}
    return {"doc_id": pl.String(), "source": pl.String(), **whole, **content, **reasons, **phases}


def phase_schema() -> dict[str, Any]:
    """Columns and types of a phases frame."""
    import polars as pl

    return {
        "group": pl.String(),
        "part": pl.String(),
        "ms": pl.Float64(),
        "count": pl.Int64(),
        "synchronised": pl.Boolean(),
    }


def rounds_frame(records: Iterable[RoundRecord], *, doc_id: str, source: str = "") -> pl.DataFrame:
    """One row per round of one request.

    Args:
        records: The rounds, in order.
        doc_id: Id of the request or document; the unit that intervals resample.
        source: Register or file the text came from; default "".

    Returns:
        A frame with the columns of ``round_schema``; times in seconds. Frames concatenate, empty ones included.
    """
    import polars as pl

    rows = [{"doc_id": doc_id, "source": source, **record.row()} for record in records]
    return pl.DataFrame(rows, schema=round_schema())


def records_from(frame: pl.DataFrame) -> list[RoundRecord]:
    """The records of a rounds frame, in its order; the inverse of ``rounds_frame``.

    Args:
        frame: A frame with the columns of ``round_schema``.

    Returns:
        One record per row.

    Raises:
        UserError: A column is missing.
    """
    require(frame, tuple(round_schema()), "a rounds frame")
    names = [item.name for item in fields(RoundRecord) if item.name != "phases"]
    out = []
    for row in frame.iter_rows(named=True):
        values: dict[str, Any] = {
            name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names
        }
        out.append(RoundRecord(**values, phases=PhaseTimes(**{name: row[f"t_{name}"] for name in PHASES})))
    return out


def phases_frame(
    rounds: Iterable[RoundRecord] | pl.DataFrame,
    *,
    draft_steps: DraftStepTimes | Sequence[DraftStepTimes] = (),
    setup: SetupTimes | Sequence[SetupTimes] = (),
    synchronised: bool = False,
) -> pl.DataFrame:
    """Where the time went, in long format, for ``plot.phase_anatomy``.

    Args:
        rounds: Records, or a rounds frame.
        draft_steps: Anatomy of draft steps of one or more runs; averaged over steps.
        setup: Stages of one or more generations; averaged over generations.
        synchronised: True when the device was synchronised around the phases of rounds and stages.

    Returns:
        One row per part: group ("round", "draft step", "setup"), part, ms (mean milliseconds per round, per draft step
        or per generation), count (rounds, steps or generations averaged over), synchronised. Groups without a
        measurement are absent.
    """
    import polars as pl

    frame = rounds if isinstance(rounds, pl.DataFrame) else rounds_frame(rounds, doc_id="")
    require(frame, tuple(f"t_{name}" for name in PHASES), "a rounds frame")
    rows: list[tuple[str, str, float, int, bool]] = []
    if len(frame):
        means = frame.select(pl.col(f"t_{name}").mean() for name in PHASES).row(0)
        rows += [("round", part, 1e3 * mean, len(frame), synchronised) for part, mean in zip(PHASES, means)]
    runs = _many(draft_steps, DraftStepTimes)
    if steps := sum(run.steps for run in runs):
        marked = any(run.synchronised for run in runs)
        for part in STEP_PARTS:
            mean = sum(getattr(run, part) * run.steps for run in runs) / steps
            rows.append(("draft step", part, 1e3 * mean, steps, marked))
    stages = [asdict(one) for one in _many(setup, SetupTimes)]
    for part in STAGES if stages else ():
        mean = sum(one[part] for one in stages) / len(stages)
        rows.append(("setup", part, 1e3 * mean, len(stages), synchronised))
    return pl.DataFrame(
        [(group, part.replace("_", " "), *rest) for group, part, *rest in rows], schema=phase_schema(), orient="row"
    )


def predicted_phases(seconds: Mapping[str, float], *, rounds: int, group: str = "predicted round") -> pl.DataFrame:
    """What a cost model says of the phases of rounds, as a phases frame that goes beside a measured one.

    Args:
        seconds: Seconds of all rounds together by phase, such as {"draft": 0.4, "verify": 2.1, "commit": 0.1}.
        rounds: Number of rounds they are the sum of.
        group: Name of the bar; default "predicted round". A name with "predicted" in it is drawn as a prediction.

    Returns:
        A frame of ``phase_schema``, ms per round.

    Raises:
        UserError: No round.
    """
    import polars as pl

    check_int("rounds", rounds, low=1)
    rows = [(group, part.replace("_", " "), 1e3 * value / rounds, rounds, False) for part, value in seconds.items()]
    return pl.DataFrame(rows, schema=phase_schema(), orient="row")


def require(frame: pl.DataFrame, columns: Sequence[str], what: str) -> None:
    """Refuse a frame that lacks columns.

    Args:
        frame: The frame given.
        columns: Names it must hold.
        what: What the frame should be, for the sentence.

    Raises:
        UserError: A column is missing; the sentence names it.
    """
    if missing := [name for name in columns if name not in frame.columns]:
        raise UserError(f"{what} needs the columns {', '.join(columns)}; {', '.join(missing)} is missing")


def _many(value: T | Sequence[T], kind: type[T]) -> list[T]:
    """One or several, as a list."""
    return [value] if isinstance(value, kind) else list(value)  # type: ignore[arg-type]
