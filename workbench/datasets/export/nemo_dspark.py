"""Export to NeMo Automodel's DSpark cache.

A layer's id there is the layer whose output rows it is, counted from 0, as in our stores, with one exception: the last
layer's rows lie after the final norm, for its trainer reads them where transformers keeps them. Nothing is shifted.

Legend: S tokens, L layers, H hidden.
Source: NVIDIA-NeMo/Automodel, ``components/datasets/llm/dspark_cache.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.core.errors import CapabilityError
from workbench.core.manifest import write_json
from workbench.core.staging import staged
from workbench.datasets.export import nemo
from workbench.datasets.export.fidelity import Fidelity
from workbench.datasets.export.parts import FILE as PARTS
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import Exporter, ExportReport, register
from workbench.datasets.export.sidecar import Ledger, Sealed, row_columns, row_hashes, seal, sealed_report
from workbench.datasets.export.source import SequenceRow, SequenceSource

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

FORMAT_VERSION = 1
WEIGHTS = "target_weights.safetensors"


@register("nemo-automodel-dspark")
class NemoDSpark(Exporter):
    """NeMo Automodel's DSpark cache."""

    about = "NeMo Automodel offline cache for DSpark: padded safetensors shards"
    options = nemo.NemoOptions

    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write a DSpark cache; see ``Exporter.run``."""
        chosen = nemo.NemoOptions(**options)
        source = SequenceSource.of(data_dir, parts)
        final = source.num_layers - 1
        stored = None if chosen.layers is None else [i for i in chosen.layers if i != final or i in source.layers]
        tapped = source.chosen(stored)
        layers = tapped if chosen.layers is None else tuple(chosen.layers)
        if not layers:
            raise CapabilityError(
                f"{source.path} holds no tapped layers and this format needs one: extract again with layers tapped, or "
                f"give layers=[{final}] for the last one, which every store holds"
            )
        length = nemo.padded_length(source, chosen.seq_length)
        fidelity = Fidelity(
            model,
            source.manifest,
            documents=len(source),
            stored=source.hidden_dtype,
            written=chosen.hidden_dtype,
            side="post",
        )
        with staged(out) as directory:
            with Ledger(directory, row_columns(layers)) as ledger:

                def sample(_: int, row: SequenceRow) -> dict[str, Tensor]:
                    last_SH = parts.normed(row.last_SH).to(chosen.dtype)
                    fidelity.see(row.tokens_S, last_SH, parts)
                    taps = {i: last_SH if i == final else row.taps[i].to(chosen.dtype) for i in layers}
                    ledger.add(row.doc_id, len(row.tokens_S), row_hashes(row.tokens_S, row.mask_S, last_SH, taps))
                    return {
                        "input_ids": row.tokens_S,
                        "attention_mask": torch.ones_like(row.tokens_S),
                        "loss_mask": row.mask_S.long(),
                        "target_hidden_states": torch.cat(list(taps.values()), -1),
                        "target_last_hidden_states": last_SH,
                    }

                fields = _fields(length, len(layers), source.hidden_size, chosen.dtype)
                nemo.write_shards(directory, source, tapped, fields, chosen.shard_size, sample)
            manifest = nemo.common_manifest(source, chosen, length) | {
                "format_version": FORMAT_VERSION,
                "target_model_type": chosen.model_type,
                "hidden_size": source.hidden_size,
                "num_hidden_layers": source.num_layers,
                "target_hidden_dim": source.hidden_size * len(layers),
                "target_last_hidden_dim": source.hidden_size,
                "target_layer_ids": list(layers),
                "train_data_path": str(source.manifest.corpus.get("name", "")),
                "train_split": None,
                "chat_template_sha256": "",
            }
            write_json(directory / nemo.MANIFEST, manifest)
            _save_weights(directory, parts)
            parts.save(directory)
            rounding = fidelity.result()
            about = {"norm": "post", "layers": list(layers), "rounding": rounding.to_dict()}
            size = seal(directory, self.name, source.manifest, about)
        note = f"layer {final} is exported after the final norm, as the trainer reads it; SGLang cannot serve its rows"
        notes = [note] if final in layers else []
        return sealed_report(
            self.name,
            out,
            ledger,
            size=size,
            parts=(PARTS, WEIGHTS),
            layers=layers,
            norm="post",
            notes=notes,
            rounding=rounding,
        )

    def validate(self, out: str | Path) -> list[str]:
        """Problems of a DSpark cache, a sentence each; empty when it is sound."""
        sealed = Sealed.open(out, self.name)
        if sealed.parts is None:
            return sealed.problems
        layers, (vocab, hidden) = sealed.facts["layers"], sealed.parts.head_VH.shape
        expected = {
            "format_version": FORMAT_VERSION,
            "target_layer_ids": layers,
            "hidden_size": hidden,
            "num_hidden_layers": sealed.facts["source"]["model"]["layers"],
            "target_hidden_dim": hidden * len(layers),
            "target_last_hidden_dim": hidden,
        }
        manifest = nemo.read_manifest(sealed, expected)
        kinds = {short: kind for short, kind in nemo.DTYPES.values()}
        if manifest is None or manifest.get("dtype") not in kinds:
            sealed.problems.append("the cache cannot be read by its manifest")
            return sealed.problems
        fields = _fields(manifest["seq_length"], len(layers), hidden, kinds[manifest["dtype"]])
        for number, held in nemo.read_samples(sealed, fields, manifest["shard_size"]):
            ids_S, last_SH = held["input_ids"], held["target_last_hidden_states"]
            if int(ids_S.min()) < 0 or int(ids_S.max()) >= vocab:
                sealed.problems.append(f"{sealed.at(number)}: an id lies outside the vocabulary")
            sealed.check_rows(number, "target_hidden_states", held["target_hidden_states"])
            if sealed.check_rows(number, "target_last_hidden_states", last_SH):
                sealed.check_post_norm(number, last_SH)
            taps = dict(zip(layers, held["target_hidden_states"].split(hidden, -1), strict=True))
            sealed.compare(number, row_hashes(ids_S, held["loss_mask"], last_SH, taps))
        sealed.problems += _weight_problems(sealed)
        return sealed.problems


def _fields(length: int, layers: int, hidden: int, dtype: torch.dtype) -> nemo.Fields:
    return {
        "input_ids": (torch.int64, (length,)),
        "attention_mask": (torch.int64, (length,)),
        "loss_mask": (torch.int64, (length,)),
        "target_hidden_states": (dtype, (length, layers * hidden)),
        "target_last_hidden_states": (dtype, (length, hidden)),
    }


def _weights(parts: ModelParts) -> dict[str, Tensor]:
    tensors = {"embed_tokens.weight": parts.embedding_VH, "lm_head.weight": parts.head_VH}
    return {name: value.to(torch.float32, copy=True).contiguous() for name, value in tensors.items()}


def _save_weights(directory: Path, parts: ModelParts) -> None:
    from safetensors.torch import save_file

    save_file(_weights(parts), directory / WEIGHTS)


def _weight_problems(sealed: Sealed) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert sealed.parts is not None
    try:
        found = load_file(sealed.out / WEIGHTS)
    except (OSError, SafetensorError) as error:
        return [f"{WEIGHTS} cannot be read ({error})"]
    due = _weights(sealed.parts)
    same = found.keys() == due.keys() and all(torch.equal(found[name], due[name]) for name in due)
    return [] if same else [f"{WEIGHTS} does not hold the model's embedding and head in float32"]
