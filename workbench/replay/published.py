"""Published costs of drafting and verifying, as cost models to try a policy on machines one does not have.

Every number is one its source gives, or follows from numbers it gives by the arithmetic named here. They hold at the
context, batch width and engine of their source, none of which a model of ratios knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from workbench.replay.cost import CostModel


def published_costs() -> Mapping[str, CostModel]:
    """Cost models from published measurements.

    Returns:
        Name to model; each model's ``source`` says where its numbers come from and which of them were derived.
    """
    return MappingProxyType({name: make(name) for name, make in _MODELS.items()})


def _memra_27b(name: str) -> CostModel:
    ratios = {1: 1.03, 2: 1.13, 3: 1.19, 4: 1.30, 5: 1.58, 6: 1.71}
    plain, prose = 45.0, {1: (0.855, 68.8), 2: (0.811, 88.0), 3: (0.663, 90.0), 4: (0.602, 84.9)}  # K: accepted, tok/s
    left_over = [(1 + share * k) * plain / speed - ratios[k + 1] for k, (share, speed) in prose.items()]
    draft, overhead = np.polyfit(list(prose), left_over, 1)
    return CostModel.from_ratios(
        ratios,
        draft=float(draft),
        overhead=float(overhead),
        plain_seconds=1 / plain,
        name=name,
        source=(
            "memra, verify economics: verify(T)/decode of a 27B on an RTX 5090 Laptop, plain 45.0 tok/s on prose; "
            "draft step and overhead: the least-squares line through what its prose speeds at K = 1..4 leave over"
        ),
    )


def _memra_35b(name: str) -> CostModel:
    ratios = {1: 1.00, 2: 1.27, 3: 1.41, 4: 1.66, 5: 1.95, 6: 2.18}
    speedup, speed, share = 1.23, 212.7, 0.524  # prose at K = 2
    plain = speedup / speed
    draft = (59 + 105 + 82 + 273) * 1e-6 / plain
    return CostModel.from_ratios(
        ratios,
        draft=draft,
        overhead=(1 + 2 * share) / speedup - ratios[3] - 2 * draft,
        plain_seconds=plain,
        name=name,
        source=(
            "memra, verify economics: verify(T)/decode of a 35B-A3B on an RTX 5090 Laptop, plain 172.9 tok/s on prose "
            "(212.7 tok/s at 1.23x); draft step from its anatomy of a 35B with the full head, 59 + 105 + 82 + 273 "
            "microseconds; overhead: what the prose speed at K = 2 leaves over"
        ),
    )


def _m4_max(name: str) -> CostModel:
    measured = {1: 1.0, 2: 0.54, 4: 0.58, 8: 0.49, 16: 0.48}  # per row, of a decode step
    per_row = {t: float(np.interp(t, list(measured), list(measured.values()))) for t in range(2, 17)}
    return CostModel.from_ratios(
        {1: 1.0, **{t: t * cost for t, cost in per_row.items()}},
        draft=0.015,
        plain_seconds=1 / 22.3,
        name=name,
        source=(
            "TurboSpark, composite verify cost of a 27B in INT4 on an M4 Max: T c(T) + 0.015 per draft in decode "
            "steps, c = .54, .58, .49, .48 at T = 2, 4, 8, 16, straight between; plain 22.3 tok/s; without the "
            "rollback of rejected drafts, whose absence its documents name as the gap to their measured speeds"
        ),
    )


def _tree_step(name: str) -> CostModel:
    return CostModel.from_ratios(
        {t: 1 + 0.012 * max(0, t - 3) for t in range(1, 9)},
        plain_seconds=0.112,
        name=name,
        source=(
            "Atlas, tree shape search: step cost S(M) = 112 ms (1 + 0.012 max(0, M - 3)) at verify width M up to 8, "
            "drafting included; it gives no plain step, so S(1) stands for it, and speed-ups are against that"
        ),
    )


def _moe_k1(name: str) -> CostModel:
    return CostModel.from_ratios(
        {1: 1.0, 2: 35 / 21},
        plain_seconds=0.021,
        name=name,
        source=(
            "Atlas, economics of one draft on a 35B mixture of experts: a verify of 2 rows about 35 ms against about "
            "21 ms for a decode step with its proposal, which is the plain step here"
        ),
    )


_MODELS: dict[str, Callable[[str], CostModel]] = {
    "27B, RTX 5090 Laptop": _memra_27b,
    "35B-A3B, RTX 5090 Laptop": _memra_35b,
    "27B INT4, M4 Max": _m4_max,
    "27B, tree step": _tree_step,
    "35B MoE, one draft": _moe_k1,
}
