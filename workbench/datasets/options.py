"""Options of an extraction, checked as a whole before anything is read or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.core.errors import check_choice, check_int, check_real
from workbench.core.schemas import HIDDEN_DTYPES
from workbench.datasets.anchors import Anchors, check_anchors
from workbench.datasets.left_out import ON_BAD

LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class ExtractOptions:
    """What shapes anchor records.

    Args:
        gamma: Slots per record; default 5.
        top_k: Ids kept per slot, at most the vocabulary; default 64.
        temperature: Of the stored probabilities; default 0.7.
        anchors: A count per document, "all", a list of positions, or a mapping from document id to its list; default 4.
        chunk: Tokens per forward; default 512.
        seed: Seed of the choice of anchors; default 20260811.
        hidden_dtype: "bfloat16" or "float32"; default "bfloat16".
        shard_rows: Records after which a shard ends, at the end of a document; default 2,048.
        batch: Documents that run together; None, the default, for one on a CPU, and on a GPU for as many as fill a
            forward. In exact mode the bytes do not depend on it; in fast mode they do, at the level of rounding.
        on_bad: What is done about a document whose rows are not finite or do not add up: "stop" ends the
            run, "quarantine" leaves the whole document out and lists it with its reason; default "stop".

    Raises:
        UserError: A value is out of range; the sentence names it, the range and the remedy.
    """

    gamma: int = 5
    top_k: int = 64
    temperature: float = 0.7
    anchors: Anchors = 4
    chunk: int = 512
    seed: int = 20260811
    hidden_dtype: str = "bfloat16"
    shard_rows: int = 2048
    batch: int | None = None
    on_bad: str = "stop"

    def __post_init__(self) -> None:
        greedy = "for the greedy pick read the first of top_ids, which is the same at every temperature"
        checked: dict[str, Any] = {
            "gamma": check_int("gamma", self.gamma, low=1, hint="a record needs a slot"),
            "top_k": check_int("top_k", self.top_k, low=1),
            "temperature": check_real("temperature", self.temperature, low=LEAST_TEMPERATURE, hint=greedy),
            "anchors": check_anchors(self.anchors),
            "chunk": check_int("chunk", self.chunk, low=1),
            "seed": check_int("seed", self.seed, low=0),
            "hidden_dtype": check_choice("hidden_dtype", self.hidden_dtype, HIDDEN_DTYPES),
            "shard_rows": check_int("shard_rows", self.shard_rows, low=1),
            "batch": None if self.batch is None else check_int("batch", self.batch, low=1),
            "on_bad": check_choice("on_bad", self.on_bad, ON_BAD),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a ``top_k`` above the vocabulary."""
        check_int("top_k", self.top_k, low=1, high=vocab_size, hint="the vocabulary has no more ids")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping for a manifest, without ``on_bad``: it changes no record of a document that is stored."""
        anchors = self.anchors
        listed = {name: list(p) for name, p in sorted(anchors.items())} if isinstance(anchors, Mapping) else anchors
        return {
            "gamma": self.gamma,
            "top_k": self.top_k,
            "temperature": self.temperature,
            "anchors": list(listed) if isinstance(listed, tuple) else listed,
            "chunk": self.chunk,
            "seed": self.seed,
            "hidden_dtype": self.hidden_dtype,
            "shard_rows": self.shard_rows,
            "batch": self.batch,
        }
