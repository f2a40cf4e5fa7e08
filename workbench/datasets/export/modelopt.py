"""Exports to NVIDIA ModelOpt: one torch file per document, for its EAGLE-3, DFlash and DSpark trainers.

Legend: S tokens, H hidden, L layers.
Layer i is the output rows of layer i, counted from 0, as its dumper over transformers takes them. The side of the final
norm is a flag in every file.
Source: ModelOpt 0.47.0, ``torch/speculative/eagle/utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.core.errors import check_choice
from workbench.datasets.export.body import SampleExporter, SampleWriter
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import ExportOptions, register
from workbench.datasets.export.samples import Facts, Line, Sample, vocab_maps

FOLDER, MAP_FILE = "samples", "d2t.pt"
NORMS = ("post", "pre")


@dataclass(frozen=True)
class ModelOptOptions(ExportOptions):
    """What an export to ModelOpt takes.

    Args:
        layers: Tapped layers to export, ascending, each named by the layer whose output rows it is, counted from 0;
            default None, for all that the data hold.
        hidden_dtype: Type of exported rows, "bfloat16" or "float32"; default "bfloat16".
        norm: Side of the final norm on which last rows are written, "post" or "pre"; "pre" keeps the data's own bits
            and needs the whole target at training time, since ModelOpt's light loader knows no norm of Qwen3.5;
            default "post".

    Raises:
        UserError: A value is not valid.
    """

    norm: Literal["post", "pre"] = "post"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("norm", self.norm, NORMS)


class PtWriter(SampleWriter):
    """Writes ``samples/*.pt`` files, and the map between the vocabularies."""

    def put(self, sample: Sample) -> str:
        """Write one sample, and return its file's name from the directory."""
        assert sample.last_SH is not None
        (self.out / FOLDER).mkdir(exist_ok=True)
        name = f"{FOLDER}/{sample.index:08d}.pt"
        value = {
            "input_ids": sample.ids_S.clone(),
            "hidden_states": sample.last_SH.clone(),
            "aux_hidden_states": torch.cat(list(sample.taps), dim=-1),
            "loss_mask": sample.mask_S.clone(),
            "conversation_id": sample.doc_id,
            "hidden_states_prenorm": self.facts.prenorm,
        }
        torch.save(value, self.out / name)
        return name

    def finish(self) -> None:
        """Write ``d2t.pt`` for a trimmed draft head."""
        if maps := vocab_maps(self.parts):
            torch.save(maps["d2t"], self.out / MAP_FILE)


@register("modelopt")
class ModelOpt(SampleExporter):
    """EAGLE-3, DFlash and DSpark: rows of any layers, and last rows with their flag."""

    about = "NVIDIA ModelOpt's trainers: a torch file per document, with a flag for the final norm"
    options = ModelOptOptions
    norms = NORMS
    pattern = f"{FOLDER}/*.pt"
    writer = PtWriter

    def layer_id(self, layer: int) -> int:
        """ModelOpt names a layer by its output rows, counted from 0."""
        return layer

    def norm_of(self, options: Any) -> str:
        """As the option says."""
        return options.norm

    def take(self, out: Path, line: Line, facts: Facts, opened: Any) -> Sample:
        """Read one sample back."""
        found = torch.load(out / line.file, map_location="cpu", weights_only=True)
        flag, width = found["hidden_states_prenorm"], found["aux_hidden_states"].shape[-1]
        if not isinstance(flag, bool):
            raise ValueError(f"its flag for the final norm is {flag!r}, which any reader takes for True")
        if width != len(facts.layers) * facts.hidden_size:
            raise ValueError(f"aux_hidden_states is {width} wide")
        if found["conversation_id"] != line.doc_id:
            raise ValueError(f"it is conversation {found['conversation_id']!r}")
        taps = list(found["aux_hidden_states"].split(facts.hidden_size, dim=-1))
        return Sample(
            line.index, line.doc_id, found["input_ids"], found["loss_mask"], found["hidden_states"], taps, flag
        )

    def whole_problems(self, out: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """Problems of the map between the vocabularies."""
        due = vocab_maps(parts)
        if due is None:
            return [f"{MAP_FILE} is there and the draft head is not trimmed"] if (out / MAP_FILE).exists() else []
        if not (out / MAP_FILE).is_file():
            return [f"{MAP_FILE} is missing"]
        found = torch.load(out / MAP_FILE, weights_only=True)
        good = found.dtype == torch.int64 and torch.equal(found, due["d2t"])
        return [] if good else [f"{MAP_FILE} is not the trimmed head's map"]

    def notes(self, facts: Facts) -> list[str]:
        """What the trainer must be told."""
        ids = ", ".join(str(each["id"]) for each in facts.layers)
        told = [f"the trainer's target layers are {ids}: a layer is named by its output rows, counted from 0"]
        if facts.prenorm:
            told.append("last rows lie before the final norm: train with the whole target loaded, which applies it")
        return told
