"""Export to NeMo Automodel's EAGLE-3 cache, with the law of the target over the draft ids, whole or its largest.

Slot t of a sample pairs three layers' rows of token t with what lies one to the right: token t + 1, its mask, and the
target's row t + 1, which speaks of token t + 2. So ids, masks and laws are stored shifted left by one and end in a
zero, rows and the attention mask are not. A layer's id is the layer whose output rows it is, counted from 0, as in our
stores; the last layer's rows lie before the final norm here.

Legend: S tokens, H hidden, D draft ids, k kept draft ids.
Source: NVIDIA-NeMo/Automodel, ``components/datasets/llm/eagle3_cache.py`` and ``speculative/precompute_eagle3.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.errors import CapabilityError, UserError, check_int
from workbench.core.manifest import write_json
from workbench.core.staging import staged
from workbench.datasets.export import nemo
from workbench.datasets.export.draft_law import full_law, kept_law
from workbench.datasets.export.fidelity import Fidelity
from workbench.datasets.export.parts import FILE as PARTS
from workbench.datasets.export.parts import ModelParts
from workbench.datasets.export.registry import Exporter, ExportReport, register
from workbench.datasets.export.sidecar import (
    Ledger,
    Sealed,
    digest,
    id_digest,
    mask_digest,
    seal,
    sealed_report,
)
from workbench.datasets.export.source import SequenceRow, SequenceSource

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

FORMAT_VERSION = 2
EMBEDDINGS = "target_embeddings.safetensors"
LAYERS = 3
KEPT = ("top_ids", "top_logits", "logsumexp")
SUM_TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}  # of a law's sum: what its own type rounds away


@dataclass(frozen=True)
class Eagle3Options(nemo.NemoOptions):
    """What shapes an EAGLE-3 cache.

    Args:
        layers: Three layers to export, ascending, each named by the layer whose output rows it is, counted from 0;
            default None, for those that the data hold.
        hidden_dtype: Type of exported rows and probabilities, "bfloat16" or "float32", which must be the type the
            training computes in; default "bfloat16".
        target: Name or path of the target as the training run will give it; "" for the model's name in the data.
        model_type: ``model_type`` of the target's configuration; default "qwen3_5_text".
        seq_length: Length that samples are padded to; None for that of the longest document.
        shard_size: Samples per file; default 256.
        mask_reasoning_content: The training run's option of this name, which it compares; the masks are the data's own.
            Default False.
        mask_generation_prompt: Likewise.
        top_k: Draft ids per row whose probabilities are kept, from the ids that the data keep, renormalised as the
            format wants; 0, the default, stores the law over all draft ids, rebuilt from the rows.
    """

    top_k: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("top_k", self.top_k, low=0)


@register("nemo-automodel-eagle3")
class NemoEagle3(Exporter):
    """NeMo Automodel's EAGLE-3 cache."""

    about = "NeMo Automodel offline cache for EAGLE-3, with the target's law whole or its top-k"
    options = Eagle3Options

    def run(
        self,
        data_dir: str | Path,
        out: str | Path,
        parts: ModelParts,
        *,
        model: HybridModel | None = None,
        **options: Any,
    ) -> ExportReport:
        """Write an EAGLE-3 cache; see ``Exporter.run``."""
        chosen = Eagle3Options(**options)
        source = SequenceSource.of(data_dir, parts)
        layers = _layers(source, chosen)
        k, draft = chosen.top_k, len(parts.kept_ids_D)
        _check_kept(source, k, draft)
        length = nemo.padded_length(source, chosen.seq_length)
        masses: list[np.ndarray] = []
        fidelity = Fidelity(
            model,
            source.manifest,
            documents=len(source),
            stored="float32" if k else source.hidden_dtype,  # of kept logits
            written=chosen.hidden_dtype,
            side="law",
        )
        with staged(out) as directory:
            with Ledger(
                directory, ("ids", "mask", "position", "law", "best", *(f"layer_{i}" for i in layers))
            ) as ledger:

                def sample(number: int, row: SequenceRow) -> dict[str, Tensor]:
                    law, best_S, mass_S = _law(source, number, row, parts, k, chosen.dtype)
                    if not k:
                        fidelity.see_law(row.tokens_S, law["target_probs"], parts)
                    position_S = torch.isin(best_S, parts.kept_ids_D) & row.mask_S[1:]
                    masses.append(mass_S[row.mask_S[1:]].numpy())
                    taps = {i: _tap(source, row, i).to(chosen.dtype) for i in layers}
                    hashes = {f"layer_{i}": digest(x) for i, x in taps.items()}
                    hashes |= {"ids": id_digest(row.tokens_S[1:]), "mask": mask_digest(row.mask_S[1:])}
                    hashes |= {"position": mask_digest(position_S), "best": id_digest(best_S[position_S])}
                    hashes["law"] = digest(torch.cat([x.reshape(-1).view(torch.uint8) for x in law.values()]))
                    ledger.add(row.doc_id, len(row.tokens_S), hashes)
                    return law | {
                        "input_ids": row.tokens_S[1:],
                        "attention_mask": torch.ones_like(row.tokens_S),
                        "loss_mask": row.mask_S[1:].long(),
                        "aux_hidden_states": torch.cat(list(taps.values()), -1),
                        "position_mask": position_S[:, None],
                    }

                fields = _fields(length, source.hidden_size, draft, k, chosen.dtype)
                tapped = tuple(i for i in layers if i in source.layers)
                nemo.write_shards(directory, source, tapped, fields, chosen.shard_size, sample)
            manifest = nemo.common_manifest(source, chosen, length) | {
                "format_version": FORMAT_VERSION,
                "input_data": str(source.manifest.corpus.get("name", "")),
                "split": None,
                "draft_vocab_size": draft,
                "target_probs_topk": k,
                "aux_hidden_dim": LAYERS * source.hidden_size,
                "aux_layer_ids": list(layers),
                "selected_token_ids": parts.kept_ids_D.tolist(),
            }
            write_json(directory / nemo.MANIFEST, manifest)
            _save_embeddings(directory, parts)
            parts.save(directory)
            mass = np.concatenate(masses)
            held = {"mean": float(mass.mean()), "least": float(mass.min())} if k and len(mass) else None
            rounding = fidelity.result()
            facts = {"norm": "", "layers": list(layers), "top_k": k, "kept_mass": held, "rounding": rounding.to_dict()}
            size = seal(directory, self.name, source.manifest, facts)
        notes = []
        if held is not None:
            notes.append(
                f"the kept draft ids hold {held['mean']:.4f} of the target's law on average over supervised rows and "
                f"{held['least']:.4f} at least; the format renormalises them and drops the rest"
            )
        return sealed_report(
            self.name,
            out,
            ledger,
            size=size,
            parts=(PARTS, EMBEDDINGS),
            layers=layers,
            notes=notes,
            rounding=rounding,
        )

    def validate(self, out: str | Path) -> list[str]:
        """Problems of an EAGLE-3 cache, a sentence each; empty when it is sound."""
        sealed = Sealed.open(out, self.name)
        if sealed.parts is None:
            return sealed.problems
        layers, k, hidden = sealed.facts["layers"], sealed.facts["top_k"], sealed.parts.head_VH.shape[1]
        draft = len(sealed.parts.kept_ids_D)
        expected = {
            "format_version": FORMAT_VERSION,
            "draft_vocab_size": draft,
            "target_probs_topk": k,
            "aux_hidden_dim": LAYERS * hidden,
            "aux_layer_ids": layers,
        }
        manifest = nemo.read_manifest(sealed, expected)
        kinds = {short: kind for short, kind in nemo.DTYPES.values()}
        if manifest is None or manifest.get("dtype") not in kinds:
            sealed.problems.append("the cache cannot be read by its manifest")
            return sealed.problems
        if manifest.get("selected_token_ids") != sealed.parts.kept_ids_D.tolist():
            sealed.problems.append("selected_token_ids of the manifest are not the ids of the model's draft head")
        fields = _fields(manifest["seq_length"], hidden, draft, k, kinds[manifest["dtype"]])
        for number, held in nemo.read_samples(sealed, fields, manifest["shard_size"]):
            _check_sample(sealed, number, held, manifest, kinds[manifest["dtype"]])
        sealed.problems += _embedding_problems(sealed)
        return sealed.problems


