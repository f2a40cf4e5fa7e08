"""Train the demo checkpoint: a small Qwen3.5 + MTP language model, on an accelerator, from a prepared corpus."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from workbench.core.errors import CapabilityError, UserError, check_choice, check_int, check_real
from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import load_model
from workbench.model.weights.save import save_model
from workbench.train.losses import Steps, agreement, joint_loss
from workbench_kernels.gated_delta import carry_eagerly

STEPS_UNROLLED = 4


@dataclass(frozen=True)
class DemoRecipe:
    """Everything that shapes the demo run.

    Args:
        hidden: Width of the residual stream.
        layers: Trunk layers; every fourth is full attention.
        intermediate: Width of the SwiGLU block.
        steps: Optimiser steps in all.
        long_share: Share of the steps, at the end, trained at ``long_context``.
        tokens_per_step: Tokens of one batch.
        context: Tokens per sequence before the last stage.
        long_context: Tokens per sequence in the last stage.
        mtp_steps: Further steps, at the end, that train the MTP head alone against the finished target.
        mtp_lr: Peak learning rate of those steps.
        mtp_hard: Share of the head's target, throughout, that is the target's pick alone, not its distribution.
        mtp_long_every: Every how many of them one runs at ``long_context``; 0 for none.
        optimiser: "adamw", or "muon": Muon for the matrices inside the layers, AdamW for all else.
        lr: Peak learning rate; Muon's updates are scaled to the size of AdamW's, so that one rate serves both.
        min_lr: Learning rate at the end, as a share of the peak.
        warmup: Steps of linear warm-up.
        weight_decay: On matrices.
        mtp_weight: Weight of the MTP loss.
        seed: Of initialisation and batches.
    """

    hidden: int = 320
    layers: int = 12
    intermediate: int = 768
    steps: int = 3000
    long_share: float = 0.2
    tokens_per_step: int = 65_536
    context: int = 1024
    long_context: int = 4096
    mtp_steps: int = 500
    mtp_lr: float = 1e-3
    mtp_hard: float = 0.0
    mtp_long_every: int = 0
    optimiser: str = "adamw"
    lr: float = 3e-3
    min_lr: float = 0.02
    warmup: int = 150
    weight_decay: float = 0.1
    mtp_weight: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "intermediate", "tokens_per_step", "context", "long_context", "warmup"):
            check_int(name, getattr(self, name), low=1)
        for name in ("steps", "mtp_steps", "mtp_long_every", "seed"):
            check_int(name, getattr(self, name), low=0)
        for name in ("long_share", "min_lr", "mtp_hard"):
            check_real(name, getattr(self, name), low=0.0, high=1.0)
        for name in ("mtp_lr", "lr", "weight_decay", "mtp_weight"):
            check_real(name, getattr(self, name), low=0.0)
        check_choice("optimiser", self.optimiser, ("adamw", "muon"))
        longest = max(self.context, self.long_context)
        check_int("tokens_per_step", self.tokens_per_step, low=longest, hint="a batch holds a sequence at least")

    def config(self, vocab_size: int) -> ModelConfig:
        """The architecture this recipe trains."""
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            layer_types=tuple(FULL if (i + 1) % 4 == 0 else LINEAR for i in range(self.layers)),
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            eos_token_id=(0,),
        )


def initialise(model: HybridModel, seed: int) -> None:
    """Fill every parameter: small normals, residual outputs scaled by depth, norms at identity, slow decays."""
    gen = torch.Generator(device="cpu").manual_seed(seed)
    depth = 2 * len(model.layers)
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if name.endswith("mixer.norm"):
            value = torch.ones(p.shape)
        elif leaf == "a_log":
            value = torch.empty(p.shape).uniform_(1, 16, generator=gen).log()
        elif leaf == "dt_bias":
            dt = torch.exp(torch.empty(p.shape).uniform_(math.log(1e-3), math.log(0.1), generator=gen))
            value = dt + torch.log(-torch.expm1(-dt))
        elif leaf == "conv":
            value = torch.empty(p.shape).uniform_(-0.5, 0.5, generator=gen)
        elif p.dim() == 1:
            value = torch.zeros(p.shape)
        else:
            scale = 0.02 / math.sqrt(depth / 2) if leaf in ("o_proj", "out_proj", "down") else 0.02
            value = torch.empty(p.shape).normal_(0, scale, generator=gen)
        p.data.copy_(value)


def optimisers(model: HybridModel, recipe: DemoRecipe, *, fused: bool) -> list[torch.optim.Optimizer]:
    """The optimisers of the joint stage; their groups share one learning rate."""
    names = dict(model.named_parameters())
    inner = [p for name, p in names.items() if p.dim() == 2 and not name.endswith(("embed", "head", "conv"))]
    muon = inner if recipe.optimiser == "muon" else []
    taken = {id(p) for p in muon}
    rest = [p for p in names.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.95), fused=fused)]
    if muon:
        made.append(
            torch.optim.Muon(muon, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    return made


def batches(stream: np.ndarray, rows: int, length: int, rng: np.random.Generator, device: torch.device) -> Tensor:
    """A batch of random windows of the token stream, int64 [rows, length]."""
    starts = rng.integers(0, len(stream) - length, rows)
    picked = np.stack([stream[s : s + length] for s in starts]).astype(np.int64)
    return torch.from_numpy(picked).to(device, non_blocking=True)


def evaluate(model: HybridModel, stream: np.ndarray, context: int, rows: int, device: torch.device) -> dict[str, Any]:
    """Loss and per-step agreement over the first rows of the held-out stream.

    Args:
        model: The model.
        stream: Held-out token ids.
        context: Tokens per window.
        rows: Windows at most.
        device: Where to run.

    Returns:
        {"context", "tokens", "loss", "agreement"}.
    """
    n = min(rows, len(stream) // context)
    windows = torch.from_numpy(stream[: n * context].astype(np.int64).reshape(n, context))
    losses, hits = [], []
    size = max(1, 16_384 // context)
    for part in windows.split(size):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            lm, hit = agreement(model, part.to(device), steps=STEPS_UNROLLED)
        losses.append(float(lm) * len(part))
        hits.append(hit.double().cpu() * len(part))
    mean = (torch.stack(hits).sum(0) / n).tolist()
    return {"context": context, "tokens": n * context, "loss": sum(losses) / n, "agreement": mean}


def _heldout(model: HybridModel, held: np.ndarray, where: torch.device) -> list[dict[str, Any]]:
    return [evaluate(model, held, context, 65_536 // context, where) for context in (1024, 4096)]


def by_register(model: HybridModel, held: np.ndarray, index: Path, where: torch.device) -> dict[str, Any]:
    """Held-out loss and agreement of every register apart, at a context of 1,024.

    Args:
        model: The model.
        held: Held-out token ids.
        index: heldout_index.json: register, start and end of every document of the stream.
        where: Where to run.

    Returns:
        Register to what ``evaluate`` gives; empty without the file.
    """
    if not index.exists():
        return {}
    parts: dict[str, list[np.ndarray]] = {}
    for row in json.loads(index.read_text("utf-8")):
        parts.setdefault(row["register"], []).append(held[row["start"] : row["end"] + 1])
    streams = {register: np.concatenate(pieces) for register, pieces in sorted(parts.items())}
    return {register: evaluate(model, stream, 1024, 64, where) for register, stream in streams.items()}


def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _note(stage: str, step: int, began: float, lm: float, mtp: float) -> dict[str, Any]:
    entry = {"stage": stage, "step": step, "seconds": round(time.perf_counter() - began, 1), "lm": lm, "mtp": mtp}
    print(json.dumps(entry), flush=True)
    return entry


def train_demo(
    corpus: str | Path,
    out: str | Path,
    *,
    recipe: DemoRecipe | None = None,
    start_from: str | Path | None = None,
    device: str = "cuda",
    compile_blocks: bool = True,
    max_seconds: float | None = None,
    commit: str = "",
    command: str = "",
) -> dict[str, Any]:
    """Train the demo checkpoint and write it as a Hugging Face directory with its tokenizer.

    Args:
        corpus: Folder with train.bin, heldout.bin and tokenizer.json, as ``build_demo_corpus`` writes it.
        out: Directory for the checkpoint.
        recipe: Hyperparameters; None for the shipped ones.
        start_from: Checkpoint to continue from, with a fresh optimiser; None to initialise.
        device: "cuda", or "cpu" for a trial.
        compile_blocks: Compile the layers.
        max_seconds: Cut the steps, once their speed is known, to fit this time; the report holds the numbers.
        commit: Git commit recorded in the report.
        command: Command line recorded in the report.

    Returns:
        The report that is also written to ``training.json``.

    Raises:
        UserError: The corpus folder is incomplete.
        CapabilityError: There is no GPU where one was asked for.
    """
    recipe = recipe or DemoRecipe()
    src, dst = Path(corpus), Path(out)
    for name in ("train.bin", "heldout.bin", "tokenizer.json"):
        if not (src / name).exists():
            raise UserError(f"{src} has no {name}; make the folder with `workbench train demo-corpus`")
    if device == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("training the demo model needs a GPU and torch sees none; --device cpu is for trials")
    where = torch.device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
    train = np.fromfile(src / "train.bin", dtype=np.uint16)
    held = np.fromfile(src / "heldout.bin", dtype=np.uint16)
    vocab = json.loads((src / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    size = max(max(vocab.values()) + 1, int(train.max()) + 1)
    if start_from is None:
        model = HybridModel(recipe.config(-(-size // 64) * 64), exact=False)
        initialise(model, recipe.seed)
    else:
        model = load_model(start_from, exact=False).requires_grad_(True)
    model.to(where).train()
    calls = Steps()
    if compile_blocks:
        carry_eagerly()
        block, first, later = (_compiled(f) for f in (calls.block, calls.first, calls.later))
        calls = Steps(block, first, later)
    joint = optimisers(model, recipe, fused=where.type == "cuda")
    rng = np.random.default_rng(recipe.seed)
    began = time.perf_counter()
    log: list[dict[str, Any]] = []
    steps, marks = recipe.steps, {}
    bar = tqdm(total=steps + recipe.mtp_steps, desc="training", unit="step", mininterval=5)
    step = 0
    while step < steps:
        switch = int(steps * (1 - recipe.long_share))
        context = recipe.context if step < switch else recipe.long_context
        ramp = min(1.0, (step + 1) / recipe.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in (group for optimiser in joint for group in optimiser.param_groups):
            group["lr"] = recipe.lr * ramp * (recipe.min_lr + (1 - recipe.min_lr) * cosine)
        tokens = batches(train, recipe.tokens_per_step // context, context, rng, where)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            lm, mtp = joint_loss(
                model,
                tokens,
                steps=STEPS_UNROLLED,
                stride=1 if step < switch else 4,
                hard=recipe.mtp_hard,
                calls=calls,
            )
        (lm + recipe.mtp_weight * mtp).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in joint:
            optimiser.step()
        model.zero_grad(set_to_none=True)
        if step % 50 == 0 or step < 4 or step + 1 == steps:
            log.append(_note("joint", step, began, lm.item(), mtp.item()))
        marks[step] = time.perf_counter()
        if step + 1 in (switch, steps):
            save_model(model, dst, dtype=torch.bfloat16)
        if step == 60 and max_seconds is not None:
            per_step = (marks[60] - marks[30]) / 30 * (1 + recipe.long_share)
            left = max_seconds - (marks[60] - began) - 60 - recipe.mtp_steps * per_step / 2
            steps = min(steps, 61 + max(0, int(left / per_step)))
            print(json.dumps({"seconds_per_step": per_step, "steps": steps}), flush=True)
        step += 1
        bar.update()
    model.requires_grad_(False)
    assert model.mtp is not None
    model.mtp.requires_grad_(True)
    heldout_before = None if recipe.steps else _heldout(model, held, where)
    head = torch.optim.AdamW(model.mtp.parameters(), lr=recipe.mtp_lr, betas=(0.9, 0.95), weight_decay=0.01)
    head_steps, step, head_began = recipe.mtp_steps, 0, time.perf_counter()
    while step < head_steps:
        for group in head.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / head_steps))
            group["lr"] = recipe.mtp_lr * min(1.0, (step + 1) / 25) * cosine
        far = recipe.mtp_long_every and step % recipe.mtp_long_every == 0
        context = recipe.long_context if far else recipe.context
        tokens = batches(train, recipe.tokens_per_step // context, context, rng, where)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            lm, mtp = joint_loss(
                model, tokens, steps=STEPS_UNROLLED, stride=4 if far else 1, hard=recipe.mtp_hard, calls=calls
            )
        mtp.backward()
        head.step()
        head.zero_grad(set_to_none=True)
        if step % 50 == 0 or step + 1 == head_steps:
            log.append(_note("head", step, began, lm.item(), mtp.item()))
        step += 1
        if step == 12:
            head_began = time.perf_counter()
        if step == 30 and max_seconds is not None:
            per_step = (time.perf_counter() - head_began) / 18
            head_steps = min(
                head_steps, 30 + max(0, int((max_seconds - (time.perf_counter() - began) - 15) / per_step))
            )
        bar.update()
    bar.close()
    seconds = time.perf_counter() - began
    model = model.eval().requires_grad_(False)
    clean = HybridModel(model.config, exact=False).to(where)
    clean.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in model.state_dict().items()})
    report = {
        "recipe": asdict(replace(recipe, steps=steps, mtp_steps=head_steps)),
        "parameters": sum(p.numel() for p in clean.parameters()),
        "train_tokens": len(train),
        "tokens_seen": (steps + head_steps) * recipe.tokens_per_step,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if where.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit,
        "command": command,
        "heldout": _heldout(clean, held, where),
        "registers": by_register(clean, held, src / "heldout_index.json", where),
        "heldout_before": heldout_before,
        "log": log,
    }
    save_model(clean, dst, dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (src / name).exists():
            shutil.copyfile(src / name, dst / name)
    (dst / "training.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report
