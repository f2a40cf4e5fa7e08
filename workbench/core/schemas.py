"""Arrow schemas of what the workbench writes; PyArrow is imported when a schema is asked for.

Fixed lengths are in the types: a column of ``[N, L]`` values is a fixed-size list of L, so that it reads back as one
contiguous array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

HIDDEN_DTYPES = ("bfloat16", "float32")
SEQUENCE_DTYPES = ("bfloat16", "float32", "fp8")


def anchor_schema(*, hidden_size: int, gamma: int, top_k: int, hidden_dtype: str = "bfloat16") -> pa.Schema:
    """Columns of an anchor record.

    Args:
        hidden_size: Width H of a trunk row.
        gamma: Slots per record.
        top_k: Kept ids per slot; ``top_*`` columns are [gamma * top_k], row-major.
        hidden_dtype: "bfloat16" (stored as the uint16 of its bits) or "float32"; default "bfloat16".

    Returns:
        The schema; ``logsumexp`` is at T = 1 and ``logsumexp_t`` at the dataset's temperature.
    """
    import pyarrow as pa

    def column(name: str, kind: pa.DataType, length: int = 0) -> pa.Field:
        return pa.field(name, pa.list_(kind, length) if length else kind)

    return pa.schema(
        [
            column("doc_id", pa.string()),
            column("split", pa.string()),
            column("source", pa.string()),
            column("position", pa.int32()),
            column("prompt_len", pa.int32()),
            column("hidden", pa.uint16() if hidden_dtype == "bfloat16" else pa.float32(), hidden_size),
            column("tokens", pa.int32(), gamma + 1),
            column("slot_mask", pa.bool_(), gamma),
            column("top_ids", pa.int32(), gamma * top_k),
            column("top_logits", pa.float32(), gamma * top_k),
            column("top_probs", pa.float32(), gamma * top_k),
            column("tail_probs", pa.float32(), gamma),
            column("logsumexp", pa.float32(), gamma),
            column("logsumexp_t", pa.float32(), gamma),
        ]
    )


def sequence_schema(*, taps: Sequence[int] = (), top_k: int | None = None, hidden_dtype: str = "bfloat16") -> pa.Schema:
    """Columns of a row of the sequence store: one document, its per-token columns flattened.

    Lists have 64-bit offsets, since the rows of a few long documents pass 2^31 values.

    Args:
        taps: Layers whose output rows are kept beside the trunk rows; default none.
        top_k: Ids kept per token; None, the default, for no ``top_*`` columns.
        hidden_dtype: "bfloat16" (the uint16 of the bits), "float32", or "fp8" (the uint8 of an e4m3 value, with a
            ``*_scale`` column of one float32 per token); default "bfloat16".

    Returns:
        The schema; a document of n tokens has lists of n, of n * H for rows, and of n * top_k for ``top_*``.
    """
    import pyarrow as pa

    def listed(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, pa.large_list(kind))

    stored = {"bfloat16": pa.uint16(), "float32": pa.float32(), "fp8": pa.uint8()}[hidden_dtype]
    fields = [pa.field(name, pa.string()) for name in ("doc_id", "split", "source")]
    fields += [pa.field("prompt_len", pa.int32()), listed("tokens", pa.int32()), listed("loss_mask", pa.bool_())]
    for name in ("hidden", *(tap_column(layer) for layer in taps)):
        fields.append(listed(name, stored))
        if hidden_dtype == "fp8":
            fields.append(listed(f"{name}_scale", pa.float32()))
    if top_k is not None:
        kinds = {"top_ids": pa.int32(), **dict.fromkeys(("top_logits", "top_probs"), pa.float32())}
        kinds |= dict.fromkeys(("tail_probs", "logsumexp", "logsumexp_t"), pa.float32())
        fields += [listed(name, kind) for name, kind in kinds.items()]
    return pa.schema(fields)


def tap_column(layer: int) -> str:
    """Name of the column that holds the output rows of a layer, counted from 0."""
    return f"tap_{layer}"
