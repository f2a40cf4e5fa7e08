"""Export to DeepSpec's target cache: raw shards, an index of fixed records, and a JSON manifest.

A layer's id there is the layer whose output rows it is, counted from 0, as in our stores; ids ascend, and the last
layer is not among them. Last rows lie after the final norm. Rows are bfloat16.

Legend: S tokens, L layers, H hidden.
Source: deepseek-ai/DeepSpec, target cache version 2, as its reader and writer define it.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.core.manifest import write_json
from workbench.core.progress import progress
from workbench.core.staging import staged
from workbench.datasets.export.fidelity import Fidelity
from workbench.datasets.export.parts import FILE as PARTS
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import Exporter, ExportOptions, ExportReport, register
from workbench.datasets.export.sidecar import Ledger, Sealed, row_columns, row_hashes, seal, sealed_report
from workbench.datasets.export.source import SequenceSource

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")  # sample, shard, tokens, offsets of the five tensors in the order of FIELDS
FIELDS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")
MANIFEST, INDEX = "manifest.json", "samples.idx"
FIXED = {
    "version": VERSION,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.size,
}


@dataclass(frozen=True)
class DeepSpecOptions(ExportOptions):
    """What shapes a DeepSpec target cache.

    Args:
        layers: Tapped layers to export, ascending, each named by the layer whose output rows it is, counted from 0;
            default None, for all that the data hold.
        hidden_dtype: "bfloat16", the only type of the format; default "bfloat16".
        target: Name or path of the target exactly as the training run will give it, which is compared; "" for the
            model's name in the data.
        shard_bytes: Bytes after which a shard ends, at the end of a document; default 64 GiB.
    """

    target: str = ""
    shard_bytes: int = 64 << 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("shard_bytes", self.shard_bytes, low=1)
        if self.hidden_dtype != "bfloat16":
            raise UserError(f"hidden_dtype={self.hidden_dtype!r} is not valid: this format holds 'bfloat16' only")


@register("deepspec")
class DeepSpec(Exporter):
    """DeepSpec's target cache."""

    about = "DeepSpec target cache (DSpark, DFlash, EAGLE-3): raw bfloat16 shards with an index"
    options = DeepSpecOptions

    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write a target cache; see ``Exporter.run``."""
        chosen = DeepSpecOptions(**options)
        source = SequenceSource.of(data_dir, parts)
        layers = source.chosen(chosen.layers)
        _check_layers(layers, source)
        lengths: list[int] = []
        supervised: list[int] = []
        fidelity = Fidelity(
            model,
            source.manifest,
            documents=len(source),
            stored=source.hidden_dtype,
            written=chosen.hidden_dtype,
            side="post",
            dtypes=(chosen.hidden_dtype,),
        )
        with staged(out) as directory:
            with (
                Ledger(directory, row_columns(layers)) as ledger,
                _Writer(directory, chosen.shard_bytes) as writer,
                progress(len(source), desc="export", unit="doc") as bar,
            ):
                for row in source.documents(layers):
                    last_SH = parts.normed(row.last_SH).to(torch.bfloat16)
                    fidelity.see(row.tokens_S, last_SH, parts)
                    taps = {i: row.taps[i].to(torch.bfloat16) for i in layers}
                    writer.add(row.tokens_S, row.mask_S, torch.cat(list(taps.values()), -1), last_SH)
                    ledger.add(row.doc_id, len(row.tokens_S), row_hashes(row.tokens_S, row.mask_S, last_SH, taps))
                    lengths.append(len(row.tokens_S))
                    supervised.append(int(row.mask_S.sum()))
                    bar.update(1)
            manifest = FIXED | {
                "num_samples": len(lengths),
                "num_shards": len(writer.shards),
                "target_layer_ids": list(layers),
                "hidden_size": source.hidden_size,
                "shards": [{"shard_id": i, "file_name": name} for i, name in enumerate(writer.shards)],
                "target_model_name_or_path": chosen.target or source.manifest.model["name"],
                "max_length": max(lengths),
                "min_loss_tokens": min(supervised),
            }
            write_json(directory / MANIFEST, manifest)
            parts.save(directory)
            rounding = fidelity.result()
            about = {"norm": "post", "layers": list(layers), "rounding": rounding.to_dict()}
            size = seal(directory, self.name, source.manifest, about)
        name = manifest["target_model_name_or_path"]
        note = f"train with target_model_name_or_path={name!r}: the trainer compares it with the cache's"
        return sealed_report(
            self.name,
            out,
            ledger,
            size=size,
            parts=(PARTS,),
            layers=layers,
            norm="post",
            notes=[note],
            rounding=rounding,
        )

    def validate(self, out: str | Path) -> list[str]:
        """Problems of a target cache, a sentence each; empty when it is sound."""
        sealed = Sealed.open(out, self.name)
        if sealed.parts is None:
            return sealed.problems
        try:
            manifest = json.loads((sealed.out / MANIFEST).read_text("utf-8"))
            index = (sealed.out / INDEX).read_bytes()
            if _check_manifest(sealed, manifest, index):
                _check_samples(sealed, manifest, index)
        except (OSError, ValueError, KeyError, TypeError) as error:
            sealed.problems.append(f"{MANIFEST} or {INDEX} cannot be read ({type(error).__name__}: {error})")
        return sealed.problems


def _check_layers(layers: tuple[int, ...], source: SequenceSource) -> None:
    if not layers:
        raise CapabilityError(
            f"{source.path} holds no tapped layers and this format needs one: extract again with layers tapped"
        )
    if layers[-1] >= source.num_layers - 1:
        raise UserError(
            f"layers={list(layers)} is not valid: this format holds the last layer ({source.num_layers - 1}) as last "
            "rows after the final norm and not among its layers; leave it out"
        )


class _Writer:
    """Shards and their index, written one sample at a time."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self.directory, self.shard_bytes, self.shards = directory, shard_bytes, list[str]()
        self.samples, self.at = 0, 0
        self._shard: BinaryIO | None = None
        self._index = open(directory / INDEX, "wb")  # noqa: SIM115

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in (self._shard, self._index):
            if handle is not None:
                handle.flush()
                os.fsync(handle.fileno())
                handle.close()

    def add(self, tokens_S: Tensor, mask_S: Tensor, taps_SLH: Tensor, last_SH: Tensor) -> None:
        """Write the next sample."""
        blobs = [
            tokens_S.numpy().astype("<i4").tobytes(),
            np.ones(len(tokens_S), np.uint8).tobytes(),
            mask_S.numpy().astype(np.uint8).tobytes(),
            *(x.contiguous().view(torch.uint16).numpy().astype("<u2").tobytes() for x in (taps_SLH, last_SH)),
        ]
        handle = self._room(sum(map(len, blobs)))
        offsets = []
        for blob in blobs:
            offsets.append(self.at)
            handle.write(blob)
            self.at += len(blob)
        self._index.write(RECORD.pack(self.samples, len(self.shards) - 1, len(tokens_S), *offsets))
        self.samples += 1

    def _room(self, size: int) -> BinaryIO:
        if self._shard is None or (self.at and self.at + size > self.shard_bytes):
            if self._shard is not None:
                self._shard.flush()
                os.fsync(self._shard.fileno())
                self._shard.close()
            self.shards.append(f"shard-{len(self.shards):05d}.bin")
            self._shard, self.at = open(self.directory / self.shards[-1], "wb"), 0  # noqa: SIM115
        return self._shard


