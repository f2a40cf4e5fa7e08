"""The draft table: one row per position of every tape, on disk as Arrow shards, opened as a Polars frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core.errors import CapabilityError, CheckpointError, UserError
from workbench.core.manifest import Manifest
from workbench.core.tape import Corpus, Tape
from workbench.datasets.engine import EngineOptions, fill
from workbench.datasets.estimate import tape_bytes
from workbench.datasets.extract import numerical_class
from workbench.datasets.provenance import DOCUMENTS_FILE, as_corpus, check_tapes, documents_bytes, new_manifest
from workbench.datasets.shards import ShardDirectory, load_shards, plan_shards
from workbench.model.chain import chains_for
from workbench.model.hybrid import HybridModel
from workbench.replay.columns import bytes_by_group, table_columns, table_schema
from workbench.replay.job import Replaying, document_facts
from workbench.replay.options import ReplayOptions, temperatures
from workbench.sampling.options import Shaping

if TYPE_CHECKING:
    import polars as pl

    from workbench.spec.policies import Policy

KIND = "draft-table"


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
    temperature: float = ReplayOptions.temperature,
    top_k: int = ReplayOptions.top_k,
    top_p: float = ReplayOptions.top_p,
    min_p: float = ReplayOptions.min_p,
    filter_order: str = ReplayOptions.filter_order,
    repetition_penalty: float = ReplayOptions.repetition_penalty,
    frequency_penalty: float = ReplayOptions.frequency_penalty,
    presence_penalty: float = ReplayOptions.presence_penalty,
    penalty_last_n: int | None = ReplayOptions.penalty_last_n,
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ReplayOptions.logit_bias,
    seed: int = ReplayOptions.seed,
    forced: bool = ReplayOptions.forced,
    shadow: int = ReplayOptions.shadow,
    target: bool = ReplayOptions.target,
    ranks: bool = ReplayOptions.ranks,
    overlap: float | Sequence[float] = ReplayOptions.overlap,
    batch: int | None = ReplayOptions.batch,
    exact: bool | None = None,
    resume: bool = True,
    engine: str = EngineOptions.engine,
    workers: int | None = EngineOptions.workers,
    ray_address: str | None = EngineOptions.ray_address,
    num_gpus: float | None = EngineOptions.num_gpus,
) -> DraftTable:
    """Write the draft table of a corpus: the target's scores everywhere and the drafter's chain at every start.

    Above temperature 0, or with penalties or a bias, target and drafter draw with the noise that live rounds under
    ``accept="coupled"`` would use: that of a token's position, the seed and the tape's random stream. The stream is the
    one a sampled own tape was made with, else the tape's place among ``tapes``.

    Args:
        model: The target with its MTP head.
        tapes: The documents.
        out: Directory for shards and manifest.
        k_max: Draft slots per start; default 8.
        stride: Every how many positions a chain starts; default 1. Walks need 1.
        chunk: Tokens per forward; default 512.
        carrier: Hidden rows the head is fed, "normed" (default) or "pre_norm".
        shard_rows: Rows after which a shard ends, at the end of a document.
        temperature: 0, the default, records the most likely tokens; above, draws.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens that hold this share of the mass; 1 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely; 0 keeps all.
        filter_order: "chain" (default), "joint" or "temperature_last".
        repetition_penalty: Of tokens in the text; 1 is none.
        frequency_penalty: Per occurrence in the text; 0 is none.
        presence_penalty: Of tokens in the text; 0 is none.
        penalty_last_n: Tokens at the end of the text that penalties see; None for all.
        logit_bias: Added to the logits of token ids; -inf forbids one.
        seed: Of every draw; default 0.
        forced: Record the chain fed with the tape's own tokens: what it would draft, and the probabilities of the
            tape's tokens, which the estimator "ratio" goes by; those of softmax at T = 1 at temperature 0. Default
            False.
        shadow: The drafter's most likely tokens to record in every slot, which trees are scored from, at most 8;
            default 0.
        target: Record the target's two most likely tokens, their probabilities and its entropy, at T = 1; default
            False.
        ranks: Record, of every draft, its rank and log-probability in the target's row after the tape's own tokens and
            the drafter's log-probability, at T = 1; default False.
        overlap: Temperatures of 1 - ||p - q||_1 / 2 at the first slot, of the laws before penalties and filters; none
            by default. A diagnostic of that slot at that start: never multiply it along a chain.
        batch: Documents that run together; None, the default, for one on a CPU, and on a GPU for as many as fill a
            forward. Draws and ranks go document by document. In exact mode the bytes do not depend on it; in fast mode
            they do, at the level of rounding.
        exact: Numerical class; None for the model's own. Tables that are to equal live rounds bit for bit need the
            class of those rounds.
        resume: Go on with a directory that an equal run left.
        engine: "local", in this process, or "ray", by workers that hold one model each; the bytes are the same in
            exact mode. See ``EngineOptions`` for the three that go with it.
        workers: Processes that hold a model, with engine ray; None for as many as there is room for.
        ray_address: Of a running Ray cluster whose machines share ``out``; None for one on this machine.
        num_gpus: GPUs that each worker asks for; None for 1 when the model is on a GPU and 0 when it is not.

    Returns:
        The table.

    Raises:
        CapabilityError: The checkpoint has no MTP head, or the class is exact on a GPU.
        UserError: An option, a tape or the directory is not valid; nothing is left behind then.
    """
    options = ReplayOptions(
        k_max=k_max,
        stride=stride,
        chunk=chunk,
        carrier=carrier,
        shard_rows=shard_rows,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        filter_order=filter_order,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        penalty_last_n=penalty_last_n,
        logit_bias=logit_bias,
        seed=seed,
        forced=forced,
        shadow=shadow,
        target=target,
        ranks=ranks,
        overlap=temperatures(overlap),
        batch=batch,
    )
    place = EngineOptions(engine, workers, ray_address, num_gpus)
    if not model.can_draft:
        raise CapabilityError(
            f"checkpoint {model.source or 'in memory'} has no mtp.* weights, so there is nothing to replay: use "
            "wb.score for likelihoods alone"
        )
    corpus = scorable(model, tapes)
    if (biased := [i for i, _ in options.shaping().bias]) and biased[-1] >= model.config.vocab_size:
        raise UserError(
            f"logit_bias names id {biased[-1]}, but the vocabulary has {model.config.vocab_size} ids; name ids below "
            f"{model.config.vocab_size}"
        )
    drafts = model.config.vocab_size if model.draft_head is None else len(model.draft_head)
    if options.shadow > drafts:
        raise UserError(f"shadow={options.shadow} is not valid: the draft head has {drafts} ids; record fewer")
    with numerical_class(model, exact):
        chains_for(model)  # refuses a class in which the device's chains are not live ones
        head = model.draft_head
        manifest = new_manifest(
            KIND,
            model,
            corpus,
            parameters=options.key() | {"draft_head": None if head is None else head.key},
            extra={} if head is None else {"draft_head": head.facts},
        )
        _write(model, corpus, Path(out), manifest, options, place, resume)
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
    model: HybridModel,
    corpus: Corpus,
    out: Path,
    manifest: Manifest,
    options: ReplayOptions,
    place: EngineOptions,
    resume: bool,
) -> None:
    rows = [len(tape) - 1 for tape in corpus]
    schema = table_schema(options.columns())
    job = Replaying("replay", rows, schema, corpus, options, document_facts(model, corpus, options))
    plan = plan_shards(rows, options.shard_rows)
    with ShardDirectory(
        out,
        manifest,
        plan=plan,
        schema=schema,
        files={DOCUMENTS_FILE: documents_bytes(corpus)},
        expected=tape_bytes(schema, rows, corpus.tapes),
        resume=resume,
    ) as directory:
        fill(directory, job, model, place)
        directory.finish({"documents": len(corpus), "rows": sum(rows), "tokens": corpus.n_tokens})


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
    def draft_head(self) -> dict[str, Any] | None:
        """The trimmed head that drafted: how many ids, their hash, how they were chosen; None for the whole head."""
        if self.manifest.parameters.get("draft_head") is None:  # tables older than trims have no such entry
            return None
        return dict(self.manifest.extra["draft_head"])

    @property
    def plain(self) -> bool:
        """True when the table holds the most likely tokens, False when it holds draws."""
        return "sequence" not in self.dataset.column_names

    @property
    def k_shadow(self) -> int:
        """Candidates of the drafter recorded per slot; 0 for none."""
        kept = self.dataset.features.get("shadow_ids")
        return kept.length // self.k_max if kept is not None else 0

    @cached_property
    def bytes_per_row(self) -> dict[str, float]:
        """Bytes of values that a row takes, by group of columns; see ``ReplayOptions.bytes_per_row``."""
        shapes = {name: getattr(kind, "length", 0) for name, kind in self.dataset.features.items()}
        every = table_columns(
            self.k_max,
            drawn=not self.plain,
            forced="forced_q" in shapes,
            shadow=self.k_shadow,
            target="target_top2" in shapes,
            ranks="draft_rank" in shapes,
            overlap=shapes.get("overlap", 0),
        )
        return bytes_by_group([column for column in every if column.name in shapes])

    @property
    def key(self) -> dict[str, Any]:
        """What a walk must agree with: model, draft head, carrier, slots, numerical class, shaping and seed."""
        model = self.manifest.model
        return {
            "model": model["fingerprint"],
            "exact": model["exact"],
            "row_block": model["row_block"],
            "draft_head": None if self.draft_head is None else self.draft_head["digest"],
            "carrier": self.manifest.parameters["carrier"],
            "k_max": self.k_max,
            "shaping": self.manifest.parameters["shaping"],
            "seed": self.manifest.parameters["seed"],
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
            ("draft head", "whole" if (head := self.draft_head) is None else f"{head['ids']:,} ids, {head['source']}"),
            ("numerics", "exact" if model["exact"] else "fast"),
            ("tokens", "most likely" if self.plain else _shaping(self.manifest.parameters)),
            ("bytes per row", sizes_text(self.bytes_per_row)),
        ]
        return card("Draft table", rows)._repr_html_()


def sizes_text(groups: Mapping[str, float]) -> str:
    """Bytes per row by group, as one text."""
    total = f"{sum(groups.values()):,.0f}"
    parts = ", ".join(f"{name} {size:,.0f}" for name, size in groups.items())
    return f"{total} ({parts}), and texts" if len(groups) > 1 else f"{total}, and texts"


def _shaping(parameters: Mapping[str, Any]) -> str:
    """Shaping and seed of a table of draws, without what is at its default."""
    idle = Shaping().key()
    said = [f"{name}={value}" for name, value in parameters["shaping"].items() if value != idle[name]]
    return ", ".join([f"drawn: {said[0]}", *said[1:], f"seed={parameters['seed']}"])


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
