"""How long going on with a dataset of many shards takes: no model runs, shards are small, the disk's cache is warm."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from workbench.bench.arms import row
from workbench.core.manifest import Manifest
from workbench.core.progress import progress
from workbench.datasets.shards import ShardDirectory

SHARDS, QUICK_SHARDS, ROWS, WIDTH = 10_000, 200, 4, 1024


class ProvenFirst(ShardDirectory):
    """The other order: every hash before the run begins."""

    proves_later = False


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the resume benchmark.

    Args:
        quick: Few shards and repeats.

    Yields:
        Seconds until a run over a directory that lacks its last shard can make rows, seconds until every hash of the
        others is proven beside it, and seconds with every hash taken first; milliseconds of listing one more shard, and
        of writing the manifest anew.
    """
    shards, repeats = (QUICK_SHARDS, 2) if quick else (SHARDS, 5)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "data"
        size = _build(out, shards)
        seconds: dict[str, list[float]] = {}
        for _ in progress(range(repeats), desc="resume", unit="run"):
            for name, kind in (("hashes beside the run", ShardDirectory), ("hashes first", ProvenFirst)):
                began = perf_counter()
                with _directory(kind, out, shards) as directory:
                    assert directory.pending == [shards - 1]
                    seconds.setdefault(f"start, {name}", []).append(perf_counter() - began)
                    assert directory.recheck() == [shards - 1]
                    seconds.setdefault(f"every hash proven, {name}", []).append(perf_counter() - began)
        facts = {"mode": "compiled", "shards": shards, "bytes": size}
        for name, values in seconds.items():
            yield row(name, values, "s", **facts)
        yield from _listing(out, repeats, facts)


def _listing(out: Path, repeats: int, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    manifest = Manifest.read(out)
    took: dict[str, list[float]] = {"list one more shard": [], "write the manifest anew": []}
    for i in range(repeats):
        began = perf_counter()
        manifest.list_shard(out, manifest.shards[0] | {"file": f"data-{i}"})
        listed = perf_counter()
        manifest.write(out)
        took["list one more shard"].append(1e3 * (listed - began))
        took["write the manifest anew"].append(1e3 * (perf_counter() - listed))
    for name, values in took.items():
        yield row(name, values, "ms", **facts)


def _directory(kind: type[ShardDirectory], out: Path, shards: int) -> ShardDirectory:
    import pyarrow as pa

    schema = pa.schema([pa.field("doc_id", pa.string()), pa.field("hidden", pa.list_(pa.uint16(), WIDTH))])
    manifest = Manifest(kind="bench", parameters={"shards": shards})
    return kind(out, manifest, plan=[(i, i + 1) for i in range(shards)], schema=schema)


def _build(out: Path, shards: int) -> int:
    """Write every shard but the last, and return their bytes."""
    import numpy as np
    import pyarrow as pa

    with _directory(ShardDirectory, out, shards) as directory:
        for i in progress(range(shards - 1), desc="shards", unit="shard"):
            values = np.random.default_rng(i).integers(0, 1 << 16, ROWS * WIDTH, np.uint16)
            rows = pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH)
            columns = [pa.array([f"document {i}"] * ROWS), rows]
            directory.write(i, [pa.RecordBatch.from_arrays(columns, schema=directory.schema)])
        return sum(shard["bytes"] for shard in directory.manifest.shards)
