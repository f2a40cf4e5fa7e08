"""What the numbers mean: every acceptance metric, defined once, from rounds.

Reads drafted and accepted counts and nothing else of a round's content; knows no model, policy or tensor.

joint(j) is the share of *all* rounds in which slots 1..j were accepted; reach(j) the share of rounds with 1..j-1
accepted that drafted slot j; cond(j) the share of those in which slot j was accepted. So joint(j) is the product of
reach·cond over 1..j. ``tau`` is accepted / rounds, without the bonus token that papers often include; accepted length
is the mean of 1 + accepted over rounds that no stop, budget or context cut. Undefined ratios are None, never NaN.

Shapes: N rounds, G requests, K slots (index 0 holds slot 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isclose
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from workbench.core.bootstrap import Interval, bootstrap_by, bootstrap_difference
from workbench.core.errors import UserError, check_choice, check_int
from workbench.core.records import CUTS, RoundRecord

__all__ = [
    "AGGREGATIONS",
    "Acceptance",
    "Interval",
    "SlotCounts",
    "Telemetry",
    "acceptance",
    "bootstrap_by",
    "bootstrap_difference",
    "check_identities",
    "repeated_ngrams",
    "slot_counts",
]

AGGREGATIONS = ("pooled", "request_mean")
COLUMNS = ("drafted", "accepted", "emitted", "chain_stop", "round_stop")


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator, or None when the denominator is 0."""
    return numerator / denominator if denominator else None


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Counters of a session, by draft position and without a cap on positions; values, so a copy is a reading.

    Args:
        rounds: Rounds.
        drafted: Drafted tokens; discarded chain tokens are not among them.
        accepted: Accepted tokens, without bonus tokens.
        emitted: Tokens committed to the output.
        cut: Rounds that a stop, the budget or the context ended early.
        pos_drafted: Rounds that drafted slot j, [K].
        pos_tested: Rounds that drafted slot j and accepted every slot before it, [K].
        pos_accepted: Rounds that accepted slots 1..j, [K].
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    cut: int = 0
    pos_drafted: tuple[int, ...] = ()
    pos_tested: tuple[int, ...] = ()
    pos_accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, records: Iterable[RoundRecord]) -> Telemetry:
        """Count rounds.

        Args:
            records: Rounds, in any order.

        Returns:
            Their counters.
        """
        out = cls()
        for record in records:
            out = out.add(record)
        return out

    def add(self, record: RoundRecord) -> Telemetry:
        """Return the counters with one more round in them."""
        return self.merge(
            Telemetry(
                rounds=1,
                drafted=record.drafted,
                accepted=record.accepted,
                emitted=record.emitted,
                cut=int(record.cut),
                pos_drafted=(1,) * record.drafted,
                pos_tested=(1,) * min(record.accepted + 1, record.drafted),
                pos_accepted=(1,) * record.accepted,
            )
        )

    def merge(self, other: Telemetry) -> Telemetry:
        """Return the sum of two counters, such as those of two sessions."""
        return self._combine(other, 1)

    def delta(self, previous: Telemetry) -> Telemetry:
        """Return what happened since an earlier reading of the same session.

        Args:
            previous: The earlier reading.

        Returns:
            The difference.

        Raises:
            UserError: A counter of ``previous`` is larger, so it is no earlier reading of this session.
        """
        out = self._combine(previous, -1)
        if (
            min([out.rounds, out.drafted, out.emitted, out.cut, *out.pos_drafted, *out.pos_tested, *out.pos_accepted])
            < 0
        ):
            raise UserError(
                f"a reading of {previous.rounds} rounds is no earlier reading of one of {self.rounds} rounds: "
                "a counter would go backwards; take both from the same session, the earlier one as `previous`"
            )
        return out

    def _combine(self, other: Telemetry, sign: int) -> Telemetry:
        def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            width = max(len(a), len(b))
            padded = ((*x, *(0,) * (width - len(x))) for x in (a, b))
            out = [x + sign * y for x, y in zip(*padded, strict=True)]
            while out and out[-1] == 0:
                out.pop()
            return tuple(out)

        return Telemetry(
            self.rounds + sign * other.rounds,
            self.drafted + sign * other.drafted,
            self.accepted + sign * other.accepted,
            self.emitted + sign * other.emitted,
            self.cut + sign * other.cut,
            add(self.pos_drafted, other.pos_drafted),
            add(self.pos_tested, other.pos_tested),
            add(self.pos_accepted, other.pos_accepted),
        )

    @property
    def tau(self) -> float | None:
        """Accepted tokens per round, without the bonus; None without rounds."""
        return ratio(self.accepted, self.rounds)

    def row(self) -> dict[str, Any]:
        """The counters as one flat mapping, with tau."""
        return asdict(self) | {"tau": self.tau}


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Per request and slot, the counts that joint, reach and cond are ratios of.

    Args:
        rounds_G: Rounds per request.
        drafted_GK: Rounds that drafted the slot.
        tested_GK: Rounds that drafted the slot and accepted all slots before it.
        accepted_GK: Rounds that accepted this slot and all before it.
    """

    rounds_G: np.ndarray
    drafted_GK: np.ndarray
    tested_GK: np.ndarray
    accepted_GK: np.ndarray

    def parts(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Numerators and denominators of one kind, [G, K] each.

        Args:
            kind: "joint", "reach" or "cond".

        Returns:
            Counts whose sums over requests, divided, are the pooled ratio.

        Raises:
            UserError: Another kind.
        """
        before_GK = np.concatenate([self.rounds_G[:, None], self.accepted_GK], axis=1)[:, :-1]
        all_GK = np.broadcast_to(self.rounds_G[:, None], self.accepted_GK.shape)
        return {
            "joint": (self.accepted_GK, all_GK),
            "reach": (self.tested_GK, before_GK),
            "cond": (self.accepted_GK, self.tested_GK),
        }[check_choice("kind", kind, ("joint", "reach", "cond"))]

    def pooled(self, kind: str) -> tuple[float | None, ...]:
        """The ratio over all requests together, one value per slot."""
        num_GK, den_GK = self.parts(kind)
        return tuple(ratio(int(n), int(d)) for n, d in zip(num_GK.sum(0), den_GK.sum(0)))


