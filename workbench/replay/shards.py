"""Shards of a draft table, read one at a time, so that what a walk holds is bounded by one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.replay.table import DraftTable


def shard_tables(table: DraftTable, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Some columns of a table, a shard of whole documents at a time.

    Args:
        table: The draft table.
        columns: Their names.

    Yields:
        One Arrow table per shard, each column one chunk, in the order of ``columns``.
    """
    import pyarrow as pa

    names = table.dataset.column_names
    options = pa.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
    for shard in table.manifest.shards:
        with (
            pa.memory_map(str(table.path / shard["file"])) as source,
            pa.ipc.open_stream(source, options=options) as stream,
        ):
            yield stream.read_all().select(list(columns)).combine_chunks()
