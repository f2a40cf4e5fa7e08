"""Errors a user can cause; each message says what was given, what is valid and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


class UserError(ValueError):
    """A request that cannot be served as given; the CLI prints its sentence and exits with 2."""


class CheckpointError(UserError):
    """A checkpoint, tokenizer or dataset on disk that cannot be used as it is."""


class CapabilityError(UserError):
    """A request that this model, proposer or policy cannot serve, such as drafting without an MTP head."""


class NonFiniteError(UserError):
    """A row of logits that holds NaN or infinity; carries the row's position and, if known, the phase of the round."""

    def __init__(self, position: int, kind: str, *, phase: str = "") -> None:
        whose = {"draft": "the drafter's ", "verify": "the target's "}.get(phase, "the ")
        super().__init__(
            f"{whose}logits of position {position} hold {kind}; every logit must be finite: "
            "check the checkpoint's weights and dtype (half precision overflows on real models)"
        )
        self.position, self.phase = position, phase


def check_int(name: str, value: Any, *, low: int, high: int | None = None, hint: str = "") -> int:
    """Return ``value`` as an int inside [low, high], or raise a sentence.

    Args:
        name: What the user calls the value.
        value: The value given; bool is refused.
        low: Smallest valid value.
        high: Largest valid value; None for no bound.
        hint: What to do instead, appended to the sentence.

    Returns:
        The value as a plain int.

    Raises:
        UserError: The value is not an integer or is out of range.
    """
    bound = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    good = isinstance(value, Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        raise UserError(f"{name}={value!r} is not valid: it must be {bound}{'; ' + hint if hint else ''}")
    return int(value)


def check_real(
    name: str,
    value: Any,
    *,
    low: float,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
    hint: str = "",
) -> float:
    """Return ``value`` as a finite float inside the interval, or raise a sentence.

    Args:
        name: What the user calls the value.
        value: The value given; NaN, infinity and bool are refused.
        low: Lower bound.
        high: Upper bound; None for no bound.
        open_low: The lower bound itself is refused.
        open_high: The upper bound itself is refused.
        hint: What to do instead, appended to the sentence.

    Returns:
        The value as a float.

    Raises:
        UserError: The value is not a finite number or is out of range.
    """
    left = "above" if open_low else "at least"
    right = "" if high is None else f" and {'below' if open_high else 'at most'} {high}"
    good = isinstance(value, Real) and not isinstance(value, bool) and value - value == 0
    if good:
        good = value > low if open_low else value >= low
    if good and high is not None:
        good = value < high if open_high else value <= high
    if not good:
        tail = "; " + hint if hint else ""
        raise UserError(f"{name}={value!r} is not valid: it must be a number {left} {low}{right}{tail}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """Return ``value`` when it is True or False, or raise a sentence.

    Args:
        name: What the user calls the value.
        value: The value given.

    Returns:
        The value.

    Raises:
        UserError: The value is anything else.
    """
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r} is not valid: it must be True or False")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str], *, hint: str = "") -> str:
    """Return ``value`` when it is one of ``choices``, or raise a sentence that lists them.

    Args:
        name: What the user calls the value.
        value: The value given.
        choices: Valid values.
        hint: What to do instead, appended to the sentence.

    Returns:
        The value.

    Raises:
        UserError: The value is none of the choices.
    """
    valid = list(choices)
    if value not in valid:
        tail = "; " + hint if hint else ""
        raise UserError(f"{name}={value!r} is not valid: choose one of {', '.join(map(repr, valid))}{tail}")
    return str(value)
