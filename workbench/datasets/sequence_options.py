"""Options of a sequence store, checked as a whole before anything is read or written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from workbench.core.errors import UserError, check_choice, check_int, check_real
from workbench.core.schemas import SEQUENCE_DTYPES
from workbench.datasets.left_out import ON_BAD
from workbench.datasets.options import LEAST_TEMPERATURE

VALUE_BYTES = {"bfloat16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True)
class SequenceOptions:
    """What shapes a sequence store.

    Args:
        taps: Layers, counted from 0, whose output rows are kept beside the trunk rows; default none.
        hidden_dtype: "bfloat16", "float32" (for a model that computes in it, where an export is to hold rows after the
            final norm and would round them a second time), or "fp8" (e4m3 with a scale per token and row: features for
            a drafter, too coarse to rebuild the target's logits from, so keep ``top_k`` beside it); default "bfloat16".
        top_k: Ids kept per token, at most the vocabulary; None, the default, keeps nothing of the logits.
        temperature: Of the stored probabilities; default 0.7.
        chunk: Tokens per forward; default 512.
        shard_tokens: Tokens after which a shard ends, at the end of a document; default 65,536.
        batch: Documents that run together; None, the default, for one on a CPU, and on a GPU for as many as fill a
            forward. In exact mode the bytes do not depend on it; in fast mode they do, at the level of rounding.
        on_bad: What is done about a document whose rows are not finite or do not add up: "stop" ends the
            run, "quarantine" leaves the whole document out and lists it with its reason; default "stop".

    Raises:
        UserError: A value is out of range; the sentence names it, the range and the remedy.
    """

    taps: tuple[int, ...] = ()
    hidden_dtype: str = "bfloat16"
    top_k: int | None = None
    temperature: float = 0.7
    chunk: int = 512
    shard_tokens: int = 65536
    batch: int | None = None
    on_bad: str = "stop"

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "taps": _check_taps(self.taps),
            "hidden_dtype": check_choice("hidden_dtype", self.hidden_dtype, SEQUENCE_DTYPES),
            "top_k": None if self.top_k is None else check_int("top_k", self.top_k, low=1),
            "temperature": check_real("temperature", self.temperature, low=LEAST_TEMPERATURE),
            "chunk": check_int("chunk", self.chunk, low=1),
            "shard_tokens": check_int("shard_tokens", self.shard_tokens, low=1),
            "batch": None if self.batch is None else check_int("batch", self.batch, low=1),
            "on_bad": check_choice("on_bad", self.on_bad, ON_BAD),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_model(self, *, vocab_size: int, layers: int) -> None:
        """Refuse a ``top_k`` above the vocabulary, or a tap of a layer that the model lacks.

        Args:
            vocab_size: Ids of the model.
            layers: Layers of the model.

        Raises:
            UserError: One of them is out of range.
        """
        if self.top_k is not None:
            check_int("top_k", self.top_k, low=1, high=vocab_size, hint="the vocabulary has no more ids")
        for layer in self.taps:
            check_int("taps", layer, low=0, high=layers - 1, hint=f"this model has {layers} layers, counted from 0")

    def token_bytes(self, hidden_size: int) -> float:
        """Bytes that a token takes in a shard, without names and headers.

        Args:
            hidden_size: Width H of a row.

        Returns:
            The bytes; a bit for the mask among them.
        """
        row = hidden_size * VALUE_BYTES[self.hidden_dtype] + 4 * (self.hidden_dtype == "fp8")
        return 4 + 1 / 8 + row * (1 + len(self.taps)) + (0 if self.top_k is None else 12 * self.top_k + 12)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest, without ``on_bad``: it changes nothing of a document that is stored."""
        shaping = {name: value for name, value in asdict(self).items() if name != "on_bad"}
        return shaping | {"taps": list(self.taps)}


def _check_taps(taps: Any) -> tuple[int, ...]:
    if isinstance(taps, (str, bytes)) or not isinstance(taps, Sequence):
        raise UserError(f"taps={taps!r} is not valid: give a list of layers, counted from 0, or () for none")
    layers = tuple(check_int("taps", layer, low=0, hint="layers are counted from 0") for layer in taps)
    if any(a >= b for a, b in pairwise(layers)):
        raise UserError(f"taps={list(layers)!r} is not valid: name every layer once, in ascending order")
    return layers
