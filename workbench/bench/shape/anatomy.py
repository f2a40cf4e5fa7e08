"""Where a round's time goes, by the arms that a device has; the parts of a draft step; and what comes before rounds.

Rounds are those of the speculative piece at the given acceptance. Their own clocks part them: the host's by phase, a
graphed round by the device's parts (its verdict is within the commit), a streamed one not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from workbench.bench.shape.setting import Setting
from workbench.bench.shape.timing import figure
from workbench.core.errors import UserError
from workbench.spec.telemetry import StepProbe

Rows = Iterator[dict[str, Any]]
STAGES = ("init", "capture", "prime", "drafter_fill")  # of a session, before and between its rounds


def anatomy_rows(setting: Setting) -> Rows:
    """Phases of rounds by every arm, parts of a draft step, and stages before rounds."""
    for arm in setting.arms:
        with setting.optional(f"the anatomy of rounds, {arm}"):
            yield from _phases(setting, arm)
    with setting.optional("the anatomy of draft steps"):
        yield from _steps(setting)
    for arm in setting.arms:
        with setting.optional(f"the anatomy of the setup, {arm}"):
            stages = asdict(setting.speculative(arm).setup)
            for name in STAGES:
                yield _row(setting, "setup", name, arm, [stages[name]])


def _phases(setting: Setting, arm: str) -> Rows:
    """Of whole rounds after the first burst; a phase that an arm does not part has no row."""
    phases = [record.phases for record in setting.speculative(arm).timed]
    if not phases:
        raise UserError("every round was cut by the end of its burst: measure without quick")
    for name in asdict(phases[0]):
        values = [getattr(one, name) for one in phases]
        if any(values):
            yield _row(setting, "round", name, arm, values)
    yield _row(setting, "round", "total", arm, [one.total for one in phases])


def _steps(setting: Setting) -> Rows:
    """Of the host's rounds, burst by burst; on a GPU each part is waited for, so that their sum is no speed."""
    probe = StepProbe(setting.device)
    drafter = setting.drafter("eager", probe=probe)
    readings = [probe.reading()]
    setting.bursts("eager", proposer=drafter, after=lambda: readings.append(probe.reading()))
    timed = list(pairwise(readings[1:]))
    for part in probe.seconds:
        values = [(after[1][part] - before[1][part]) / (after[0] - before[0]) for before, after in timed]
        yield _row(setting, "draft step", part, "eager", values, synchronised=probe.synchronised)


def _row(
    setting: Setting, group: str, part: str, arm: str, seconds: list[float], *, synchronised: bool = False
) -> dict[str, Any]:
    facts = {"group": group, "part": part, "arm": arm, "mode": setting.mode, "k": setting.k}
    label = f"{group}, {part.replace('_', ' ')}, {arm}"
    return figure(label, [1e3 * t for t in seconds], "ms", **facts, synchronised=synchronised)
