"""What a policy is called and described as, the workbench's own and user-written ones alike."""

from __future__ import annotations

import json
from typing import Any

from workbench.core.errors import UserError
from workbench.spec.policies.base import Policy


def spec_of(policy: Policy) -> dict[str, Any] | None:
    """A policy's JSON-ready description; None for a user-written one without ``spec()``."""
    spec = getattr(policy, "spec", None)
    if not callable(spec):
        return None
    try:
        made: dict[str, Any] = json.loads(canonical(dict(spec())))
        return made
    except (TypeError, ValueError) as error:
        raise UserError(
            f"spec() of {type(policy).__name__} is not a mapping that JSON can hold ({error}): return one of numbers, "
            "flags, texts, None, lists and mappings"
        ) from None


def family_of(policy: Policy) -> str:
    """A policy's family; the name of its class where that is not the workbench's own."""
    family = getattr(policy, "family", None)
    own = type(policy).__module__.startswith("workbench.")
    return family if own and isinstance(family, str) else type(policy).__name__


def label_of(policy: Policy) -> str:
    """A policy's short name: its own ``label``, else its type's name and its spec."""
    label = getattr(policy, "label", None)
    if isinstance(label, str):
        return label
    spec = spec_of(policy)
    shown = ", ".join(f"{name}={value}" for name, value in (spec or {}).items() if name != "family")
    return type(policy).__name__ + (f"({shown})" if shown else "")


def canonical(value: Any) -> str:
    """A JSON-ready value as one text, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
