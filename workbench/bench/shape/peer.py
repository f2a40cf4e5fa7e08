"""transformers on the very weights of a random model: the same tensors, on the same device, nothing written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

from workbench.bench.decode import FirstToken
from workbench.bench.shape.setting import Setting
from workbench.bench.shape.timing import figure
from workbench.core.errors import CapabilityError
from workbench.model.hybrid import HybridModel
from workbench.model.weights.names import parameter_table

OWN_FIELDS = ("architectures", "model_type", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
NEW, REPEATS = 16, 3  # of its generate, whose steps take the host's time


def peer_rows(setting: Setting) -> Iterator[dict[str, Any]]:
    """transformers' forward and generate, and ours over them, in one process."""
    with setting.optional("transformers"):
        theirs = transformers_twin(setting.model)
        for length in setting.lengths:
            with setting.optional(f"transformers' forward of {length:,} tokens"):
                call = partial(theirs, setting.tokens(length), use_cache=True, logits_to_keep=1)
                with torch.inference_mode():
                    seconds = setting.time(call)
                facts = {"mode": "fast", "tokens": length}
                yield figure(
                    f"transformers forward of {length:,} tokens", [length / t for t in seconds], "tok/s", **facts
                )
                pairs = [a / b for a, b in zip(seconds, setting.chunk(length), strict=True)]
                yield figure(f"forward of {length:,} tokens / transformers", pairs, "ratio", **facts | _mode(setting))
        new = 4 if setting.quick else NEW
        seconds = [_generate(theirs, setting, new) for _ in range(1 + REPEATS)][1:]
        yield figure("transformers generate", [(new - 1) / t for t in seconds], "tok/s", mode="fast", tokens=new)
        for arm in setting.arms:
            with setting.optional(f"plain decode, {arm}, over transformers generate"):
                ours = median(setting.plain(arm).seconds) / setting.burst
                values = [t / (new - 1) / ours for t in seconds]
                yield figure(f"plain decode, {arm} / transformers generate", values, "ratio", arm=arm, **_mode(setting))


def transformers_twin(model: HybridModel) -> Any:
    """The same decoder in transformers, sharing the model's tensors; its MTP head has no place there.

    Args:
        model: The target.

    Returns:
        A ``Qwen3_5ForCausalLM`` in eval mode.

    Raises:
        CapabilityError: transformers is missing, or too old for this family.
    """
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        from transformers.utils import logging
    except ImportError as error:
        raise CapabilityError(
            f"transformers is missing or too old here ({error}): install transformers>=5.17"
        ) from None
    logging.set_verbosity_error()
    fields = {name: value for name, value in model.config.to_dict().items() if name not in OWN_FIELDS}
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with torch.device(model.device):
            twin = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields))
    finally:
        torch.set_default_dtype(before)
    twin.load_state_dict(published_tensors(model), strict=True, assign=True)
    return twin.requires_grad_(False).eval()


def published_tensors(model: HybridModel) -> dict[str, torch.Tensor]:
    """Views of the target's weights by their published names, a tied head under its own name as well."""
    params, found = dict(model.named_parameters()), {}
    for ours, parts in parameter_table(model.config, mtp=False).items():
        at = 0
        for part in parts:
            found[part.name] = params[ours].data[at : at + part.shape[0]].view(part.shape)
            at += part.shape[0]
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    return found


def _generate(theirs: Any, setting: Setting, new: int) -> float:
    clock = FirstToken()
    ids_1T = torch.tensor([setting.prompt], device=setting.device)
    theirs.generate(
        ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=new, min_new_tokens=new, do_sample=False,
        use_cache=True, pad_token_id=0, streamer=clock,
    )  # fmt: skip
    return clock.since


def _mode(setting: Setting) -> dict[str, str]:
    return {"mode": f"{setting.mode} against fast" if setting.mode == "exact" else "fast"}
