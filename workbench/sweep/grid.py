"""A grid of policies: the product of parameter values, without those that differ in name alone.

Fixed K has no floor, cap or floor context; an explicit floor has no floor context; a threshold of 0 tests no slot and
reads nothing; a draft length of 0 is plain decode, whatever else is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from workbench.core.errors import UserError
from workbench.spec.policies import AdaptiveFloor, FixedK, Policy, policy_from
from workbench.spec.policies.naming import canonical, family_of, spec_of

DEFAULT_FLOOR = "default"  # the adaptive floor that goes by the model's width
PARAMETERS = ("k", "p_min", "pmin0", "statistic", "floor", "cap", "floor_context")


def grid(
    *,
    k: int | Iterable[int] | None = None,
    p_min: float | Iterable[float] = 0.0,
    pmin0: bool | Iterable[bool] = False,
    floor: int | str | Iterable[int | str | None] | None = None,
    cap: int | Iterable[int] = 7,
    floor_context: int | Iterable[int] = 1024,
    statistic: str | Iterable[str] = "drawn",
    policies: Any = None,
) -> list[Policy]:
    """Distinct policies of a grid, and explicit ones after them.

    Args:
        k: Draft lengths; None for no grid, which needs ``policies``.
        p_min: Thresholds in [0, 1]; default 0, none.
        pmin0: Whether the threshold tests slot 0 too; default False.
        floor: None for fixed K; a number for an adaptive floor; "default" for the floor by the model's
            width; default None.
        cap: Largest draft lengths of adaptive policies; default 7.
        floor_context: Committed lengths past which a default floor relaxes; default 1024.
        statistic: "drawn" or "top", what the threshold reads; default "drawn".
        policies: Explicit policies, or what ``policy_from`` takes; one or several.

    Returns:
        The policies, in the order of the product with k first, each once.

    Raises:
        UserError: A value is not valid, or nothing is asked for.
    """
    axes: dict[str, Any] = {"k": k, "p_min": p_min, "pmin0": pmin0, "statistic": statistic, "floor": floor}
    axes |= {"cap": cap, "floor_context": floor_context}
    if k is None:
        idle = {"p_min": 0.0, "pmin0": False, "statistic": "drawn", "floor": None, "cap": 7, "floor_context": 1024}
        if used := [name for name, value in idle.items() if axes[name] is not value and axes[name] != value]:
            raise UserError(f"{used[0]}={axes[used[0]]!r} spans a grid with k: give k too, or leave {used[0]} out")
    lists = {name: values(name, value) for name, value in axes.items() if k is not None}
    found: list[Policy] = []
    if lists:
        found += [_member(dict(zip(lists, cell, strict=True))) for cell in product(*lists.values())]
    found += explicit(policies)
    if not found:
        raise UserError("a sweep needs policies: give k, such as k=range(1, 9), or policies=[...]")
    kept: dict[Any, Policy] = {}
    for policy in found:
        spec = spec_of(policy)
        kept.setdefault(id(policy) if spec is None else (family_of(policy), canonical(spec)), policy)
    return list(kept.values())


def values(name: str, value: Any) -> list[Any]:
    """The values of one axis: one of them alone, or several.

    Args:
        name: The parameter.
        value: A value, or an iterable of values.

    Returns:
        At least one value.

    Raises:
        UserError: There is none.
    """
    listed = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else [value]
    if not listed:
        raise UserError(f"{name}={value!r} is empty: give one value or several")
    return listed


def explicit(policies: Any) -> list[Policy]:
    """Policies given one by one, each an object of the protocol, a mapping or a text that ``policy_from`` reads.

    Args:
        policies: One, a sequence, or None for none.

    Returns:
        The policies.

    Raises:
        UserError: One of them is no policy.
    """
    if policies is None:
        return []
    many = isinstance(policies, Iterable) and not isinstance(policies, (str, Mapping))
    out = []
    for one in list(policies) if many else [policies]:
        policy = policy_from(one) if isinstance(one, (str, Mapping)) else one
        lacking = [name for name in ("k_max", "anticipating", "start") if not hasattr(policy, name)]
        if lacking or isinstance(policy, type):
            raise UserError(
                f"{one!r} is not a policy: give an object with k_max, anticipating and start(width=...), such as "
                "FixedK(k=3), or its spec"
            )
        out.append(policy)
    return out


def _member(cell: dict[str, Any]) -> Policy:
    """One cell of the product as the plainest policy that acts so; every value is checked, used or not."""
    k, floor, p_min = cell["k"], cell["floor"], cell["p_min"]
    threshold = {name: cell[name] for name in ("p_min", "pmin0", "statistic")}
    if isinstance(floor, str) and floor != DEFAULT_FLOOR:
        raise UserError(
            f"floor={floor!r} is not valid: it must be an integer of at least 1, 'default' for the floor by the "
            "model's width, or None for fixed K"
        )
    fixed = FixedK(k=k, **threshold)
    lowest = None if floor in (None, DEFAULT_FLOOR) else floor
    adaptive = AdaptiveFloor(
        k=max(k, 1), floor=lowest, cap=cell["cap"], floor_context=cell["floor_context"], **threshold
    )
    if k == 0:
        return FixedK(k=0)
    acts = threshold if p_min > 0 else {}
    if floor is None:
        return FixedK(k=fixed.k, **acts)
    context: dict[str, Any] = {"floor_context": adaptive.floor_context} if lowest is None else {}
    return AdaptiveFloor(k=k, floor=lowest, cap=adaptive.cap, **context, **acts)
