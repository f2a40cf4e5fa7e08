"""Export of anchor records to flat little-endian columns with a text index, one row per record.

Hidden rows are the trunk rows of the record, before the final norm, in bfloat16. Documents are numbered in their
order, and ``documents.tsv`` holds their ids; slot masks and log-sums lie in files of their own, which readers of the
format pass over. The head and the embedding are written in the order of the draft ids.

Legend: N records, H hidden, G slots (gamma), K kept ids.
Source: the ``memra-dspark-anchors-v1`` columns of a DSpark extractor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import UserError
from workbench.core.manifest import Manifest, write_atomic, write_json
from workbench.core.progress import progress
from workbench.core.staging import staged
from workbench.datasets.bfloat import from_bfloat16_bits, to_bfloat16_bits
from workbench.datasets.export.fidelity import Fidelity
from workbench.datasets.export.parts import FILE as PARTS
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import Exporter, ExportOptions, ExportReport, register
from workbench.datasets.export.sidecar import (
    RMS_TOLERANCE,
    Ledger,
    Sealed,
    digest,
    id_digest,
    mask_digest,
    seal,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.model.hybrid import HybridModel

TAG = "memra-dspark-anchors-v1"
META, INDEX, DOCUMENTS = "extraction.meta.json", "index.tsv", "documents.tsv"
INDEX_COLUMNS = ("record", "pair_id", "anchor_pos", "prompt_len", "split", "mode", "category")
BLOCK = 1024  # records read at a time
MASS_TOLERANCE = 2e-5  # of the sum of kept and tail probabilities
RATIO_TOLERANCE = 1e-5  # of a kept probability over the first one's, against their logits
COLUMNS = {  # file to our column and type on disk
    "hiddens.bf16": ("hidden", "<u2"),
    "tokens.u32": ("tokens", "<u4"),
    "top_ids.u32": ("top_ids", "<u4"),
    "top_logits.f32": ("top_logits", "<f4"),
    "top_probs.f32": ("top_probs", "<f4"),
    "tail_probs.f32": ("tail_probs", "<f4"),
    "slot_mask.u8": ("slot_mask", "u1"),
    "logsumexp.f32": ("logsumexp", "<f4"),
    "logsumexp_t.f32": ("logsumexp_t", "<f4"),
}
LAW = ("top_ids.u32", "top_logits.f32", "top_probs.f32", "tail_probs.f32", "logsumexp.f32", "logsumexp_t.f32")


@dataclass(frozen=True)
class ColumnarOptions(ExportOptions):
    """What shapes flat columns of anchor records.

    Args:
        layers: None, the default: anchor records hold no tapped layers.
        hidden_dtype: "bfloat16", the only type of the format; default "bfloat16".
        mode: What the index says of every record's prompt, "think" or "nothink" in the format's own data; default
            "nothink".
    """

    mode: str = "nothink"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None or self.hidden_dtype != "bfloat16":
            raise UserError("flat columns hold one row per anchor in bfloat16: leave layers and hidden_dtype out")
        _plain("mode", self.mode)


@register("columnar")
class Columnar(Exporter):
    """Flat columns of anchor records."""

    about = "flat little-endian columns of anchor records with a text index"
    options = ColumnarOptions

    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write flat columns; see ``Exporter.run``."""
        from workbench.datasets.extract import load_anchors

        chosen = ColumnarOptions(**options)
        records, manifest = load_anchors(data_dir), Manifest.read(data_dir)
        _check_parts(Path(data_dir), manifest, parts)
        documents: list[str] = []
        with staged(out) as directory:
            with ExitStack() as stack:
                files = {name: stack.enter_context(_Synced(directory / name)) for name in (*COLUMNS, INDEX)}
                ledger = stack.enter_context(Ledger(directory, ("ids", "slots", "hidden", "law", "place")))
                files[INDEX].write(("\t".join(INDEX_COLUMNS) + "\n").encode())
                bar = stack.enter_context(progress(len(records), desc="export", unit="rec"))
                for table in records.with_format("arrow").iter(batch_size=BLOCK):
                    _write(table, files, ledger, documents, chosen.mode)
                    bar.update(table.num_rows)
            lines = [f"{i}\t{json.dumps(doc_id)}\n" for i, doc_id in enumerate(documents)]
            write_atomic(directory / DOCUMENTS, "".join(["pair_id\tdoc_id\n", *lines]).encode())
            write_json(directory / META, _meta(manifest, ledger.records, len(documents), parts))
            for name, values in _weights(parts).items():
                write_atomic(directory / name, values.tobytes())
            parts.save(directory)
            stored = manifest.parameters["hidden_dtype"]
            fidelity = Fidelity(None, manifest, documents=0, stored=stored, written=chosen.hidden_dtype, side="pre")
            rounding = fidelity.result().to_dict()  # records hold no whole documents to compare
            size = seal(directory, self.name, manifest, {"norm": "pre", "layers": [], "rounding": rounding})
        each = sum((Path(out) / name).stat().st_size for name in COLUMNS) / ledger.records
        return ExportReport(
            format=self.name,
            out=str(out),
            documents=len(documents),
            tokens=int(manifest.counts["tokens"]),
            bytes=size,
            parts_bytes=sum((Path(out) / name).stat().st_size for name in (PARTS, *_weights(parts))),
            norm="pre",
            notes=[f"{ledger.records} anchor records of {each:.0f} bytes"],
            rounding=rounding,
        )

    def validate(self, out: str | Path) -> list[str]:
        """Problems of flat columns, a sentence each; empty when they are sound."""
        sealed = Sealed.open(out, self.name)
        if sealed.parts is None:
            return sealed.problems
        try:
            meta = json.loads((sealed.out / META).read_text("utf-8"))
            index = [line.split("\t") for line in (sealed.out / INDEX).read_text("utf-8").split("\n")[:-1]]
            if _check_meta(sealed, meta) and _check_index(sealed, index):
                for first, columns in _read(sealed.out, meta):
                    _check_block(sealed, first, columns, index, meta)
            for name, values in _weights(sealed.parts).items():
                if (sealed.out / name).read_bytes() != values.tobytes():
                    sealed.problems.append(f"{name} does not hold the model's rows in the order of its draft ids")
        except (OSError, ValueError, KeyError, TypeError) as error:
            sealed.problems.append(f"the export cannot be read ({type(error).__name__}: {error})")
        return sealed.problems


