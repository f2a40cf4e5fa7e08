"""Policies from mappings and short texts, as manifests, sweeps and command lines hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from workbench.core.errors import UserError, check_choice
from workbench.spec.policies.adaptive import Ema, Goodput, Suspend
from workbench.spec.policies.base import Policy
from workbench.spec.policies.confidence import Cumulative, MinConfidence
from workbench.spec.policies.gate import Gate
from workbench.spec.policies.oracle import Oracle, Scripted
from workbench.spec.policies.standard import AdaptiveFloor, FixedK, Ladder

CLASSES: dict[str, Any] = {
    cls.family: cls
    for cls in (
        FixedK,
        AdaptiveFloor,
        MinConfidence,
        Cumulative,
        Ema,
        Ladder,
        Suspend,
        Goodput,
        Gate,
        Oracle,
        Scripted,
    )
}


def policy_from(spec: Mapping[str, Any] | str) -> Policy:
    """A built-in policy from its description; the inverse of ``policy.spec()``.

    Args:
        spec: A mapping with "family" and fields; the same as JSON; or a text such as "fixed k=3 p_min=0.5" or
            "ladder steps=4:3,8:2 lanes=8".

    Returns:
        The policy.

    Raises:
        UserError: The family or a field is unknown, a field is missing, or a value is not valid.
    """
    given = dict(spec) if isinstance(spec, Mapping) else _read(spec)
    family = check_choice("family", given.pop("family", None), CLASSES)
    cls = CLASSES[family]
    known = {item.name: item for item in fields(cls)}
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"policy {family!r} has no field {unknown[0]!r}: its fields are {', '.join(known)}")
    missing = [name for name, item in known.items() if item.default is MISSING and name not in given]
    if missing:
        raise UserError(f"policy {family!r} needs {', '.join(missing)}: add {missing[0]}=.. to {spec!r}")
    if family == "scripted" and isinstance(given["ks"], Mapping):
        given["ks"] = {int(start) if str(start).isdigit() else start: k for start, k in given["ks"].items()}
    policy: Policy = cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    return policy


def _read(text: str) -> dict[str, Any]:
    """A mapping from JSON, or from a family and ``name=value`` parts between spaces."""
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise UserError(f"policy {text!r} is not JSON ({error}): give a JSON object with 'family'") from None
    family, *parts = text.split() or [""]
    out: dict[str, Any] = {"family": family}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or name in out:
            raise UserError(
                f"policy {text!r} is not valid at {part!r}: write a family and name=value parts, each name once, "
                "such as 'fixed k=3 p_min=0.5'"
            )
        out[name] = _value(value)
    return out


def _value(text: str) -> Any:
    """A JSON value or one of Python's words for it; any other text is itself."""
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