def _check_manifest(sealed: Sealed, manifest: dict[str, Any], index: bytes) -> bool:
    """Whether the manifest describes the directory, so that its samples can be read."""
    before = len(sealed.problems)
    assert sealed.parts is not None
    say = sealed.problems.append
    for name, expected in FIXED.items():
        if manifest.get(name) != expected:
            say(f"{name} of the manifest is {manifest.get(name)!r}; {expected!r} is the format's")
    ids, known = manifest["target_layer_ids"], sealed.facts["layers"]
    if ids != sorted(set(ids)) or not ids:
        say(f"target_layer_ids {ids} do not ascend")
    elif ids[0] < -1 or ids[-1] >= int(sealed.facts["source"]["model"]["layers"]) - 1:
        say(f"target_layer_ids {ids} reach the last layer, which the format keeps apart")
    elif ids != known:
        say(f"target_layer_ids are {ids}, and the rows are outputs of layers {known}, counted from 0")
    if manifest["hidden_size"] != sealed.parts.head_VH.shape[1]:
        say(f"hidden_size is {manifest['hidden_size']}, and the model's is {sealed.parts.head_VH.shape[1]}")
    if not manifest["num_samples"] == len(sealed.ledger) == len(index) / RECORD.size:
        say(f"the manifest, the index and the source disagree about the number of samples ({len(sealed.ledger)})")
    names = [f"shard-{i:05d}.bin" for i in range(manifest["num_shards"])]
    if manifest["shards"] != [{"shard_id": i, "file_name": name} for i, name in enumerate(names)]:
        say("the manifest's shards are not numbered from 0 on without a gap")
    return len(sealed.problems) == before and all((sealed.out / name).is_file() for name in names)


