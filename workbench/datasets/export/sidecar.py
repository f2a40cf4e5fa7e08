"""What travels beside an export: a ledger of what its source says each record holds, and a seal over its files.

Readers of these formats accept wrong ids, NaN, rows before the wrong norm and layers by a wrong number. The ledger is
written from the source, never from what was written, so that a validator can hold an export against it; the seal finds
what was changed later. This module knows no format.

Legend: S rows, H hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import CheckpointError
from workbench.core.manifest import Manifest, sha256_file, write_json
from workbench.datasets.export.fidelity import Rounding
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import ExportReport

FACTS = "workbench.json"
LEDGER = "workbench-records.tsv"
FORMAT = 1
KEYS = ("doc_id", "tokens")
RMS_TOLERANCE = 0.02  # of the mean square of a normalised row, above what bfloat16 rounds away


def digest(values: Tensor | np.ndarray) -> str:
    """Hash of the bits of values in the type and order given, 16 hex digits."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def id_digest(ids: Tensor | np.ndarray) -> str:
    """Hash of token ids, whatever width they are stored in."""
    return digest(np.asarray(ids).astype("<i8"))


def mask_digest(mask: Tensor | np.ndarray) -> str:
    """Hash of a mask, whatever type it is stored in; other values than 0 and 1 give another hash."""
    return digest(np.asarray(mask).astype("<i8"))


def row_columns(layers: Sequence[int]) -> tuple[str, ...]:
    """Names of the hashes of ``row_hashes``."""
    return ("ids", "mask", "last", *(f"layer_{layer}" for layer in layers))


def row_hashes(
    ids_S: Tensor | np.ndarray, mask_S: Tensor | np.ndarray, last_SH: Tensor, taps: Mapping[int, Tensor]
) -> dict[str, str]:
    """Hashes of a document: its ids, its mask, its last rows, and the rows of every layer."""
    held = {"ids": id_digest(ids_S), "mask": mask_digest(mask_S), "last": digest(last_SH)}
    return held | {f"layer_{layer}": digest(x_SH) for layer, x_SH in taps.items()}


