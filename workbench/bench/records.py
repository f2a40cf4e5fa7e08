"""Bytes on disk of anchor records, sequence stores and every export of the same documents, beside what was predicted.

No clock is read. Of a dataset the files of its shards count; of an export all files but the model's parts, which do not
grow with the documents, and the lists that the workbench checks it by.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.bench.arms import row
from workbench.core.manifest import Manifest
from workbench.core.progress import progress, quiet
from workbench.core.schemas import anchor_schema
from workbench.core.staging import directory_bytes
from workbench.core.tape import Corpus
from workbench.datasets import extract, extract_sequences
from workbench.datasets.anchors import anchor_positions
from workbench.datasets.estimate import batch_bytes, tape_bytes
from workbench.datasets.export import export
from workbench.datasets.export.samples import FILE, LINES
from workbench.datasets.export.sidecar import FACTS, LEDGER
from workbench.datasets.layouts import LAYOUTS, Layout
from workbench.datasets.options import ExtractOptions
from workbench.datasets.sequence_options import SequenceOptions
from workbench.facade import load
from workbench.model.hybrid import HybridModel

ANCHORS, TOP_K = 4, 64  # per document; ids kept
TAPS, EAGLE = 5, 3  # layers of DSpark and of EAGLE-3
LENGTH, SHORTEST, DOCUMENTS = 1024, 32, 24
AGREES = 0.05  # measured bytes miss the predicted ones by no more: headers, names and lines of text beside the rows
LISTS = (FILE, LINES, FACTS, LEDGER)  # what the workbench puts into an export, for its own check
RECORDS, STORE, STORE_K = "anchor records", "sequence store, bfloat16", "sequence store, bfloat16, with top-k"


@dataclass(frozen=True)
class Arm:
    """One thing to write.

    Args:
        name: In the rows.
        predicted: Bytes it should take.
        data: Of an export, the arm whose dataset it is made of; "" for a dataset.
        to: Of an export, the format.
        options: Of the export, or of the extraction.
    """

    name: str
    predicted: float
    data: str = ""
    to: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of the records benchmark.

    Args:
        quick: Fewer and shorter documents.

    Yields:
        Bytes per token of the documents by dataset and by format.
    """
    from workbench.corpus import corpus

    model = load("demo", exact=False)
    length, count = (128, 5) if quick else (LENGTH, DOCUMENTS)
    cut: dict[str, Any] = dict(max_tokens=length, overflow="truncate", min_tokens=SHORTEST, limit=count)
    yield from measure_model(model, corpus("demo", tokenizer=model.tokenizer, **cut))


def measure_model(
    model: HybridModel, tapes: Corpus, *, anchors: int = ANCHORS, top_k: int = TOP_K
) -> Iterator[dict[str, Any]]:
    """Rows of a model's records of some documents.

    Args:
        model: The target.
        tapes: The documents; every format holds all of them.
        anchors: Anchor records per document.
        top_k: Ids kept per slot and per token.

    Yields:
        Per arm the bytes per token of the documents, per anchor, over those of the anchor records, and over what was
        predicted.
    """
    taps = tapped(model)
    held = sum(_records(tapes, anchors))
    arms = [*_datasets(model, tapes, taps, anchors, top_k), *_exports(model, tapes, taps, held, top_k)]
    facts = {"mode": "fast", "documents": len(tapes), "tokens": tapes.n_tokens, "context": max(map(len, tapes))}
    facts |= {"taps": list(taps), "anchors": held, "top_k": top_k}
    least = 0
    with tempfile.TemporaryDirectory() as folder:
        for arm in progress(arms, desc="records", unit="arm"):
            with quiet():
                size, beside = _written(arm, model, tapes, Path(folder))
            least = least or size
            own = sum(_records(tapes, arm.options["anchors"])) if "anchors" in arm.options else held
            yield row(
                arm.name,
                [size / tapes.n_tokens],
                "bytes/token",
                bytes=size,
                beside_bytes=beside,
                per_anchor=size / own,
                over_records=size / least,
                predicted_bytes=round(arm.predicted),
                of_predicted=size / arm.predicted,
                agrees=abs(size / arm.predicted - 1) <= AGREES,
                **facts,
            )


def tapped(model: HybridModel) -> tuple[int, ...]:
    """Layers whose rows are kept: five, evenly from the first to the last but one, or as many as there are."""
    below = model.config.num_layers - 1
    return tuple(sorted({int(i) for i in np.linspace(0, below - 1, min(TAPS, below)).round()}))