def _layers(source: SequenceSource, chosen: Eagle3Options) -> tuple[int, ...]:
    final = source.num_layers - 1
    if chosen.layers is None:
        layers = source.layers
    else:
        layers = tuple(chosen.layers)
        source.chosen([i for i in layers if i != final or i in source.layers])
    if len(layers) != LAYERS:
        raise CapabilityError(
            f"layers={list(layers)} is not valid: EAGLE-3 takes three layers' rows, and {source.path} holds those of "
            f"{list(source.layers)} and of {final}, the last; name three of them"
        )
    return layers


def _check_kept(source: SequenceSource, k: int, draft: int) -> None:
    if not k:
        return
    lacking = [name for name in KEPT if name not in source.rows.column_names]
    if lacking:
        raise CapabilityError(
            f"top_k={k} needs the ids and logits that a store keeps per token, and {source.path} lacks {lacking[0]}: "
            "use top_k=0, or extract again with top_k"
        )
    stored = len(source.rows[:1]["top_ids"][0]) // len(source.rows[:1]["tokens"][0])
    if k > stored or k >= draft:
        raise UserError(
            f"top_k={k} is not valid: {source.path} keeps {stored} ids per token and the draft head has {draft}; give "
            f"at most {min(stored, draft - 1)}, or 0 for the law over all draft ids"
        )


def _tap(source: SequenceSource, row: SequenceRow, layer: int) -> Tensor:
    return row.taps.get(layer, row.last_SH)