def slot_counts(
    drafted: ArrayLike, accepted: ArrayLike, *, groups: ArrayLike | None = None, slots: int = 0
) -> SlotCounts:
    """Count drafted, tested and accepted rounds per request and slot.

    Args:
        drafted: Drafted tokens of each round, [N].
        accepted: Accepted tokens of each round, [N].
        groups: Request index of each round, integers from 0 [N]; None for one request.
        slots: Least number of slots to count; default 0.

    Returns:
        The counts, K being the longest draft or ``slots``.

    Raises:
        UserError: A round accepted more than it drafted.
    """
    drafted_N, accepted_N = np.asarray(drafted, dtype=np.int64), np.asarray(accepted, dtype=np.int64)
    group_N = np.zeros(len(drafted_N), np.int64) if groups is None else np.asarray(groups, dtype=np.int64)
    wrong = np.flatnonzero((accepted_N > drafted_N) | (accepted_N < 0))
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"round {i} accepted {accepted_N[i]} of {drafted_N[i]} drafted tokens: 0 to the number drafted is valid; "
            "the bonus token is not an accepted one"
        )
    g, k = max(int(group_N.max(initial=-1)) + 1, 1), max(int(drafted_N.max(initial=0)), slots)
    tally = np.zeros((3, g, k), np.int64)
    for j in range(k):
        for row, hit_N in enumerate((drafted_N > j, (drafted_N > j) & (accepted_N >= j), accepted_N > j)):
            tally[row, :, j] = np.bincount(group_N[hit_N], minlength=g)
    return SlotCounts(np.bincount(group_N, minlength=g), *tally)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Every acceptance metric of a set of rounds. Counts are totals; ratios follow ``aggregation``.

    Args:
        aggregation: "pooled" (ratios of totals) or "request_mean" (mean of each request's ratio, over the requests
            that have one).
        requests: Requests with at least one round.
        rounds: Rounds.
        cut: Rounds that a stop, the budget or the context ended; they are in every count but accepted length.
        drafted: Drafted tokens.
        accepted: Accepted tokens, without bonus.
        emitted: Tokens committed to the output.
        tau: accepted / rounds, without bonus.
        accepted_length: Mean of 1 + accepted over rounds not cut.
        emitted_per_round: emitted / rounds, cut rounds included.
        efficiency: accepted / drafted.
        full_accepts: Rounds that drafted and accepted all of it.
        joint: joint(j) over all rounds, [K].
        reach: reach(j), [K].
        cond: cond(j), [K].
        joint_whole: joint(j) over rounds not cut, [K]; accepted_length is 1 + its sum.
        pos_drafted: Rounds that drafted slot j, [K].
        pos_tested: Rounds that drafted slot j after accepting all before it, [K].
        pos_accepted: Rounds that accepted slots 1..j, [K].
        lengths: Rounds with exactly j accepted, j from 0 to K.
        chain_stops: Rounds per reason that ended the chain.
        round_stops: Rounds per reason that ended the round; "" for whole rounds.
    """

    aggregation: str
    requests: int
    rounds: int
    cut: int
    drafted: int
    accepted: int
    emitted: int
    tau: float | None
    accepted_length: float | None
    emitted_per_round: float | None
    efficiency: float | None
    full_accepts: int
    joint: tuple[float | None, ...]
    reach: tuple[float | None, ...]
    cond: tuple[float | None, ...]
    joint_whole: tuple[float | None, ...]
    pos_drafted: tuple[int, ...]
    pos_tested: tuple[int, ...]
    pos_accepted: tuple[int, ...]
    lengths: tuple[int, ...]
    chain_stops: dict[str, int] = field(default_factory=dict)
    round_stops: dict[str, int] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """All fields as one mapping that JSON can hold."""
        return asdict(self)

    def positions(self) -> list[dict[str, Any]]:
        """One mapping per slot: aggregation, slot (from 1), joint, reach, cond and their counts."""
        names = ("joint", "reach", "cond", "pos_drafted", "pos_tested", "pos_accepted")
        return [
            {"aggregation": self.aggregation, "slot": j + 1}
            | {name.removeprefix("pos_"): getattr(self, name)[j] for name in names}
            for j in range(len(self.joint))
        ]


def acceptance(rounds: Any, *, aggregation: str = "pooled") -> Acceptance:
    """Every acceptance metric of a set of rounds, its identities checked.

    Args:
        rounds: Records of one request, a mapping from request id to its records, or a frame with the columns
            drafted, accepted, emitted, chain_stop and round_stop, and doc_id when it holds several requests.
        aggregation: "pooled" or "request_mean"; default "pooled".

    Returns:
        The metrics, with the aggregation named. Without rounds every ratio is None.

    Raises:
        UserError: A frame without those columns, a round that accepted more than it drafted, or another aggregation.
    """
    check_choice("aggregation", aggregation, AGGREGATIONS)
    columns, request_N = _columns(rounds)
    out = _pooled(columns, requests=len(np.unique(request_N)))
    if aggregation == "request_mean":
        order_N = np.argsort(request_N, kind="stable")
        parts = np.split(order_N, np.flatnonzero(np.diff(request_N[order_N])) + 1) if len(order_N) else []
        slots = len(out.joint)
        each = [_pooled({name: column[part] for name, column in columns.items()}, slots=slots) for part in parts]
        out = _request_mean(out, each)
    check_identities(out)
    return out


def check_identities(metrics: Acceptance) -> None:
    """Assert the identities between the metrics.

    tau = Σ joint, accepted length = 1 + Σ joint over whole rounds, and totals = sums over slots hold for both
    aggregations; joint(j) = Π reach·cond is an identity of pooled ratios only, and is asserted for those.

    Args:
        metrics: What ``acceptance`` returned.

    Raises:
        AssertionError: An identity does not hold; some count or denominator is wrong.
    """

    def same(a: float, b: float) -> bool:
        return isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)

    m = metrics
    assert m.drafted == sum(m.pos_drafted), f"drafted {m.drafted} is not the sum over slots {m.pos_drafted}"
    assert m.accepted == sum(m.pos_accepted), f"accepted {m.accepted} is not the sum over slots {m.pos_accepted}"
    assert m.rounds == sum(m.lengths), f"{m.rounds} rounds, but the histogram of lengths holds {sum(m.lengths)}"
    for name in ("joint", "reach", "cond"):
        values = [x for x in getattr(m, name) if x is not None]
        assert all(0 <= x <= 1 for x in values), f"{name} leaves [0, 1]: {values}"
    if m.tau is not None:
        total = sum(x or 0.0 for x in m.joint)
        assert same(m.tau, total), f"tau {m.tau} is not the sum of joint acceptance {total}"
    if m.accepted_length is not None:
        total = 1 + sum(x or 0.0 for x in m.joint_whole)
        assert same(m.accepted_length, total), f"accepted length {m.accepted_length} is not 1 + Σ joint = {total}"
    if m.aggregation == "pooled":
        product = 1.0
        for j, (joint, reach, cond) in enumerate(zip(m.joint, m.reach, m.cond, strict=True), start=1):
            product *= (reach or 0.0) * (cond or 0.0)
            assert same(joint or 0.0, product), f"joint({j}) = {joint} is not the product of reach·cond {product}"


def repeated_ngrams(tokens: ArrayLike, n: int = 8) -> float | None:
    """Share of a text's n-grams that occurred earlier in it; a small model's greedy text loops, and this says so.

    Args:
        tokens: Token ids, [length].
        n: Length of the n-grams; default 8.

    Returns:
        1 − distinct / all over overlapping n-grams, from 0 to below 1; None for a text shorter than n.

    Raises:
        UserError: n below 1.
    """
    ids = np.ascontiguousarray(tokens, dtype=np.int64)
    if len(ids) < check_int("n", n, low=1):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)
    return 1.0 - len(np.unique(windows, axis=0)) / len(windows)


def _columns(rounds: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The columns metrics need, and the request index of each round, from records or a frame."""
    if hasattr(rounds, "columns"):
        missing = [name for name in COLUMNS if name not in rounds.columns]
        if missing:
            raise UserError(
                f"the frame lacks {', '.join(missing)}: acceptance needs the columns {', '.join(COLUMNS)}, "
                "as core.frames.rounds_frame writes them"
            )
        columns = {name: rounds[name].to_numpy() for name in COLUMNS}
        ids = rounds["doc_id"].to_numpy() if "doc_id" in rounds.columns else np.zeros(len(rounds), np.int64)
    else:
        per_request = rounds if isinstance(rounds, Mapping) else {"": rounds}
        pairs = [(name, record) for name, records in per_request.items() for record in records]
        columns = {name: np.array([getattr(record, name) for _, record in pairs]) for name in COLUMNS}
        ids = np.array([name for name, _ in pairs], dtype=object)
    return columns, np.unique(ids, return_inverse=True)[1]


