"""What NeMo Automodel's two caches have in common: padded samples in safetensors shards, and a JSON manifest.

Sample i lies in shard i // shard_size. This module knows neither cache's tensors.

Legend: S padded length, H hidden.
Source: NVIDIA-NeMo/Automodel, offline caches of DSpark (format 1) and EAGLE-3 (format 2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import UserError, check_flag, check_int
from workbench.core.progress import progress
from workbench.datasets.export.registry import ExportOptions
from workbench.datasets.export.sidecar import Sealed
from workbench.datasets.export.source import SequenceRow, SequenceSource
from workbench.datasets.export.stacked import StackedFile

MANIFEST = "manifest.json"
DTYPES = {"bfloat16": ("bf16", torch.bfloat16), "float32": ("fp32", torch.float32)}

Fields = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class NemoOptions(ExportOptions):
    """What shapes a cache.

    Args:
        layers: Tapped layers to export, ascending, each named by the layer whose output rows it is, counted from 0;
            default None, for all that the data hold.
        hidden_dtype: Type of exported rows, "bfloat16" or "float32", which must be the type the training computes in;
            default "bfloat16".
        target: Name or path of the target as the training run will give it; "" for the model's name in the data.
        model_type: ``model_type`` of the target's configuration, which the trainer compares; default "qwen3_5_text".
        seq_length: Length that samples are padded to; None for that of the longest document.
        shard_size: Samples per file; default 256.
        mask_reasoning_content: The training run's option of this name, which it compares; the masks are the data's own.
            Default False.
        mask_generation_prompt: Likewise.
    """

    target: str = ""
    model_type: str = "qwen3_5_text"
    seq_length: int | None = None
    shard_size: int = 256
    mask_reasoning_content: bool = False
    mask_generation_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("shard_size", self.shard_size, low=1)
        if self.seq_length is not None:
            check_int("seq_length", self.seq_length, low=1)
        for name in ("mask_reasoning_content", "mask_generation_prompt"):
            check_flag(name, getattr(self, name))

    @property
    def dtype(self) -> torch.dtype:
        """Type of exported rows."""
        return DTYPES[self.hidden_dtype][1]


def padded_length(source: SequenceSource, wanted: int | None) -> int:
    """Length that samples are padded to.

    Args:
        source: The data.
        wanted: What was asked for; None for the longest document.

    Raises:
        UserError: A document is longer.
    """
    import pyarrow.compute as pc

    lengths = pc.list_value_length(source.rows.select_columns(["tokens"])[:].column("tokens")).to_numpy()
    longest = int(lengths.max())
    if wanted is not None and longest > wanted:
        at = int(lengths.argmax())
        raise UserError(
            f"seq_length={wanted} is not valid: document {source.rows[at : at + 1]['doc_id'][0].as_py()!r} has "
            f"{longest} tokens, and an export cuts none; give at least that, or cut documents with "
            f"corpus(..., max_tokens={wanted}) before extracting"
        )
    return longest if wanted is None else wanted


def common_manifest(source: SequenceSource, options: NemoOptions, seq_length: int) -> dict[str, Any]:
    """Fields that both manifests have."""
    made = source.manifest
    return {
        "target_model": options.target or made.model["name"],
        "target_vocab_size": int(made.model["vocab_size"]),
        "seq_length": seq_length,
        "dtype": DTYPES[options.hidden_dtype][0],
        "num_samples": len(source),
        "shard_size": options.shard_size,
        "shuffle_seed": 0,
        "mask_reasoning_content": options.mask_reasoning_content,
        "mask_generation_prompt": options.mask_generation_prompt,
        "complete": True,
    }


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:06d}.safetensors"


def write_shards(
    directory: Path,
    source: SequenceSource,
    layers: tuple[int, ...],
    fields: Fields,
    shard_size: int,
    sample: Callable[[int, SequenceRow], Mapping[str, Tensor]],
) -> None:
    """Write every document as a sample.

    Args:
        directory: Where to.
        source: The data.
        layers: Tapped layers to read.
        fields: Per tensor its type and the padded shape of one sample.
        shard_size: Samples per file.
        sample: Tensors of a document, given its place and its row, without padding.
    """
    rows = enumerate(source.documents(layers))
    with progress(len(source), desc="export", unit="doc") as bar:
        for shard in range(-(-len(source) // shard_size)):
            held = min(shard_size, len(source) - shard * shard_size)
            with StackedFile(directory / shard_name(shard), held, fields) as file:
                for number, row in islice(rows, held):
                    file.put(number % shard_size, sample(number, row))
                    bar.update(1)


def read_manifest(sealed: Sealed, expected: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest of a cache, held against what its source and its parts say.

    Args:
        sealed: The export.
        expected: Values that its fields must have.

    Returns:
        The manifest; None where it cannot be read.
    """
    try:
        manifest = json.loads((sealed.out / MANIFEST).read_text("utf-8"))
        facts = {
            "complete": True,
            "num_samples": len(sealed.ledger),
            "target_vocab_size": sealed.facts["source"]["model"]["vocab_size"],
            **expected,
        }
        for name, value in facts.items():
            if manifest.get(name) != value:
                sealed.problems.append(f"{name} of the manifest is {manifest.get(name)!r} and must be {value!r}")
        if int(manifest["shard_size"]) < 1 or int(manifest["seq_length"]) < max(row["tokens"] for row in sealed.ledger):
            sealed.problems.append("shard_size or seq_length of the manifest does not hold the documents")
            return None
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        sealed.problems.append(f"{MANIFEST} cannot be read ({type(error).__name__}: {error})")
        return None