class _Synced:
    """A file that is on the disk when the block ends."""

    def __init__(self, path: Path) -> None:
        self.handle: BinaryIO = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> BinaryIO:
        return self.handle

    def __exit__(self, *error: object) -> None:
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.handle.close()


def _plain(name: str, text: str) -> str:
    if not isinstance(text, str) or any(c in text for c in "\t\r\n"):
        raise UserError(f"{name}={text!r} is not valid: the index is text with tabs between, so it can hold none")
    return text


def _check_parts(data: Path, manifest: Manifest, parts: ModelParts) -> None:
    from safetensors.torch import load_file

    norm = manifest.extra["norm"]
    shape = (int(manifest.model["vocab_size"]), int(manifest.model["hidden_size"]))
    same = tuple(parts.head_VH.shape) == shape and parts.norm_kind == "1+w" and parts.eps == norm["eps"]
    if not same or not torch.equal(load_file(data / norm["file"])["weight"], parts.final_norm_H):
        raise UserError(
            f"the model's head {tuple(parts.head_VH.shape)} or its final norm is not that of {data}, made with "
            f"vocabulary and width {shape}: give the model that made the data"
        )


def _meta(manifest: Manifest, records: int, documents: int, parts: ModelParts) -> dict[str, Any]:
    made = manifest.parameters
    return {
        "format": TAG,
        "model": manifest.model["name"],
        "hidden_size": manifest.model["hidden_size"],
        "vocab_size": manifest.model["vocab_size"],
        "draft_vocab_size": len(parts.kept_ids_D),
        "hidden": "row before the final norm of the token before the anchor",
        "gamma": made["gamma"],
        "top_k": made["top_k"],
        "temperature": made["temperature"],
        "chunk": made["chunk"],
        "seed": made["seed"],
        "anchors_per_pair": made["anchors"],
        "records": records,
        "pairs": documents,
    }


