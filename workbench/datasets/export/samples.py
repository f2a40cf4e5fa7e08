"""The manifest of an export with a file per document, and its list of samples: what a checker holds the files against.

Legend: S tokens, H hidden.
``export.json`` says what the directory is, in words that no format of these has a place for: the numbering of layers,
the side of the final norm, the model and the dataset. ``samples.jsonl`` has a line per document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import CheckpointError
from workbench.core.manifest import write_json
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.rule import misfits

FILE, LINES, PARTS = "export.json", "samples.jsonl", "parts"
FORMAT = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Sample:
    """One document as a format holds it.

    Args:
        index: Place in the export.
        doc_id: Id of the document.
        ids_S: Token ids, int64.
        mask_S: Supervised tokens, int64 of 0 and 1.
        last_SH: Last rows, on the export's side of the final norm; None where the format has none.
        taps: Output rows of every exported layer, [S, H] each.
        prenorm: The file's own word that its last rows lie before the final norm; None where it has no such word.
    """

    index: int
    doc_id: str
    ids_S: Tensor
    mask_S: Tensor
    last_SH: Tensor | None
    taps: Sequence[Tensor]
    prenorm: bool | None = None


@dataclass(frozen=True)
class Line:
    """What ``samples.jsonl`` says of a document.

    Args:
        index: Place in the export.
        doc_id: Id of the document.
        file: Its file, from the directory of the export.
        tokens: Its length.
        supervised: Tokens of its mask that are set.
        ids_sha256: Hash of its ids as little-endian int64.
        mask_sha256: Hash of its mask as bytes of 0 and 1.
        sha256: Hash of the file.
        excerpts: From ``rule.excerpts``.
    """

    index: int
    doc_id: str
    file: str
    tokens: int
    supervised: int
    ids_sha256: str
    mask_sha256: str
    sha256: str
    excerpts: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Facts:
    """What ``export.json`` says.

    Args:
        to: Name of the exporter.
        hidden_size: Width H of a row.
        vocab_size: Ids of the model.
        num_layers: Layers of the model.
        hidden_dtype: Type of exported rows.
        norm: rows ("pre", "post" or ""), kind and eps of the final norm.
        layers: Per exported layer: layer (its output rows, from 0), hf_index (in hidden_states of transformers), id (in
            the numbering of the format).
        draft_ids: Ids of the trimmed head; None for the whole vocabulary.
        source: Kind, hash of the manifest, model, tokenizer and corpus of the dataset.
        documents: Documents written.
        tokens: Their tokens.
        left_out: Document ids that were not written, and why.
        files: sha256 of every file that is no sample.
        rounding: What happened to last rows on their way, from ``fidelity.Rounding``; empty where there are none.
        complete: The export reached its end.
    """

    to: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    hidden_dtype: str
    norm: dict[str, Any]
    layers: list[dict[str, int]]
    draft_ids: int | None
    source: dict[str, Any]
    documents: int = 0
    tokens: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    rounding: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Type of exported rows."""
        return DTYPES[self.hidden_dtype]

    @property
    def prenorm(self) -> bool:
        """Last rows lie before the final norm."""
        return self.norm["rows"] == "pre"

    def write(self, out: Path) -> None:
        """Write ``export.json``."""
        write_json(out / FILE, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, out: Path) -> Facts:
        """Read ``export.json``.

        Raises:
            CheckpointError: There is none, or it is none of ours.
        """
        file = out / FILE
        if not file.is_file():
            raise CheckpointError(f"{out} has no {FILE}: give a directory that an export to this format wrote")
        try:
            data = json.loads(file.read_text("utf-8"))
            if (found := data.pop("format")) != FORMAT:
                raise CheckpointError(f"{file} is of format {found!r} and this version reads {FORMAT}: export again")
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{file} does not describe an export ({error}): export again") from None


