"""The draft table: one row per position of every tape, on disk as Arrow shards, opened as a Polars frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import as_corpus, check_tapes, new_manifest
from workbench.datasets.shards import ShardDirectory, load_shards, plan_shards
from workbench.model.fingerprint import fingerprint
from workbench.model.hybrid import HybridModel
from workbench.replay.options import ReplayOptions
from workbench.replay.run import Chunk, chain_tape

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from workbench.spec.policies import Policy

KIND = "draft-table"


def table_schema(k_max: int) -> pa.Schema:
    """Columns of a draft table with ``k_max`` slots; slots past the end of a tape, or without a chain, are null."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("doc_id", pa.string()),
            pa.field("source", pa.string()),
            pa.field("split", pa.string()),
            pa.field("own", pa.string()),
            pa.field("position", pa.int32()),
            pa.field("length", pa.int32()),
            pa.field("prompt_len", pa.int32()),
            pa.field("n_bytes", pa.int64()),
            pa.field("token", pa.int32()),
            pa.field("next_token", pa.int32()),
            pa.field("target_id", pa.int32()),
            pa.field("target_margin", pa.float32()),
            pa.field("nll", pa.float32()),
            pa.field("on_tape", pa.bool_()),
            pa.field("draft_ids", pa.list_(pa.int32(), k_max)),
            pa.field("draft_top1", pa.list_(pa.float32(), k_max)),
            pa.field("draft_margin", pa.list_(pa.float32(), k_max)),
        ]
    )


def replay(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    out: str | Path,
    k_max: int = ReplayOptions.k_max,
    stride: int = ReplayOptions.stride,
    chunk: int = ReplayOptions.chunk,
    carrier: str = ReplayOptions.carrier,
    shard_rows: int = ReplayOptions.shard_rows,
    exact: bool | None = None,
    resume: bool = True,
) -> DraftTable:
    """Write the draft table of a corpus: the target's scores everywhere and the drafter's chain at every start.

    Args:
        model: The target with its MTP head.
        tapes: The documents.
        out: Directory for shards and manifest.
        k_max: Draft slots per start; default 8.
        stride: Every how many positions a chain starts; default 1. Walks need 1.
        chunk: Tokens per forward; default 512.
        carrier: Hidden rows the head is fed, "normed" (default) or "pre_norm".
        shard_rows: Rows after which a shard ends, at the end of a document.
        exact: Numerical class; None for the model's own. Tables that are to equal live rounds bit for bit need the
            class of those rounds.
        resume: Go on with a directory that an equal run left.

    Returns:
        The table.

    Raises:
        CapabilityError: The checkpoint has no MTP head.
        UserError: An option, a tape or the directory is not valid; nothing is left behind then.
    """
    options = ReplayOptions(k_max, stride, chunk, carrier, shard_rows)
    if not model.can_draft:
        raise CapabilityError(
            f"checkpoint {model.source or 'in memory'} has no mtp.* weights, so there is nothing to replay: use "
            "wb.score for likelihoods alone"
        )
    corpus = scorable(model, tapes)
    parameters = {"k_max": k_max, "stride": stride, "chunk": chunk, "carrier": carrier, "shard_rows": shard_rows}
    with numerical_class(model, exact):
        manifest = new_manifest(KIND, model, corpus, parameters=parameters)
        _write(model, corpus, Path(out), manifest, options, resume)
    return load_table(out, check_hashes=False)


def scorable(model: HybridModel, tapes: Any) -> Corpus:
    """Tapes as a corpus that this model can score; a sentence when it cannot."""
    corpus = as_corpus(tapes)
    check_tapes(model, corpus)
    for tape in corpus:
        if len(tape) < 2:
            raise UserError(
                f"tape {tape.doc_id!r} has {len(tape)} token; at least 2 are needed to score one: leave short "
                "documents out with corpus(..., min_tokens=2)"
            )
    return corpus


def _write(
    model: HybridModel, corpus: Corpus, out: Path, manifest: Manifest, options: ReplayOptions, resume: bool
) -> None:
    rows, schema = [len(tape) - 1 for tape in corpus], table_schema(options.k_max)
    plan = plan_shards(rows, options.shard_rows)
    with ShardDirectory(out, manifest, plan=plan, schema=schema, resume=resume) as directory:
        directory.fill(
            lambda span, bar: _batches(model, corpus.tapes[span], schema, options, bar), sizes=rows, desc="replay"
        )
        directory.finish({"documents": len(corpus), "rows": sum(rows), "tokens": corpus.n_tokens})


