"""A cell of a sweep: one policy walked over one table, as sums per document; frames and bootstraps need no more.

Shapes: G documents, K slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError
from workbench.core.metrics import SlotCounts
from workbench.replay.predict import document_seconds
from workbench.replay.rows import Documents
from workbench.spec.policies import Policy
from workbench.spec.policies.naming import canonical, family_of, label_of, spec_of

if TYPE_CHECKING:
    from workbench.replay.cost import CostModel
    from workbench.replay.counts import WalkCounts
    from workbench.replay.table import DraftTable

ALL = "all"  # the source that stands for all documents
COUNTS = ("rounds", "cut", "emitted", "drafted", "accepted", "whole", "whole_accepted")
SECONDS = ("tokens", "seconds", "plain_seconds")  # of all sequences that run together
SLOTS = ("pos_drafted", "pos_tested", "pos_accepted")
# Quantities that are ratios of sums over documents: numerators, summed, over denominators.
RATIOS: dict[str, tuple[tuple[str, ...], str]] = {
    "tau": (("accepted",), "rounds"),
    "accepted_length": (("whole", "whole_accepted"), "whole"),
    "emitted_per_round": (("emitted",), "rounds"),
    "efficiency": (("accepted",), "drafted"),
    "drafted_per_token": (("drafted",), "emitted"),
    "speedup": (("plain_seconds",), "seconds"),
    "tokens_per_second": (("tokens",), "seconds"),
}


@dataclass(frozen=True, eq=False)
class Walked:
    """A table as its cells need it.

    Args:
        name: What the sweep calls it.
        key: What a walk over it must agree with (``DraftTable.key``).
        content: Hash of its shards.
        estimator: By which its walks go.
        seed: Of the acceptances that "ratio" draws; None for estimators that draw nothing.
        documents: Ids, in the table's order.
        sources: Their registers.
    """

    name: str
    key: dict[str, Any]
    content: str
    estimator: str
    seed: int | None
    documents: tuple[str, ...]
    sources: tuple[str, ...]

    @classmethod
    def of(cls, name: str, table: DraftTable, estimator: str, seed: int) -> Walked:
        """Describe a table that is about to be walked."""
        documents = Documents.of(table)
        if ALL in documents.sources:
            raise UserError(
                f"table {name!r} holds a source named 'all', which stands for all sources together: replay its "
                "documents under another source"
            )
        hashes = "".join(shard["sha256"] for shard in table.manifest.shards)
        content = hashlib.sha256(hashes.encode()).hexdigest()
        drawn = seed if estimator == "ratio" else None
        return cls(name, table.key, content, estimator, drawn, documents.ids, documents.sources)

    @property
    def temperature(self) -> float:
        """Of its draws; 0 for the most likely tokens."""
        return float(self.key["shaping"]["temperature"])

    def identity(self) -> dict[str, Any]:
        """What must agree for cells to belong to this table, JSON-ready."""
        return {"key": self.key, "content": self.content, "estimator": self.estimator, "seed": self.seed}


@dataclass(frozen=True, eq=False)
class Cell:
    """Sums per document of one policy over one table.

    Args:
        key: Hash of everything that makes the cell.
        table: Name of the table.
        label: Short name of the policy.
        family: Its family.
        spec: Its description; None for a user-written policy without one.
        k_max: Its longest draft.
        sums: Per name of ``COUNTS``, and of ``SECONDS`` under a cost model, an array [G].
        slots: Per name of ``SLOTS``, an array [G, K].
        extrapolated: Share of its rounds at contexts longer than the cost model knows; None without one.
        policy: The policy itself, where this process made the cell.
    """

    key: str
    table: str
    label: str
    family: str
    spec: dict[str, Any] | None
    k_max: int
    sums: Mapping[str, np.ndarray]
    slots: Mapping[str, np.ndarray]
    extrapolated: float | None = None
    policy: Policy | None = field(default=None, repr=False)

    def parts(self, quantity: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Numerators and denominators per document, [G] each; None where the cell cannot tell (no cost was given)."""
        above, below = RATIOS[quantity]
        if not {*above, below} <= set(self.sums):
            return None
        return np.sum([self.sums[name] for name in above], axis=0), self.sums[below]

    def slot_counts(self, of: np.ndarray) -> SlotCounts:
        """Counts per slot of the documents of a mask or index."""
        return SlotCounts(self.sums["rounds"][of], *(self.slots[name][of] for name in SLOTS))


def cell_key(walked: Walked, policy: Policy, spec: Mapping[str, Any], setting: Mapping[str, Any]) -> str:
    """Hash of what makes a cell: table, policy, estimator, cost, width and contexts.

    Args:
        walked: The table.
        policy: The policy.
        spec: Its description.
        setting: Of the sweep: cost, width, contexts.

    Returns:
        24 hex digits.
    """
    made = {"table": walked.identity(), "policy": {"family": family_of(policy), "spec": spec}, "setting": setting}
    return hashlib.sha256(canonical(made).encode()).hexdigest()[:24]


def cell_of(counts: WalkCounts, *, key: str, walked: Walked, cost: CostModel | None, width: int) -> Cell:
    """The sums of one walk.

    Args:
        counts: The walk's counts.
        key: The cell's key.
        walked: The table; its documents are those of the counts.
        cost: Model of the time that rounds take; None for none.
        width: Sequences decoded side by side, for the cost.

    Returns:
        The cell.
    """
    assert counts.documents == walked.documents, "a walk counts the documents of its table, in order"
    policy, slots, whole = counts.policy, counts.slots, counts.whole_slots
    sums = {
        "rounds": counts.rounds_G,
        "cut": counts.cut_G,
        "emitted": counts.emitted_G,
        "drafted": counts.drafted_G,
        "accepted": counts.accepted_G,
        "whole": whole.rounds_G,
        "whole_accepted": whole.accepted_GK.sum(1),
    }
    extrapolated = None
    if cost is not None:
        times = document_seconds(counts, cost, width=width)
        values = (width * times.emitted_G, times.seconds_G, times.plain_G)
        sums |= {name: value.astype(np.float64) for name, value in zip(SECONDS, values, strict=True)}
        extrapolated = times.extrapolated
    by_slot = (slots.drafted_GK, slots.tested_GK, slots.accepted_GK)
    spec = spec_of(policy)
    return Cell(
        key,
        walked.name,
        label_of(policy),
        family_of(policy),
        spec,
        policy.k_max,
        sums,
        {name: array_GK[:, : policy.k_max] for name, array_GK in zip(SLOTS, by_slot, strict=True)},
        extrapolated,
        policy,
    )
