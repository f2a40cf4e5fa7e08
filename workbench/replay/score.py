"""Likelihoods without chains, and a dump of hidden rows with the greedy track beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError
from workbench.core.progress import progress
from workbench.core.tape import Corpus, Tape
from workbench.datasets.bfloat import to_bfloat16_bits
from workbench.datasets.estimate import tape_bytes
from workbench.datasets.extract import numerical_class
from workbench.datasets.groups import batch_limit, plan_groups
from workbench.datasets.norm import NORM_FILE, norm_bytes, row_facts
from workbench.datasets.provenance import DOCUMENTS_FILE, documents_bytes, new_manifest
from workbench.datasets.shards import Part, ShardDirectory, in_order, load_shards, plan_shards
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies
from workbench.replay.options import ReplayOptions
from workbench.replay.run import Chunk, Passed, chain_tape, run_group
from workbench.replay.table import scorable

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

KIND = "scores"


def score(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    out: str | Path | None = None,
    hidden: bool = False,
    chunk: int = ReplayOptions.chunk,
    shard_rows: int = 16_384,
    k_format: str = "dense",
    v_format: str = "dense",
    window: int | None = None,
    exact: bool | None = None,
    resume: bool = True,
) -> pl.DataFrame:
    """Score every token once by the target, the first of a document unscored; no drafting.

    Args:
        model: The target; it needs no MTP head.
        tapes: The documents.
        out: Directory for per-token rows (nll, the target's greedy pick, and hidden rows); None keeps totals only.
        hidden: Store the trunk row of every scored position as bfloat16 bits, rounded to nearest even; needs out.
        chunk: Tokens per forward; default 512.
        shard_rows: Rows after which a shard ends, at the end of a document.
        k_format: How keys are kept: "dense" (the model's type), "q8_0", "q5_1" or "fp8"; attention reads what was kept.
        v_format: How values are kept, likewise.
        window: Attention sees this many rows, the row's own included; None for all.
        exact: Numerical class; None for the model's own.
        resume: Go on with a directory that an equal run left.

    Returns:
        Per document: doc_id, source, nll (mean nats per scored token), n_tokens scored, n_bytes, perplexity,
        bits_per_byte.

    Raises:
        UserError: A tape, a format or the directory is not valid, or hidden was asked for without out.
    """
    import polars as pl

    options = ReplayOptions(chunk=chunk, shard_rows=shard_rows)
    if hidden and out is None:
        raise UserError("hidden=True needs out: hidden rows are written to a directory, not kept in memory")
    corpus = scorable(model, tapes)
    cache: dict[str, Any] = {"k_format": k_format, "v_format": v_format, "window": window}
    model.cache_bytes(0, **cache)  # refuses formats that do not fit, before anything is written
    with numerical_class(model, exact):
        if out is None:
            rows = []
            with progress(corpus.n_tokens - len(corpus), desc="score", unit="tok") as bar:
                for tape in corpus:
                    total = 0.0
                    for part in chain_tape(model, tape, options, chains=False, cache=cache):
                        total += float(part.nll.sum(dtype=np.float64))
                        bar.update(len(part.nll))
                    rows.append((tape.doc_id, tape.source, total / (len(tape) - 1), len(tape) - 1, tape.n_bytes))
            kinds = {"doc_id": pl.String, "source": pl.String, "nll": pl.Float64, "n_tokens": pl.Int64}
            return _derived(pl.DataFrame(rows, schema={**kinds, "n_bytes": pl.Int64}, orient="row"))
        parameters = {"chunk": chunk, "hidden": hidden, "shard_rows": shard_rows, **cache}
        manifest = new_manifest(KIND, model, corpus, parameters=parameters, extra=row_facts(model) if hidden else {})
        files = {DOCUMENTS_FILE: documents_bytes(corpus), **({NORM_FILE: norm_bytes(model)} if hidden else {})}
        schema = score_schema(model.config.hidden_size if hidden else 0)
        sizes = [len(tape) - 1 for tape in corpus]
        with ShardDirectory(
            Path(out),
            manifest,
            plan=plan_shards(sizes, shard_rows),
            schema=schema,
            files=files,
            expected=tape_bytes(schema, sizes, corpus.tapes),
            resume=resume,
        ) as directory:
            directory.stream(
                lambda documents, bar: _chunks(model, corpus.tapes, documents, sizes, options, cache, bar),
                lambda items, documents: in_order(
                    (
                        Part(i, _batch(corpus.tapes[i], chunk, schema), last)
                        for item in items
                        for i, chunk, last in item.chunks()
                    ),
                    documents,
                ),
                sizes=sizes,
                desc="score",
            )
            directory.finish({"documents": len(corpus), "rows": sum(sizes), "tokens": corpus.n_tokens})
    columns = ["doc_id", "source", "nll", "n_bytes"]
    frame = pl.from_arrow(load_shards(out, kind=KIND, check_hashes=False).data.table.select(columns))
    assert isinstance(frame, pl.DataFrame)
    return per_document(frame)


def score_schema(hidden_size: int) -> pa.Schema:
    """Columns of a score directory; ``hidden`` is there when its width is not 0."""
    import pyarrow as pa

    fields = [
        pa.field("doc_id", pa.string()),
        pa.field("source", pa.string()),
        pa.field("position", pa.int32()),
        pa.field("n_bytes", pa.int64()),
        pa.field("token", pa.int32()),
        pa.field("nll", pa.float32()),
        pa.field("target_id", pa.int32()),
        pa.field("target_margin", pa.float32()),
    ]
    return pa.schema(fields + ([pa.field("hidden", pa.list_(pa.uint16(), hidden_size))] if hidden_size else []))


def _chunks(
    model: HybridModel,
    tapes: Sequence[Tape],
    documents: Sequence[int],
    rows: Sequence[int],
    options: ReplayOptions,
    cache: Mapping[str, Any],
    bar: Any,
) -> Iterator[Passed]:
    """Chunks of every group that holds a wanted document."""
    wanted, copies = set(documents), HostCopies(model.device)
    for group in plan_groups(rows, batch_limit(model, options.batch, options.chunk)):
        if wanted.isdisjoint(group):
            continue
        members = [tapes[i] for i in group]
        for passed in run_group(model, members, options, copies, documents=group, chains=False, cache=cache):
            yield passed
            bar.update(sum(passed.counts))


def _batch(tape: Tape, part: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    t = len(part.nll)
    at = np.arange(part.first, part.first + t, dtype=np.int32)
    columns: dict[str, Any] = {
        "doc_id": pa.array([tape.doc_id] * t),
        "source": pa.array([tape.source] * t),
        "position": pa.array(at),
        "n_bytes": pa.array([tape.n_bytes] * t, pa.int64()),
        "token": pa.array(tape.tokens[at]),
        "nll": pa.array(part.nll),
        "target_id": pa.array(part.target_id),
        "target_margin": pa.array(part.target_margin),
    }
    if "hidden" in schema.names:
        bits = to_bfloat16_bits(part.trunk.float().cpu().numpy())
        columns["hidden"] = pa.FixedSizeListArray.from_arrays(pa.array(bits.reshape(-1)), bits.shape[1])
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def per_document(frame: pl.DataFrame) -> pl.DataFrame:
    """Totals per document from per-token rows (doc_id, source, nll, n_bytes)."""
    import polars as pl

    totals = frame.group_by("doc_id", maintain_order=True).agg(
        pl.col("source").first(),
        pl.col("nll").cast(pl.Float64).mean(),
        pl.len().cast(pl.Int64).alias("n_tokens"),
        pl.col("n_bytes").first(),
    )
    return _derived(totals)


def _derived(frame: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    bits = pl.col("nll") * pl.col("n_tokens") / np.log(2)
    return frame.with_columns(
        pl.col("nll").exp().alias("perplexity"), (bits / pl.col("n_bytes")).alias("bits_per_byte")
    )
