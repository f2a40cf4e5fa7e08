"""Draft trees: a spine with hedges, the rows a verify would feed, and which of them stand. On plain integers.

The spine is a chain as drafted. A hedge at depth d is another candidate for the place of spine token d; hedges have no
children. So every ancestor is a spine node, the drafter runs one step per depth, and a hedge that stands ends the walk.
Rows: 0 is the pending token, 1..L the spine in order of depth, then the hedges by depth and rank.

Source: seed 001 for shapes, row order and walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.core.errors import UserError, check_int
from workbench.spec.accept import Verdict

MAX_RANK = 8  # candidates per depth: what a draft table can hold
MAX_DEPTH = 64  # the longest chain
MAX_NODES = 128
MAX_SHAPES = 200_000


@dataclass(frozen=True, init=False, repr=False)
class TreeShape:
    """How many candidates a tree holds per depth: the spine's and its hedges.

    Args:
        shape: Text such as "1,2,2" (nothing to choose at the first depth, one hedge at the second and third), the
            counts, or a shape.
        max_rank: Most candidates per depth; default 8.
        max_depth: Longest spine; default 64.
        max_nodes: Most nodes, the root not counted; default 128.

    Raises:
        UserError: It is no list of counts, or passes a limit.
    """

    counts: tuple[int, ...]

    def __init__(
        self,
        shape: str | Iterable[int] | TreeShape,
        *,
        max_rank: int = MAX_RANK,
        max_depth: int = MAX_DEPTH,
        max_nodes: int = MAX_NODES,
    ) -> None:
        counts = _counts(shape)
        if not 1 <= len(counts) <= max_depth:
            raise UserError(
                f"tree shape {_text(counts)!r} has {len(counts)} depths; 1 to {max_depth} are valid: write one count "
                "per depth, such as '1,2,2'"
            )
        for depth, count in enumerate(counts, start=1):
            check_int(f"tree shape {_text(counts)!r}: count {depth}", count, low=1, high=max_rank)
        if sum(counts) > max_nodes:
            raise UserError(
                f"tree shape {_text(counts)!r} has {sum(counts)} nodes; at most {max_nodes} are valid: use fewer, or "
                "raise max_nodes"
            )
        object.__setattr__(self, "counts", counts)

    @property
    def depth(self) -> int:
        """Spine tokens: steps of the drafter."""
        return len(self.counts)

    @property
    def nodes(self) -> int:
        """Spine tokens and hedges."""
        return sum(self.counts)

    @property
    def verify_width(self) -> int:
        """Rows of a verify: the nodes and the pending token."""
        return self.nodes + 1

    @property
    def widest(self) -> int:
        """Most candidates at one depth."""
        return max(self.counts)

    @property
    def is_chain(self) -> bool:
        """True without hedges."""
        return self.widest == 1

    def __str__(self) -> str:
        return _text(self.counts)

    def __repr__(self) -> str:
        return f"TreeShape({_text(self.counts)!r})"


def _text(counts: Iterable[int]) -> str:
    return ",".join(map(str, counts))


def _counts(shape: str | Iterable[int] | TreeShape) -> tuple[int, ...]:
    if isinstance(shape, TreeShape):
        return shape.counts
    if not isinstance(shape, (str, Iterable)):
        raise UserError(f"tree shape {shape!r} is not valid: write counts per depth, such as '1,2,2'")
    try:
        return tuple(map(int, shape.split(","))) if isinstance(shape, str) else tuple(shape)
    except ValueError:
        raise UserError(f"tree shape {shape!r} is not valid: write counts per depth, such as '1,2,2'") from None


def tree_shapes(max_nodes: int, *, max_rank: int = 4, max_depth: int | None = None) -> list[TreeShape]:
    """Every shape under a node budget, chains among them.

    Args:
        max_nodes: Most nodes, the root not counted.
        max_rank: Most candidates per depth; default 4.
        max_depth: Longest spine; None for as long as the budget allows. Give the slots of the draft table.

    Returns:
        The shapes by nodes, then depth, then counts.

    Raises:
        UserError: A limit is out of range, or the shapes are more than 200,000.
    """
    check_int("max_nodes", max_nodes, low=1, high=MAX_NODES)
    check_int("max_rank", max_rank, low=1, high=MAX_RANK)
    longest = check_int(
        "max_depth", min(max_nodes, MAX_DEPTH) if max_depth is None else max_depth, low=1, high=MAX_DEPTH
    )
    ways, total = [1] + [0] * max_nodes, 0  # shapes of the present depth, by nodes
    for _ in range(min(longest, max_nodes)):
        ways = [sum(ways[max(0, n - max_rank) : n]) for n in range(max_nodes + 1)]
        total += sum(ways)
    if total > MAX_SHAPES:
        raise UserError(
            f"max_nodes={max_nodes} with max_rank={max_rank} and max_depth={longest} gives {total:,} shapes; at most "
            f"{MAX_SHAPES:,} are valid: lower one of them"
        )
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(min(longest, max_nodes)):
        level = [(*t, c) for t in level for c in range(1, min(max_rank, max_nodes - sum(t)) + 1)]
        found += level
    found.sort(key=lambda counts: (sum(counts), len(counts), counts))
    return [TreeShape(counts, max_nodes=max_nodes) for counts in found]


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row of a tree's verify.

    Args:
        token: Its id.
        depth: 0 for the pending token, which stands at the round's start; row positions are start + depth.
        parent: The row before it on its path; 0 for the root itself.
    """

    token: int
    depth: int
    parent: int


