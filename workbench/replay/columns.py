"""The columns of a draft table: name, group, type and width, the schema they make, and what a row of each group takes.

A column holds one value or a fixed number of them per row. What belongs to a slot is null where the slot has no draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.tape import Tape

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.replay.run import Chunk

TEXT_OFFSET = 4  # bytes that a text column takes per row besides the text


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        name: Its name.
        group: "base", "drawn", or the option that asks for it.
        kind: Type of a value, by Arrow's name.
        width: Values per row; 0 for one that is no list.
        per: "row", "start" (null where no chain starts) or "slot" (null where a slot has no draft).
    """

    name: str
    group: str
    kind: str
    width: int = 0
    per: str = "row"

    @property
    def bytes(self) -> float:
        """Bytes of a row's values; of a text, without the text."""
        sizes = {"string": float(TEXT_OFFSET), "bool": 1 / 8}
        size = sizes[self.kind] if self.kind in sizes else float(np.dtype(self.kind).itemsize)
        return size * max(self.width, 1)

    def empty(self, rows: int) -> np.ndarray:
        """An array of what stands for null: -1 for ids, NaN for other numbers."""
        dtype = np.dtype(self.kind)
        return np.full((rows, self.width) if self.width else rows, -1 if dtype.kind == "i" else np.nan, dtype)


def table_columns(
    k_max: int,
    *,
    drawn: bool = False,
    forced: bool = False,
    shadow: int = 0,
    target: bool = False,
    ranks: bool = False,
    overlap: int = 0,
) -> list[Column]:
    """Columns of a draft table with ``k_max`` slots.

    Args:
        k_max: Slots.
        drawn: Tokens are drawn: draft_top1 then has the width that live rounds compare with thresholds, draft_top is
            the largest probability of the draft's row, sequence the tape's random stream, and law_differs and
            draws_differ say how its text was made otherwise than the table draws.
        forced: Of the chain fed with the tape's tokens, per slot: forced_ids (what it would draft there), forced_q (the
            drafter's probability of the tape's token) and forced_top (the largest of its row, T = 1); target_p, the
            target's probability of the next token. Probabilities are shaped, or of softmax at T = 1 at temperature 0.
        shadow: Candidates per slot: shadow_ids and shadow_probs, the drafter's most likely tokens by (logit
            descending, id ascending) with their probabilities (softmax at T = 1 over its whole vocabulary), those of
            one slot side by side; 0 for none.
        target: target_top2 and target_top2_probs, the target's two most likely tokens, and target_entropy in nats, all
            at T = 1.
        ranks: Of the token drafted in slot j at position p: draft_rank, its rank from 1 in the target's row p + j,
            after the tape's own tokens; draft_target_logp, its log-probability there; draft_logp, the drafter's own.
            Both at T = 1, unfiltered, in nats.
        overlap: Number of temperatures of overlap, 1 - ||p - q||_1 / 2 at the first slot; 0 for none.

    Returns:
        The columns, in order.
    """
    k, base = k_max, "base"
    found = [
        Column("doc_id", base, "string"),
        Column("source", base, "string"),
        Column("split", base, "string"),
        Column("own", base, "string"),
        Column("position", base, "int32"),
        Column("length", base, "int32"),
        Column("prompt_len", base, "int32"),
        Column("n_bytes", base, "int64"),
        Column("token", base, "int32"),
        Column("next_token", base, "int32"),
        Column("target_id", base, "int32"),
        Column("target_margin", base, "float32"),
        Column("nll", base, "float32"),
        Column("on_tape", base, "bool"),
        Column("draft_ids", base, "int32", k, "slot"),
        Column("draft_top1", base, "float64" if drawn else "float32", k, "slot"),
        Column("draft_margin", base, "float32", k, "slot"),
    ]
    if drawn:
        found += [
            Column("draft_top", "drawn", "float32", k, "slot"),
            Column("sequence", "drawn", "int64"),
            Column("law_differs", "drawn", "string"),
            Column("draws_differ", "drawn", "string"),
        ]
    if forced:
        found += [
            Column("target_p", "forced", "float64"),
            Column("forced_q", "forced", "float64", k, "slot"),
            Column("forced_top", "forced", "float32", k, "slot"),
            Column("forced_ids", "forced", "int32", k, "slot"),
        ]
    if shadow:
        found += [
            Column("shadow_ids", "shadow", "int32", k * shadow, "slot"),
            Column("shadow_probs", "shadow", "float32", k * shadow, "slot"),
        ]
    if target:
        found += [
            Column("target_top2", "target", "int32", 2),
            Column("target_top2_probs", "target", "float32", 2),
            Column("target_entropy", "target", "float32"),
        ]
    if ranks:
        found += [
            Column("draft_rank", "ranks", "int32", k, "slot"),
            Column("draft_target_logp", "ranks", "float32", k, "slot"),
            Column("draft_logp", "ranks", "float32", k, "slot"),
        ]
    return found + ([Column("overlap", "overlap", "float32", overlap, "start")] if overlap else [])


def bytes_by_group(columns: list[Column]) -> dict[str, float]:
    """Bytes of values that a row takes, by group of columns; texts and the bits that mark nulls come on top."""
    out: dict[str, float] = {}
    for column in columns:
        out[column.group] = out.get(column.group, 0.0) + column.bytes
    return out


def table_schema(columns: list[Column]) -> pa.Schema:
    """The Arrow schema of columns."""
    import pyarrow as pa

    def kind(column: Column) -> pa.DataType:
        value = pa.type_for_alias(column.kind)
        return pa.list_(value, column.width) if column.width else value

    return pa.schema([pa.field(column.name, kind(column)) for column in columns])


def table_batch(
    tape: Tape, facts: Mapping[str, Any], part: Chunk, columns: list[Column], schema: pa.Schema
) -> pa.RecordBatch:
    """Rows of a chunk.

    Args:
        tape: The document.
        facts: What is the same in all of its rows, by column.
        part: The chunk.
        columns: The columns.
        schema: Their schema.

    Returns:
        One row per row of the chunk.
    """
    import pyarrow as pa

    t = len(part.nll)
    at = np.arange(part.first, part.first + t, dtype=np.int32)
    following, empty_TK = tape.tokens[at + 1], part.columns["draft_ids"] < 0
    same = {"doc_id": tape.doc_id, "source": tape.source, "split": tape.split, "n_bytes": tape.n_bytes, **facts}
    each = {
        "position": at,
        "length": np.full(t, len(tape), np.int32),
        "prompt_len": np.full(t, tape.prompt_len, np.int32),
        "token": tape.tokens[at],
        "next_token": following,
        "target_id": part.target_id,
        "target_margin": part.target_margin,
        "nll": part.nll,
        "on_tape": part.target_id == following,
        **part.columns,
    }

    def array(column: Column) -> pa.Array:
        kind = schema.field(column.name).type
        if column.name in same:
            return pa.array([same[column.name]] * t, kind)
        values = each[column.name]
        if not column.width:
            return pa.array(values, kind)
        mask = None
        if column.per != "row":
            null_TS = empty_TK if column.per == "slot" else empty_TK[:, :1]
            mask = null_TS.repeat(column.width // null_TS.shape[1], 1).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind.value_type, mask=mask), column.width)

    return pa.RecordBatch.from_arrays([array(column) for column in columns], schema=schema)
