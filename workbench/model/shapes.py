"""The published geometries of Qwen3.5's dense models, and models of random weights in them.

Speed does not depend on what the weights are, so that it can be measured where no checkpoint is. Such a model knows
nothing: its text is no language, and its drafter agrees with it by chance alone.
"""

from __future__ import annotations

import math

import torch

from workbench.core.errors import check_choice, check_int
from workbench.model.config import FULL, LINEAR, ModelConfig
from workbench.model.hybrid import HybridModel
from workbench.model.weights.load import device_of, dtype_of
from workbench.model.weights.names import parameter_table

# hidden, intermediate, layers, query heads, key/value heads, value heads of delta layers, tied
_PUBLISHED: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 48, False),
}
SHAPES = tuple(_PUBLISHED)
TINY = "tiny"  # for trials of what measures the others

NORM_SPREAD = 0.02  # of the norms' weights around their neutral value
DECAYS = (0.01, 16.0)  # range of exp(a_log)


def published_config(name: str) -> ModelConfig:
    """The configuration of one of ``SHAPES``, with its MTP head; "tiny" is a small one of the same kind.

    Args:
        name: "0.8B", "2B", "4B", "9B" or "27B".

    Returns:
        The configuration.

    Raises:
        UserError: The name is unknown.

    Source: transformers ``Qwen3_5TextConfig`` and the configurations published with the checkpoints.
    """
    if name == TINY:
        return _config(64, 128, 4, 4, 2, 4, True, vocab=384, head=32, linear_head=32, key_heads=2, context=4096)
    check_choice("shape", name, SHAPES)
    return _config(*_PUBLISHED[name])


def _config(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    tied: bool,
    *,
    vocab: int = 248_320,
    head: int = 256,
    linear_head: int = 128,
    key_heads: int = 16,
    context: int = 262_144,
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layer_types=tuple(FULL if i % 4 == 3 else LINEAR for i in range(layers)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=linear_head,
        linear_value_head_dim=linear_head,
        rope_theta=1e7,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        eos_token_id=(248_044,) if vocab > 248_044 else (0,),
    )


def parameter_count(config: ModelConfig, *, mtp: bool = False) -> int:
    """Parameters of a model.

    Args:
        config: Its shape.
        mtp: Count the MTP head; default False, as published totals do.

    Returns:
        How many numbers its checkpoint holds.
    """
    table = parameter_table(config, mtp=mtp)
    return sum(math.prod(part.shape) for parts in table.values() for part in parts)


@torch.no_grad()
def random_model(
    shape: str | ModelConfig,
    *,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    exact: bool | None = None,
) -> HybridModel:
    """A model of random weights, drawn where they will lie.

    Matrices are normal with variance 1/columns, so that a block's output is of the size of its normed input whatever
    the width, logits have a standard deviation near 1, and a token's own embedding is a small part of its last row: a
    tied head does not repeat the last token. Norms lie close to their neutral value; ``dt_bias`` and the decays follow
    the reference initialisation.

    Args:
        shape: One of ``SHAPES``, or any configuration.
        seed: Of the weights; the bits also depend on the kind of device and on the type.
        device: Where to put it; default "cpu".
        dtype: Weight type; default float32 on a CPU and bfloat16 on a GPU.
        exact: Numerical class; default True on a CPU (False in float64), False on a GPU.

    Returns:
        The model in eval mode, without a tokenizer.

    Raises:
        UserError: The shape, the seed, the device or the type is not valid.

    Source: transformers ``Qwen3_5PreTrainedModel._init_weights`` for ``A_log`` and ``dt_bias``.
    """
    config = published_config(shape) if isinstance(shape, str) else shape
    check_int("seed", seed, low=0)
    where = device_of(device)
    kind = dtype_of(dtype, where)
    exact = where.type == "cpu" and kind != torch.float64 if exact is None else exact
    with torch.device("meta"):
        model = HybridModel(config, exact=exact)
    model = model.to(kind).to_empty(device=where)
    generator = torch.Generator(where).manual_seed(seed)
    for name, value in model.named_parameters():
        leaf = name.rpartition(".")[2]
        if leaf == "a_log":
            value.copy_(torch.empty_like(value, dtype=torch.float32).uniform_(*DECAYS, generator=generator).log())
        elif leaf == "dt_bias":
            value.fill_(1.0)
        elif value.dim() == 1:
            value.normal_(1.0 if name.endswith("mixer.norm") else 0.0, NORM_SPREAD, generator=generator)
        else:
            value.normal_(0.0, value.shape[-1] ** -0.5, generator=generator)
    model.source = f"random {shape}" if isinstance(shape, str) else "random"
    return model.requires_grad_(False).eval()