def _pooled(columns: dict[str, np.ndarray], *, requests: int = 1, slots: int = 0) -> Acceptance:
    """Metrics of rounds as ratios of totals."""
    drafted_N, accepted_N, emitted_N = (columns[name].astype(np.int64) for name in ("drafted", "accepted", "emitted"))
    n, whole_N = len(drafted_N), ~np.isin(columns["round_stop"].astype(str), CUTS)
    counts = slot_counts(drafted_N, accepted_N, slots=slots)
    k = counts.accepted_GK.shape[1]
    return Acceptance(
        aggregation="pooled",
        requests=requests,
        rounds=n,
        cut=int(n - whole_N.sum()),
        drafted=int(drafted_N.sum()),
        accepted=int(accepted_N.sum()),
        emitted=int(emitted_N.sum()),
        tau=ratio(int(accepted_N.sum()), n),
        accepted_length=ratio(int((1 + accepted_N[whole_N]).sum()), int(whole_N.sum())),
        emitted_per_round=ratio(int(emitted_N.sum()), n),
        efficiency=ratio(int(accepted_N.sum()), int(drafted_N.sum())),
        full_accepts=int(((drafted_N > 0) & (accepted_N == drafted_N)).sum()),
        joint=counts.pooled("joint"),
        reach=counts.pooled("reach"),
        cond=counts.pooled("cond"),
        joint_whole=slot_counts(drafted_N[whole_N], accepted_N[whole_N], slots=k).pooled("joint"),
        pos_drafted=tuple(counts.drafted_GK.sum(0).tolist()),
        pos_tested=tuple(counts.tested_GK.sum(0).tolist()),
        pos_accepted=tuple(counts.accepted_GK.sum(0).tolist()),
        lengths=tuple(np.bincount(accepted_N, minlength=k + 1).tolist()),
        chain_stops=_tally(columns["chain_stop"]),
        round_stops=_tally(columns["round_stop"]),
    )


def _request_mean(totals: Acceptance, each: Sequence[Acceptance]) -> Acceptance:
    """The totals with every ratio replaced by the mean of the requests' ratios, where they have one."""

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return ratio(sum(known), len(known))

    scalars = ("tau", "accepted_length", "emitted_per_round", "efficiency")
    vectors = ("joint", "reach", "cond", "joint_whole")
    fields: dict[str, Any] = {name: mean(getattr(one, name) for one in each) for name in scalars}
    for name in vectors:
        fields[name] = tuple(mean(getattr(one, name)[j] for one in each) for j in range(len(totals.joint)))
    return replace(totals, aggregation="request_mean", **fields)


def _tally(values_N: np.ndarray) -> dict[str, int]:
    """Rounds per reason."""
    names, counts = np.unique(values_N.astype(str), return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))
