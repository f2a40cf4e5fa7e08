"""Exports to SpecForge: one torch file per document, for its DSpark, DFlash and EAGLE-3 trainers.

Legend: S tokens, H hidden, L layers.
Ids, masks and rows are stored unshifted; the trainers shift. Layer i is the output rows of layer i, counted from 0, in
all three; last rows carry the final norm already. Files are read in the order of their paths as text, so numbers are
padded with zeros.
Source: SpecForge 0.2.0, ``runtime/data_plane/offline_reader.py`` and the ``data`` modules of its algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.core.errors import CapabilityError
from workbench.datasets.export.body import SampleExporter, SampleWriter
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import register
from workbench.datasets.export.samples import Facts, Line, Sample, vocab_maps
from workbench.datasets.export.source import SequenceRow

PER_FOLDER = 2_000
MAP_FILE = "vocab_mapping/vocab_mapping.pt"


class CkptWriter(SampleWriter):
    """Writes ``rows_*/data_*.ckpt`` files, and the map between the vocabularies."""

    def put(self, sample: Sample) -> str:
        """Write one sample, and return its file's name from the directory."""
        first = sample.index - sample.index % PER_FOLDER
        folder = f"rows_{first:08d}-{first + PER_FOLDER:08d}"
        (self.out / folder).mkdir(exist_ok=True)
        name = f"{folder}/data_{sample.index:08d}.ckpt"
        torch.save(PACK[self.facts.to](sample), self.out / name)
        return name

    def finish(self) -> None:
        """Write ``vocab_mapping.pt`` for a trimmed draft head."""
        if maps := vocab_maps(self.parts):
            (self.out / MAP_FILE).parent.mkdir()
            torch.save(dict(maps), self.out / MAP_FILE)


def _joined(taps: Sequence[Tensor]) -> Tensor:
    """Rows of all layers side by side, [S, L * H]."""
    return torch.cat(list(taps), dim=-1)


def _dflash(sample: Sample) -> dict[str, Tensor]:
    return {
        "input_ids": sample.ids_S.clone(),
        "loss_mask": sample.mask_S.clone(),
        "hidden_states": _joined(sample.taps),
    }


def _dspark(sample: Sample) -> dict[str, Tensor]:
    assert sample.last_SH is not None
    return {**_dflash(sample), "target_last_hidden_states": sample.last_SH.clone()}


def _eagle3(sample: Sample) -> dict[str, Tensor]:
    assert sample.last_SH is not None
    return {
        "input_ids": sample.ids_S.clone(),
        "loss_mask": sample.mask_S.clone(),
        "hidden_state": sample.last_SH.clone()[None],
        "aux_hidden_state": _joined(sample.taps)[None],
    }


PACK = {"specforge-dflash": _dflash, "specforge-dspark": _dspark, "specforge-eagle3": _eagle3}


class SpecForge(SampleExporter):
    """What the three exports share."""

    pattern = "*.ckpt*"
    writer = CkptWriter
    taps_key: ClassVar[str] = "hidden_states"
    last_key: ClassVar[str] = ""

    def layer_id(self, layer: int) -> int:
        """SpecForge names a layer by its output rows, counted from 0."""
        return layer

    def unfit(self, row: SequenceRow) -> str:
        """The trainers refuse a document in which no two tokens in a row are supervised."""
        if bool((row.mask_S[1:] & row.mask_S[:-1]).any()):
            return ""
        return "no two tokens of it in a row are supervised"

    def take(self, out: Path, line: Line, facts: Facts, opened: Any) -> Sample:
        """Read one sample back."""
        found = torch.load(out / line.file, map_location="cpu", weights_only=True)
        taps_SD = _flat(found[self.taps_key])
        if taps_SD.shape[-1] != len(facts.layers) * facts.hidden_size:
            raise ValueError(f"{self.taps_key} is {taps_SD.shape[-1]} wide")
        last_SH = _flat(found[self.last_key]) if self.last_key else None
        taps = list(taps_SD.split(facts.hidden_size, dim=-1))
        return Sample(line.index, line.doc_id, found["input_ids"], found["loss_mask"], last_SH, taps)

    def whole_problems(self, out: Path, facts: Facts, parts: ModelParts) -> list[str]:
        """Problems of the map between the vocabularies."""
        due = vocab_maps(parts)
        if due is None:
            return [f"{MAP_FILE} is there and the draft head is not trimmed"] if (out / MAP_FILE).exists() else []
        if not (out / MAP_FILE).is_file():
            return [f"{MAP_FILE} is missing"]
        found = torch.load(out / MAP_FILE, weights_only=True)
        return [
            f"{name} of {MAP_FILE} is not the trimmed head's"
            for name in due
            if name not in found or found[name].dtype != due[name].dtype or not torch.equal(found[name], due[name])
        ]

    def notes(self, facts: Facts) -> list[str]:
        """What the trainer must be told."""
        ids = ", ".join(str(each["id"]) for each in facts.layers)
        return [f"the trainer's target layers are {ids}: a layer is named by its output rows, counted from 0"]


def _flat(x: Tensor) -> Tensor:
    """[1, S, D] or [S, D] as [S, D]."""
    return x[0] if x.ndim == 3 and x.shape[0] == 1 else x


@register("specforge-dspark")
class SpecForgeDSpark(SpecForge):
    """DSpark: rows of any layers, and last rows after the final norm."""

    about = "SpecForge's DSpark trainer: a torch file per document, last rows after the final norm"
    last_key = "target_last_hidden_states"


@register("specforge-dflash")
class SpecForgeDFlash(SpecForge):
    """DFlash and Domino: rows of any layers, and no last rows."""

    about = "SpecForge's DFlash and Domino trainers: a torch file per document, tapped rows alone"
    norms = ("",)


@register("specforge-eagle3")
class SpecForgeEagle3(SpecForge):
    """EAGLE-3: rows of three layers, and last rows after the final norm."""

    about = "SpecForge's EAGLE-3 trainer: a torch file per document, three tapped layers"
    taps_key = "aux_hidden_state"
    last_key = "hidden_state"

    def check_layers(self, layers: Sequence[int]) -> None:
        """EAGLE-3 takes exactly three layers."""
        if len(layers) != 3:
            raise CapabilityError(
                f"{self.name} takes the rows of exactly three layers and {len(layers)} were chosen: name three with "
                "layers, such as layers=(1, 5, 8)"
            )

    def unfit(self, row: SequenceRow) -> str:
        """The reader drops the mask's last entry, and takes documents in which nothing is left."""
        return "" if bool(row.mask_S[:-1].any()) else "no token of it before the last one is supervised"
