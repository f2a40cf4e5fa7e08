"""Sequence stores written straight from a model's forwards, and seals taken again, for tests of exports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from workbench.core.manifest import sha256_file
from workbench.core.tape import Corpus, Tape
from workbench.datasets.export.sidecar import FACTS
from workbench.datasets.norm import NORM_FILE, norm_bytes, norm_facts
from workbench.datasets.provenance import new_manifest
from workbench.datasets.shards import ShardDirectory, plan_shards

CONVENTION = "tap i is the output rows of layer i, counted from 0"


def documents(vocab: int, lengths: Sequence[int] = (17, 9, 24, 9, 30), seed: int = 3) -> Corpus:
    """Random documents whose masks have holes."""
    generator = np.random.default_rng(seed)
    tapes = []
    for i, n in enumerate(lengths):
        mask = generator.random(n) < 0.7
        mask[:2] = False
        mask[3:6] = True
        tokens = generator.integers(0, vocab, n)
        tapes.append(Tape(f"d{i}", tokens, prompt_len=2, source="s", split="train", supervised=mask))
    return Corpus(tapes, name="random")


def write_sequences(
    model: Any,
    tapes: Corpus,
    out: Path,
    *,
    taps: Sequence[int] = (),
    hidden_dtype: str = "bfloat16",
    top_k: int = 0,
    shard_rows: int = 2,
    pre_norm: bool = True,
) -> Path:
    """Write a store of these documents.

    Args:
        model: The target.
        tapes: The documents.
        out: Directory.
        taps: Layers whose output rows are stored.
        hidden_dtype: "bfloat16", "float32" or "fp8".
        top_k: Ids kept per token; 0 for none.
        shard_rows: Documents per shard.
        pre_norm: What the manifest says of the rows.
    """
    kind = {"bfloat16": pa.uint16(), "float32": pa.float32(), "fp8": pa.uint8()}[hidden_dtype]
    texts = [(name, pa.string()) for name in ("doc_id", "split", "source")]
    fields = [
        *texts,
        ("tokens", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.bool_())),
        ("prompt_len", pa.int32()),
    ]
    for name in ("hidden", *(f"tap_{i}" for i in taps)):
        fields.append((name, pa.large_list(kind)))
        fields += [(f"{name}_scale", pa.large_list(pa.float32()))] if hidden_dtype == "fp8" else []
    if top_k:
        fields += [("top_ids", pa.large_list(pa.int32()))]
        fields += [
            (name, pa.large_list(pa.float32()))
            for name in ("top_logits", "top_probs", "tail_probs", "logsumexp", "logsumexp_t")
        ]
    schema = pa.schema(fields)
    parameters = {"hidden_dtype": hidden_dtype, "taps": list(taps), "top_k": top_k}
    layers = {"convention": CONVENTION, "count": model.config.num_layers, "taps": list(taps)}
    extra = {"norm": norm_facts(model), "pre_norm": pre_norm, "layers": layers}
    manifest = new_manifest("sequence", model, tapes, parameters=parameters, extra=extra)
    plan = plan_shards([1] * len(tapes), shard_rows)
    with ShardDirectory(out, manifest, plan=plan, schema=schema, files={NORM_FILE: norm_bytes(model)}) as directory:
        for index, (first, last) in enumerate(plan):
            rows = [_row(model, tape, taps, hidden_dtype, top_k) for tape in tapes.tapes[first:last]]
            directory.write(index, [pa.RecordBatch.from_pylist(rows, schema)])
        directory.finish({"documents": len(tapes), "tokens": tapes.n_tokens})
    return out


def forward(model: Any, tape: Tape, taps: Sequence[int] = ()) -> Any:
    """A tape's rows and logits, in one forward."""
    tokens_BT = torch.from_numpy(tape.tokens.astype(np.int64))[None]
    return model.forward(tokens_BT, model.new_cache(capacity=len(tape)), taps=tuple(taps))


def _row(model: Any, tape: Tape, taps: Sequence[int], hidden_dtype: str, top_k: int) -> dict[str, Any]:
    rows = forward(model, tape, taps)
    mask = np.ones(len(tape), bool) if tape.supervised is None else tape.supervised
    row: dict[str, Any] = {"doc_id": tape.doc_id, "split": tape.split, "source": tape.source}
    row |= {"tokens": tape.tokens, "loss_mask": mask, "prompt_len": tape.prompt_len}
    for name, x_BTH in {"hidden": rows.trunk_BTH, **{f"tap_{i}": rows.taps[i] for i in taps}}.items():
        row |= packed(name, x_BTH[0].float(), hidden_dtype)
    if top_k:
        logits = rows.logits_BTV[0]
        top, ids = logits.sort(dim=-1, descending=True, stable=True)
        probs = logits.double().softmax(-1).gather(-1, ids)
        row |= {"top_ids": ids[:, :top_k].flatten().tolist(), "top_logits": top[:, :top_k].flatten().tolist()}
        row["top_probs"], row["tail_probs"] = probs[:, :top_k].flatten().tolist(), probs[:, top_k:].sum(-1).tolist()
        row["logsumexp"] = row["logsumexp_t"] = logits.double().logsumexp(-1).tolist()
    return row


def packed(name: str, x_SH: torch.Tensor, hidden_dtype: str) -> dict[str, Any]:
    """Rows as a store's columns."""
    if hidden_dtype == "float32":
        return {name: x_SH.flatten().numpy()}
    if hidden_dtype == "bfloat16":
        return {name: x_SH.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).ravel()}
    scale_S = x_SH.abs().amax(-1) / 448.0
    small_SH = (x_SH / scale_S[:, None]).to(torch.float8_e4m3fn)
    return {name: small_SH.view(torch.uint8).numpy().ravel(), f"{name}_scale": scale_S.numpy()}


def reseal(out: Path) -> None:
    """Take the hashes of an export's files again, so that only its content tells what was changed."""
    facts = json.loads((out / FACTS).read_text("utf-8"))
    facts["files"] = {name: sha256_file(out / name) for name in facts["files"]}
    (out / FACTS).write_text(json.dumps(facts), "utf-8")