def _weights(parts: ModelParts) -> dict[str, np.ndarray]:
    def bits(rows_DH: Tensor) -> np.ndarray:
        if rows_DH.dtype is torch.bfloat16:
            return rows_DH.contiguous().view(torch.uint16).numpy().astype("<u2")
        return to_bfloat16_bits(rows_DH.float().numpy()).astype("<u2")

    ids_D = parts.kept_ids_D
    embedding = parts.embedding_VH if parts.draft_ids_D is None else parts.embedding_VH[ids_D]
    return {
        "draft_ids.u32": ids_D.numpy().astype("<u4"),
        "embedding.bf16": bits(embedding),
        "lm_head.bf16": bits(parts.draft_head_DH),
    }


def _flat(table: pa.Table, name: str) -> np.ndarray:
    """A column's values [N, ...] in rows."""
    import pyarrow.compute as pc

    values = pc.list_flatten(table.column(name)).to_numpy()
    if name == "hidden" and values.dtype == np.float32:
        values = to_bfloat16_bits(values)
    return values.reshape(table.num_rows, -1)


def _write(table: pa.Table, files: dict[str, BinaryIO], ledger: Ledger, documents: list[str], mode: str) -> None:
    held = {name: _flat(table, column).astype(kind) for name, (column, kind) in COLUMNS.items()}
    for name, values in held.items():
        files[name].write(values.tobytes())
    texts = table.select(["doc_id", "position", "prompt_len", "split", "source"]).to_pylist()
    for i, row in enumerate(texts):
        if not documents or documents[-1] != row["doc_id"]:
            documents.append(row["doc_id"])
        place = [str(row["position"]), str(row["prompt_len"]), _plain("split", row["split"])]
        place += [mode, _plain("source", row["source"])]
        files[INDEX].write(("\t".join([str(ledger.records), str(len(documents) - 1), *place]) + "\n").encode())
        ledger.add(row["doc_id"], held["tokens.u32"].shape[1], _hashes(held, i, place))


def _hashes(held: dict[str, np.ndarray], i: int, place: list[str]) -> dict[str, str]:
    return {
        "ids": id_digest(held["tokens.u32"][i]),
        "slots": mask_digest(held["slot_mask.u8"][i]),
        "hidden": digest(held["hiddens.bf16"][i]),
        "law": digest(np.concatenate([held[name][i].view(np.uint32) for name in LAW])),
        "place": digest(np.frombuffer("\t".join(place).encode(), np.uint8)),
    }


def _check_meta(sealed: Sealed, meta: dict[str, Any]) -> bool:
    assert sealed.parts is not None
    made, before = sealed.facts["source"], len(sealed.problems)
    due = {
        "format": TAG,
        "hidden_size": made["model"]["hidden_size"],
        "vocab_size": made["model"]["vocab_size"],
        "records": len(sealed.ledger),
        **{name: made["parameters"][name] for name in ("gamma", "top_k", "temperature")},
    }
    for name, value in due.items():
        if meta.get(name) != value:
            sealed.problems.append(f"{name} of {META} is {meta.get(name)!r} and must be {value!r}")
    if len(sealed.problems) > before:
        return False
    for name, width in _widths(meta).items():
        size = (sealed.out / name).stat().st_size
        if size != len(sealed.ledger) * width * np.dtype(COLUMNS[name][1]).itemsize:
            sealed.problems.append(f"{name} has {size} bytes, which is not {len(sealed.ledger)} rows of {width} values")
    return len(sealed.problems) == before