def read_samples(sealed: Sealed, fields: Fields, shard_size: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Samples of a cache whose shards have the tensors they should; what is not so becomes a problem.

    Args:
        sealed: The export.
        fields: Per tensor its type and the padded shape of one sample.
        shard_size: Samples per file.

    Yields:
        A sample's place and its tensors, without padding; padding that is not zero is a problem.
    """
    from safetensors import SafetensorError, safe_open

    count = len(sealed.ledger)
    for shard in range(-(-count // shard_size)):
        held = min(shard_size, count - shard * shard_size)
        path = sealed.out / shard_name(shard)
        try:
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != set(fields):
                    sealed.problems.append(f"{path.name} holds {sorted(file.keys())} and must hold {sorted(fields)}")
                    continue
                wrong = [name for name, field in fields.items() if not _fits(file.get_slice(name), held, field)]
                if wrong:
                    sealed.problems.append(
                        f"{wrong[0]} of {path.name} has another shape or type than the manifest says"
                    )
                    continue
                for place in range(held):
                    number = shard * shard_size + place
                    yield number, _cut(sealed, number, {name: file.get_slice(name)[place] for name in fields})
        except (OSError, SafetensorError) as error:
            sealed.problems.append(f"{path.name} cannot be read ({error})")


def _fits(part: Any, samples: int, field: tuple[torch.dtype, tuple[int, ...]]) -> bool:
    kinds = {"I64": torch.int64, "I32": torch.int32, "BF16": torch.bfloat16, "F32": torch.float32, "BOOL": torch.bool}
    return tuple(part.get_shape()) == (samples, *field[1]) and kinds.get(part.get_dtype()) is field[0]


def _cut(sealed: Sealed, number: int, padded: dict[str, Tensor]) -> dict[str, Tensor]:
    n = sealed.ledger[number]["tokens"]
    for name, value in padded.items():
        if bool(value[n:].any()):  # true for NaN, too
            sealed.problems.append(f"{sealed.at(number)}: {name} is not zero behind the document's {n} tokens")
    if not bool((padded["attention_mask"][:n] == 1).all()):
        sealed.problems.append(f"{sealed.at(number)}: attention_mask does not cover the document's {n} tokens")
    return {name: value[:n] for name, value in padded.items()}
