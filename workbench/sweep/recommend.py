"""Which policy a sweep speaks for, and how sure it is: a paired bootstrap over documents.

Every policy sees the same resampled documents, so what they share cancels; how often a policy comes out first says how
far the choice hangs on the documents at hand. It says nothing of texts unlike them.
Shapes: D draws, M policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import Interval, bootstrap_by, bootstrap_difference, ratio_draws
from workbench.core.errors import UserError, check_choice
from workbench.core.frames import require
from workbench.spec.policies import Policy, policy_from
from workbench.sweep.cells import RATIOS, Cell
from workbench.sweep.frame import AT_ONCE, groups_of, stacked
from workbench.sweep.held import sums_behind

if TYPE_CHECKING:
    import polars as pl

OBJECTIVES = tuple(name for name in RATIOS if name != "drafted_per_token")  # of these, more is better
UNITS = {"speedup": "x", "tokens_per_second": " tokens/s", "tau": " accepted per round"}
UNITS |= {"accepted_length": " tokens per round", "emitted_per_round": " tokens per round"}
SURE = 0.95  # share of resamples from which on a choice is called sure


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The policy with the largest objective, and how it stands against the others.

    Args:
        policy: The policy; None where only its description is known and its family is not the workbench's.
        label: Its short name.
        spec: Its description; None for a user-written policy without one.
        objective: What is made large.
        table: Table walked.
        source: Documents judged by.
        value: The objective over all of them.
        low: Lower end of its interval; None with fewer than two documents.
        high: Upper end.
        level: Coverage of the interval.
        probability_best: Share of resamples in which it comes first, ties shared; None with fewer than two documents.
        runner_up: Name of the next best policy; None without one.
        runner_up_value: Its objective.
        lead: Paired interval of the difference to it; None without one.
        same: Names of policies whose rounds are the very same.
        candidates: Policies judged, those of ``same`` not counted.
        documents: Documents judged by.
        draws: Resamples.
        probabilities: Share of resamples in which each policy comes first, by name, largest first; those never
            first are left out.
    """

    policy: Policy | None
    label: str
    spec: dict[str, Any] | None
    objective: str
    table: str
    source: str
    value: float
    low: float | None
    high: float | None
    level: float
    probability_best: float | None
    runner_up: str | None
    runner_up_value: float | None
    lead: Interval | None
    same: tuple[str, ...]
    candidates: int
    documents: int
    draws: int
    probabilities: dict[str, float]

    @property
    def sure(self) -> bool:
        """Whether it comes first in at least 95 % of the resamples."""
        return self.probability_best is not None and self.probability_best >= SURE

    @property
    def sentence(self) -> str:
        """The recommendation as one line."""
        best = f"{self.label}: {shown(self.objective, self.value)}"
        if self.low is not None and self.high is not None:
            best += f" ({self.low:.2f}-{self.high:.2f})"
        if self.probability_best is None:
            parts = [f"{best}, from {self.documents} document, which says nothing of the spread between documents"]
        else:
            parts = [f"{best}, best in {100 * self.probability_best:.0f} % of resamples"]
        if self.runner_up is not None and self.runner_up_value is not None:
            parts.append(f"next {self.runner_up}: {shown(self.objective, self.runner_up_value)}")
        if self.same:
            parts.append(f"the same rounds as {', '.join(self.same)}")
        return "; ".join(parts)

    def _card(self) -> Any:
        from workbench.display import card

        how = (
            "–" if self.probability_best is None else f"{100 * self.probability_best:.0f} % of {self.draws:,} resamples"
        )
        rows: list[tuple[str, Any]] = [(self.objective, self.value)]
        if self.low is not None:
            rows.append((f"{100 * self.level:g} % interval", f"{self.low:.4g} to {self.high:.4g}"))
        rows += [("best in", how), ("next", self.runner_up)]
        if self.lead is not None and self.lead.low is not None:
            rows.append(("ahead of it by", f"{self.lead.value:.3g} ({self.lead.low:.3g} to {self.lead.high:.3g})"))
        if self.same:
            rows.append(("same rounds as", self.same))
        rows += [("judged by", f"{self.documents:,} documents of {self.table}, source {self.source}")]
        rows += [("policies", self.candidates)]
        note = (
            ""
            if self.sure
            else "Not sure: other policies come first in some resamples, or there are too few documents."
        )
        return card(f"Recommended: {self.label}", rows, note)

    def __repr__(self) -> str:
        return f"Recommendation({self.sentence})"

    def _repr_html_(self) -> str:
        return str(self._card()._repr_html_())


def shown(objective: str, value: float) -> str:
    """A value with its unit."""
    return f"{value:.2f}{UNITS.get(objective, '')}"


