"""Anchor records of a corpus: every tape once through the target's funnel, in chunks, to Arrow shards.

Documents run in groups, each from its own position, and only rows that a record needs are scored; nothing after the
last of them is run. Records are made and written on a thread of its own, in the order of the corpus, while the next
chunks run. What is held is the caches of one group, the rows its open records need, and records of documents that came
before their turn, so memory does not depend on the number of tapes; a run that may leave documents out also holds the
records of the one whose turn it is, until its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.errors import UserError
from workbench.core.schemas import anchor_schema
from workbench.core.tape import Corpus, Tape
from workbench.datasets.anchors import Anchors, anchor_positions, slot_mask
from workbench.datasets.engine import EngineOptions, Job, fill
from workbench.datasets.estimate import tape_bytes
from workbench.datasets.groups import batch_limit, plan_groups
from workbench.datasets.left_out import kept_counts, quarantine_bytes
from workbench.datasets.norm import NORM_FILE, norm_bytes, row_facts
from workbench.datasets.options import ExtractOptions
from workbench.datasets.passes import Passed, filled_records, run_group
from workbench.datasets.provenance import DOCUMENTS_FILE, as_corpus, check_tapes, documents_bytes, new_manifest
from workbench.datasets.shards import Part, ShardDirectory, in_order, load_shards, plan_shards, without_rows
from workbench.datasets.window import Filled, Window
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies

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
    batch: int | None = ExtractOptions.batch,
    on_bad: str = ExtractOptions.on_bad,
    exact: bool | None = None,
    resume: bool = True,
    engine: str = EngineOptions.engine,
    workers: int | None = EngineOptions.workers,
    ray_address: str | None = EngineOptions.ray_address,
    num_gpus: float | None = EngineOptions.num_gpus,
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
        batch: Documents that run together; None, the default, for one on a CPU, and on a GPU for as many as fill a
            forward. In exact mode the bytes do not depend on it; in fast mode they do, at the level of rounding.
        on_bad: What is done about a document whose rows are not finite or do not add up: "stop" ends the
            run; "quarantine" leaves the whole document out and lists it with its reason, for ``load_quarantine``,
            while shards stay cut where they were and records of other documents as they are. Default "stop"; a run
            that stopped can go on with "quarantine".
        exact: Numerical class; None for the model's own.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.
        engine: "local", in this process, or "ray", by workers that hold one model each; the bytes are the same in
            exact mode. See ``EngineOptions`` for the three that go with it.
        workers: Processes that hold a model, with engine ray; None for as many as there is room for.
        ray_address: Of a running Ray cluster whose machines share ``out``; None for one on this machine.
        num_gpus: GPUs that each worker asks for; None for 1 when the model is on a GPU and 0 when it is not.

    Returns:
        The records, memory-mapped, in the order of the tapes.

    Raises:
        UserError: An option, a tape or the directory is not valid, or every document would be left out; nothing is
            left behind then.
        NonFiniteError: A row of logits holds NaN or infinity.

    Source: DSpark anchor records, for which the target's row at p + j supervises slot j.
    """
    options = ExtractOptions(gamma, top_k, temperature, anchors, chunk, seed, hidden_dtype, shard_rows, batch, on_bad)
    place = EngineOptions(engine, workers, ray_address, num_gpus)
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
        manifest = new_manifest(KIND, model, corpus, parameters=options.to_dict(), extra=row_facts(model))
        directory = ShardDirectory(
            Path(out),
            manifest,
            plan=plan_shards(rows, options.shard_rows),
            schema=schema,
            files={NORM_FILE: norm_bytes(model), DOCUMENTS_FILE: documents_bytes(corpus)},
            expected=tape_bytes(schema, rows, corpus.tapes),
            resume=resume,
            leaves_out=partial(quarantine_bytes, corpus.tapes) if options.on_bad == "quarantine" else None,
        )
        with directory:
            fill(directory, Extraction("extract", fed, schema, corpus.tapes, options), model, place)
            directory.finish(kept_counts(directory.manifest, corpus.tapes, rows) | {"rows_run": sum(fed)})
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


@dataclass(frozen=True, eq=False)
class Extraction(Job[Passed]):
    """Anchor records as a job.

    Args:
        desc: Name on the progress bar.
        sizes: Tokens to run per document.
        schema: Columns.
        tapes: The documents.
        options: What is recorded.
    """

    tapes: Sequence[Tape]
    options: ExtractOptions

    def items(self, model: HybridModel, documents: Sequence[int], bar: Any) -> Iterator[Passed]:
        """Chunks of the documents."""
        return _passes(model, self.tapes, documents, self.sizes, self.options, bar)

    def parts(self, items: Iterator[Passed], documents: Sequence[int]) -> Iterator[Part]:
        """Their records."""
        return _parts(items, self.tapes, documents, self.options, self.schema)


def _anchors(tape: Tape, options: ExtractOptions) -> np.ndarray:
    return anchor_positions(tape, anchors=options.anchors, gamma=options.gamma, seed=options.seed)


def _passes(
    model: HybridModel,
    tapes: Sequence[Tape],
    documents: Sequence[int],
    fed: Sequence[int],
    options: ExtractOptions,
    bar: Any,
) -> Iterator[Passed]:
    """Chunks of every group that holds a wanted document; the group runs whole, so that its rows are the same."""
    wanted, copies = set(documents), HostCopies(model.device)
    for group in plan_groups(fed, batch_limit(model, options.batch, options.chunk)):
        if wanted.isdisjoint(group):
            continue
        members = [tapes[i] for i in group]
        windows = [Window(_anchors(tape, options), options.gamma) for tape in members]
        yield from run_group(model, group, members, windows, options, copies, bar)


def _parts(
    passes: Iterator[Passed],
    tapes: Sequence[Tape],
    documents: Sequence[int],
    options: ExtractOptions,
    schema: pa.Schema,
) -> Iterator[Part]:
    """Records of the wanted documents, in their order."""
    every = (
        without_rows(document, filled)
        if isinstance(filled, str)
        else Part(document, _batch(tapes[document], filled, options, schema), last)
        for passed in passes
        for document, filled, last in filled_records(passed, tapes, on_bad=options.on_bad)
    )
    return in_order(every, documents, whole=options.on_bad == "quarantine")


def _batch(tape: Tape, filled: Filled, options: ExtractOptions, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    n, at, slots = len(filled.positions), filled.positions, filled.slots
    values: dict[str, Any] = {
        "doc_id": [tape.doc_id] * n,
        "split": [tape.split] * n,
        "source": [tape.source] * n,
        "position": at.astype(np.int32),
        "prompt_len": np.full(n, tape.prompt_len, dtype=np.int32),
        "hidden": filled.hidden_NH,
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
