"""The sequence store: per document every token's trunk row, for drafters that attend to all earlier positions.

A row of the store is a document: its ids, loss mask, trunk rows h_0..h_{n-1} before the final norm, the output rows of
tapped layers and, if asked for, what the target says after every token. Documents run in groups, in chunks, and are
written on a thread of its own, one record batch per document, so memory does not depend on the number of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.core.schemas import sequence_schema
from workbench.core.tape import Corpus, Tape
from workbench.datasets.engine import EngineOptions, Job, fill
from workbench.datasets.extract import numerical_class
from workbench.datasets.groups import WINDOW, batch_limit, plan_groups
from workbench.datasets.left_out import kept_counts, quarantine_bytes
from workbench.datasets.norm import LAYERS, NORM_FILE, norm_bytes, row_facts
from workbench.datasets.provenance import DOCUMENTS_FILE, as_corpus, check_tapes, documents_bytes, new_manifest
from workbench.datasets.sequence_options import SequenceOptions
from workbench.datasets.sequence_passes import Stretch, run_documents, sparse_names, whole_documents
from workbench.datasets.shards import Part, ShardDirectory, in_order, load_shards, plan_shards, without_rows
from workbench.model.hybrid import HybridModel
from workbench.model.transfer import HostCopies

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

KIND = "sequence"
HELD_BYTES = 2 << 30  # documents that wait for their turn hold at most this much


def extract_sequences(
    model: HybridModel,
    tapes: Corpus | Sequence[Tape] | Tape,
    *,
    out: str | Path,
    taps: Sequence[int] = SequenceOptions.taps,
    hidden_dtype: str = SequenceOptions.hidden_dtype,
    top_k: int | None = SequenceOptions.top_k,
    temperature: float = SequenceOptions.temperature,
    chunk: int = SequenceOptions.chunk,
    shard_tokens: int = SequenceOptions.shard_tokens,
    batch: int | None = SequenceOptions.batch,
    on_bad: str = SequenceOptions.on_bad,
    exact: bool | None = None,
    resume: bool = True,
    engine: str = EngineOptions.engine,
    workers: int | None = EngineOptions.workers,
    ray_address: str | None = EngineOptions.ray_address,
    num_gpus: float | None = EngineOptions.num_gpus,
) -> datasets.Dataset:
    """Write the sequence store of a corpus and open it as a Hugging Face dataset, a row per document.

    Row i of ``hidden`` and of the taps is the target's row at token i; with ``top_k``, entry i says what comes after
    token i. ``loss_mask`` is the tape's own mask, and without one what follows the prompt. Everything is checked before
    the directory is made; a run that was killed goes on per shard when called again, and ends with the same bytes.

    Args:
        model: The target.
        tapes: The documents.
        out: Directory for shards and manifest.
        taps: Layers, counted from 0, whose output rows are kept too, ascending; default none.
        hidden_dtype: How rows are kept: "bfloat16" (bits in uint16, rounded to nearest even), "float32" (for a model
            that computes in it, where an export is to hold rows after the final norm and would round them again), or
            "fp8" (e4m3 with a scale per token and row: too coarse to rebuild logits from, so keep ``top_k`` beside it).
        top_k: Ids kept per token; None, the default, for none.
        temperature: Of the stored probabilities; default 0.7.
        chunk: Tokens per forward; default 512.
        shard_tokens: Tokens after which a shard ends, at the end of a document; default 65,536.
        batch: Documents that run together; None for as many as fill a forward on a GPU, and one on a CPU.
        on_bad: What is done about a document whose rows are not finite or do not add up: "stop" ends the
            run; "quarantine" leaves it out and lists it with its reason, for ``load_quarantine``. Default "stop".
        exact: Numerical class; None for the model's own. In exact mode the shards' bytes depend neither on chunk nor
            on batch.
        resume: Go on with a directory that an equal run left; False refuses one that holds anything.
        engine: "local", in this process, or "ray", by workers that hold one model each; the bytes are the same in
            exact mode. See ``EngineOptions`` for the three that go with it.
        workers: Processes that hold a model, with engine ray; None for as many as there is room for.
        ray_address: Of a running Ray cluster whose machines share ``out``; None for one on this machine.
        num_gpus: GPUs that each worker asks for; None for 1 when the model is on a GPU and 0 when it is not.

    Returns:
        The store, memory-mapped, its documents in the order of the tapes; ``read_sequence`` gives one's arrays.

    Raises:
        UserError: An option, a tape or the directory is not valid; nothing is left behind then.
        NonFiniteError: A row of logits holds NaN or infinity.
    """
    options = SequenceOptions(taps, hidden_dtype, top_k, temperature, chunk, shard_tokens, batch, on_bad)  # type: ignore[arg-type]
    place = EngineOptions(engine, workers, ray_address, num_gpus)
    options.check_model(vocab_size=model.config.vocab_size, layers=model.config.num_layers)
    corpus = as_corpus(tapes)
    check_tapes(model, corpus)
    sizes = [len(tape) for tape in corpus]
    schema = sequence_schema(taps=options.taps, top_k=options.top_k, hidden_dtype=options.hidden_dtype)
    layers = {"convention": LAYERS, "count": model.config.num_layers, "taps": list(options.taps)}
    with numerical_class(model, exact):
        directory = ShardDirectory(
            Path(out),
            new_manifest(
                KIND, model, corpus, parameters=options.to_dict(), extra=row_facts(model) | {"layers": layers}
            ),
            plan=plan_shards(sizes, options.shard_tokens),
            schema=schema,
            files={NORM_FILE: norm_bytes(model), DOCUMENTS_FILE: documents_bytes(corpus)},
            expected=[round(options.token_bytes(model.config.hidden_size) * n) for n in sizes],
            resume=resume,
            leaves_out=partial(quarantine_bytes, corpus.tapes) if options.on_bad == "quarantine" else None,
        )
        with directory:
            fill(directory, SequenceExtraction("extract", sizes, schema, corpus.tapes, options), model, place)
            directory.finish(kept_counts(directory.manifest, corpus.tapes, [1] * len(corpus)))
    return load_sequences(out, check_hashes=False)


def load_sequences(path: str | Path, *, check_hashes: bool = True) -> datasets.Dataset:
    """Open a finished sequence store, memory-mapped.

    Args:
        path: The directory ``extract_sequences`` wrote.
        check_hashes: Compare every file with its hash in the manifest; default True.

    Returns:
        The store, a row per document.

    Raises:
        CheckpointError: This is no sequence store, it is incomplete, or its bytes have changed.
    """
    return load_shards(path, kind=KIND, check_hashes=check_hashes)


def loss_mask(tape: Tape) -> np.ndarray:
    """Which tokens may be trained on: as the tape says, and without a mask of its own those after its prompt.

    Args:
        tape: The document.

    Returns:
        bool [n].
    """
    return np.arange(len(tape)) >= tape.prompt_len if tape.supervised is None else tape.supervised


@dataclass(frozen=True, eq=False)
class SequenceExtraction(Job[Stretch]):
    """A sequence store as a job; every document is a record batch of its own.

    Args:
        desc: Name on the progress bar.
        sizes: Tokens to run per document.
        schema: Columns.
        tapes: The documents.
        options: What is kept.
    """

    batch_rows = 1

    tapes: Sequence[Tape]
    options: SequenceOptions

    def items(self, model: HybridModel, documents: Sequence[int], bar: Any) -> Iterator[Stretch]:
        """Chunks of the documents."""
        return _stretches(model, self.tapes, documents, self.options, bar)

    def parts(self, items: Iterator[Stretch], documents: Sequence[int]) -> Iterator[Part]:
        """The documents."""
        return _parts(items, self.tapes, documents, self.options, self.schema)


def _limit(model: HybridModel, tapes: Sequence[Tape], options: SequenceOptions) -> Callable[[int], int]:
    """Documents that run together; also bounded by what documents that wait for their turn hold."""
    limit = batch_limit(model, options.batch, options.chunk)
    if options.batch is not None:
        return limit
    longest = max(map(len, tapes)) * options.token_bytes(model.config.hidden_size)
    most = max(1, int(HELD_BYTES // (WINDOW * longest)))
    return lambda rows: min(limit(rows), most)


def _stretches(
    model: HybridModel, tapes: Sequence[Tape], documents: Sequence[int], options: SequenceOptions, bar: Any
) -> Iterator[Stretch]:
    """Chunks of every group that holds a wanted document; the group runs whole, so that its rows are the same."""
    wanted, copies = set(documents), HostCopies(model.device)
    for group in plan_groups([len(tape) for tape in tapes], _limit(model, tapes, options)):
        if not wanted.isdisjoint(group):
            yield from run_documents(model, group, [tapes[i] for i in group], options, copies, bar)


def _parts(
    stretches: Iterator[Stretch],
    tapes: Sequence[Tape],
    documents: Sequence[int],
    options: SequenceOptions,
    schema: pa.Schema,
) -> Iterator[Part]:
    """The wanted documents, in their order."""
    every = (
        without_rows(document, found)
        if isinstance(found, str)
        else Part(document, _batch(tapes[document], found, schema), True)
        for document, found in whole_documents(stretches, tapes, documents, on_bad=options.on_bad)
    )
    return in_order(every, documents, whole=True)


def _batch(tape: Tape, columns: Mapping[str, np.ndarray], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    names = sparse_names()
    values: dict[str, Any] = {
        "doc_id": tape.doc_id,
        "split": tape.split,
        "source": tape.source,
        "prompt_len": tape.prompt_len,
        "tokens": tape.tokens,
        "loss_mask": loss_mask(tape),
        **{names.get(name, name): x.view(np.uint16) if x.dtype == np.int16 else x for name, x in columns.items()},
    }
    made = []
    for field in schema:
        value = values[field.name]
        if pa.types.is_large_list(field.type):
            flat = pa.array(np.ascontiguousarray(value).reshape(-1), field.type.value_type)
            made.append(pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat))
        else:
            made.append(pa.array([value], field.type))
    return pa.RecordBatch.from_arrays(made, schema=schema)
