"""Published tensor names and how they map onto this library's stacked parameters.

A stacked parameter concatenates published tensors along dimension 0 in the order listed. Loading fills, saving
splits; both read the one table made here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workbench.model.config import LINEAR, ModelConfig

IGNORED = re.compile(r"^(model\.)?visual\.")
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


@dataclass(frozen=True)
class Part:
    """One published tensor inside a parameter.

    Args:
        name: Published name in canonical form ("model...", "mtp...", "lm_head.weight").
        shape: Published shape.
    """

    name: str
    shape: tuple[int, ...]


def canonical(name: str) -> str:
    """Canonical form of a published name: every known prefix becomes "model.", "mtp." or "lm_head."."""
    bare = name
    changed = True
    while changed:
        changed = False
        for prefix in _PREFIXES:
            if bare.startswith(prefix):
                bare = bare[len(prefix) :]
                changed = True
    if bare.startswith(("mtp.", "lm_head.")):
        return bare
    return "model." + bare


def parameter_table(config: ModelConfig, *, mtp: bool) -> dict[str, list[Part]]:
    """Parameter name of HybridModel to the published tensors it stacks.

    Args:
        config: Shape of the model.
        mtp: Include the MTP head.

    Returns:
        One entry per parameter, in module order.
    """
    h, i, v = config.hidden_size, config.intermediate_size, config.vocab_size
    hv, c, vd = config.linear_num_value_heads, config.conv_dim, config.value_dim
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    table: dict[str, list[Part]] = {"embed": [Part("model.embed_tokens.weight", (v, h))]}

    def norms(ours: str, theirs: str) -> None:
        table[f"{ours}.input_norm"] = [Part(f"{theirs}.input_layernorm.weight", (h,))]
        table[f"{ours}.post_norm"] = [Part(f"{theirs}.post_attention_layernorm.weight", (h,))]

    def ffn(ours: str, theirs: str) -> None:
        table[f"{ours}.ffn.gate_up"] = [
            Part(f"{theirs}.mlp.gate_proj.weight", (i, h)),
            Part(f"{theirs}.mlp.up_proj.weight", (i, h)),
        ]
        table[f"{ours}.ffn.down"] = [Part(f"{theirs}.mlp.down_proj.weight", (h, i))]

    def attention(ours: str, theirs: str) -> None:
        at = f"{theirs}.self_attn"
        table[f"{ours}.qkv"] = [
            Part(f"{at}.q_proj.weight", (2 * heads * d, h)),
            Part(f"{at}.k_proj.weight", (kv * d, h)),
            Part(f"{at}.v_proj.weight", (kv * d, h)),
        ]
        table[f"{ours}.o_proj"] = [Part(f"{at}.o_proj.weight", (h, heads * d))]
        table[f"{ours}.q_norm"] = [Part(f"{at}.q_norm.weight", (d,))]
        table[f"{ours}.k_norm"] = [Part(f"{at}.k_norm.weight", (d,))]

    for n, kind in enumerate(config.layer_types):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        norms(ours, theirs)
        if kind == LINEAR:
            at = f"{theirs}.linear_attn"
            table[f"{ours}.mixer.in_proj"] = [
                Part(f"{at}.in_proj_qkv.weight", (c, h)),
                Part(f"{at}.in_proj_z.weight", (vd, h)),
                Part(f"{at}.in_proj_b.weight", (hv, h)),
                Part(f"{at}.in_proj_a.weight", (hv, h)),
            ]
            table[f"{ours}.mixer.conv"] = [Part(f"{at}.conv1d.weight", (c, 1, config.linear_conv_kernel_dim))]
            table[f"{ours}.mixer.a_log"] = [Part(f"{at}.A_log", (hv,))]
            table[f"{ours}.mixer.dt_bias"] = [Part(f"{at}.dt_bias", (hv,))]
            table[f"{ours}.mixer.norm"] = [Part(f"{at}.norm.weight", (config.linear_value_head_dim,))]
            table[f"{ours}.mixer.out_proj"] = [Part(f"{at}.out_proj.weight", (h, vd))]
        else:
            attention(f"{ours}.mixer", theirs)
        ffn(ours, theirs)
    table["norm"] = [Part("model.norm.weight", (h,))]
    if not config.tie_word_embeddings:
        table["head"] = [Part("lm_head.weight", (v, h))]
    if mtp:
        table["mtp.fc"] = [Part("mtp.fc.weight", (h, 2 * h))]
        table["mtp.embedding_norm"] = [Part("mtp.pre_fc_norm_embedding.weight", (h,))]
        table["mtp.hidden_norm"] = [Part("mtp.pre_fc_norm_hidden.weight", (h,))]
        table["mtp.norm"] = [Part("mtp.norm.weight", (h,))]
        norms("mtp", "mtp.layers.0")
        attention("mtp.attention", "mtp.layers.0")
        ffn("mtp", "mtp.layers.0")
    return table
