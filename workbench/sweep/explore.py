"""Explore a draft table by sliders: K, p_min and floor redraw acceptance and speed at once, from the table alone.

Every position of the sliders is a walk over the recorded table; nothing is generated. Walks already made are kept.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.bootstrap import Interval, bootstrap_by
from workbench.core.errors import check_int, check_real
from workbench.core.metrics import Acceptance, SlotCounts
from workbench.core.progress import quiet
from workbench.spec.policies import AdaptiveFloor, FixedK, Policy

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from workbench.replay.table import DraftTable

SETTLE = 0.06  # seconds without a further change before a figure is drawn
DRAWS = 500  # resamples of an interval on the screen
SIZE = (11.5, 4.0)
# A layout engine would take as long as the drawing, and would move the axes from one setting to the next.
PLACE = {"left": 0.055, "right": 0.915, "bottom": 0.26, "top": 0.92, "wspace": 0.36}
Setting = tuple[int, float, int | None]


@dataclass(frozen=True, eq=False)
class Measured:
    """One policy over the documents of a table.

    Args:
        slots: Rounds per document and slot.
        rounds_G: Rounds per document.
        emitted_G: Tokens emitted per document.
        acceptance: Every acceptance metric, pooled.
        speedup: Predicted, over plain decode; None without a cost model.
    """

    slots: SlotCounts
    rounds_G: np.ndarray
    emitted_G: np.ndarray
    acceptance: Acceptance
    speedup: Interval | None

    @property
    def per_round(self) -> Interval:
        """Tokens per round, with its interval by document."""
        return bootstrap_by(np.arange(len(self.rounds_G)), self.emitted_G, self.rounds_G, draws=DRAWS)[0]


def policy_of(k: int, p_min: float = 0.0, floor: int | None = None, *, statistic: str = "drawn") -> Policy:
    """The policy of three sliders: fixed K without a floor, else the adaptive draft length between floor and K.

    Args:
        k: Draft length; the cap of an adaptive one. 0 is plain decode.
        p_min: Threshold on the drafter's probability.
        floor: Smallest draft length of the adaptive policy, at most k; None for fixed K.
        statistic: "drawn" or "top", what the threshold reads.

    Returns:
        The policy.
    """
    if floor is None or k == 0:
        return FixedK(k=k, p_min=p_min, statistic=statistic)
    return AdaptiveFloor(k=k, cap=k, floor=min(floor, k), p_min=p_min, statistic=statistic)


def explore(
    table: DraftTable,
    cost: Any = None,
    *,
    k: int = 3,
    p_min: float = 0.0,
    floor: int | None = None,
    k_max: int | None = None,
    estimator: str | None = None,
) -> Explorer:
    """Sliders for K, p_min and floor over a draft table, for the last line of a notebook cell.

    Args:
        table: The draft table, with a chain at every start.
        cost: A CostModel that predicts speed-ups; None draws tokens per round instead.
        k: Draft length to begin with; default 3.
        p_min: Threshold to begin with; default 0.
        floor: Floor to begin with; default None, which is fixed K.
        k_max: Longest draft offered; None for all slots of the table.
        estimator: "own", "forced" or "ratio"; None as for ``walk``.

    Returns:
        An object that a notebook shows as sliders, figure and numbers. ``.figure()`` gives the figure alone,
        ``.numbers()`` the numbers, and ``.set(...)`` moves the sliders.

    Raises:
        UserError: A starting value is out of range, or the table cannot be walked.
    """
    longest = table.k_max if k_max is None else check_int("k_max", k_max, low=1, high=table.k_max)
    statistic = "top" if estimator == "ratio" else "drawn"

    def measure(settings: Sequence[Setting]) -> list[Measured]:
        return measured(table, [policy_of(*one, statistic=statistic) for one in settings], cost, estimator)

    return Explorer(measure, k_max=longest, start=(k, p_min, floor), priced=cost is not None)


def measured(table: DraftTable, policies: Sequence[Policy], cost: Any, estimator: str | None) -> list[Measured]:
    """Walk policies over a table and measure them."""
    from workbench.replay.fast import walk_counts
    from workbench.replay.predict import predict

    out = []
    with quiet():  # a bar for every move of a slider would pile up under it
        for counts in walk_counts(table, policies, estimator=estimator):
            speedup = None if cost is None else predict(counts, cost, draws=DRAWS).speedup
            out.append(Measured(counts.slots, counts.rounds_G, counts.emitted_G, counts.acceptance(), speedup))
    return out


class Explorer:
    """Sliders, a figure and numbers over a function that measures policies.

    Args:
        measure: From settings (k, p_min, floor) to one ``Measured`` each.
        k_max: Longest draft offered.
        start: The setting to begin with.
        priced: Whether ``measure`` gives speed-ups.
    """

    def __init__(
        self, measure: Callable[[Sequence[Setting]], list[Measured]], *, k_max: int, start: Setting, priced: bool
    ) -> None:
        self.measure, self.k_max, self.priced = measure, k_max, priced
        self.setting = self._checked(*start)
        self._known: dict[Setting, Measured] = {}
        self._widget: Any = None
        self._pending: asyncio.TimerHandle | None = None

    def set(self, k: int | None = None, p_min: float | None = None, floor: int | str | None = "same") -> Explorer:
        """Move the sliders.

        Args:
            k: Draft length; None leaves it.
            p_min: Threshold; None leaves it.
            floor: Floor, None for fixed K; "same" leaves it.

        Returns:
            The explorer.

        Raises:
            UserError: A value is out of range.
        """
        old = self.setting
        wanted = (old[0] if k is None else k, old[1] if p_min is None else p_min, old[2] if floor == "same" else floor)
        self.setting = self._checked(*wanted)
        if self._widget is not None:
            self._move()
            self._redraw()
        return self

    def along_k(self) -> list[Measured]:
        """The policy at every K from 0 on, other settings as they are; walked at the first need, then kept."""
        _, p_min, floor = self.setting
        settings = [self._key(k, p_min, floor) for k in range(self.k_max + 1)]
        if missing := [one for one in dict.fromkeys(settings) if one not in self._known]:
            self._known |= zip(missing, self.measure(missing), strict=True)
        return [self._known[one] for one in settings]

    def frame(self) -> pl.DataFrame:
        """The policy at every K: tau, accepted length, efficiency, and tokens per round and speed-up with intervals."""
        import polars as pl

        rows: list[dict[str, Any]] = []
        for k, one in enumerate(self.along_k()):
            got = one.acceptance
            row = {"k": k, "tau": got.tau, "accepted_length": got.accepted_length, "efficiency": got.efficiency}
            for name, found in (("emitted_per_round", one.per_round), ("speedup", one.speedup)):
                ends = (None, None, None) if found is None else (found.value, found.low, found.high)
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), ends))
            rows.append(row | {"documents": got.requests})
        floats = [name for name in rows[0] if name not in ("k", "documents")]
        schema = {"k": pl.Int64, **dict.fromkeys(floats, pl.Float64), "documents": pl.Int64}
        return pl.DataFrame(rows, schema=schema)

    def figure(self) -> Figure:
        """Acceptance by position of the chosen policy, and speed-up (or tokens per round) by K, as a pyplot figure."""
        import matplotlib.pyplot as plt

        return self._drawn_on(plt.figure(figsize=SIZE))

    def _drawn_on(self, figure: Figure) -> Figure:
        from workbench.plot import acceptance_by_position, speedup_by_k

        left, right = figure.subplots(1, 2, gridspec_kw=PLACE)
        k = self.setting[0]
        acceptance_by_position(self.along_k()[k], ax=left, by=None)
        # The same scale for every setting, so that the eye compares heights.
        left.set_xlim(0.6, self.k_max + 0.4)
        left.set_xticks(range(1, self.k_max + 1))
        speedup_by_k(self.frame(), ax=right, value="speedup" if self.priced else "emitted_per_round")
        right.axvline(k, color="#999999", linewidth=6, alpha=0.3, zorder=0)
        return figure

    def numbers(self) -> dict[str, Any]:
        """The chosen policy in numbers: tau, accepted length, efficiency, tokens per round, speed-up, counts."""
        one = self.along_k()[self.setting[0]]
        got = one.acceptance
        out: dict[str, Any] = {
            "tau (accepted per round, without bonus)": got.tau,
            "accepted length (with bonus, whole rounds)": got.accepted_length,
            "draft efficiency (accepted / drafted)": got.efficiency,
            "tokens per round": _text(one.per_round),
        }
        out["predicted speed-up"] = _text(one.speedup, "×") if one.speedup else "– (needs a cost model)"
        return out | {"rounds": got.rounds, "of these cut": got.cut, "documents": got.requests}

    @property
    def widget(self) -> Any:
        """The ipywidgets box, made at the first need."""
        if self._widget is None:
            self._build()
        return self._widget

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"Explorer({_named(self.setting)}; K up to {self.k_max})"

    def _checked(self, k: Any, p_min: Any, floor: Any) -> Setting:
        k = check_int("k", k, low=0, high=self.k_max)
        p_min = check_real("p_min", p_min, low=0.0, high=1.0)
        return k, p_min, None if floor is None else check_int("floor", floor, low=1, high=self.k_max)

    @staticmethod
    def _key(k: int, p_min: float, floor: int | None) -> Setting:
        """Settings that are one policy have one key."""
        if k == 0:
            return (0, 0.0, None)
        return (k, round(p_min, 6), floor if floor is None else min(floor, k))

    def _build(self) -> None:
        import ipywidgets as w

        k, p_min, floor = self.setting
        wide = w.Layout(width="26em")
        style = {"description_width": "9em"}
        self._k = w.IntSlider(k, 0, self.k_max, description="K (at most)", style=style, layout=wide)
        self._p = w.FloatSlider(
            p_min, min=0, max=1, step=0.05, description="p_min", readout_format=".2f", style=style, layout=wide
        )
        options = [("none: fixed K", 0), *((str(n), n) for n in range(1, self.k_max + 1))]
        self._floor = w.SelectionSlider(
            options=options, value=floor or 0, description="floor", style=style, layout=wide
        )
        self._k.tooltip, self._p.tooltip = "draft tokens per round, at most", "drop drafts below this probability"
        self._floor.tooltip = "adaptive draft length: at least this, at most K"
        self._picture = w.Image(format="png", layout=w.Layout(width="100%", max_width="1150px"))
        self._card = w.HTML()
        for slider in (self._k, self._p, self._floor):
            slider.observe(self._changed, names="value")
        controls = w.VBox([self._k, self._p, self._floor])
        self._widget = w.VBox([w.HBox([controls, self._card], layout=w.Layout(flex_flow="row wrap")), self._picture])
        self._redraw()

    def _changed(self, change: Any) -> None:
        """Draw once the sliders have come to rest; at once where no event loop runs."""
        self.setting = self._checked(self._k.value, self._p.value, self._floor.value or None)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._redraw()
            return
        if self._pending is not None:
            self._pending.cancel()
        self._pending = loop.call_later(SETTLE, self._redraw)

    def _move(self) -> None:
        """Put the sliders where the setting is, without drawing for each."""
        k, p_min, floor = self.setting
        for slider, value in ((self._k, k), (self._p, p_min), (self._floor, floor or 0)):
            slider.unobserve(self._changed, names="value")
            slider.value = value
            slider.observe(self._changed, names="value")

    def _redraw(self) -> None:
        """New figure and numbers; the old ones stay until the new ones are there, so that nothing flickers."""
        from matplotlib.figure import Figure

        from workbench.display import card

        self._pending = None
        drawn = io.BytesIO()
        self._drawn_on(Figure(figsize=SIZE)).savefig(drawn, format="png", dpi=100)
        self._picture.value = drawn.getvalue()
        self._card.value = card(_named(self.setting), self.numbers())._repr_html_()


def _named(setting: Setting) -> str:
    """A setting in words."""
    k, p_min, floor = setting
    if k == 0:
        return "K = 0: plain decode"
    length = f"K = {k}" if floor is None else f"K from {min(floor, k)} to {k}, adaptive"
    return length + (f", p_min = {p_min:.2f}" if p_min else "")


def _text(one: Interval, unit: str = "") -> str:
    """A value with its interval."""
    if one.value is None:
        return "–"
    ends = "" if one.low is None else f" ({one.low:.2f}–{one.high:.2f})"
    return f"{one.value:.2f}{unit}{ends}"
