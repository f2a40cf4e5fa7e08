"""Arrow schemas of what the workbench writes; PyArrow is imported when a schema is asked for.

Fixed lengths are in the types: a column of ``[N, L]`` values is a fixed-size list of L, so that it reads back as one
contiguous array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

HIDDEN_DTYPES = ("bfloat16", "float32")


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