def digest_ids(ids_S: Tensor) -> str:
    """Hash of token ids, whatever their integer type."""
    return hashlib.sha256(ids_S.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def digest_mask(mask_S: Tensor) -> str:
    """Hash of a mask, whatever its type."""
    return hashlib.sha256((mask_S != 0).contiguous().numpy().tobytes()).hexdigest()


def append_line(handle: Any, line: Line) -> None:
    """Write one line of ``samples.jsonl``."""
    handle.write(json.dumps(asdict(line), ensure_ascii=False, allow_nan=False) + "\n")


def read_lines(out: Path) -> Iterator[Line]:
    """The lines of ``samples.jsonl``, in order."""
    with open(out / LINES, encoding="utf-8") as handle:
        for text in handle:
            yield Line(**json.loads(text))


def sample_problems(line: Line, sample: Sample, facts: Facts, parts: ModelParts) -> list[str]:
    """What is wrong with one document of an export, a phrase each.

    Args:
        line: What the list of samples says of it.
        sample: What its file holds.
        facts: What the export is.
        parts: Norm and head of the model.
    """
    return [*_id_problems(line, sample, facts), *_row_problems(line, sample, facts, parts)]


def _id_problems(line: Line, sample: Sample, facts: Facts) -> list[str]:
    found, ids_S, mask_S = [], sample.ids_S, sample.mask_S
    for name, value_S in (("ids", ids_S), ("mask", mask_S)):
        if value_S.dtype != torch.int64:
            found.append(f"the type of its {name} is {value_S.dtype} where torch.int64 is due")
        if tuple(value_S.shape) != (line.tokens,):
            found.append(f"the shape of its {name} is {tuple(value_S.shape)} where ({line.tokens},) is due")
    if ids_S.numel() and not 0 <= int(ids_S.min()) <= int(ids_S.max()) < facts.vocab_size:
        found.append(f"it holds ids outside the vocabulary of {facts.vocab_size}")
    elif digest_ids(ids_S) != line.ids_sha256:
        found.append("its token ids are not those of the dataset")
    if not bool(((mask_S == 0) | (mask_S == 1)).all()) or digest_mask(mask_S) != line.mask_sha256:
        found.append("its mask is not that of the dataset")
    return found


def _row_problems(line: Line, sample: Sample, facts: Facts, parts: ModelParts) -> list[str]:
    rows: dict[str, Tensor] = {f"tap {place}": x_SH for place, x_SH in enumerate(sample.taps)}
    if sample.last_SH is not None:
        rows["last"] = sample.last_SH
    found, shape = [], (line.tokens, facts.hidden_size)
    if len(sample.taps) != len(facts.layers):
        found.append(f"it holds rows of {len(sample.taps)} tapped layers where {len(facts.layers)} are due")
    if (sample.last_SH is None) != (facts.norm["rows"] == ""):
        found.append("it holds last rows" if sample.last_SH is not None else "it holds no last rows")
    for name, x_SH in rows.items():
        if tuple(x_SH.shape) != shape:
            found.append(f"its {name} rows have shape {tuple(x_SH.shape)} where {shape} is due")
        elif x_SH.dtype != facts.dtype:
            found.append(f"its {name} rows are {x_SH.dtype} where {facts.dtype} is due")
        elif not bool(x_SH.isfinite().all()):
            found.append(f"its {name} rows hold NaN or infinity, first at position {_first_bad(x_SH)}")
    if sample.prenorm is not None and sample.prenorm is not facts.prenorm:
        found.append(f"its flag says that the last rows lie {_side(sample.prenorm)} the final norm, and they do not")
    if not found:
        for excerpt in line.excerpts:
            found += misfits(excerpt, sample.last_SH, sample.taps, parts, prenorm=facts.prenorm)
    return found


def _first_bad(x_SH: Tensor) -> int:
    return int((~x_SH.isfinite().all(-1)).nonzero()[0, 0])


def _side(prenorm: bool) -> str:
    return "before" if prenorm else "after"


def vocab_maps(parts: ModelParts) -> Mapping[str, Tensor] | None:
    """The map between the draft head's ids and the target's.

    Args:
        parts: Holds the ids of the trimmed head.

    Returns:
        ``d2t`` int64 [D], to be added to a draft id, and ``t2d`` bool [V], True for the target's ids that are drafted;
        None for the whole vocabulary.
    """
    ids_D = parts.draft_ids_D
    if ids_D is None:
        return None
    t2d_V = torch.zeros(parts.head_VH.shape[0], dtype=torch.bool)
    t2d_V[ids_D] = True
    return {"d2t": ids_D - torch.arange(len(ids_D)), "t2d": t2d_V}
