"""What turns logits into a law: penalties, bias, temperature and filters, checked as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf
from typing import Any

from workbench.core.errors import UserError, check_choice, check_int, check_real

ORDERS = ("chain", "joint", "temperature_last")
WINDOW_FLOOR, WINDOW_CAP = 64, 8192
MAX = 1e30  # largest finite bias: far beyond any logit, far inside float32


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """How logits become probabilities, the same for target, drafter and plain decode.

    Args:
        temperature: At least 0; 0 is greedy: all mass on the largest penalised, biased and allowed logit, the lowest
            id on ties, filters ignored. Default 0.
        top_k: Keep the k most probable ids; 0, the default, keeps all.
        top_p: Keep an id while the mass of strictly more probable ids is below this, in (0, 1]; default 1 keeps all.
        min_p: Keep ids at least this fraction as probable as the best, in [0, 1); default 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of ids in the window, above 0; default 1.
        frequency_penalty: Subtracted per occurrence in the window, in [-2, 2]; default 0.
        presence_penalty: Subtracted once for ids in the window, in [-2, 2]; default 0.
        penalty_last_n: Tokens of the committed text, prompt included, that the window holds; None, the default, is
            all of them; ``seed_window`` is the seed's preset.
        logit_bias: Id to bias, as a mapping or as pairs, added after the penalties; minus infinity forbids an id.
            Stored as pairs in the order of ids. Default empty.
        order: "chain" (default): temperature, top-k, top-p on the renormalised rest, min-p. "joint": the ids that
            top-k, top-p over all mass and min-p each keep, at the temperature. "temperature_last": the same with
            all three judged at T = 1, then the temperature. Ties at a boundary are all kept in every order.

    Raises:
        UserError: A value is out of range; the sentence names it, the range and the remedy.

    Source: "chain" is the order of transformers, "joint" that of seed 002, "temperature_last" that of seed 003.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int | None = None
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    order: str = "chain"

    def __post_init__(self) -> None:
        last_n, off = self.penalty_last_n, "{} switches it off"
        checked: dict[str, Any] = {
            "temperature": check_real("temperature", self.temperature, low=0, hint="0 is greedy"),
            "top_k": check_int("top_k", self.top_k, low=0, hint=off.format(0)),
            "top_p": check_real("top_p", self.top_p, low=0, high=1, open_low=True, hint=off.format(1)),
            "min_p": check_real("min_p", self.min_p, low=0, high=1, open_high=True, hint=off.format(0)),
            "repetition_penalty": check_real(
                "repetition_penalty", self.repetition_penalty, low=0, open_low=True, hint=off.format(1)
            ),
            "penalty_last_n": None
            if last_n is None
            else check_int("penalty_last_n", last_n, low=1, hint="None is the whole text"),
            "logit_bias": _pairs(self.logit_bias),
            "order": check_choice("order", self.order, ORDERS),
        }
        for name in ("frequency_penalty", "presence_penalty"):
            checked[name] = check_real(name, getattr(self, name), low=-2, high=2, hint=off.format(0))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """The law is a point mass: nothing is drawn."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """The law depends on the text before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as stored: pairs in the order of ids."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def key(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest, the same for equal shapings; an infinite bias is the text "-inf"."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "penalty_last_n": self.penalty_last_n,
            "logit_bias": [[i, "-inf" if value == -inf else value] for i, value in self.bias],
            "order": self.order,
        }


def shaping_of(options: Any) -> Shaping:
    """The shaping that an options object describes, by fields named as here but for ``filter_order``, the order."""
    names = (f.name for f in fields(Shaping) if f.name != "order")
    return Shaping(order=options.filter_order, **{name: getattr(options, name) for name in names})


def seed_window(penalty_last_n: int) -> int:
    """The ``penalty_last_n`` that seed 002 serves for the one asked for: at least 64, at most 8,192.

    Args:
        penalty_last_n: Tokens asked for, at least 1.

    Returns:
        The window, to be given to ``Shaping``.

    Raises:
        UserError: The number is not an integer of at least 1.
    """
    asked = check_int("penalty_last_n", penalty_last_n, low=1, hint="leave the penalties at their defaults for none")
    return min(max(asked, WINDOW_FLOOR), WINDOW_CAP)


def _pairs(given: Any) -> tuple[tuple[int, float], ...]:
    how = "give a mapping from id to bias, such as {13: -2.0}, or pairs"
    try:
        listed = [(i, bias) for i, bias in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError) as error:
        raise UserError(f"logit_bias={given!r} is not valid: {how}") from error
    pairs = []
    for i, bias in listed:
        check_int("logit_bias id", i, low=0, hint=how)
        if bias != -inf:
            check_real(f"logit_bias of id {i}", bias, low=-MAX, high=MAX, hint="-inf forbids the id")
        pairs.append((int(i), float(bias)))
    pairs.sort()
    for (i, _), (j, _) in pairwise(pairs):
        if i == j:
            raise UserError(f"logit_bias names id {i} twice; give every id one bias")
    return tuple(pairs)