class Ledger:
    """Writes a line per record: its document, its tokens, and hashes of what the source says it holds.

    Args:
        directory: Where the export is being written.
        columns: Names of the hashes.
    """

    def __init__(self, directory: Path, columns: Sequence[str]) -> None:
        self.columns, self.records, self.tokens = tuple(columns), 0, 0
        self._file = open(directory / LEDGER, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write("\t".join((*KEYS, *self.columns)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, doc_id: str, tokens: int, hashes: Mapping[str, str]) -> None:
        """Add the next record."""
        assert set(hashes) == set(self.columns)
        fields = [json.dumps(doc_id), str(tokens), *(hashes[name] for name in self.columns)]
        self._file.write("\t".join(fields) + "\n")
        self.records += 1
        self.tokens += tokens


def seal(directory: Path, exporter: str, source: Manifest, facts: Mapping[str, Any]) -> int:
    """Write what the export is, with a hash of every file in it; the last file of an export.

    Args:
        directory: Where the export was written.
        exporter: Name of its format.
        source: Manifest of the data it was made from.
        facts: What a validator must know.

    Returns:
        Bytes of the directory.
    """
    files = {path.name: sha256_file(path) for path in sorted(directory.iterdir())}
    shards = "".join(shard["sha256"] for shard in source.shards)
    about = {
        "format": FORMAT,
        "exporter": exporter,
        "source": {
            "kind": source.kind,
            "parameters": source.parameters,
            "model": source.model,
            "tokenizer": source.tokenizer,
            "corpus": source.corpus,
            "shards_sha256": hashlib.sha256(shards.encode()).hexdigest(),
        },
        **facts,
        "files": files,
    }
    write_json(directory / FACTS, about)
    return sum(path.stat().st_size for path in directory.iterdir())


def sealed_report(
    exporter: str,
    out: str | Path,
    ledger: Ledger,
    *,
    size: int,
    parts: Sequence[str],
    layers: Sequence[int],
    norm: str = "",
    notes: Sequence[str] = (),
    rounding: Rounding,
) -> ExportReport:
    """What an export with a ledger wrote.

    Args:
        exporter: Name of its format, which names layers as we do.
        out: The directory, whole.
        ledger: Its ledger, a line per document.
        size: Its bytes, from ``seal``.
        parts: Files that hold parts of the model.
        layers: Exported layers.
        norm: Side of the final norm on which last rows lie; "" where there are none.
        notes: What the user must know.
        rounding: What rounding cost.
    """
    return ExportReport(
        format=exporter,
        out=str(out),
        documents=ledger.records,
        tokens=ledger.tokens,
        bytes=size,
        parts_bytes=sum((Path(out) / name).stat().st_size for name in parts),
        layers=layers,
        layer_ids=layers,
        norm=norm,
        notes=[*notes, *filter(None, [rounding.sentence])],
        rounding=rounding.to_dict(),
    )


@dataclass(eq=False)
class Sealed:
    """An export opened for validation.

    Args:
        out: Its directory.
        problems: What is wrong so far, a sentence each.
        facts: What ``seal`` wrote.
        ledger: Lines of the ledger.
        parts: The model's parts; None where they cannot be read.
    """

    out: Path
    problems: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    parts: ModelParts | None = None

    @classmethod
    def open(cls, out: str | Path, exporter: str) -> Sealed:
        """Check the seal of a directory and read its ledger and parts.

        Args:
            out: The directory.
            exporter: Name of the format it should have.

        Returns:
            The export; where ``parts`` is None there is nothing more to check.
        """
        self = cls(Path(out), [])
        path = self.out / FACTS
        if not path.is_file():
            self.problems.append(f"{out} has no {FACTS}: give a directory that an export to this format wrote")
            return self
        try:
            self.facts = json.loads(path.read_text("utf-8"))
            files, known = dict(self.facts["files"]), self.facts["exporter"]
        except (ValueError, KeyError, TypeError) as error:
            self.problems.append(f"{path} cannot be read ({error})")
            return self
        if known != exporter or self.facts.get("format") != FORMAT:
            self.problems.append(f"{out} is an export to {known!r} and was to be checked as {exporter!r}")
            return self
        for name, expected in files.items():
            if not (self.out / name).is_file():
                self.problems.append(f"{name} is missing")
            elif sha256_file(self.out / name) != expected:
                self.problems.append(f"{name} has changed since it was written")
        for path in self.out.iterdir():
            if path.name not in files and path.name != FACTS:
                self.problems.append(f"{path.name} does not belong to the export")
        if not (self.out / LEDGER).is_file():
            return self
        try:
            self.ledger = _lines(self.out / LEDGER)
            self.parts = ModelParts.load(self.out)
        except (CheckpointError, ValueError) as error:
            self.problems.append(f"the ledger or the model's parts cannot be read: {error}")
        return self

    def at(self, index: int) -> str:
        """A record in words."""
        return f"record {index} (document {self.ledger[index]['doc_id']!r})"

    def compare(self, index: int, held: Mapping[str, str]) -> None:
        """Hold hashes of a record against the ledger's."""
        for name, found in held.items():
            if self.ledger[index].get(name) != found:
                self.problems.append(f"{self.at(index)}: {name} is not what the source holds")

    def check_rows(self, index: int, name: str, rows_SH: Tensor) -> bool:
        """Whether every value of some rows is finite; it is a problem where one is not."""
        finite = bool(rows_SH.float().isfinite().all())
        if not finite:
            self.problems.append(f"{self.at(index)}: {name} holds NaN or infinity")
        return finite

    def check_post_norm(self, index: int, rows_SH: Tensor) -> None:
        """Rows after the final norm have a mean square of one, once divided by the norm's scale; others do not."""
        assert self.parts is not None
        scale_H = self.parts.scale_H
        used = scale_H.abs() > 1e-3
        square_S = (rows_SH.float()[:, used] / scale_H[used]).square().mean(-1)
        far = (square_S - 1).abs() > RMS_TOLERANCE
        if bool(far.any()):
            self.problems.append(
                f"{self.at(index)}: {int(far.sum())} of {len(far)} last rows do not lie after the model's final norm"
            )


def _lines(path: Path) -> list[dict[str, Any]]:
    head, *lines = path.read_text("utf-8").split("\n")[:-1]
    names = head.split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    return [{**row, "doc_id": json.loads(row["doc_id"]), "tokens": int(row["tokens"])} for row in rows]