def _check_index(sealed: Sealed, index: list[list[str]]) -> bool:
    head = index.pop(0)
    if tuple(head) != INDEX_COLUMNS or len(index) != len(sealed.ledger) or any(len(i) != len(head) for i in index):
        sealed.problems.append(f"{INDEX} does not have its columns and a line per record")
        return False
    last = (-1, 0)
    for number, line in enumerate(index):
        here = (int(line[1]), int(line[2]))
        if int(line[0]) != number or here <= last or here[1] < 1:
            sealed.problems.append(f"{sealed.at(number)}: its line in {INDEX} does not follow the one before it")
        last = here
    return True


def _widths(meta: dict[str, Any]) -> dict[str, int]:
    slots, kept = meta["gamma"], meta["gamma"] * meta["top_k"]
    wide = {"hiddens.bf16": meta["hidden_size"], "tokens.u32": slots + 1}
    return {name: wide.get(name, kept if name.startswith("top_") else slots) for name in COLUMNS}


def _read(out: Path, meta: dict[str, Any]) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    planes = {
        name: np.memmap(out / name, COLUMNS[name][1], "r").reshape(-1, width) for name, width in _widths(meta).items()
    }
    for first in range(0, meta["records"], BLOCK):
        yield first, {name: np.array(plane[first : first + BLOCK]) for name, plane in planes.items()}


def _check_block(
    sealed: Sealed, first: int, held: dict[str, np.ndarray], index: list[list[str]], meta: dict[str, Any]
) -> None:
    assert sealed.parts is not None
    shape = (-1, meta["gamma"], meta["top_k"])
    ids, logits, probs = (held[name].reshape(shape) for name in ("top_ids.u32", "top_logits.f32", "top_probs.f32"))
    hidden_NH = torch.from_numpy(from_bfloat16_bits(held["hiddens.bf16"]))
    with np.errstate(all="ignore"):
        mass = probs.sum(-1, dtype=np.float64) + held["tail_probs.f32"]
        ratio = np.exp((logits - logits[..., :1]).astype(np.float64) / meta["temperature"])
        falls = (np.diff(logits) < 0) | ((np.diff(logits) == 0) & (np.diff(ids.astype(np.int64)) > 0))
        faults = {
            "an id lies outside the vocabulary": (held["tokens.u32"] >= meta["vocab_size"]).any(-1)
            | (ids >= meta["vocab_size"]).any((1, 2)),
            "its hidden row holds NaN or infinity": ~hidden_NH.isfinite().all(-1).numpy(),
            "its hidden row lies after the final norm": _post_norm(hidden_NH, sealed.parts),
            "kept and tail probabilities do not sum to 1": ~(np.abs(mass - 1) <= MASS_TOLERANCE).all(-1),
            "kept ids are not in the order of their logits": ~falls.all((1, 2)),
            "probabilities are not those of the logits": ~(
                np.abs(probs - ratio * probs[..., :1]) <= RATIO_TOLERANCE
            ).all((1, 2)),
        }
    for i in range(len(ids)):
        number = first + i
        sealed.problems += [f"{sealed.at(number)}: {fault}" for fault, where in faults.items() if where[i]]
        sealed.compare(number, _hashes(held, i, index[number][2:]))


def _post_norm(hidden_NH: Tensor, parts: ModelParts) -> np.ndarray:
    """Rows whose mean square is one once divided by the norm's scale, where most are so: a few are by chance."""
    used = parts.scale_H.abs() > 1e-3
    square_N = (hidden_NH[:, used] / parts.scale_H[used]).square().mean(-1)
    near_N = ((square_N - 1).abs() < RMS_TOLERANCE).numpy()
    return near_N & (near_N.mean() > 0.5)