def recommend(
    frame: pl.DataFrame,
    *,
    objective: str = "speedup",
    source: str = "all",
    table: str | None = None,
    store: str | Path | None = None,
    draws: int | None = None,
    seed: int | None = None,
) -> Recommendation:
    """The best policy of a sweep, and how sure that is.

    Args:
        frame: Rows of ``sweep`` or ``load_sweep``; a filter before narrows the choice.
        objective: What to make large: "speedup" (default) or "tokens_per_second", which need a sweep under a cost
            model, "tau", "accepted_length", "emitted_per_round" or "efficiency".
        source: Documents to judge by; default "all".
        table: Which table's rows to judge, where the frame holds several.
        store: The sweep's directory; None for sweeps that this process walked or loaded.
        draws: Resamples; None for those of the sweep.
        seed: Of the resampling; None for that of the sweep.

    Returns:
        The recommendation. A policy whose rounds are the very same as another's is named with it, not against it.

    Raises:
        UserError: The frame holds no such rows, its sums are not at hand, or the objective is null in it.
    """
    check_choice("objective", objective, OBJECTIVES)
    rows = rows_of(frame, source=source, table=table)
    cells, walked, bootstrap = sums_behind(rows, store)
    draws, seed = bootstrap.draws if draws is None else draws, bootstrap.seed if seed is None else seed
    index_G = groups_of(walked, cells[0])[source]
    names_G = np.array(walked.documents)[index_G]
    pair = stacked(cells, objective, index_G)
    if pair is None:
        raise UserError(
            f"the sweep has no {objective}, which needs a cost model: sweep with cost=..., or choose another objective"
        )
    top_GM, bottom_GM = pair
    same = _alike(top_GM, bottom_GM)
    firsts = [members[0] for members in same]
    cells_M, top_GM, bottom_GM = [cells[i] for i in firsts], top_GM[:, firsts], bottom_GM[:, firsts]
    below_M = bottom_GM.sum(0)
    value_M = np.divide(top_GM.sum(0), below_M, out=np.full(len(firsts), -np.inf), where=below_M > 0)
    order = np.argsort(-value_M, kind="stable")
    best = int(order[0])
    if value_M[best] == -np.inf:
        raise UserError(
            f"no policy has {objective} over source {source!r}: nothing was drafted there; choose another objective"
        )
    second = int(order[1]) if len(order) > 1 and value_M[order[1]] > -np.inf else None
    share_M = _shares(names_G, top_GM, bottom_GM, draws, seed) if len(names_G) > 1 else None
    options: dict[str, Any] = {"draws": draws, "seed": seed, "level": bootstrap.level}
    one = bootstrap_by(names_G, top_GM[:, best], bottom_GM[:, best], **options)[0]
    lead = None
    if second is not None:
        sides = [(names_G, top_GM[:, i], bottom_GM[:, i]) for i in (best, second)]
        lead = bootstrap_difference(*sides, **options)[0]
    labels = [cell.label for cell in cells_M]
    chances = {} if share_M is None else {labels[i]: float(share_M[i]) for i in np.argsort(-share_M) if share_M[i] > 0}
    cell = cells_M[best]
    return Recommendation(
        policy=_policy(cell),
        label=cell.label,
        spec=cell.spec,
        objective=objective,
        table=walked.name,
        source=source,
        value=float(value_M[best]),
        low=one.low,
        high=one.high,
        level=bootstrap.level,
        probability_best=None if share_M is None else float(share_M[best]),
        runner_up=None if second is None else labels[second],
        runner_up_value=None if second is None else float(value_M[second]),
        lead=lead,
        same=tuple(cells[i].label for i in same[best][1:]),
        candidates=len(firsts),
        documents=len(names_G),
        draws=draws,
        probabilities=chances,
    )


def rows_of(frame: pl.DataFrame, *, source: str, table: str | None) -> pl.DataFrame:
    """The rows of one source, and of one table where it is named.

    Args:
        frame: A sweep's frame.
        source: The source.
        table: The table; None for whichever there is.

    Returns:
        At least one row.

    Raises:
        UserError: There is none.
    """
    require(frame, ("cell", "table", "source"), "a frame of wb.sweep")
    if not len(frame):
        raise UserError("the frame holds no rows: give rows of wb.sweep")
    check_choice("source", source, frame["source"].unique(maintain_order=True).to_list())
    if table is not None:
        check_choice("table", table, frame["table"].unique(maintain_order=True).to_list())
        frame = frame.filter(table=table)
    rows = frame.filter(source=source)
    if not len(rows):
        raise UserError(f"table {table!r} has no source {source!r}: choose one of its own")
    return rows


def _alike(top_GM: np.ndarray, bottom_GM: np.ndarray) -> list[list[int]]:
    """Policies in groups with equal sums in every document, each group and the first members in order."""
    found: dict[bytes, list[int]] = {}
    for i in range(top_GM.shape[1]):
        found.setdefault(top_GM[:, i].tobytes() + bottom_GM[:, i].tobytes(), []).append(i)
    return list(found.values())


def _shares(names_G: np.ndarray, top_GM: np.ndarray, bottom_GM: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Share of draws in which each policy is first, ties shared equally, [M]."""
    parts = [slice(i, i + AT_ONCE) for i in range(0, top_GM.shape[1], AT_ONCE)]
    drawn = [ratio_draws(names_G, top_GM[:, part], bottom_GM[:, part], draws=draws, seed=seed) for part in parts]
    ratio_DM = np.nan_to_num(np.concatenate(drawn, axis=1), nan=-np.inf)
    best_D = ratio_DM.max(1)
    defined_D = best_D > -np.inf
    wins_DM = (ratio_DM == best_D[:, None])[defined_D]
    ways_D = wins_DM.sum(1)
    return (wins_DM / ways_D[:, None]).mean(0) if len(wins_DM) else np.zeros(top_GM.shape[1])


def _policy(cell: Cell) -> Policy | None:
    """The policy of a cell, made again from its description where this process did not make the cell."""
    if cell.policy is None and cell.spec is not None and cell.spec.get("family") == cell.family:
        return policy_from(cell.spec)
    return cell.policy
