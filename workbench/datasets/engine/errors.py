"""Sentences of workers, carried home as data, so that they reach the user as if they had been raised here."""

from __future__ import annotations

from typing import Any

from workbench.core.errors import CapabilityError, CheckpointError, NonFiniteError, UserError

KINDS = {kind.__name__: kind for kind in (UserError, CheckpointError, CapabilityError, NonFiniteError)}


def packed(error: UserError) -> dict[str, Any]:
    """An error as JSON-ready data: its kind, its sentence and what else it carries."""
    kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in KINDS)
    return {"kind": kind, "sentence": str(error), "facts": dict(vars(error))}


def unpacked(data: dict[str, Any]) -> UserError:
    """The error that ``packed`` took."""
    kind = KINDS[data["kind"]]
    error = kind.__new__(kind, data["sentence"])
    error.__dict__.update(data["facts"])
    return error