def tree_rows(shape: TreeShape, pending: int, candidates: Sequence[Sequence[int]]) -> list[TreeRow]:
    """The rows that a verify of a tree feeds.

    Args:
        shape: The tree.
        pending: The token at the root.
        candidates: Per depth, the spine's token and then the hedges in order of rank; at least as many as the shape
            asks for, no id twice at one depth.

    Returns:
        The root, the spine, then the hedges by depth and rank.
    """
    for depth, (count, ids) in enumerate(zip(shape.counts, candidates, strict=True), start=1):
        assert len(set(ids[:count])) == count, f"depth {depth} needs {count} different candidates, and has {ids}"
    rows = [TreeRow(pending, 0, 0)]
    rows += [TreeRow(ids[0], depth, depth - 1) for depth, ids in enumerate(candidates, start=1)]
    for depth, (count, ids) in enumerate(zip(shape.counts, candidates, strict=True), start=1):
        rows += [TreeRow(token, depth, depth - 1) for token in ids[1:count]]
    return rows


def accept_tree(
    rows: Sequence[TreeRow],
    picks: Sequence[int],
    *,
    stop_ids: frozenset[int] = frozenset(),
    force: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], Verdict]:
    """Follow the target's own picks down a tree.

    From the root on, the node is taken whose token is the pick of the row before it. A hedge ends the walk, as does a
    pick that no node holds. Siblings hold different tokens, so what is emitted is the target's own text.

    Args:
        rows: The tree, as ``tree_rows`` lays it out.
        picks: The target's pick after each row; read only along the path.
        stop_ids: Tokens that end the text.
        force: Text to commit instead of the target's own, from the place after the pending token on; a node equal to
            the pick but not to this text counts as accepted and ends the round.

    Returns:
        The rows of the accepted nodes, and the verdict; ``accepted`` is their number.
    """
    spine = max(row.depth for row in rows)
    path: list[int] = []
    at = 0
    for depth in range(1, spine + 1):
        want = picks[at]
        node = next((i for i, row in enumerate(rows) if row.depth == depth and row.token == want), None)
        if node is None:
            break
        path.append(node)
        if force is not None and force[depth - 1] != want:
            return tuple(path), Verdict(depth, (*force[:depth],), force[depth - 1], "forced")
        at = node
        if want in stop_ids:
            return tuple(path), Verdict(depth, tuple(rows[i].token for i in path), None, "stop")
        if node > spine:
            break
    bonus = picks[at] if force is None else force[len(path)]
    return tuple(path), Verdict(len(path), (*(rows[i].token for i in path), bonus), bonus, "")
