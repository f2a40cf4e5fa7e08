"""Covering designs: a few cells in which every pair of levels of every two factors occurs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any


def covering(factors: Mapping[str, Sequence[Any]], *, times: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Cells in which every pair of levels of every two factors occurs at least ``times`` times; greedy."""
    names = list(factors)
    missing = Counter(
        {(a, x, b, y): times for a, b in combinations(names, 2) for x, y in product(factors[a], factors[b])}
    )

    def pairs(cell: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        return ((a, cell[a], b, cell[b]) for a, b in combinations(names, 2))

    rng, cells = random.Random(seed), []
    while missing:
        a, x, b, y = max(missing, key=lambda pair: (missing[pair], str(pair)))
        best: tuple[int, dict[str, Any]] = (-1, {})
        for _ in range(60):
            cell = {name: rng.choice(levels) for name, levels in factors.items()} | {a: x, b: y}
            gain = sum(pair in missing for pair in pairs(cell))
            best = max(best, (gain, cell), key=lambda item: item[0])
        for pair in pairs(best[1]):
            missing[pair] -= 1
            if missing[pair] <= 0:
                del missing[pair]
        cells.append(best[1])
    return cells
