"""The directory of a sweep: finished cells in parts that are written once, beside a manifest.

A part is an Arrow stream with one row per cell; it is written to a temporary name, synced, renamed and hashed, and only
then listed. A later run over the same tables and setting adds parts for the cells that are missing, whatever its grid.
Tables may be added; a table that changed, another setting or another major version of a library is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import CheckpointError
from workbench.core.manifest import Manifest, library_versions, major_version
from workbench.datasets.shards import ShardDirectory, verify
from workbench.sweep.cells import COUNTS, SECONDS, SLOTS, Cell, Walked

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.replay.cost import CostModel

KIND, COST = "sweep", "cost.json"
LIBRARIES = ("specdec-workbench", "numpy", "numba", "polars", "pyarrow")


def cell_schema() -> pa.Schema:
    """Columns of a part: a cell's identity, its sums per document, and [documents * slots] counts in document order."""
    import pyarrow as pa

    names = ("cell", "table", "policy", "family", "spec")
    fields = [pa.field(name, pa.string()) for name in names] + [pa.field("k_max", pa.int32())]
    fields += [pa.field(name, pa.list_(pa.int64())) for name in (*COUNTS, *SLOTS)]
    fields += [pa.field(name, pa.list_(pa.float64())) for name in SECONDS]
    return pa.schema([*fields, pa.field("extrapolated", pa.float64())])


def new_manifest(walked: Sequence[Walked], setting: Mapping[str, Any], bootstrap: Mapping[str, Any]) -> Manifest:
    """Describe a sweep that is about to start.

    Args:
        walked: Its tables.
        setting: Cost, width and contexts, which every cell of a store shares.
        bootstrap: Draws, seed and level of its frame; they may differ from run to run.

    Returns:
        An incomplete manifest without parts.
    """
    return Manifest(
        kind=KIND,
        parameters={"setting": dict(setting), "tables": {one.name: one.identity() for one in walked}},
        versions=library_versions(LIBRARIES),
        extra={"bootstrap": dict(bootstrap)},
    )


def documents_file(name: str, content: str) -> str:
    """Name of the file that lists a table's documents."""
    safe = re.sub(r"[^\w.-]", "_", name)
    return f"documents-{safe}-{content[:12]}.json"


class CellStore(ShardDirectory):
    """One run over one store; use it as a context manager.

    Args:
        out: The directory, made if needed.
        walked: The tables of this run.
        setting: Cost, width and contexts.
        bootstrap: Draws, seed and level of this run's frame.
        cost: The cost model of the setting, kept beside the cells; None for none.
        resume: Go on with what is there; False refuses a directory that holds anything.

    Raises:
        UserError: The directory holds something else, another sweep's cells, or is being written by another process.
        CheckpointError: The manifest is not as it was written.
    """

    shard_names = re.compile(r"part-\d{5,}\.arrow")
    proves_later = False  # cells are read before the run begins

    def __init__(
        self,
        out: Path,
        walked: Sequence[Walked],
        *,
        setting: Mapping[str, Any],
        bootstrap: Mapping[str, Any],
        cost: CostModel | None = None,
        resume: bool = True,
    ) -> None:
        files = {
            documents_file(one.name, one.content): json.dumps({"doc_id": one.documents, "source": one.sources}).encode()
            for one in walked
        }
        if cost is not None:
            with TemporaryDirectory() as place:
                files[COST] = cost.save(Path(place) / COST).read_bytes()
        manifest = new_manifest(walked, setting, bootstrap)
        super().__init__(out, manifest, plan=(), schema=cell_schema(), files=files, resume=resume)
        self._cells: list[str] = []

    def differences(self, before: Manifest) -> list[str]:
        """What keeps this run's cells out of the directory: kind, setting, tables of one name, major versions."""
        if before.kind != KIND:
            return [f"kind is {before.kind!r} there and {KIND!r} now"]
        there, now = _shared(before, self.manifest)
        return [phrase.removeprefix("parameters.") for phrase in there.differences(now)]

    def carried(self, before: Manifest) -> Manifest:
        """The directory's manifest, opened again, with this run's tables, versions and bootstrap in it."""
        tables = before.parameters["tables"] | self.manifest.parameters["tables"]
        before.parameters = {**before.parameters, "tables": tables}
        before.versions, before.extra, before.complete = self.manifest.versions, self.manifest.extra, False
        return before

    def name(self, index: int) -> str:
        """File name of a part."""
        return f"part-{index:05d}.arrow"

    def holds(self, index: int) -> dict[str, Any]:
        """The keys of the cells of the part just written."""
        return {"cells": self._cells}

    def read(self) -> dict[str, Cell]:
        """Finished cells by key, in the order they were written."""
        return {cell.key: cell for shard in self.manifest.shards for cell in read_part(self.out / shard["file"])}

    def append(self, cells: Sequence[Cell]) -> None:
        """Write finished cells as one more part.

        Args:
            cells: The cells; none writes nothing.
        """
        if not cells:
            return
        import pyarrow as pa

        last = max((int(shard["file"][5:-6]) for shard in self.manifest.shards), default=-1)
        self._cells = [cell.key for cell in cells]
        self.write(last + 1, [pa.RecordBatch.from_pylist([_row(cell) for cell in cells], schema=self.schema)])

    def finish(self, counts: Mapping[str, int]) -> None:
        """Mark the store complete.

        Args:
            counts: Totals for the manifest.
        """
        self.manifest.counts, self.manifest.complete = dict(counts), True
        self.manifest.write(self.out)