def _records(tapes: Corpus, anchors: Any) -> list[int]:
    """Anchor records of every document."""
    of = ExtractOptions(anchors=anchors)
    return [len(anchor_positions(tape, anchors=of.anchors, gamma=of.gamma, seed=of.seed)) for tape in tapes]


def _datasets(model: HybridModel, tapes: Corpus, taps: tuple[int, ...], anchors: int, top_k: int) -> list[Arm]:
    """What extraction writes, with the bytes that it says before it begins."""
    width = model.config.hidden_size
    schema = anchor_schema(hidden_size=width, gamma=ExtractOptions.gamma, top_k=top_k)
    head = schema.serialize().size + 8 + batch_bytes(schema)  # of a shard

    def records(name: str, chosen: int | str) -> Arm:
        rows = _records(tapes, chosen)
        shards = -(-sum(rows) // ExtractOptions.shard_rows)
        predicted = sum(tape_bytes(schema, rows, tapes.tapes)) + shards * head
        return Arm(name, predicted, options={"anchors": chosen, "top_k": top_k})

    def store(name: str, **options: Any) -> Arm:
        given = SequenceOptions(taps=taps, **options)
        return Arm(name, given.token_bytes(width) * tapes.n_tokens, options={"taps": taps, **options})

    return [
        records(RECORDS, anchors),
        records(f"{RECORDS}, every position", "all"),
        store(STORE),
        store("sequence store, fp8", hidden_dtype="fp8"),
        store("sequence store, float32", hidden_dtype="float32"),
        store(STORE_K, top_k=top_k),
    ]


def _exports(model: HybridModel, tapes: Corpus, taps: tuple[int, ...], records: int, top_k: int) -> list[Arm]:
    """Every format, with the bytes of its layout."""
    width, padded = model.config.hidden_size, len(tapes) * max(map(len, tapes))
    trimmed = model.draft_head
    draft = model.config.vocab_size if trimmed is None else len(trimmed.ids_D)
    known = {layout.name: layout for layout in LAYOUTS}
    three: dict[str, Any] = {"layers": taps[:EAGLE]}

    def arm(to: str, layout: Layout, *, name: str = "", data: str = STORE, **options: Any) -> Arm:
        each = layout.token_bytes(width, len(taps))
        return Arm(name or to, each * (padded if layout.padded else tapes.n_tokens), data, to, options)

    def law(size: int) -> Layout:
        """NeMo's EAGLE-3 cache, whose shifted ids, masks and law lie beside three taps and no last rows."""
        return Layout("nemo-automodel eagle3", ids=8 + 8 + 8 + 1 + size, taps=EAGLE, last=0, padded=True)

    slots = ExtractOptions.gamma
    flat = 2 * width + 4 * (slots + 1) + slots * (12 * top_k + 4 + 4 + 4 + 1)  # of a record, without its line of text
    return [
        arm("speculators", known["speculators"]),
        arm("specforge-dspark", known["specforge dspark"]),
        arm("specforge-dflash", Layout("specforge dflash", ids=8 + 8, last=0)),
        arm("specforge-eagle3", known["specforge eagle3"], **three),
        arm("deepspec", known["deepspec"]),
        arm("modelopt", known["modelopt"]),
        arm("nemo-automodel-dspark", known["nemo-automodel dspark"]),
        arm("nemo-automodel-eagle3", law(2 * draft), name="nemo-automodel-eagle3, whole law", **three),
        arm(
            "nemo-automodel-eagle3",
            law((2 + 4) * top_k),
            name=f"nemo-automodel-eagle3, top {top_k}",
            data=STORE_K,
            top_k=top_k,
            **three,
        ),
        Arm("columnar", flat * records, RECORDS, "columnar"),
    ]


def _written(arm: Arm, model: HybridModel, tapes: Corpus, folder: Path) -> tuple[int, int]:
    """Write an arm, and return the bytes of its documents and of what describes them; datasets stay for the exports."""
    out = folder / arm.name
    if arm.to:
        report = export(folder / arm.data, to=arm.to, model=model, out=out, **arm.options)
        assert report.documents == len(tapes), "every format holds every document"
        lists = sum((out / name).stat().st_size for name in LISTS if (out / name).exists())
        size = directory_bytes(out) - report.parts_bytes - lists
        shutil.rmtree(out)
        return size, lists
    make = extract if "anchors" in arm.options else extract_sequences
    make(model, tapes, out=out, **arm.options)
    size = sum((out / shard["file"]).stat().st_size for shard in Manifest.read(out).shards)
    return size, directory_bytes(out) - size
