"""Compare two sessions bit for bit: text, every plane of target and drafter, and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.cache.hybrid import HybridCache
from workbench.core.errors import UserError

if TYPE_CHECKING:
    from workbench.spec.session import Session


@dataclass(frozen=True)
class Difference:
    """The first difference within one plane.

    Args:
        owner: "target" or "drafter".
        layer: Layer of the plane; None for what belongs to no layer.
        plane: "k", "v", "conv", "state", "carrier", or "rows" when the two hold different numbers of them.
        row: Row within the plane: a position for "k" and "v", a window row for "conv", a head for "state".
        offset: Element within the row.
        a: Its value in the first session; the number of rows for "rows".
        b: Its value in the second.
    """

    owner: str
    layer: int | None
    plane: str
    row: int | None
    offset: int | None
    a: float | None
    b: float | None

    def __str__(self) -> str:
        where = self.owner if self.layer is None else f"{self.owner} layer {self.layer}"
        if self.row is None:
            return f"{where}: {self.plane} of {self.a} and {self.b}"
        return f"{where}: {self.plane} differs first in row {self.row} at offset {self.offset} ({self.a!r}, {self.b!r})"


@dataclass(frozen=True)
class SessionComparison:
    """What a comparison found; true when there is a difference.

    Args:
        text: Position of the first difference of the texts, the length of the shorter when it begins the longer; None
            when they are equal.
        differences: The first difference of every plane that differs, in order: target, then drafter.
        owners: Whose planes were compared: the target's, and the drafter's where both sessions have one.
        planes: Planes compared.
        bytes_compared: Bytes compared, of each session.
        bytes_held: Bytes that the planes of the two sessions hold, spare rows included.
    """

    text: int | None
    differences: tuple[Difference, ...]
    owners: tuple[str, ...]
    planes: int
    bytes_compared: int
    bytes_held: tuple[int, int]

    def __bool__(self) -> bool:
        return self.text is not None or bool(self.differences)

    @property
    def first(self) -> Difference | None:
        """The first difference of the planes."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        held = f"{self.bytes_compared:,} bytes in {self.planes} planes of {' and '.join(self.owners)} compared, "
        held += f"{self.bytes_held[0]:,} and "
        held += f"{self.bytes_held[1]:,} held"
        if not self:
            return f"equal in every bit: {held}"
        said = [] if self.text is None else [f"text differs first at position {self.text}"]
        if self.differences:
            more = len(self.differences) - 1
            said.append(str(self.differences[0]) + (f", and {more} more planes differ" if more else ""))
        return f"{'; '.join(said)}: {held}"

    def _repr_html_(self) -> str:
        from workbench.display import card

        rows: list[tuple[str, Any]] = [
            ("equal", not self),
            ("text", "equal" if self.text is None else f"differs first at position {self.text}"),
            *((f"difference {i}", str(found)) for i, found in enumerate(self.differences, 1)),
            ("planes", f"{self.planes} of {' and '.join(self.owners)}"),
            ("bytes compared", self.bytes_compared),
            ("bytes held", self.bytes_held),
        ]
        return card("Sessions compared", rows)._repr_html_()


@torch.inference_mode()
def compare_sessions(a: Session, b: Session) -> SessionComparison:
    """Compare two sessions of one model bit for bit; rows that wait in a drafter's queue are written first.

    Args:
        a: One session.
        b: The other.

    Returns:
        The comparison; false when the sessions are equal.

    Raises:
        UserError: A plane has other shapes or types in the one than in the other: another model or cache format.
    """
    drafters = [session.state.proposer for session in (a, b)]
    both = all(drafter is not None for drafter in drafters)
    for drafter in drafters:
        if drafter is not None:
            drafter.flush()
    xs, ys = _contents(a, both), _contents(b, both)
    differences: list[Difference] = []
    compared = 0
    names = list(dict.fromkeys([*xs, *ys]))
    for name in names:
        x, y = (own[name] if name in own else other[name][:0] for own, other in ((xs, ys), (ys, xs)))
        if found := _difference(name, x, y):
            differences.append(found)
        compared += x[: len(y)].numel() * x.element_size()
    return SessionComparison(
        _text_difference(a.tokens, b.tokens),
        tuple(differences),
        ("target", "drafter") if both else ("target",),
        len(names),
        compared,
        (_held(a), _held(b)),
    )


Name = tuple[str, int | None, str]


def _caches(session: Session) -> Iterator[tuple[str, HybridCache]]:
    yield "target", session.state.cache
    if session.state.proposer is not None and session.state.proposer.cache is not None:
        yield "drafter", session.state.proposer.cache


def _contents(session: Session, drafter: bool) -> dict[Name, Tensor]:
    """Every plane by its name, the row first."""
    out: dict[Name, Tensor] = {}
    for owner, cache in _caches(session):
        if drafter or owner == "target":
            for layer, plane in enumerate(cache.planes):
                out.update({(owner, layer, part): x for part, x in plane.parts(0, cache.lengths[0]).items()})
    if drafter and session.state.proposer is not None:
        out.update({("drafter", None, part): x for part, x in session.state.proposer.tensors().items()})
    return out


def _held(session: Session) -> int:
    return sum(cache.nbytes for _, cache in _caches(session))


def _text_difference(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _difference(name: Name, x: Tensor, y: Tensor) -> Difference | None:
    """The first element whose bits differ, or the numbers of rows where those alone do."""
    owner, layer, plane = name
    if x.dtype != y.dtype or x.shape[1:] != y.shape[1:]:
        raise UserError(
            f"{plane} of {owner} layer {layer} is {x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}: compare "
            "sessions of one model and one cache format"
        )
    rows = min(len(x), len(y))
    view = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    p, q = (t[:rows].contiguous().view(view).flatten(1) for t in (x, y))
    if not torch.equal(p, q):
        row, offset = (int(i) for i in (p != q).nonzero()[0])
        values = (float(t[:rows].flatten(1)[row, offset]) for t in (x, y))
        return Difference(owner, layer, plane, row, offset, *values)
    return Difference(owner, layer, "rows", None, None, len(x), len(y)) if len(x) != len(y) else None