def read_store(path: Path) -> tuple[Manifest, list[Walked], list[Cell]]:
    """Open a finished store.

    Args:
        path: Its directory.

    Returns:
        Its manifest, tables and cells, each in the order they were added.

    Raises:
        CheckpointError: It is no sweep, is incomplete, or its bytes are not those that were written.
    """
    manifest = Manifest.read(path)
    if manifest.kind != KIND:
        raise CheckpointError(f"{path} holds {manifest.kind!r}; a sweep's store is needed here: give another directory")
    if not manifest.complete:
        raise CheckpointError(
            f"{path} is incomplete ({sum(len(shard['cells']) for shard in manifest.shards)} cells are done): run the "
            "sweep again into it to go on"
        )
    verify(path, manifest)
    walked = []
    for name, identity in manifest.parameters["tables"].items():
        listed = json.loads((path / documents_file(name, identity["content"])).read_text("utf-8"))
        pair = tuple(listed["doc_id"]), tuple(listed["source"])
        walked.append(
            Walked(name, identity["key"], identity["content"], identity["estimator"], identity["seed"], *pair)
        )
    return manifest, walked, [cell for shard in manifest.shards for cell in read_part(path / shard["file"])]


def read_part(file: Path) -> list[Cell]:
    """The cells of one part."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
        table = stream.read_all()
    columns = {name: table.column(name) for name in table.column_names}
    out = []
    for i in range(table.num_rows):
        row = {name: columns[name][i] for name in columns}
        texts = {name: row[name].as_py() for name in ("cell", "table", "policy", "family", "spec", "k_max")}
        arrays = {
            name: np.array(row[name].values.to_numpy(zero_copy_only=False))
            for name in (*COUNTS, *SECONDS, *SLOTS)
            if row[name].is_valid
        }
        shape = (len(arrays["rounds"]), texts["k_max"])
        out.append(
            Cell(
                texts["cell"],
                texts["table"],
                texts["policy"],
                texts["family"],
                json.loads(texts["spec"]),
                texts["k_max"],
                {name: arrays[name] for name in (*COUNTS, *SECONDS) if name in arrays},
                {name: arrays[name].reshape(shape) for name in SLOTS},
                row["extrapolated"].as_py(),
            )
        )
    return out


def _row(cell: Cell) -> dict[str, Any]:
    """A cell as a row of a part."""
    texts = {"cell": cell.key, "table": cell.table, "policy": cell.label, "family": cell.family}
    spec = {"spec": json.dumps(cell.spec), "k_max": cell.k_max, "extrapolated": cell.extrapolated}
    slots = {name: array_GK.reshape(-1) for name, array_GK in cell.slots.items()}
    return {**texts, **spec, **dict.fromkeys(SECONDS), **cell.sums, **slots}


def _shared(before: Manifest, now: Manifest) -> tuple[Manifest, Manifest]:
    """Two manifests reduced to what must agree: the setting, tables that both name, and major versions."""
    tables = [one.parameters["tables"] for one in (before, now)]
    both = [name for name in tables[0] if name in tables[1]]
    libraries = [name for name in before.versions if name in now.versions]
    return tuple(  # type: ignore[return-value]
        Manifest(
            kind=KIND,
            parameters={**one.parameters["setting"], "tables": {name: listed[name] for name in both}},
            versions={name: major_version(one.versions[name]) for name in libraries},
        )
        for one, listed in zip((before, now), tables)
    )