def _law(
    source: SequenceSource, number: int, row: SequenceRow, parts: ModelParts, k: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Tensors of the law, the target's picks, and the kept mass, of all rows but the first."""
    n = len(row.tokens_S)
    if not k:
        blocks = list(full_law(row.last_SH[1:], parts)) if n > 1 else []
        probs = [p.to(dtype) for p, _ in blocks] or [torch.zeros(0, len(parts.kept_ids_D), dtype=dtype)]
        best = [b for _, b in blocks] or [torch.zeros(0, dtype=torch.int64)]
        return {"target_probs": torch.cat(probs)}, torch.cat(best), torch.ones(n - 1)
    import pyarrow.compute as pc

    table = source.rows[number : number + 1]
    ids, logits, logsumexp = (pc.list_flatten(table.column(name)).to_numpy() for name in KEPT)
    law = kept_law(ids.reshape(n, -1)[1:], logits.reshape(n, -1)[1:], logsumexp[1:], parts, k)
    tensors = {"target_probs_values": law.probs_Sk.to(dtype), "target_probs_indices": law.indices_Sk}
    return tensors, law.best_S, law.mass_S


def _fields(length: int, hidden: int, draft: int, k: int, dtype: torch.dtype) -> nemo.Fields:
    law: nemo.Fields = {"target_probs": (dtype, (length, draft))}
    if k:
        law = {"target_probs_values": (dtype, (length, k)), "target_probs_indices": (torch.int32, (length, k))}
    return law | {
        "input_ids": (torch.int64, (length,)),
        "attention_mask": (torch.int64, (length,)),
        "loss_mask": (torch.int64, (length,)),
        "aux_hidden_states": (dtype, (length, LAYERS * hidden)),
        "position_mask": (torch.bool, (length, 1)),
    }


def _check_sample(
    sealed: Sealed, number: int, held: dict[str, Tensor], manifest: dict[str, Any], dtype: torch.dtype
) -> None:
    assert sealed.parts is not None
    at, say, draft = sealed.at(number), sealed.problems.append, manifest["draft_vocab_size"]
    ids_S, mask_S, position_S = held["input_ids"], held["loss_mask"], held["position_mask"][:, 0]
    if int(ids_S.min()) < 0 or int(ids_S.max()) >= len(sealed.parts.head_VH):
        say(f"{at}: an id lies outside the vocabulary")
    if int(ids_S[-1]) or int(mask_S[-1]) or bool(position_S[-1]):
        say(f"{at}: the last slot is not zero, so ids and masks are not shifted left by one")
    if bool((position_S & (mask_S == 0)).any()):
        say(f"{at}: position_mask holds slots that loss_mask does not")
    sealed.check_rows(number, "aux_hidden_states", held["aux_hidden_states"])
    names = ("target_probs_values", "target_probs_indices") if "target_probs_values" in held else ("target_probs",)
    law = {name: held[name][:-1] for name in names}
    probs_Sk, used = held[names[0]].float(), position_S
    if not bool((probs_Sk >= 0).all()) or bool(((probs_Sk[used].sum(-1) - 1).abs() > SUM_TOLERANCE[dtype]).any()):
        say(f"{at}: probabilities of a supervised slot are negative, NaN, or do not sum to 1")
    found = {"ids": id_digest(ids_S[:-1]), "mask": mask_digest(mask_S[:-1]), "position": mask_digest(position_S[:-1])}
    found["law"] = digest(torch.cat([x.reshape(-1).view(torch.uint8) for x in law.values()]))
    if len(names) == 2:
        index_Sk = held[names[1]].long()
        inside = bool(((index_Sk >= 0) & (index_Sk < draft)).all())
        if not inside or bool((index_Sk[:-1].sort(-1).values.diff() == 0).any()):
            say(f"{at}: indices of the law are not distinct places among the {draft} draft ids")
        if inside:
            selected = torch.tensor(manifest["selected_token_ids"])
            found["best"] = id_digest(selected[index_Sk[position_S, 0]])
    layers = sealed.facts["layers"]
    taps = held["aux_hidden_states"].chunk(LAYERS, -1)
    sealed.compare(number, found | {f"layer_{i}": digest(x) for i, x in zip(layers, taps, strict=True)})


def _save_embeddings(directory: Path, parts: ModelParts) -> None:
    from safetensors.torch import save_file

    weight_VH = parts.embedding_VH.to(torch.float32, copy=True).contiguous()
    save_file({"weight": weight_VH}, directory / EMBEDDINGS)


def _embedding_problems(sealed: Sealed) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert sealed.parts is not None
    try:
        found = load_file(sealed.out / EMBEDDINGS)
    except (OSError, SafetensorError) as error:
        return [f"{EMBEDDINGS} cannot be read ({error})"]
    same = found.keys() == {"weight"} and torch.equal(found["weight"], sealed.parts.embedding_VH.float())
    return [] if same else [f"{EMBEDDINGS} does not hold the model's embedding in float32"]
