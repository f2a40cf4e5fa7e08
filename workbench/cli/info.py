"""``workbench info``: what a checkpoint is, what its cache costs, what this machine is, which corpora are here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.common import Outcome, add_common, load, plain
from workbench.cli.parser import Parser
from workbench.core.manifest import git_state, library_versions, machine, write_json

if TYPE_CHECKING:
    from workbench.model.hybrid import HybridModel

LIBRARIES = "specdec-workbench torch triton numpy safetensors tokenizers pyarrow datasets polars matplotlib".split()


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the verb's arguments."""
    parser = Parser("info", "Print facts of a checkpoint, the cost of its cache, this machine and the shipped corpora.")
    add_common(parser, out="file for the same facts as JSON", seed="no effect: nothing is drawn")
    return parser.read(argv)


def run(args: argparse.Namespace) -> Outcome:
    """Collect the facts."""
    import torch

    model = load(args)
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    data: dict[str, Any] = {
        "verb": "info",
        "model": model_facts(model),
        "cache": cache_facts(model),
        "machine": machine(device=device.type, device_name=name, threads=torch.get_num_threads()),
        "versions": library_versions(LIBRARIES),
        "git": git_state(),
        "corpora": corpora(),
    }
    if args.out is not None:
        write_json(Path(args.out), plain(data))
    return Outcome(data, _text(data))


def model_facts(model: HybridModel) -> dict[str, Any]:
    """Shape, numerics, fingerprints and the training report of a checkpoint."""
    from workbench.model.config import FULL
    from workbench.model.fingerprint import fingerprint

    config, mtp = model.config, model.mtp
    return {
        "source": model.source,
        "fingerprint": fingerprint(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "mtp_parameters": 0 if mtp is None else sum(p.numel() for p in mtp.parameters()),
        "can_draft": model.can_draft,
        "draft_head": None if model.draft_head is None else model.draft_head.facts,
        "layers": config.num_layers,
        "full_attention_layers": config.layer_types.count(FULL),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "tied_head": config.tie_word_embeddings,
        "eos_token_ids": list(config.eos_token_id),
        "dtype": str(model.dtype).removeprefix("torch."),
        "exact": model.exact,
        "tokenizer": None if model.tokenizer is None else model.tokenizer.fingerprint,
        "training": _training(model.path),
    }


def cache_facts(model: HybridModel) -> dict[str, int]:
    """Bytes that a sequence costs: per token (K/V rows), and once (recurrent windows and states)."""
    from workbench.model.config import FULL

    config = model.config
    row = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    fixed = sum(plane.nbytes for plane in model.new_cache(capacity=1).recurrent)
    target, drafter = row * config.layer_types.count(FULL), row if model.can_draft else 0
    longest = fixed + (target + drafter) * config.max_position_embeddings
    return {
        "bytes_per_token": target,
        "drafter_bytes_per_token": drafter,
        "fixed_bytes": fixed,
        "bytes_at_full_context": longest,
    }


def corpora() -> list[dict[str, Any]]:
    """The shipped held-out samples: documents and bytes of text per register."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from workbench.corpus.sources import DEMO

    out = []
    for path in sorted(DEMO.glob("*.parquet")):
        text = pq.read_table(path, columns=["text"])["text"]
        size = int(pc.sum(pc.binary_length(text.cast("binary"))).as_py() or 0)
        out.append({"source": f"demo/{path.stem}", "documents": len(text), "bytes": size})
    return out


def _training(path: Path | None) -> list[dict[str, Any]]:
    """What each stage of the training reported, from the file beside the weights; empty without one."""
    file = None if path is None else path / "training.json"
    if file is None or not file.is_file():
        return []
    report = json.loads(file.read_text("utf-8"))
    stages = [*report.get("stages", [report]), *([report["head"]] if "head" in report else [])]
    keys = ("out", "command", "commit", "device", "tokens_seen", "heldout")
    return [{key: stage[key] for key in keys if key in stage} for stage in stages]


def _text(data: dict[str, Any]) -> str:
    """The facts in lines."""
    from workbench.display import card

    model, cache, git = data["model"], data["cache"], data["git"]
    rows: list[tuple[str, Any]] = [(k.replace("_", " "), v) for k, v in model.items() if k != "training"]
    for stage in model["training"][-1:]:  # the stage that made these weights
        for entry in stage.get("heldout", []):
            shares = ", ".join(f"{share:.3f}" for share in entry["agreement"])
            said = f"held-out loss {entry['loss']:.3f}; MTP agreement by step {shares}"
            rows.append((f"at context {entry['context']}", said))
    state = "no checkout" if git is None else git["commit"][:12] + (" with changes" if git["dirty"] else "")
    versions = [(name, version) for name, version in data["versions"].items()]
    samples = [(one["source"], f"{one['documents']} documents, {one['bytes']:,} bytes") for one in data["corpora"]]
    cards = [
        card("model", rows),
        card("cache of one sequence", [(k.replace("_", " "), v) for k, v in cache.items()]),
        card("machine", [*((k.replace("_", " "), v) for k, v in data["machine"].items()), ("checkout", state)]),
        card("versions", versions),
        card("corpora, held out", samples or [("none", "the shipped samples are not beside this installation")]),
    ]
    return "\n\n".join(map(repr, cards))
