"""What a round costs: seconds of steps, verifies, commits and the rest, at a context and a batch width.

A round of S drafter steps whose D drafts are verified costs

    first(1) + (S - 1) step + verify(1 + D) + accept(1 + D) + commit(D, A) + other + unseen(A)

where unseen(A) is what the A accepted tokens add to the drafter's next first step, which takes their true rows in, and
the draft terms are absent at S = 0. Each term is a line over the context. The model knows nothing of acceptance:
``predict`` multiplies it with the counts of a walk. It holds for one numerical class, one way of committing, one thread
count and one machine, and for greedy rounds; drawing costs more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import CheckpointError, UserError, check_int, check_real
from workbench.core.manifest import write_json
from workbench.replay.curves import PHASES, Curve, RoundCost, between

if TYPE_CHECKING:
    import polars as pl

FORMAT, KIND = 1, "cost model"
KEYS = {"format", "kind", "name", "source", "facts", "contexts", "widths"}


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """Seconds per round; or plain steps per round, where one plain step is said to take 1.

    Args:
        name: What it is called in tables.
        source: Where the numbers come from.
        widths: Costs by batch width: so many sequences run together, each with drafts of the same length.
        contexts: Shortest and longest context measured, tokens; None when the numbers come without one. Beyond them
            the lines are continued, and ``predict`` says for how many rounds.
        facts: What the numbers hold for: numerical class, strategy, threads, machine.
    """

    name: str
    source: str
    widths: Mapping[int, RoundCost]
    contexts: tuple[float, float] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.widths:
            raise UserError("a cost model needs the costs of at least one batch width: give widths={1: ...}")
        for width in self.widths:
            check_int("a batch width", width, low=1)

    def __repr__(self) -> str:
        return f"CostModel({self.name!r}, widths {sorted(self.widths)}, k up to {self.k_max})"

    @property
    def k_max(self) -> int | None:
        """Longest draft all of whose rounds are known, at every width; None without a bound."""
        known = [cost.k_max for cost in self.widths.values() if cost.k_max is not None]
        return min(known, default=None)

    def phases(
        self, *, steps: int, drafted: int, accepted: int | None = None, context: float = 0, width: int = 1
    ) -> dict[str, float]:
        """Seconds of one round by phase; arguments are those of ``round_seconds``."""
        check_int("drafted", drafted, low=0)
        check_int("steps", steps, low=drafted, hint="every draft takes a drafter step, and dropped ones do too")
        if accepted is not None:
            check_int("accepted", accepted, low=0, high=drafted)
        check_int("width", width, low=1)
        at = np.array([1.0, check_real("context", context, low=0)])
        work = between(self.widths, width, lambda cost: cost.work(steps, drafted))
        ends = between(self.widths, width, lambda cost: cost.outcome(drafted))
        mean_over = slice(0, drafted + 1) if accepted is None else slice(accepted, accepted + 1)
        out = dict.fromkeys(PHASES, 0.0)
        for phase, table in work.items():
            out[phase] += float(table[steps, drafted] @ at)
        for phase, table in ends.items():
            out[phase] += float((table[drafted, mean_over] @ at).mean())
        return out

    def round_seconds(
        self, *, steps: int, drafted: int, accepted: int | None = None, context: float = 0, width: int = 1
    ) -> float:
        """Seconds of one round.

        Args:
            steps: Drafter steps run, discarded tokens included.
            drafted: Drafts verified.
            accepted: Drafts that stand; None for the mean over 0 to ``drafted``.
            context: Tokens known when it starts.
            width: Sequences that run such a round together.

        Returns:
            Seconds, for all of them together.

        Raises:
            UserError: An argument is not valid, or the model does not know that many rows or sequences.
        """
        return sum(self.phases(steps=steps, drafted=drafted, accepted=accepted, context=context, width=width).values())

    def plain_seconds(self, *, context: float = 0, width: int = 1) -> float:
        """Seconds of one step of plain decode.

        Args:
            context: Tokens known when it starts.
            width: Sequences that step together.

        Raises:
            UserError: An argument is not valid.
        """
        check_int("width", width, low=1)
        at = np.array([1.0, check_real("context", context, low=0)])
        return float(between(self.widths, width, RoundCost.plain_line) @ at)

    def grid(self, k_max: int, *, contexts: Sequence[float], width: int = 1) -> np.ndarray:
        """Seconds of every kind of round.

        Args:
            k_max: Largest number of steps and drafts.
            contexts: Tokens known when the round starts, C of them.
            width: Sequences that run together.

        Returns:
            [C, K+1 steps, K+1 drafted], the mean over accepted counts; NaN where there are more drafts than steps.

        Raises:
            UserError: An argument is not valid.
        """
        check_int("k_max", k_max, low=0)
        check_int("width", width, low=1)
        at_C2 = np.array([[1.0, check_real("a context", c, low=0)] for c in contexts]).reshape(-1, 2)
        work = between(self.widths, width, lambda cost: cost.work(k_max, k_max))
        ends = between(self.widths, width, lambda cost: cost.outcome(k_max))
        ways_D = 1 + np.arange(k_max + 1)
        lines_SD = sum(work.values()) + sum(table.sum(1) for table in ends.values()) / ways_D[:, None]
        grid = np.einsum("sdx,cx->csd", lines_SD, at_C2)
        grid[:, np.arange(k_max + 1)[:, None] < np.arange(k_max + 1)] = np.nan
        return grid

    def curve(self, k_max: int, *, context: float = 0, width: int = 1) -> tuple[float, ...]:
        """t(K), the seconds of a round that drafts and verifies K tokens, as goodput policies and oracles take it.

        Args:
            k_max: Largest K.
            context: Tokens known when the round starts.
            width: Sequences that run together.

        Returns:
            t(0) to t(k_max), the mean over accepted counts.

        Raises:
            UserError: An argument is not valid.
        """
        return tuple(np.diagonal(self.grid(k_max, contexts=[context], width=width)[0]).tolist())

    @classmethod
    def from_ratios(
        cls,
        verify: Mapping[int, float],
        *,
        draft: float = 0.0,
        overhead: float = 0.0,
        commit: float = 0.0,
        plain_seconds: float = 1.0,
        name: str = "ratios",
        source: str = "given ratios",
    ) -> CostModel:
        """A model of a machine that one has ratios of, not measurements.

        Args:
            verify: Rows of a verify, the pending token's included, to its cost in plain steps.
            draft: Cost of a drafter step, plain steps.
            overhead: Cost of a round besides, plain steps.
            commit: Cost of committing a part of a verify, plain steps; a whole one costs nothing.
            plain_seconds: Seconds of a plain step; 1 leaves every cost in plain steps.
            name: What it is called in tables.
            source: Where the ratios come from.

        Returns:
            The model: batch width 1, no dependence on context.

        Raises:
            UserError: A ratio is not a number above 0, or a number of rows not an integer of at least 1.

        Source: the payoff of a draft length, (1 + accepted) / (verify(1 + K) + K draft + overhead).
        """
        if not isinstance(verify, Mapping) or not verify:
            raise UserError(f"verify={verify!r} is not valid: give rows to plain steps, such as {{1: 1.0, 2: 1.1}}")
        plain = check_real("plain_seconds", plain_seconds, low=0, open_low=True)
        if 1 not in verify:
            raise UserError(
                f"verify of rows {sorted(verify, key=str)} is not valid without 1 row, a round without drafts: "
                "add 1 with its cost, 1.0 where it is a plain step"
            )
        ratios = {
            check_int("rows of a verify", rows, low=1): check_real(f"verify[{rows!r}]", cost, low=0, open_low=True)
            for rows, cost in verify.items()
        }
        parts = {"draft": draft, "overhead": overhead, "commit": commit}
        d, o, c = (plain * check_real(what, value, low=0) for what, value in parts.items())
        cost = RoundCost(
            plain=Curve.constant(plain),
            first=Curve.constant(d),
            step=Curve.constant(d),
            verify=Curve.of({rows: (plain * ratio, 0.0) for rows, ratio in ratios.items()}),
            accept=Curve.constant(0.0),
            partial=Curve.constant(c),
            whole=Curve.constant(0.0),
            other=Curve.constant(o),
        )
        return cls(name=name, source=source, widths={1: cost})

    @classmethod
    def fit(
        cls,
        rows: pl.DataFrame | Sequence[Mapping[str, Any]] | str | Path,
        *,
        mode: str | None = None,
        strategy: str | None = None,
        threads: int | None = None,
        run: str | None = None,
        statistic: str = "mean",
        name: str | None = None,
    ) -> CostModel:
        """Fit to rows of ``workbench bench phases``, no time below zero; see ``workbench.replay.fit.fit``."""
        from workbench.replay.fit import fit

        return fit(rows, mode=mode, strategy=strategy, threads=threads, run=run, statistic=statistic, name=name)

    def _content(self) -> dict[str, Any]:
        return {
            "facts": dict(self.facts),
            "contexts": None if self.contexts is None else [float(edge) for edge in self.contexts],
            "widths": {str(width): self.widths[width].to_json() for width in sorted(self.widths)},
        }

    def key(self) -> dict[str, str]:
        """What names the model in manifests: its name, source and a hash of every number."""
        digest = hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()[:16]
        return {"name": self.name, "source": self.source, "fingerprint": digest}

    def save(self, path: str | Path) -> Path:
        """Write a JSON file, whole or not at all.

        Args:
            path: The file; its folder is made if needed.

        Returns:
            The file.
        """
        where = Path(path)
        where.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "kind": KIND, "name": self.name, "source": self.source}
        return write_json(where, {**head, **self._content()})

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what ``save`` wrote.

        Args:
            path: The file.

        Returns:
            The model.

        Raises:
            CheckpointError: There is none, or it is not a cost model of this format.
        """
        where = Path(path)
        if not where.is_file():
            raise CheckpointError(f"{path} is not a file: give one that CostModel.save wrote")
        try:
            data = json.loads(where.read_text("utf-8"))
            if not isinstance(data, dict) or data.get("kind") != KIND or set(data) != KEYS:
                raise ValueError(f"it does not hold exactly {', '.join(sorted(KEYS))}")
            if data["format"] != FORMAT:
                raise ValueError(f"it is of format {data['format']!r}, and this version reads {FORMAT}")
            edges = data["contexts"]
            return cls(
                name=data["name"],
                source=data["source"],
                facts=data["facts"],
                contexts=None if edges is None else (float(edges[0]), float(edges[1])),
                widths={int(width): RoundCost.from_json(cost) for width, cost in data["widths"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path} is not a cost model ({error}): give a file that CostModel.save wrote, or fit one again"
            ) from None

    def card(self) -> Any:
        """The model as an HTML card for notebooks."""
        from workbench.display import card

        rows: list[tuple[str, Any]] = [("source", self.source), ("batch widths", sorted(self.widths))]
        rows += [(name, value) for name, value in self.facts.items() if name != "machine"]
        first = min(self.widths)
        at = 0.0 if self.contexts is None else self.contexts[0]
        plain = self.plain_seconds(context=at, width=first)
        rows.append(("plain step", f"{plain:.4g} s" if plain != 1 else "1, the unit"))
        curve = self.curve(self.k_max or 0, context=at, width=first)
        rows += [(f"round of {k} drafts", f"{seconds / plain:.3g} plain steps") for k, seconds in enumerate(curve)]
        return card(self.name, rows)

    def _repr_html_(self) -> str:
        return str(self.card()._repr_html_())
