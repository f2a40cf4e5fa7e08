"""Anchor records of a corpus: every tape once through the target's funnel, in chunks, to Arrow shards.

Legend: T rows of a chunk, R scored rows, N records, H hidden.
Only rows that a record needs are scored, and nothing after the last of them is run. One tape is in flight at a time,
with its cache and the rows its open records need; memory does not depend on the number of tapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.core.errors import UserError
from workbench.core.schemas import anchor_schema
from workbench.core.tape import Corpus, Tape
from workbench.datasets.anchors import Anchors, anchor_positions, slot_mask
from workbench.datasets.bfloat import to_bfloat16_bits
from workbench.datasets.norm import NORM_FILE, norm_bytes, norm_facts
from workbench.datasets.options import ExtractOptions
from workbench.datasets.provenance import as_corpus, check_tapes, new_manifest
from workbench.datasets.shards import ShardDirectory, load_shards, plan_shards
from workbench.datasets.topk import check_mass, check_rows, sparse_rows
from workbench.datasets.window import Filled, Window
from workbench.model.hybrid import HybridModel

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

KIND = "anchors"


def extract(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    out: str | Path,
    gamma: int = ExtractOptions.gamma,
    top_k: int = ExtractOptions.top_k,
    temperature: float = ExtractOptions.temperature,
    anchors: Anchors = ExtractOptions.anchors,
    chunk: int = ExtractOptions.chunk,
    seed: int = ExtractOptions.seed,
    hidden_dtype: str = ExtractOptions.hidden_dtype,
    shard_rows: int = ExtractOptions.shard_rows,
    exact: bool | None = None,
    resume: bool = True,
) -> datasets.Dataset:
    """Write anchor records of a corpus and open them as a Hugging Face dataset.

    A record at anchor p holds trunk row h_{p-1}, tokens x_p..x_{p+gamma} and, for slots j < gamma, what the target's
    row p + j says about token p + j + 1. Everything is checked before the directory is made; a run that was killed
    goes on per shard when called again, and ends with the same bytes.

    Args:
        model: The target.
        tapes: The documents.
        out: Directory for shards and manifest.
        gamma: Slots per record; default 5.
        top_k: Ids kept per slot; default 64.
        temperature: Of the stored probabilities; default 0.7.
        anchors: A count per document (one per equal bucket of its response, drawn by the seed), "all", a list of
            positions for every document, or a mapping from document id to its list; default 4.
        chunk: Tokens per forward; default 512.
        seed: Seed of the choice of anchors; default 20260811.
        hidden_dtype: Type of the trunk rows, "bfloat16" (bits in uint16, rounded to nearest even) or "float32".
        shard_rows: Records after which a shard ends, at the end of a document; default 2,048.
        exact: Numerical class; None for the model's own.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.

    Returns:
        The records, memory-mapped, in the order of the tapes.

    Raises:
        UserError: An option, a tape or the directory is not valid; nothing is left behind then.
        NonFiniteError: A row of logits holds NaN or infinity.

    Source: DSpark anchor records, for which the target's row at p + j supervises slot j.
    """
    options = ExtractOptions(gamma, top_k, temperature, anchors, chunk, seed, hidden_dtype, shard_rows)
    options.check_vocabulary(model.config.vocab_size)
    corpus = as_corpus(tapes)
    check_tapes(model, corpus)
    if isinstance(options.anchors, Mapping) and (strange := set(options.anchors) - {tape.doc_id for tape in corpus}):
        raise UserError(f"anchors names document {min(strange)!r}, which is not among the tapes: take it out")
    sizes = [(len(p), int(p[-1]) + options.gamma) for p in (_anchors(tape, options) for tape in corpus)]
    rows, fed = [n for n, _ in sizes], [n for _, n in sizes]
    schema = anchor_schema(
        hidden_size=model.config.hidden_size,
        gamma=options.gamma,
        top_k=options.top_k,
        hidden_dtype=options.hidden_dtype,
    )
    with numerical_class(model, exact):
        manifest = new_manifest(KIND, model, corpus, parameters=options.to_dict(), extra={"norm": norm_facts(model)})
        directory = ShardDirectory(
            Path(out),
            manifest,
            plan=plan_shards(rows, options.shard_rows),
            schema=schema,
            files={NORM_FILE: norm_bytes(model)},
            resume=resume,
        )
        with directory:
            directory.fill(
                lambda span, bar: _batches(model, corpus.tapes[span], options, schema, bar), sizes=fed, desc="extract"
            )
            directory.finish(
                {"documents": len(corpus), "records": sum(rows), "tokens": corpus.n_tokens, "rows_run": sum(fed)}
            )
    return load_anchors(out, check_hashes=False)


def load_anchors(path: str | Path, *, check_hashes: bool = True) -> datasets.Dataset:
    """Open finished anchor records, memory-mapped.

    Args:
        path: The directory ``extract`` wrote.
        check_hashes: Compare every file with its hash in the manifest; default True.

    Returns:
        The records.

    Raises:
        CheckpointError: These are no anchor records, they are incomplete, or their bytes have changed.
    """
    return load_shards(path, kind=KIND, check_hashes=check_hashes)


@contextmanager
def numerical_class(model: HybridModel, exact: bool | None) -> Iterator[None]:
    """Run a block with ``model.exact`` set; None leaves it."""
    before = model.exact
    if exact is not None and not isinstance(exact, bool):
        raise UserError(f"exact={exact!r} is not valid: use True, False, or None for the model's own")
    model.exact = before if exact is None else exact
    try:
        yield
    finally:
        model.exact = before


def _anchors(tape: Tape, options: ExtractOptions) -> np.ndarray:
    return anchor_positions(tape, anchors=options.anchors, gamma=options.gamma, seed=options.seed)


def _batches(
    model: HybridModel, tapes: Sequence[Tape], options: ExtractOptions, schema: pa.Schema, bar: Any
) -> Iterator[pa.RecordBatch]:
    for tape in tapes:
        for filled in run_tape(model, tape, _anchors(tape, options), options, bar):
            yield _batch(tape, filled, options, schema)


def run_tape(
    model: HybridModel, tape: Tape, positions: np.ndarray, options: ExtractOptions, bar: Any = None
) -> Iterator[Filled]:
    """Run one tape through the funnel and hand out its records as they are completed.

    Args:
        model: The target.
        tape: The document.
        positions: Its anchors.
        options: Slots, kept ids, temperature and chunk are read.
        bar: Progress, counted in tokens; None for none.

    Yields:
        Completed records in order.

    Raises:
        NonFiniteError: A row of logits holds NaN or infinity; the message names document and position.
        UserError: A trunk row is not finite, or the mass of a row is not one.
    """
    window = Window(positions, options.gamma)
    cache = model.new_cache(capacity=window.end)
    tokens_1T = torch.from_numpy(tape.tokens[: window.end].astype(np.int64))[None].to(model.device)
    for start in range(0, window.end, options.chunk):
        end = min(start + options.chunk, window.end)
        scored, carriers = window.scored_in(start, end), window.carriers_in(start, end)
        rows = model.forward(
            tokens_1T[:, start:end], cache, logits=(scored - start).tolist() if len(scored) else "none"
        )
        kept = None
        try:
            if len(scored):
                assert rows.logits_BTV is not None
                check_rows(rows.logits_BTV[0], scored)
                kept = sparse_rows(rows.logits_BTV[0], top_k=options.top_k, temperature=options.temperature)
                check_mass(kept.probs, kept.tail, scored)
        except UserError as error:
            error.args = (f"document {tape.doc_id!r}: {error}",)
            raise
        hidden_NH = rows.trunk_BTH[0, torch.from_numpy(carriers - start).to(model.device)].float().cpu().numpy()
        if not np.isfinite(hidden_NH).all():
            bad = int(carriers[~np.isfinite(hidden_NH).all(-1)][0])
            raise UserError(
                f"document {tape.doc_id!r}: the trunk row of position {bad} is not finite: check the checkpoint's "
                "weights and dtype (half precision overflows on real models)"
            )
        filled = window.add(end, scored, kept, hidden_NH)
        if bar is not None:
            bar.update(end - start)
        if filled is not None:
            yield filled


def _batch(tape: Tape, filled: Filled, options: ExtractOptions, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    n, at, slots = len(filled.positions), filled.positions, filled.slots
    hidden = to_bfloat16_bits(filled.hidden_NH) if options.hidden_dtype == "bfloat16" else filled.hidden_NH
    values: dict[str, Any] = {
        "doc_id": [tape.doc_id] * n,
        "split": [tape.split] * n,
        "source": [tape.source] * n,
        "position": at.astype(np.int32),
        "prompt_len": np.full(n, tape.prompt_len, dtype=np.int32),
        "hidden": hidden,
        "tokens": tape.tokens[at[:, None] + np.arange(options.gamma + 1)],
        "slot_mask": slot_mask(tape, at, options.gamma),
        "top_ids": slots.ids,
        "top_logits": slots.logits,
        "top_probs": slots.probs,
        "tail_probs": slots.tail,
        "logsumexp": slots.logsumexp,
        "logsumexp_t": slots.logsumexp_t,
    }
    columns = []
    for column in schema:
        value = values[column.name]
        if pa.types.is_fixed_size_list(column.type):
            flat = pa.array(np.ascontiguousarray(value).reshape(-1), column.type.value_type)
            columns.append(pa.FixedSizeListArray.from_arrays(flat, column.type.list_size))
        else:
            columns.append(pa.array(value, column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