def _batches(
    model: HybridModel, tapes: Sequence[Tape], schema: pa.Schema, options: ReplayOptions, bar: Any
) -> Iterator[pa.RecordBatch]:
    here = fingerprint(model)
    for tape in tapes:
        own = tape.own.kind if tape.own and tape.own.model == here else ""
        for part in chain_tape(model, tape, options):
            yield _batch(tape, own, part, schema)
            bar.update(len(part.nll))


def _batch(tape: Tape, own: str, part: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    t = len(part.nll)
    at = np.arange(part.first, part.first + t, dtype=np.int32)
    empty = part.draft_ids < 0

    def slots(values: np.ndarray, kind: pa.DataType) -> pa.FixedSizeListArray:
        flat = pa.array(values.reshape(-1), kind, mask=empty.reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    following = tape.tokens[at + 1]
    columns = {
        "doc_id": pa.array([tape.doc_id] * t),
        "source": pa.array([tape.source] * t),
        "split": pa.array([tape.split] * t),
        "own": pa.array([own] * t),
        "position": pa.array(at),
        "length": pa.array(np.full(t, len(tape), np.int32)),
        "prompt_len": pa.array(np.full(t, tape.prompt_len, np.int32)),
        "n_bytes": pa.array([tape.n_bytes] * t, pa.int64()),
        "token": pa.array(tape.tokens[at]),
        "next_token": pa.array(following),
        "target_id": pa.array(part.target_id),
        "target_margin": pa.array(part.target_margin),
        "nll": pa.array(part.nll),
        "on_tape": pa.array(part.target_id == following),
        "draft_ids": slots(part.draft_ids, pa.int32()),
        "draft_top1": slots(part.draft_top1, pa.float32()),
        "draft_margin": slots(part.draft_margin, pa.float32()),
    }
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


class DraftTable:
    """An opened draft table.

    Args:
        path: Its directory.
        manifest: Its manifest.
        dataset: The Hugging Face dataset over its shards.
    """

    def __init__(self, path: Path, manifest: Manifest, dataset: Any) -> None:
        self.path, self.manifest, self.dataset = path, manifest, dataset

    @cached_property
    def frame(self) -> pl.DataFrame:
        """One row per position, in the order of the tapes."""
        import polars as pl

        frame = pl.from_arrow(self.dataset.data.table)
        assert isinstance(frame, pl.DataFrame)
        return frame

    @property
    def k_max(self) -> int:
        """Draft slots per start."""
        return int(self.manifest.parameters["k_max"])

    @property
    def key(self) -> dict[str, Any]:
        """What a walk must agree with: model, carrier, slots, numerical class."""
        model = self.manifest.model
        return {
            "model": model["fingerprint"],
            "exact": model["exact"],
            "row_block": model["row_block"],
            "carrier": self.manifest.parameters["carrier"],
            "k_max": self.k_max,
        }

    def rounds(
        self, *, k: int = 3, policy: Policy | None = None, estimator: str | None = None, **given: Any
    ) -> pl.DataFrame:
        """Rounds of a policy walked over the table; see ``walk``."""
        from workbench.replay.walk import walk

        return walk(self, k=k, policy=policy, estimator=estimator, **given)

    @cached_property
    def nll(self) -> pl.DataFrame:
        """Per document: source, mean nll (nats per scored token), n_tokens scored, n_bytes."""
        from workbench.replay.score import per_document

        return per_document(self.frame)

    @property
    def tokens_nll(self) -> pl.DataFrame:
        """Per scored token: doc_id, source, position (of the row that scores it), nll in nats."""
        return self.frame.select("doc_id", "source", "position", "nll")

    def __repr__(self) -> str:
        counts = self.manifest.counts
        return f"DraftTable({counts['documents']} documents, {counts['rows']:,} rows, k_max={self.k_max})"

    def _repr_html_(self) -> str:
        from workbench.display import card

        counts, model = self.manifest.counts, self.manifest.model
        rows = [
            ("documents", counts["documents"]),
            ("rows", f"{counts['rows']:,}"),
            ("slots per start", self.k_max),
            ("model", f"{model['name']} ({model['fingerprint']})"),
            ("numerics", "exact" if model["exact"] else "fast"),
        ]
        return card("Draft table", rows)._repr_html_()


def load_table(path: str | Path, *, check_hashes: bool = True) -> DraftTable:
    """Open a finished draft table.

    Args:
        path: The directory ``replay`` wrote.
        check_hashes: Compare every file with its hash in the manifest; default True.

    Returns:
        The table.

    Raises:
        CheckpointError: It is no draft table, is incomplete, or its bytes have changed.
    """
    where = Path(path)
    if not where.is_dir():
        raise CheckpointError(f"{path} is not a directory: give the directory that replay wrote")
    dataset = load_shards(where, kind=KIND, check_hashes=check_hashes)
    return DraftTable(where, Manifest.read(where), dataset)