def _check_samples(sealed: Sealed, manifest: dict[str, Any], index: bytes) -> None:
    hidden, layers = manifest["hidden_size"], manifest["target_layer_ids"]
    per_token = (4, 1, 1, 2 * hidden * len(layers), 2 * hidden)
    sizes = [(sealed.out / shard["file_name"]).stat().st_size for shard in manifest["shards"]]
    shard, end = 0, 0
    for number, (sample, at, tokens, *offsets) in enumerate(RECORD.iter_unpack(index)):
        if at == shard + 1 and end == sizes[shard]:
            shard, end = at, 0
        wanted = [end + tokens * sum(per_token[:i]) for i in range(len(FIELDS))]
        if sample != number or at != shard or tokens != sealed.ledger[number]["tokens"] or offsets != wanted:
            sealed.problems.append(f"{sealed.at(number)}: its entry in {INDEX} does not follow the one before it")
            return
        end += tokens * sum(per_token)
        if end > sizes[shard]:
            sealed.problems.append(f"{sealed.at(number)}: its tensors reach past the end of shard {shard}")
            return
        _check_sample(sealed, number, _read(sealed.out, manifest, shard, tokens, wanted, per_token), layers)
    if shard != len(sizes) - 1 or end != sizes[shard]:
        sealed.problems.append(f"shard {shard} goes on after its last sample, or shards follow that no sample is in")


def _read(
    out: Path, manifest: dict[str, Any], shard: int, tokens: int, offsets: list[int], per_token: tuple[int, ...]
) -> dict[str, np.ndarray]:
    kinds = ("<i4", "u1", "u1", "<u2", "<u2")
    held = {}
    with open(out / manifest["shards"][shard]["file_name"], "rb") as handle:
        for name, kind, offset, size in zip(FIELDS, kinds, offsets, per_token):
            handle.seek(offset)
            held[name] = np.frombuffer(handle.read(tokens * size), kind).reshape(tokens, -1)
    return held


def _check_sample(sealed: Sealed, number: int, held: dict[str, np.ndarray], layers: list[int]) -> None:
    assert sealed.parts is not None
    ids_S, mask_S = held["input_ids"][:, 0], held["loss_mask"][:, 0]
    if ids_S.min() < 0 or ids_S.max() >= len(sealed.parts.head_VH):
        sealed.problems.append(f"{sealed.at(number)}: an id lies outside the vocabulary")
    if not (held["attention_mask"] == 1).all():
        sealed.problems.append(f"{sealed.at(number)}: attention_mask is not all ones")
    rows = {name: torch.from_numpy(held[name].copy()).view(torch.bfloat16) for name in FIELDS[3:]}
    taps_SLH, last_SH = rows.values()
    sealed.check_rows(number, "target_hidden_states", taps_SLH)
    if sealed.check_rows(number, "target_last_hidden_states", last_SH):
        sealed.check_post_norm(number, last_SH)
    width = last_SH.shape[1]
    taps = {layer: taps_SLH[:, j * width : (j + 1) * width] for j, layer in enumerate(layers)}
    sealed.compare(number, row_hashes(ids_S, mask_S, last_SH, taps))
