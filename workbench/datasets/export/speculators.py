"""Exports to speculators: token rows as a Hugging Face dataset, hidden rows as one safetensors file per document.

Legend: S tokens, H hidden, L layers.
Layer k is ``hidden_states[k]`` of transformers, 0 for the embedding: the output rows of our layer k - 1. The last of
the L + 1 rows lies before the final norm, which the trainer applies. Ids and masks are stored unshifted.
Source: speculators 0.9.0, ``train/data.py``, ``train/vocab_mapping.py``.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from workbench.core.manifest import write_atomic, write_json
from workbench.datasets.export.body import SampleExporter, SampleWriter
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import register
from workbench.datasets.export.samples import Facts, Line, Sample, vocab_maps

FOLDER, ARROW, COUNTS = "hidden_states", "data-00000-of-00001.arrow", "token_freq.pt"
BATCH = 256


class ArrowWriter(SampleWriter):
    """Writes token rows to one Arrow stream, hidden rows to ``hidden_states/hs_*.safetensors``."""

    def __init__(self, out: Path, facts: Facts, parts: ModelParts) -> None:
        import pyarrow as pa

        super().__init__(out, facts, parts)
        (out / FOLDER).mkdir()
        listed = pa.list_(pa.int64())
        self.schema = pa.schema([("input_ids", listed), ("loss_mask", listed), ("seq_len", pa.int64())])
        self.handle = open(out / ARROW, "wb")  # noqa: SIM115  (closed in close)
        self.stream = pa.ipc.new_stream(self.handle, self.schema)
        self.held: list[Sample] = []
        self.counts_V = np.zeros(facts.vocab_size, np.int64)

    def put(self, sample: Sample) -> str:
        """Write one sample, and return its file's name from the directory."""
        assert sample.last_SH is not None
        name = f"{FOLDER}/hs_{sample.index}.safetensors"
        rows_SLH = torch.stack([*sample.taps, sample.last_SH], dim=1).contiguous()
        save_file({"token_ids": sample.ids_S.clone(), "hidden_states": rows_SLH}, self.out / name)
        self.counts_V += np.bincount(sample.ids_S[sample.mask_S.bool()].numpy(), minlength=len(self.counts_V))
        self.held.append(Sample(sample.index, sample.doc_id, sample.ids_S, sample.mask_S, None, ()))
        if len(self.held) == BATCH:
            self._flush()
        return name

    def _flush(self) -> None:
        import pyarrow as pa

        lengths = [len(sample.ids_S) for sample in self.held]
        offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([value.numpy() for value in values])))
            for values in ([sample.ids_S for sample in self.held], [sample.mask_S for sample in self.held])
        ]
        batch = pa.RecordBatch.from_arrays([*columns, pa.array(lengths, pa.int64())], schema=self.schema)
        self.stream.write_batch(batch)
        self.held = []

    def finish(self) -> None:
        """Write what ``load_from_disk`` reads, the counts of supervised ids, and the maps of a trimmed head."""
        import datasets

        if self.held:
            self._flush()
        self.close()
        features = datasets.Features.from_arrow_schema(self.schema).to_dict()
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        state: dict[str, Any] = {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": hashlib.sha256((self.out / ARROW).read_bytes()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",  # the reader compares rows as tensors
            "_output_all_columns": False,
            "_split": None,
        }
        write_json(self.out / "dataset_info.json", info)
        write_json(self.out / "state.json", state)
        seen = np.flatnonzero(self.counts_V)
        torch.save({int(i): int(self.counts_V[i]) for i in seen}, self.out / COUNTS)
        for name, value in (vocab_maps(self.parts) or {}).items():
            held = io.BytesIO()
            np.save(held, value.numpy())
            write_atomic(self.out / map_file(name, self.facts), held.getvalue())

    def close(self) -> None:
        """Close the stream and its file."""
        if not self.handle.closed:
            self.stream.close()
            self.handle.close()


def map_file(name: str, facts: Facts) -> str:
    """File of a map between the vocabularies, "d2t" or "t2d"."""
    return f"{name}-{facts.draft_ids}.npy"


@register("speculators")
class Speculators(SampleExporter):
    """EAGLE-3, DFlash, DSpark and MTP: rows of any layers, or of none, and last rows before the final norm."""

    about = "speculators' trainers: a Hugging Face dataset of ids and a safetensors file per document, pre-norm"
    norms = ("pre",)
    pattern = f"{FOLDER}/hs_*"
    writer = ArrowWriter

    def layer_id(self, layer: int) -> int:
        """speculators counts the embedding as layer 0."""
        return layer + 1

    def check_layers(self, layers: Sequence[int]) -> None:
        """Any number of layers: an MTP head trains from the last rows alone."""

    def opened(self, out: Path) -> Any:
        """The token rows."""
        import pyarrow as pa

        return pa.ipc.open_stream(pa.memory_map(str(out / ARROW))).read_all()

    def take(self, out: Path, line: Line, facts: Facts, opened: Any) -> Sample:
        """Read one sample back, its hidden rows and its token row."""
        found, row = load_file(out / line.file), opened.slice(line.index, 1)
        ids_S, mask_S = (
            torch.tensor(row.column(name)[0].values.to_numpy(zero_copy_only=False))
            for name in ("input_ids", "loss_mask")
        )
        if row.column("seq_len")[0].as_py() != line.tokens:
            raise ValueError(f"seq_len of its token row is {row.column('seq_len')[0].as_py()}")
        if found["token_ids"].dtype != torch.int64 or not torch.equal(found["token_ids"], ids_S):
            raise ValueError("token_ids of its hidden rows are not input_ids of its token row")
        rows_SLH = found["hidden_states"]
        if rows_SLH.ndim != 3 or rows_SLH.shape[1] != len(facts.layers) + 1:
            raise ValueError(f"hidden_states has shape {tuple(rows_SLH.shape)}")
        *taps, last_SH = rows_SLH.unbind(1)
        return Sample(line.index, line.doc_id, ids_S, mask_S, last_SH, taps)

    def whole_problems(self, out: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """Problems of the dataset's state, of its length, and of the maps between the vocabularies."""
        import datasets

        found = []
        rows = datasets.load_from_disk(str(out))
        if rows.format["type"] != "torch":
            found.append("state.json does not ask for torch's format, and the reader compares rows as tensors")
        if len(rows) != facts.documents:
            found.append(f"{ARROW} holds {len(rows)} rows where {facts.documents} are due")
        for name, due in (vocab_maps(parts) or {}).items():
            file = out / map_file(name, facts)
            held = np.load(file, allow_pickle=False) if file.is_file() else np.zeros(0)
            if held.dtype != due.numpy().dtype or not np.array_equal(held, due.numpy()):
                found.append(f"{file.name} is not the trimmed head's map")
        return found

    def notes(self, facts: Facts) -> list[str]:
        """What the trainer must be told."""
        ids = ", ".join(str(each["id"]) for each in facts.layers)
        told = [f"the trainer's target layers are {ids}: entries of hidden_states, 0 for the embedding"] if ids else []
        return told + [
            "the trainer applies the final norm itself; speculators 0.9.0 multiplies by the weight where this model "
            "multiplies by one plus it, in EAGLE-3 drafts and for targets of type qwen3_5_moe_text, so those see "
            "wrongly scaled rows"
        ]
