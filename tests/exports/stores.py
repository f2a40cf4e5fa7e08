"""A sequence store made from a model in the plainest way, and the model's own rows to hold exports against.

Legend: S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.core.manifest import sha256_file
from workbench.core.tape import Corpus, Tape
from workbench.datasets.norm import NORM_FILE, norm_bytes, norm_facts
from workbench.datasets.provenance import new_manifest
from workbench.datasets.shards import ShardDirectory, plan_shards

LAYERS = (0, 1, 3)  # of the tiny model's five
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class Truth:
    """What the model says of one document.

    Args:
        doc_id: Its id.
        ids_S: Token ids, int64.
        mask_S: Supervised tokens, bool.
        trunk_SH: Rows before the final norm, float32.
        normed_SH: Rows after it, float32.
        taps: Layer to its output rows.
        logits_SV: Logits.
    """

    doc_id: str
    ids_S: Tensor
    mask_S: Tensor
    trunk_SH: Tensor
    normed_SH: Tensor
    taps: dict[int, Tensor]
    logits_SV: Tensor


def documents(vocab: int = 83, lengths: Sequence[int] = (21, 34, 8, 13, 29)) -> Corpus:
    """Documents under masks of every kind: none, two turns, nothing supervised, every other token, the tail."""
    generator = np.random.default_rng(7)
    tapes = []
    for i, n in enumerate(lengths):
        mask = np.zeros(n, bool)
        if i == 1:
            mask[3:6] = mask[20:] = True
        elif i == 3:
            mask[1::2] = True
        elif i == 4:
            mask[10:] = True
        tapes.append(
            Tape(f"doc/{i}", generator.integers(0, vocab, n), min(n, 2), "s", "train", None if i == 0 else mask)
        )
    return Corpus(tapes, name="c")


def truths(model: Any, tapes: Corpus, layers: Sequence[int] = LAYERS) -> dict[str, Truth]:
    """The model's own rows of every document, by id."""
    found = {}
    for tape in tapes:
        ids_S = torch.from_numpy(tape.tokens.astype(np.int64))
        rows = model.forward(ids_S[None], model.new_cache(capacity=len(tape)), taps=layers)
        mask = np.ones(len(tape), bool) if tape.supervised is None else tape.supervised
        found[tape.doc_id] = Truth(
            tape.doc_id,
            ids_S,
            torch.from_numpy(mask.copy()),
            rows.trunk_BTH[0].float(),
            rows.normed_BTH[0].float(),
            {layer: rows.taps[layer][0].float() for layer in layers},
            rows.logits_BTV[0],
        )
    return found


def pack(x_SH: Tensor, name: str, hidden_dtype: str) -> dict[str, np.ndarray]:
    """The columns that hold rows in a type of the store."""
    if hidden_dtype == "fp8":
        scale_S = x_SH.abs().amax(-1).clamp_min(1e-12) / 448.0
        packed_SH = (x_SH / scale_S[:, None]).to(torch.float8_e4m3fn)
        return {name: packed_SH.view(torch.uint8).numpy().reshape(-1), f"{name}_scale": scale_S.numpy()}
    stored = x_SH.to(DTYPES[hidden_dtype])
    flat = stored.view(torch.int16).numpy().view(np.uint16) if hidden_dtype == "bfloat16" else stored.numpy()
    return {name: flat.reshape(-1)}


def make_store(
    model: Any,
    tapes: Corpus,
    out: Path,
    *,
    layers: Sequence[int] = LAYERS,
    hidden_dtype: str = "bfloat16",
    extra: dict[str, Any] | None = None,
) -> dict[str, Truth]:
    """Write a sequence store of these documents, and return what the model says of each."""
    import pyarrow as pa

    known = truths(model, tapes, layers)
    rows = []
    for tape, truth in zip(tapes, known.values(), strict=True):
        columns = {"doc_id": tape.doc_id, "split": tape.split, "source": tape.source, "prompt_len": tape.prompt_len}
        columns |= {"tokens": tape.tokens, "loss_mask": truth.mask_S.numpy()}
        columns |= pack(truth.trunk_SH, "hidden", hidden_dtype)
        for layer in layers:
            columns |= pack(truth.taps[layer], f"tap_{layer}", hidden_dtype)
        rows.append(columns)
    kinds = {"doc_id": pa.string(), "split": pa.string(), "source": pa.string(), "prompt_len": pa.int32()}
    for name, value in rows[0].items():
        if isinstance(value, np.ndarray):
            kinds[name] = pa.large_list(pa.from_numpy_dtype(value.dtype))
    schema = pa.schema(list(kinds.items()))
    batches = [pa.RecordBatch.from_pylist([{n: _plain(v) for n, v in row.items()}], schema=schema) for row in rows]
    facts = {"norm": norm_facts(model), "pre_norm": True} if extra is None else extra
    manifest = new_manifest("sequence", model, tapes, parameters={"taps": list(layers)}, extra=facts)
    plan = plan_shards([len(tape) for tape in tapes], 40)
    with ShardDirectory(out, manifest, plan=plan, schema=schema, files={NORM_FILE: norm_bytes(model)}) as directory:
        for index in directory.pending:
            directory.write(index, batches[slice(*plan[index])])
        directory.finish({"documents": len(tapes), "tokens": tapes.n_tokens})
    return known


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def bless(out: Path) -> None:
    """Write every hash of an export anew, so that only what the files say can give a change away."""
    lines = [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        if (out / line["file"]).is_file():
            line["sha256"] = sha256_file(out / line["file"])
    (out / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    facts = json.loads((out / "export.json").read_text("utf-8"))
    facts["files"] = {name: sha256_file(out / name) for name in facts["files"] if (out / name).is_file()}
    (out / "export.json").write_text(json.dumps(facts), "utf-8")


def change_facts(out: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what ``export.json`` says."""
    facts = json.loads((out / "export.json").read_text("utf-8"))
    change(facts)
    (out / "export.json").write_text(json.dumps(facts), "utf-8")


def change_sample(out: Path, index: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what one sample's file holds, whatever its format."""
    from safetensors.torch import load_file, save_file

    line = [json.loads(text) for text in (out / "samples.jsonl").read_text("utf-8").splitlines()][index]
    file = out / line["file"]
    held = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    change(held)
    if file.suffix == ".safetensors":
        save_file({name: value.contiguous() for name, value in held.items()}, file)
    else:
        torch.save(held, file)
    bless(out)
